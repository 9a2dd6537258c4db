"""The schedule under random task times, delays and orders of arrival: what each mode promises.

The simulator checks every read, weight version and idle worker against its own data plane and raises
Violation; here clusters are drawn, and the checks are shown to bite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from dorylus_hpc.engine.random_clusters import random_cluster
from dorylus_hpc.engine.schedule import (
    Group,
    Round,
    Run,
    Schedule,
    Table,
    Topology,
    Unit,
    _entries_read,
    idle_workers_with_work,
)
from dorylus_hpc.engine.simulator import Cluster, Violation, simulate
from dorylus_hpc.engine.stash import VersionStore

SEEDS = 2000
MUTANT_SEEDS = range(400)


def check(seed: int, **given: object) -> None:
    cluster = random_cluster(seed, **given)  # type: ignore[arg-type]
    outcome = simulate(cluster, seed=seed)
    assert outcome.max_lead <= cluster.staleness, seed
    assert outcome.max_read_age <= cluster.staleness + 1, seed
    if cluster.update == "epoch":
        assert outcome.most_versions <= cluster.staleness + 2, seed


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_random_clusters_keep_their_promises(batch: int) -> None:
    for seed in range(batch * SEEDS // 10, (batch + 1) * SEEDS // 10):
        check(seed)


@pytest.mark.parametrize("mode", ["nopipe", "pipe"])
def test_exact_modes_never_lead(mode: str) -> None:
    for seed in range(40):
        cluster = random_cluster(seed, mode=mode)  # type: ignore[arg-type]
        outcome = simulate(cluster, seed=seed)
        assert (outcome.max_lead, outcome.max_read_age) == (0, 0)
        assert outcome.most_versions <= 2


def test_the_bound_is_reached_and_not_only_kept() -> None:
    for staleness in range(4):
        outcomes = [
            simulate(random_cluster(seed, mode="async", staleness=staleness, epochs=6, stops=0.0), seed=seed)
            for seed in range(30)
        ]
        assert max(outcome.max_lead for outcome in outcomes) == staleness
        assert max(outcome.max_read_age for outcome in outcomes) >= min(1, staleness)


@pytest.mark.parametrize("mode", ["nopipe", "pipe", "async"])
def test_promises_hold_while_workers_come_and_go(mode: str) -> None:
    for seed in range(60):
        check(seed, mode=mode, resizes=1.0)


@pytest.mark.parametrize("mode", ["nopipe", "pipe"])
def test_promises_hold_with_sums_over_all_intervals(mode: str) -> None:
    """Every unit of every server has written its sums before any reads them: the data plane looks."""
    for seed in range(120):
        check(seed, mode=mode, reduces=1.0, resizes=0.5)


def test_a_seed_replays() -> None:
    first, second = (simulate(random_cluster(7), seed=7) for _ in range(2))
    assert first == second


def caught(**given: object) -> bool:
    for seed in MUTANT_SEEDS:
        try:
            check(seed, **given)
        except (AssertionError, IndexError, KeyError, ValueError):
            return True
    return False


def test_a_bound_one_too_wide_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not caught(mode="async")
    original = Schedule._slowest
    monkeypatch.setattr(Schedule, "_slowest", lambda self: original(self) + 1)
    assert caught(mode="async")


def test_rows_one_round_too_old_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Schedule._needed
    monkeypatch.setattr(Schedule, "_needed", lambda self, number: original(self, number) - 1)
    assert caught(mode="pipe")
    assert caught(mode="async")


def test_sums_that_are_not_all_waited_for_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not caught(mode="pipe", reduces=1.0)
    original = _entries_read

    def all_but_one(topology: Topology, table: Table) -> list[tuple[int, ...]]:
        found = original(topology, table)
        return [entries[:-1] or entries for entries in found] if table.direction == "all" else found

    monkeypatch.setattr("dorylus_hpc.engine.schedule._entries_read", all_but_one)
    assert caught(mode="pipe", reduces=1.0)


def test_weights_one_version_too_old_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Schedule._least_version
    monkeypatch.setattr(Schedule, "_least_version", lambda self, number: max(0, original(self, number) - 1))
    assert caught(mode="pipe")
    assert caught(mode="async", staleness=0)


def test_weights_that_are_not_given_back_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VersionStore, "release", lambda self, who: ())
    assert caught(mode="pipe")


def test_a_unit_that_keeps_weights_after_a_stop_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Schedule._may_start
    monkeypatch.setattr(
        Schedule, "_may_start", lambda self, unit, number: not self._stopped and original(self, unit, number)
    )
    assert caught(mode="async", stops=1.0)


def test_installing_under_a_reader_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "_is_read", lambda self, table, entry: False)
    assert caught(mode="async")


def test_a_worker_that_idles_beside_work_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Schedule.task_done

    def drops_a_wake_up(self: Schedule, unit: int) -> object:
        before = self._free.copy()
        actions = original(self, unit)
        if len(actions) > 2 and isinstance(actions[-1], Run) and before:
            self._free = dict.fromkeys(self._free, 0)  # forgets that workers became free
        return actions

    monkeypatch.setattr(Schedule, "task_done", drops_a_wake_up)
    assert caught(mode="pipe")


def resize_that(monkeypatch: pytest.MonkeyPatch, free: Callable[[int, int], int]) -> None:
    """Let `resize` keep books wrongly: free workers from (workers, running)."""

    def resize(self: Schedule, resource: str, workers: int) -> object:
        running = self.running(resource)
        self._workers[resource] = workers
        self._free[resource] = free(workers, running)
        return self._take()

    monkeypatch.setattr(Schedule, "resize", resize)


def test_only_the_right_books_of_free_workers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    resize_that(monkeypatch, lambda workers, running: workers - running)
    for seed in range(60):
        check(seed, resizes=1.0, stops=0.0)


@pytest.mark.parametrize(
    "free",
    [
        lambda workers, running: max(0, workers - running),  # forgets how many too many run
        lambda workers, running: workers,  # forgets all that run
        lambda workers, running: min(0, workers - running),  # gives nothing more
    ],
)
def test_wrong_books_of_free_workers_are_caught(
    monkeypatch: pytest.MonkeyPatch, free: Callable[[int, int], int]
) -> None:
    resize_that(monkeypatch, free)
    assert caught(resizes=1.0, stops=0.0)


def test_a_resize_that_starts_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def resize(self: Schedule, resource: str, workers: int) -> list[object]:
        self._free[resource] += workers - self._workers[resource]
        self._workers[resource] = workers
        return []

    monkeypatch.setattr(Schedule, "resize", resize)
    assert caught(resizes=1.0)


def star(mode: str, n_units: int = 3, workers: int = 1) -> Schedule:
    """One part whose intervals all read each other, one gather."""
    everybody = [tuple(other for other in range(n_units) if other != unit) for unit in range(n_units)]
    none = [()] * n_units
    topology = Topology(
        units=tuple(Unit(0, interval) for interval in range(n_units)),
        reads={"in": everybody, "out": everybody},
        blocks={"in": 0, "out": 0},
        ghost_reads={"in": none, "out": none},
        sends={"in": [False] * n_units, "out": [False] * n_units},
    )
    groups = (Group("AV1", writes=0), Group("GA1", reads=0))
    return Schedule(
        mode,  # type: ignore[arg-type]
        topology,
        [Table("Y1", "in", exchanged=True)],
        {"train": groups},
        [Round("train", 1)],
        workers={"cpu": workers},
    )


def test_the_oldest_work_comes_first() -> None:
    schedule = star("pipe")
    order = []
    actions = schedule.start()
    while actions:
        run = next(action for action in actions if isinstance(action, Run))
        order.append((run.group, run.unit))
        actions = [action for action in schedule.task_done(run.unit) if isinstance(action, Run)]
    assert order == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert schedule.finished


def test_a_gather_starts_with_the_last_row_it_reads() -> None:
    schedule = star("pipe", workers=3)
    assert [action.unit for action in schedule.start() if isinstance(action, Run)] == [0, 1, 2]
    assert schedule.task_done(2) == []
    assert schedule.task_done(0) == []
    assert [action.unit for action in schedule.task_done(1) if isinstance(action, Run)] == [0, 1, 2]


def runs(actions: Iterable[object]) -> list[int]:
    return [action.unit for action in actions if isinstance(action, Run)]


def books(schedule: Schedule) -> tuple[int, int, int]:
    return schedule.workers("cpu"), schedule.running("cpu"), schedule.ready("cpu")


def test_more_workers_take_the_oldest_tasks_at_once() -> None:
    schedule = star("pipe", n_units=5)
    assert runs(schedule.start()) == [0] and books(schedule) == (1, 1, 4)
    assert runs(schedule.resize("cpu", 3)) == [1, 2] and books(schedule) == (3, 3, 2)
    assert runs(schedule.resize("cpu", 3)) == []
    assert runs(schedule.resize("cpu", 100)) == [3, 4] and books(schedule) == (100, 5, 0)


def test_fewer_workers_let_tasks_end_and_start_none_before_enough_have() -> None:
    schedule = star("pipe", n_units=7, workers=4)
    assert runs(schedule.start()) == [0, 1, 2, 3] and books(schedule) == (4, 4, 3)
    assert schedule.resize("cpu", 2) == [] and books(schedule) == (2, 4, 3)
    assert not idle_workers_with_work(schedule)
    assert runs(schedule.task_done(0)) == [] and books(schedule) == (2, 3, 3)
    assert runs(schedule.task_done(1)) == [] and books(schedule) == (2, 2, 3)
    assert runs(schedule.task_done(2)) == [4] and books(schedule) == (2, 2, 2)


def test_fewer_and_more_again_before_any_task_ended() -> None:
    schedule = star("pipe", n_units=7, workers=4)
    schedule.start()
    assert schedule.resize("cpu", 1) == []
    assert schedule.resize("cpu", 4) == [] and books(schedule) == (4, 4, 3)
    assert runs(schedule.resize("cpu", 5)) == [4]


def test_resizing_before_the_start() -> None:
    schedule = star("pipe", n_units=3)
    assert schedule.resize("cpu", 2) == []
    assert runs(schedule.start()) == [0, 1]


@pytest.mark.parametrize(("resource", "workers"), [("cpu", 0), ("cpu", -3), ("dense", 2)])
def test_a_resize_that_makes_no_sense_is_refused(resource: str, workers: int) -> None:
    schedule = star("pipe")
    with pytest.raises(ValueError, match=rf"of cpu and a worker, got '{resource}', {workers}"):
        schedule.resize(resource, workers)
    assert books(schedule) == (1, 0, 0)


@pytest.mark.parametrize("wrong", [{"mode": "bsp"}, {"staleness": -1}, {"workers": {"cpu": 0, "dense": 1}}])
def test_wrong_modes_are_refused(wrong: dict[str, object]) -> None:
    cluster = random_cluster(1, mode="async")
    changed: Cluster = replace(cluster, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode must be|staleness must be|a worker of each kind"):
        simulate(changed)


def test_evaluations_are_not_for_async() -> None:
    cluster = random_cluster(1, mode="async")
    with pytest.raises(ValueError, match="async runs training rounds only"):
        simulate(replace(cluster, rounds=(Round("evaluate", 1, trains=False),)))


def test_a_violation_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "_needed", lambda self, number: 0)
    with pytest.raises(Violation, match=r"^seed \d+, at \d"):
        for seed in MUTANT_SEEDS:
            simulate(random_cluster(seed, mode="pipe"), seed=seed)


def test_versions_live_as_long_as_they_are_needed() -> None:
    store = VersionStore()
    assert store.bind("a", 1) is None
    assert (store.bind("a", 0), store.load, store.live) == (0, 1, (0,))
    assert store.publish(1) == ()
    assert store.bind("b", 0) == 1
    assert store.publish(2) == () and store.live == (0, 1, 2)
    assert store.release("a") == (0,) and store.live == (1, 2)
    assert store.bind("c", 2) == 2
    assert store.release("c") == () and store.release("b") == (1,)
    assert (store.load, store.live, store.newest) == (0, (2,), 2)
    assert store.publish(3) == (2,)
    with pytest.raises(ValueError, match="version 5 published after 3"):
        store.publish(5)
    store.bind("d", 0)
    with pytest.raises(ValueError, match="d is bound to version 3 already"):
        store.bind("d", 0)
    with pytest.raises(KeyError):
        store.release("e")
