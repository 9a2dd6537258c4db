"""The number of Lambda workers: the rule on worked-out curves, its books, and the model of Lambda."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench import autotune
from dorylus_hpc.engine.schedule import Group, Round, Topology, Unit
from dorylus_hpc.engine.simulator import Cluster, Lambdas, Outcome, simulate
from dorylus_hpc.serverless.autotuner import Autotuner, Decision, Integrals, Observation

TASKS = 400
NEEDS = (0.3, 0.7, 1.05, 2, 3, 5, 8, 12, 20, 30, 45, 60, 80, 120)


# Worked-out servers.


@dataclass(frozen=True)
class Server:
    """An epoch takes 1 second of the cores' work, or need / workers of the workers', and a little more.

    Where the line is `shared`, all workers are busy whatever their number, and cores idle beside them.
    """

    need: float
    sharp: float
    shared: bool = False

    def seconds(self, workers: int) -> float:
        return float((1 + (self.need / workers) ** self.sharp) ** (1 / self.sharp))

    def observe(self, workers: int, *, intervals: int = 100, slower: float = 1.0) -> Observation:
        seconds = self.seconds(workers)
        if self.shared:
            starved = 0.9 if workers < intervals else 0.0
            used = 0.97 * workers
        else:
            starved, used = 1 - 1 / seconds, self.need / seconds
        seconds *= slower
        return Observation(
            seconds=seconds,
            dense_running=used * seconds,
            dense_ready=0.0,
            cpu_running=0.0,
            cpu_ready=0.0,
            starved=starved * seconds,
            dense_ended=TASKS,
        )

    def best(self, most: int) -> tuple[float, int]:
        """The least seconds, and the fewest workers within 10 % of them."""
        least = min(self.seconds(workers) for workers in range(1, most + 1))
        return least, next(w for w in range(1, most + 1) if self.seconds(w) <= 1.1 * least)


def epochs(tuner: Autotuner, server: Server, count: int, noise: Iterator[float] | None = None) -> list[int]:
    """Workers to use after each of some epochs."""
    after = []
    for _ in range(count):
        decision = tuner.observe(server.observe(tuner.workers, slower=1.0 if noise is None else next(noise)))
        assert decision.workers == tuner.workers and decision.reason
        after.append(tuner.workers)
    return after


def noise_of(share: float, seed: int) -> Iterator[float]:
    rng = random.Random(seed)
    while True:
        yield rng.uniform(1 - share, 1 + share)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sharp", [2, 4, 8])
@pytest.mark.parametrize("need", NEEDS)
def test_the_least_number_that_is_fast_is_found_and_kept(need: float, sharp: float, shared: bool) -> None:
    server = Server(need, sharp, shared)
    tuner = Autotuner(100, 100)
    after = epochs(tuner, server, 40)
    least_seconds, least_workers = server.best(100)
    assert tuner.settled and set(after[14:]) == {after[-1]}
    for workers in after[11:]:
        assert server.seconds(workers) <= 1.1 * least_seconds
        assert workers <= 1.5 * least_workers


def test_one_path_epoch_by_epoch() -> None:
    tuner = Autotuner(100, 1000)
    assert epochs(tuner, Server(20, 8), 6) == [100, 43, 28, 23, 23, 23]
    assert tuner.settled
    tuner = Autotuner(100, 1000)
    assert epochs(tuner, Server(20, 8, shared=True), 10) == [100, 67, 28, 12, 23, 20, 20, 20, 23, 23]


def test_the_reason_tells_what_was_seen() -> None:
    tuner = Autotuner(100, 100)
    server = Server(20, 8)
    reasons = []
    for _ in range(5):
        reasons.append(tuner.observe(server.observe(tuner.workers)).reason)
    assert reasons[0] == "the first epochs are not like the others"
    assert reasons[1] == "100 workers, 20.0 in use, starved 0.0%: enough, fewer"
    assert (
        reasons[3] == "28 workers, 19.8 in use, starved 0.8%, +0.8% to the best pace with more: enough, fewer"
    )
    assert reasons[4].startswith("23 workers, ") and reasons[4].endswith(": enough, and fewer would not be")


@pytest.mark.parametrize(
    ("intervals", "most", "first"),
    [(8, 1000, 8), (100, 1000, 100), (500, 1000, 100), (500, 30, 30), (1, 1, 1)],
)
def test_it_starts_as_the_paper_does(intervals: int, most: int, first: int) -> None:
    assert Autotuner(intervals, most).workers == first


@pytest.mark.parametrize("wrong", [{"intervals": 0}, {"max_workers": 0}, {"lead": -1}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    given = {"intervals": 10, "max_workers": 10, "lead": 0} | wrong
    with pytest.raises(ValueError, match=f"got intervals {given['intervals']}, max_workers"):
        Autotuner(**given)


@pytest.mark.parametrize(("lead", "left_out"), [(0, 1), (1, 2), (3, 2)])
def test_the_first_epochs_are_left_out(lead: int, left_out: int) -> None:
    tuner = Autotuner(100, 100, lead=lead)
    after = epochs(tuner, Server(20, 8), left_out + 1)
    assert after[:left_out] == [100] * left_out and after[left_out] < 100


def test_a_starved_server_gets_more_than_it_began_with() -> None:
    server = Server(300, 8)
    tuner = Autotuner(600, 500)
    after = [tuner.observe(server.observe(tuner.workers, intervals=600)).workers for _ in range(15)]
    least_seconds, least_workers = server.best(500)
    assert after[1] == 301  # starved for two thirds of the time: three times as many
    assert server.seconds(after[-1]) <= 1.1 * least_seconds and after[-1] <= 1.5 * least_workers


def test_more_workers_that_gain_nothing_are_given_back() -> None:
    server = Server(10, 8, shared=True)
    tuner = Autotuner(600, 600)
    after = [tuner.observe(server.observe(tuner.workers, intervals=600)).workers for _ in range(20)]
    assert max(after) == 400 and after[-1] <= 1.5 * server.best(600)[1]


def test_it_stays_within_its_bounds_whatever_it_sees_and_sees_it_alike() -> None:
    for seed in range(200):
        paths = []
        for _ in range(2):
            rng = random.Random(seed)
            most = rng.choice((1, 2, 7, 100, 250))
            tuner = Autotuner(rng.choice((1, 3, 100, 300)), most, lead=rng.choice((0, 1)))
            path = []
            for _ in range(40):
                seconds = rng.choice((0.0, 1e-9, 1.0, rng.random(), 1e6))
                seen = Observation(
                    seconds=seconds,
                    dense_running=seconds * rng.choice((0.0, rng.random() * 300)),
                    dense_ready=seconds * rng.random() * 300,
                    cpu_running=seconds * rng.random(),
                    cpu_ready=seconds * rng.random(),
                    starved=seconds * rng.choice((0.0, rng.random(), 1.0)),
                    dense_ended=rng.choice((0, 1, 400)),
                )
                decision = tuner.observe(seen)
                assert 1 <= decision.workers <= most and decision.workers == tuner.workers
                path.append(decision)
            paths.append(path)
        assert paths[0] == paths[1]


@pytest.mark.parametrize("need", [5, 20, 60])
def test_noise_of_ten_percent_makes_it_neither_waver_nor_starve(need: float) -> None:
    for seed in range(20):
        server = Server(need, 4)
        after = epochs(Autotuner(100, 100), server, 100, noise_of(0.1, seed))
        least_seconds, least_workers = server.best(100)
        moves = sum(before != then for before, then in zip(after[20:], after[21:], strict=False))
        assert moves <= 3, seed
        assert server.seconds(after[-1]) <= 1.2 * least_seconds, seed
        assert after[-1] <= 2 * least_workers, seed


def test_an_epoch_that_others_slow_down_is_no_reason_for_more() -> None:
    server = Server(20, 8, shared=True)
    slow_at = {5, 6, 9, 10}
    tuner, after = Autotuner(100, 100), []
    for epoch in range(30):
        seen = server.observe(tuner.workers)
        if epoch in slow_at and tuner.workers == after[-2]:  # not the first epoch with this number
            seen = server.observe(tuner.workers, slower=1.5)
        after.append(tuner.observe(seen).workers)
    assert after[-1] <= 1.5 * server.best(100)[1]


def settled(server: Server, lead: int = 0) -> Autotuner:
    tuner = Autotuner(100, 100, lead=lead)
    epochs(tuner, server, 20)
    assert tuner.settled
    return tuner


def test_it_searches_again_when_more_are_needed() -> None:
    tuner = settled(Server(20, 8))
    assert tuner.workers == 23
    after = epochs(tuner, Server(40, 8), 20)
    assert after[:2] == [23, 23] and after[2] > 23  # two epochs may be chance
    least_seconds, least_workers = Server(40, 8).best(100)
    assert Server(40, 8).seconds(after[-1]) <= 1.1 * least_seconds and after[-1] <= 1.5 * least_workers


def test_it_searches_again_when_fewer_will_do() -> None:
    tuner = settled(Server(40, 8))
    after = epochs(tuner, Server(8, 8), 20)
    assert after[-1] <= 1.5 * Server(8, 8).best(100)[1]


def test_a_slow_drift_is_noticed() -> None:
    """A little more is needed, too little to be another world: most of five epochs, and a small step."""
    tuner = settled(Server(20, 8))
    after = epochs(tuner, Server(29, 8), 40)
    assert after[0] == 23 and 23 < after[-1] <= 1.5 * Server(29, 8).best(100)[1]


def test_two_odd_epochs_change_nothing() -> None:
    tuner = settled(Server(20, 8))
    for _ in range(10):
        epochs(tuner, Server(20, 8), 2, iter((2.0, 3.0)))
        assert epochs(tuner, Server(20, 8), 1) == [23]


def test_an_epoch_without_dense_tasks_says_nothing() -> None:
    tuner = settled(Server(20, 8))
    seen = replace(Server(20, 8).observe(23), dense_ended=0)
    assert tuner.observe(seen) == Decision(23, "no dense task ended")


# Books.


def test_integrals_by_hand() -> None:
    integrals = Integrals(4, 10.0)
    integrals.note(11.0, dense_running=2, dense_ready=0, cpu_running=1, cpu_ready=0)
    integrals.note(13.0, dense_running=3, dense_ready=5, cpu_running=3, cpu_ready=0)
    integrals.dense_ended += 7
    integrals.note(14.0, dense_running=3, dense_ready=5, cpu_running=6, cpu_ready=2)  # two wait for threads
    assert integrals.take(16.0) == Observation(
        seconds=6.0,
        dense_running=2 * 2 + 3 * 1 + 3 * 2,
        dense_ready=5 * 1 + 5 * 2,
        cpu_running=1 * 2 + 3 * 1 + 6 * 2,
        cpu_ready=2 * 2,
        starved=0.25,  # one core of four for a second; before, nothing waited, and later, no core was idle
        dense_ended=7,
    )
    integrals.note(16.5, dense_running=0, dense_ready=1, cpu_running=0, cpu_ready=0)
    again = integrals.take(17.0)
    assert (again.seconds, again.starved, again.dense_ended) == (1.0, 0.5, 0)
    assert again.dense_running == 3 * 0.5


def test_events_at_the_same_time_take_none() -> None:
    integrals = Integrals(1, 0.0)
    integrals.note(1.0, dense_running=50, dense_ready=50, cpu_running=0, cpu_ready=0)
    integrals.note(1.0, dense_running=0, dense_ready=0, cpu_running=0, cpu_ready=0)
    assert integrals.take(2.0) == Observation(2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


# The model of Lambda in the simulator.


def in_lambda(n_units: int, workers: int, model: Lambdas, *, epochs: int = 1, servers: int = 1) -> Outcome:
    """Servers whose units have one dense task an epoch, of a second each, and read nothing."""
    none = [()] * n_units
    topology = Topology(
        units=tuple(Unit(0, interval) for interval in range(n_units)),
        reads={"in": none, "out": none},
        blocks={"in": 0, "out": 0},
        ghost_reads={"in": none, "out": none},
        sends={"in": [False] * n_units, "out": [False] * n_units},
    )
    cluster = Cluster(
        topologies=[
            replace(topology, units=tuple(Unit(server, n) for n in range(n_units)))
            for server in range(servers)
        ],
        routes=[{"in": [[]] * n_units, "out": [[]] * n_units}] * servers,
        tables=(),
        groups={"train": (Group("A", "dense"),)},
        rounds=[Round("train", epoch) for epoch in range(1, epochs + 1)],
        mode="pipe",
        workers={"cpu": 1, "dense": workers},
        lambdas=model,
    )
    return simulate(cluster, task_seconds=lambda *_: 1.0, message_seconds=lambda *_: 0.0)


MODEL = Lambdas(
    transfers={"A": (20.0, 10.0)},
    latency=0.25,
    bandwidth=10.0,
    cold_seconds=4.0,
    invocations_per_second=1000.0,
)
ONE = 0.25 + 2.0 + 1.0 + 1.0  # latency, inputs, compute, results


def test_a_task_in_lambda_takes_the_sum_of_its_parts() -> None:
    outcome = in_lambda(1, 1, MODEL, epochs=3)
    assert outcome.ends[0] == pytest.approx([4 + ONE, 4 + 2 * ONE, 4 + 3 * ONE])  # cold once
    assert (outcome.environments, outcome.refused) == (1, 0)
    assert outcome.busy[0, "dense"] == pytest.approx(4 + 3 * ONE)


def test_workers_share_the_line_of_their_server() -> None:
    # Two transfer 20 bytes each at 5 bytes a second, in 4 seconds, and 10 bytes in 2.
    shared = replace(MODEL, line=10.0, cold_seconds=0.0)
    assert in_lambda(2, 2, shared).seconds == pytest.approx(0.25 + 4 + 1 + 2)
    assert in_lambda(2, 1, shared).seconds == pytest.approx(2 * ONE)  # one at a time has all of it
    assert in_lambda(2, 2, replace(shared, line=20.0)).seconds == pytest.approx(ONE)
    assert in_lambda(1, 1, replace(shared, line=1000.0)).seconds == pytest.approx(ONE)
    assert in_lambda(2, 2, shared, servers=3).seconds == pytest.approx(0.25 + 4 + 1 + 2)  # each has its own


def test_transfers_that_begin_and_end_at_different_times() -> None:
    # With a cold start for the second: its inputs begin at 1 + 0.25, when the first has had 10 of 20 bytes.
    # Both go on at 5 bytes a second; the first is through at 3.25, then the second has 10 left, for 1 second.
    slow_start = replace(MODEL, line=10.0, cold_seconds=1.0, transfers={"A": (20.0, 0.0)}, environments=2)
    first = replace(slow_start, cold_seconds=0.0)
    times = []

    def seconds(rng: random.Random, server: int, group: Group) -> float:
        times.append(0.0)
        return 1.0

    assert in_lambda(1, 1, first).seconds == pytest.approx(0.25 + 2 + 1)
    outcome = in_lambda(3, 3, replace(first, environments=2, retry_seconds=1.0))
    # Two transfer 20 bytes at 5 a second until 4.25, compute until 5.25. The third is refused at 0, 1 .. 5,
    # and starts at 6.
    assert outcome.refused == 6
    assert outcome.seconds == pytest.approx(6 + 0.25 + 2 + 1)


def test_an_environment_takes_so_many_invocations_a_second() -> None:
    often = Lambdas(
        latency=0.0, cold_seconds=0.0, invocations_per_second=0.25, environments=1, retry_seconds=0.5
    )
    outcome = in_lambda(3, 1, often)  # a task takes 1 second, but an environment starts one in 4
    assert outcome.seconds == pytest.approx(4 + 4 + 1)
    more = in_lambda(3, 1, replace(often, environments=10))
    assert (more.seconds, more.environments) == (pytest.approx(3.0), 3)


def test_environments_start_at_a_limited_rate() -> None:
    limited = Lambdas(
        latency=0.0, cold_seconds=0.0, start_burst=2, start_rate=1.0, retry_seconds=0.5, environments=10
    )
    outcome = in_lambda(4, 4, limited)
    # Two start at once, one more at 1 and at 2; but at 1 the first two are warm again.
    assert (outcome.seconds, outcome.environments) == (pytest.approx(2.0), 2)
    long = in_lambda(4, 4, replace(limited, latency=9.0))
    assert (long.seconds, long.environments) == (pytest.approx(2.0 + 10.0), 4)


# Both together.


@pytest.mark.parametrize("mode", ["pipe", "async S=0", "async S=1"])
def test_the_bench_finds_the_number_on_a_small_cluster(mode: str) -> None:
    row = autotune.judge(autotune.Case("graph work leads", mode, servers=2, intervals=40))
    assert row["reached"], row
    assert row["least_workers"] < 40 and row["times_seconds"] > 0.9


def test_the_bench_tells_who_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--servers", "1", "--intervals", "12", "--settings", "balanced", "--modes", "pipe"]
    monkeypatch.setattr(autotune, "ProcessPoolExecutor", _Here)
    file = tmp_path / "autotune.json"
    assert autotune.main([*arguments, "--json", str(file), "--decisions"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 cases" in printed and "after epoch  1:  12  the first epochs" in printed
    (case,) = json.loads(file.read_text())["cases"]
    assert case["setting"] == "balanced" and case["reached"]

    class Never(Autotuner):
        def observe(self, seen: Observation) -> Decision:
            return Decision(1, "stubborn")

    monkeypatch.setattr(autotune, "Autotuner", Never)
    assert autotune.main(arguments) == 1
    assert "missed" in capsys.readouterr().out


class _Here:
    """Runs in this process what a pool would run in others."""

    def __init__(self, processes: int) -> None:
        self.map: Callable[..., object] = map

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass
