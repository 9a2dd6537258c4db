"""Lower bounds of simulated clusters: worked out by hand, and never beaten on random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from dorylus_hpc.engine.bounds import (
    Bound,
    busiest_resource,
    critical_path,
    epoch_bound,
    nopipe_seconds,
    run_bound,
)
from dorylus_hpc.engine.random_clusters import random_cluster
from dorylus_hpc.engine.schedule import Group, Round, Table, Topology, Unit
from dorylus_hpc.engine.simulator import Cluster, simulate

SEEDS = range(80)
UNLIMITED = {"cpu": 10_000, "dense": 10_000}
NEAR = 1e-9  # sums in another order


def alone(n_units: int, *, workers: int, reads: bool = True) -> Cluster:
    """One server, whose units all read each other's rows, or none's."""
    others = [tuple(other for other in range(n_units) if reads and other != unit) for unit in range(n_units)]
    none = [()] * n_units
    return Cluster(
        topologies=[
            Topology(
                units=tuple(Unit(0, interval) for interval in range(n_units)),
                reads={"in": others, "out": others},
                blocks={"in": 0, "out": 0},
                ghost_reads={"in": none, "out": none},
                sends={"in": [False] * n_units, "out": [False] * n_units},
            )
        ],
        routes=[{"in": [[]] * n_units, "out": [[]] * n_units}],
        tables=(Table("Y", "in", exchanged=True),),
        groups={"train": (Group("A", writes=0), Group("B", reads=0))},
        rounds=[Round("train", 1)],
        mode="pipe",
        workers={"cpu": workers},
    )


def couple(mode: str, epochs: int, *, weights: bool, reads: bool = True) -> Cluster:
    """Two servers of one unit each, that read each other's rows: server 0 is slow at B, server 1 at A."""
    blocks = (0,) if reads else ()
    topology = Topology(
        units=(Unit(0, 0),),
        reads={"in": [()], "out": [()]},
        blocks={"in": len(blocks), "out": 0},
        ghost_reads={"in": [blocks], "out": [()]},
        sends={"in": [reads], "out": [False]},
    )
    return Cluster(
        topologies=[replace(topology, units=(Unit(server, 0),), peers=(1 - server,)) for server in range(2)],
        routes=[{"in": [[(1 - server, 0)] if reads else []], "out": [[]]} for server in range(2)],
        tables=(Table("Y", "in", exchanged=True),),
        groups={"train": (Group("A", writes=0, weights=weights), Group("B", reads=0))},
        rounds=[Round("train", epoch) for epoch in range(1, epochs + 1)],
        mode=mode,  # type: ignore[arg-type]
        workers={"cpu": 1},
    )


def unequal(server: int, group: Group) -> float:
    return {(0, "A"): 1.0, (0, "B"): 4.0, (1, "A"): 3.0, (1, "B"): 1.0}[server, group.name]


def run(cluster: Cluster, of: Callable[[int, Group], float], *, message: float = 0.0, seed: int = 0) -> float:
    outcome = simulate(
        cluster, seed=seed, task_seconds=lambda _, *who: of(*who), message_seconds=lambda *_: message
    )
    return outcome.seconds


def drawn(seed: int, cluster: Cluster) -> Callable[[int, Group], float]:
    """Task times of a random cluster, fixed by server and name of the group."""
    rng = random.Random(seed)
    names = sorted({group.name for chain in cluster.groups.values() for group in chain})
    times = {
        (server, name): rng.choice((0.25, 0.5, 1.0, 3.0))
        for server in range(len(cluster.topologies))
        for name in names
    }
    return lambda server, group: times[server, group.name]


def longest_chain(cluster: Cluster, of: Callable[[int, Group], float]) -> float:
    """The longest time that one unit spends in its own tasks of a training round."""
    return max(
        sum(
            of(server, group)
            for group in cluster.groups["train"]
            if unit.interval >= 0 or group.covers_ghosts
        )
        for server, topology in enumerate(cluster.topologies)
        for unit in topology.units
    )


# By hand.


@pytest.mark.parametrize(
    ("units", "workers", "bound", "nopipe"),
    [(2, 1, Bound(6.0, 3.0, 6.0), 6.0), (3, 2, Bound(4.5, 3.0, 4.5), 6.0), (2, 5, Bound(1.2, 3.0, 1.2), 3.0)],
)
def test_one_server(units: int, workers: int, bound: Bound, nopipe: float) -> None:
    cluster = alone(units, workers=workers)
    of = lambda _, group: {"A": 1.0, "B": 2.0}[group.name]  # noqa: E731
    assert epoch_bound(cluster, of) == bound
    assert bound.exact == max(bound.busiest_resource, bound.critical_path, bound.head_load_tail)
    assert nopipe_seconds(cluster, of) == nopipe == run(replace(cluster, mode="nopipe"), of)


def test_the_path_goes_through_the_slow_servers_rows() -> None:
    cluster = couple("pipe", 1, weights=False)
    assert epoch_bound(cluster, unequal) == Bound(5.0, 7.0, 5.0)  # A of server 1, then B of server 0
    assert run(cluster, unequal) == 7.0
    assert critical_path(cluster, unequal, message_seconds=0.5) == 7.5
    apart = couple("pipe", 1, weights=False, reads=False)
    assert epoch_bound(apart, unequal) == Bound(5.0, 5.0, 5.0)
    assert run(apart, unequal) == 5.0
    assert nopipe_seconds(apart, unequal) == 7.0  # as if all waited for all: nopipe itself need not
    assert run(replace(apart, mode="nopipe"), unequal) == 5.0


def test_servers_overlap_epochs_in_pipe_until_weights_are_needed() -> None:
    # Without weights server 1 is at epoch 2 from 4 on, and its A is done at 7, when server 0 starts.
    loose = couple("pipe", 3, weights=False)
    assert run_bound(loose, unequal) == run(loose, unequal) == 7 + 5 + 5
    tied = couple("pipe", 3, weights=True)
    assert run_bound(tied, unequal) == run(tied, unequal) == 3 * 7
    # The answer with the weights of each epoch, the block, and between epochs gradients and publishing.
    assert critical_path(tied, unequal, message_seconds=0.5) == 3 * (7 + 0.5 + 0.5) + 2 * 2 * 0.5


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_async_is_exact_once_and_then_a_chain(staleness: int) -> None:
    cluster = replace(couple("async", 4, weights=True), staleness=staleness)
    assert run_bound(cluster, unequal) == run(cluster, unequal) == 7 + 3 * 5


def test_a_lead_hides_the_time_of_news() -> None:
    fixed = lambda server, group: 1.0  # noqa: E731
    paths = [
        critical_path(
            replace(couple("async", 7, weights=False), staleness=staleness), fixed, message_seconds=10
        )
        for staleness in range(3)
    ]
    # Ends of the epochs: the first waits for a block, the second for news of the first, and then
    # S=0: 12, 24, 36, ..; S=1, each for news of the last but one: 12, 24, 26, 36, 38, 48, 50;
    # S=2: 12, 24, 26, 28, 36, 38, 40
    assert paths == [84, 50, 40]


def between(mode: str, epochs: int, *, staleness: int = 0, servers: int = 1) -> Cluster:
    """Four units a server: a task of many workers, then one of a single worker, then one of many."""
    none = [()] * 4
    topology = Topology(
        units=tuple(Unit(0, interval) for interval in range(4)),
        reads={"in": none, "out": none},
        blocks={"in": 0, "out": 0},
        ghost_reads={"in": none, "out": none},
        sends={"in": [False] * 4, "out": [False] * 4},
    )
    return Cluster(
        topologies=[
            replace(
                topology,
                units=tuple(Unit(server, interval) for interval in range(4)),
                peers=tuple(peer for peer in range(servers) if peer != server),
            )
            for server in range(servers)
        ],
        routes=[{"in": [[]] * 4, "out": [[]] * 4}] * servers,
        tables=(),
        groups={
            "train": (Group("A", "dense", weights=True), Group("B"), Group("C", "dense", weights=True)),
        },
        rounds=[Round("train", epoch) for epoch in range(1, epochs + 1)],
        mode=mode,  # type: ignore[arg-type]
        staleness=staleness,
        workers={"cpu": 1, "dense": 10},
    )


def test_a_resource_idles_at_the_head_and_the_tail_of_an_epoch() -> None:
    of = lambda _, group: {"A": 1.0, "B": 2.0, "C": 3.0}[group.name]  # noqa: E731
    cluster = between("pipe", 1)
    assert epoch_bound(cluster, of) == Bound(8.0, 6.0, 1 + 4 * 2 + 3)
    assert run(cluster, of) == 12.0
    for servers in (1, 2):
        for mode in ("pipe", "async"):  # S = 0
            several = between(mode, 5, servers=servers)
            assert run_bound(several, of) == run(several, of) == 5 * 12.0
    # Epoch 2 waits for all of epoch 1. Then the worker of B goes on without a pause, to its last tail.
    ahead = between("async", 5, staleness=1)
    assert run_bound(ahead, of) == run(ahead, of) == 12 + 1 + 4 * 8 + 3
    assert critical_path(ahead, of) == 5 * 6.0


def test_the_tail_follows_rows_to_another_server() -> None:
    cluster = couple("pipe", 1, weights=False)
    cluster = replace(
        cluster,
        groups={"train": (Group("A", writes=0), Group("B", "dense", reads=0))},
        workers={"cpu": 1, "dense": 1},
    )
    # Server 1: nothing before A (3), and behind it B of server 0 (4).
    assert epoch_bound(cluster, unequal) == Bound(4.0, 7.0, 7.0)
    assert epoch_bound(cluster, unequal, message_seconds=0.5) == Bound(4.0, 7.5, 7.5)


def test_work_of_ghosts_counts_where_it_is_done() -> None:
    cluster = alone(2, workers=1, reads=False)
    ghosts = replace(
        cluster.topologies[0],
        units=(*cluster.topologies[0].units, Unit(0, -1)),
        reads={"in": [()] * 3, "out": [()] * 3},
        ghost_reads={"in": [()] * 3, "out": [()] * 3},
        sends={"in": [False] * 3, "out": [False] * 3},
    )
    cluster = replace(
        cluster,
        topologies=[ghosts],
        routes=[{"in": [[]] * 3, "out": [[]] * 3}],
        tables=(Table("Y", "in", exchanged=False),),
        groups={"train": (Group("A", writes=0, covers_ghosts=True), Group("B", reads=0))},
    )
    fixed = lambda server, group: 1.0  # noqa: E731
    assert epoch_bound(cluster, fixed) == Bound(5.0, 2.0, 5.0)
    assert nopipe_seconds(cluster, fixed) == run(replace(cluster, mode="nopipe"), fixed) == 5.0


# On random clusters.


@pytest.mark.parametrize("mode", ["nopipe", "pipe", "async"])
def test_no_run_beats_the_bound(mode: str) -> None:
    for seed in SEEDS:
        cluster = random_cluster(seed, mode=mode, stops=0.0, reduces=0.5)  # type: ignore[arg-type]
        of = drawn(seed, cluster)
        for message in (0.0, 0.5):
            least = run_bound(cluster, of, message_seconds=message)
            assert run(cluster, of, message=message, seed=seed) >= least - NEAR, (seed, message)
        least = run_bound(cluster, of)
        outcome = simulate(
            cluster, seed=seed, task_seconds=lambda rng, *who, of=of: of(*who) * rng.uniform(1, 3)
        )
        assert outcome.seconds >= least - NEAR, seed  # all that takes longer


def test_pipe_reaches_the_path_where_workers_are_for_all() -> None:
    for seed in SEEDS:
        cluster = replace(random_cluster(seed, mode="pipe", reduces=0.5), workers=UNLIMITED)
        of = drawn(seed, cluster)
        assert run(cluster, of, seed=seed) == pytest.approx(run_bound(cluster, of), rel=NEAR), seed


def test_pipe_with_few_workers_stays_within_the_sum_of_both_bounds() -> None:
    for seed in SEEDS:
        cluster = random_cluster(seed, mode="pipe", epochs=1)
        of = drawn(seed, cluster)
        bound = epoch_bound(cluster, of)
        total = sum(
            busiest_resource(
                replace(cluster, topologies=[topology]), lambda _, group, n=n, of=of: of(n, group)
            )
            for n, topology in enumerate(cluster.topologies)
        )
        # A chain is at work, or all workers of a resource that it waits for are.
        seconds = run(cluster, of, seed=seed)
        assert bound.exact - NEAR <= seconds <= len(UNLIMITED) * total + bound.critical_path + NEAR, seed


def test_no_epoch_beats_its_bound_and_few_workers_come_nearer_to_it() -> None:
    nearer, before, now = 0, 0.0, 0.0
    for seed in SEEDS:
        cluster = replace(random_cluster(seed, mode="pipe", epochs=1), workers={"cpu": 1, "dense": 100})
        of = drawn(seed, cluster)
        for message in (0.5, 0.0):
            bound = epoch_bound(cluster, of, message_seconds=message)
            seconds = run(cluster, of, message=message, seed=seed)
            assert seconds >= bound.exact - NEAR, (seed, message)
        parts = max(bound.busiest_resource, bound.critical_path)
        nearer += bound.head_load_tail > parts + NEAR
        before, now = before + seconds / parts, now + seconds / bound.exact
    assert nearer > len(SEEDS) / 8
    assert now / len(SEEDS) - 1 < 0.9 * (before / len(SEEDS) - 1)


def test_the_path_in_async_is_that_of_an_exact_epoch_and_chains() -> None:
    for seed in SEEDS:
        cluster = random_cluster(seed, mode="async", stops=0.0)
        of = drawn(seed, cluster)
        later = (len(cluster.rounds) - 1) * longest_chain(cluster, of)
        expected = epoch_bound(cluster, of).critical_path + later
        assert critical_path(cluster, of) == pytest.approx(expected, rel=NEAR), (seed, cluster.staleness)


def test_nopipe_takes_no_longer_than_its_arithmetic_and_as_long_on_equal_servers() -> None:
    equal = 0
    for seed in SEEDS:
        cluster = random_cluster(seed, mode="nopipe")
        of = drawn(seed, cluster)
        assert run(cluster, of, seed=seed) <= nopipe_seconds(cluster, of) + NEAR, seed
        counts = {
            tuple(sorted(unit.interval >= 0 for unit in one.units)) for one in cluster.topologies
        }  # of units of each kind
        if len(counts) == 1:
            equal += 1
            same = lambda _, group, of=of: of(0, group)  # noqa: E731
            seconds = nopipe_seconds(cluster, same)
            assert run(cluster, same, seed=seed) == pytest.approx(seconds, rel=NEAR), seed
    assert equal > 10


def test_checks_of_idle_workers_change_no_outcome() -> None:
    for seed in range(30):
        cluster = random_cluster(seed, stops=0.0)
        assert simulate(cluster, seed=seed) == simulate(cluster, seed=seed, check_idle=False)
