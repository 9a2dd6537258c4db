"""What pipelining can gain with the task times of the Dorylus paper, in virtual time.

    python -m bench.pipelining [--servers 8] [--intervals 8 16 32 64] [--turns 1 4 16] [--json FILE]

The simulator runs the schedules of the engine on a GCN of two layers. Stages of an epoch, in seconds (GCN
on Amazon; Dorylus, OSDI '21, figure 10, task-time breakdown), of which a stage of two layers is halved::

    cpu      GA 3.2 (2 layers)   dGA 0.9 (1)                     4.1
    dense    AV 3.2 (2)          dAV 4.0 (2)                     7.2  <- busiest
    network  SC 1.6 (1)          dSC 1.4 (1)                     3.0
                                                       in all   14.3  = an epoch stage by stage

    GA1 > AV1 > SC1 | GA2 > AV2 > dAV2 > dSC2 | dGA2 > dAV1      | waits for the rows of all units in pipe

Modelled, not measured:

- A stage takes these times when a server runs it by itself, all of its intervals together. That fixes the
  time of a task: the stage's / the turns in which the workers of its resource take the intervals.
- ``cpu``, all cores of a graph server, and ``network``, its line, work at one task at a time. A scatter is
  a task of the line; messages themselves, weights and news of progress take no time.
- ``dense`` tasks are Lambdas'. `turns` is how many intervals share one. With 1, as many Lambdas as
  intervals, a task takes as long as the stage, and more intervals make it no shorter. Where the last turn
  is not full, Lambdas have less work than 7.2 seconds.
- All servers are equal, and every interval reads rows of all others: the worst case for ``pipe``.

No schedule is faster than the busiest resource, so the ratio to nopipe is at most 14.3 / 7.2 = 1.99. With
one turn that resource is a chain as well: a unit spends 7.2 seconds of an epoch in its own dense tasks,
and its small share of the others. Beside this bound, which `run_bound` computes:

- ``pipe`` waits three times an epoch for all units, and each time dense tasks of full length end behind the
  last gather: about (1.6 + 1.6) + (1.6 + 3.6) + (0.9 + 2.0) = 11.3 with one turn, ratio 1.27, however many
  intervals. With more turns less of the dense work is left then, and the epoch comes near 7.2.
- ``async`` with S = 0 drains once an epoch: a unit that gathers last ends last. S >= 1 does so in the first,
  exact epoch only; its later epochs reach the bound, and S = 2 can add nothing.

So with one turn, what pipelining gains at these times is for the most part S >= 1, and with many turns
``pipe`` has most of it. The paper's 1.9 is of its fleet, whose turns are not known here.

The second experiment doubles the time of a random quarter of the tasks of one server, and for comparison of
as many tasks spread over all servers. Lost is the time beside the same mode without it. No mode avoids that
one server has a quarter more work, so that an epoch takes at least 1.25 * 7.2 = 9.0 seconds on average. A
mode that was slower than that before has idle time to hide some of it in; one that was not must lose it.
So where tasks are short and ``pipe`` is near the bound, S = 1 can't lose as little as half of what it loses:
with 4 turns and 16 intervals at least 9.0 - 7.28 = 1.72 of 2.76. With one turn S = 1 loses less than half,
most of it to the unit with the most slow tasks (2.4 of 2.9 seconds over 20 epochs), whose own chain no lead
makes shorter. Where the slow tasks are everywhere, units are late at different times, and a lead evens it
out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.machine import write_results
from dorylus_hpc.engine.bounds import epoch_bound, nopipe_seconds, run_bound
from dorylus_hpc.engine.schedule import Direction, Group, Mode, Round, Table, Topology, Unit
from dorylus_hpc.engine.simulator import Cluster, simulate

STAGES = {"GA": 3.2, "AV": 3.2, "SC": 1.6, "dGA": 0.9, "dAV": 4.0, "dSC": 1.4}
PAPER_RATIO = 1.9
GROUPS = (
    Group("GA1"),  # of features, which are there
    Group("AV1", "dense", weights=True),
    Group("SC1", "network", writes=0),
    Group("GA2", reads=0),
    Group("AV2", "dense", weights=True),
    Group("dAV2", "dense", weights=True),
    Group("dSC2", "network", writes=1),
    Group("dGA2", reads=1),
    Group("dAV1", "dense", weights=True),
)
TABLES = (Table("Y", "in", exchanged=True), Table("dY", "out", exchanged=True))
MODES: dict[str, tuple[Mode, int]] = {
    "nopipe": ("nopipe", 0),
    "pipe": ("pipe", 0),
    "async S=0": ("async", 0),
    "async S=1": ("async", 1),
    "async S=2": ("async", 2),
}
PIPELINED = ("pipe", "async S=0", "async S=1")
STRAGGLING = ("pipe", "async S=0", "async S=1", "async S=2")
SLOW_SHARE, SLOWER = 0.25, 2.0


@dataclass(frozen=True)
class Job:
    """One simulation.

    Attributes
    ----------
    mode
        A key of MODES.
    servers, intervals, turns, epochs
        Of the cluster; `turns` is how many intervals share a dense worker.
    slow
        Probability that a task is slow: on the first server, on others.
    seed
        Decides which are.
    """

    mode: str
    servers: int
    intervals: int
    turns: int
    epochs: int
    slow: tuple[float, float] = (0.0, 0.0)
    seed: int = 0


def cluster_of(job: Job) -> Cluster:
    """Equal servers of one part each, whose intervals all read each other."""
    n, others = job.intervals, job.servers - 1
    ways: tuple[Direction, ...] = ("in", "out")
    own = [tuple(other for other in range(n) if other != unit) for unit in range(n)]
    blocks = tuple(range(others * n))
    topologies = [
        Topology(
            units=tuple(Unit(server, interval) for interval in range(n)),
            reads=dict.fromkeys(ways, own),
            blocks={way: len(blocks) for way in ways},
            ghost_reads={way: [blocks] * n for way in ways},
            sends={way: [others > 0] * n for way in ways},
            peers=tuple(peer for peer in range(job.servers) if peer != server),
        )
        for server in range(job.servers)
    ]
    routes = [
        [
            [(peer, (server - (server > peer)) * n + unit) for peer in topologies[server].peers]
            for unit in range(n)
        ]
        for server in range(job.servers)
    ]
    mode, staleness = MODES[job.mode]
    return Cluster(
        topologies=topologies,
        routes=[dict.fromkeys(ways, route) for route in routes],
        tables=TABLES,
        groups={"train": GROUPS},
        rounds=[Round("train", epoch) for epoch in range(1, job.epochs + 1)],
        mode=mode,
        staleness=staleness,
        workers={"cpu": 1, "dense": -(-n // job.turns), "network": 1},
    )


def task_seconds(cluster: Cluster, group: Group) -> float:
    """Time of a task: of its stage, in one layer, over the turns in which workers take all intervals."""
    stage = group.name.rstrip("0123456789")
    layers = sum(other.name.rstrip("0123456789") == stage for other in GROUPS)
    turns = -(-len(cluster.topologies[0].units) // cluster.workers[group.resource])
    return STAGES[stage] / layers / turns


def run(job: Job) -> float:
    """Seconds of all epochs."""
    cluster = cluster_of(job)
    seconds = {group: task_seconds(cluster, group) for group in GROUPS}

    def draw(rng: random.Random, server: int, group: Group) -> float:
        slow = rng.random() < job.slow[server > 0]
        return seconds[group] * (SLOWER if slow else 1.0)

    outcome = simulate(
        cluster, seed=job.seed, task_seconds=draw, message_seconds=lambda *_: 0.0, check_idle=False
    )
    return outcome.seconds


def run_all(jobs: Iterable[Job], processes: int) -> dict[Job, float]:
    """Run all jobs, the longest first, so that none is waited for alone."""
    ordered = sorted(set(jobs), key=lambda job: -job.servers * job.intervals**2 * job.epochs)
    if processes == 1:
        return {job: run(job) for job in ordered}
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(ordered, pool.map(run, ordered), strict=True))


def pipelining(options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each number of turns and intervals and each mode: seconds an epoch, ratio to nopipe, bounds."""
    half = options.epochs // 2
    cases = [
        Job(mode, options.servers, intervals, turns, options.epochs)
        for turns in options.turns
        for intervals in options.intervals
        for mode in ("nopipe", *PIPELINED)
    ]
    seconds = run_all([*cases, *(replace(job, epochs=half) for job in cases)], options.processes)
    rows = []
    for job in cases:
        cluster = cluster_of(job)
        of = lambda server, group, cluster=cluster: task_seconds(cluster, group)  # noqa: E731
        nopipe = nopipe_seconds(cluster, of) / job.epochs
        epoch = epoch_bound(cluster, of)
        later = (seconds[job] - seconds[replace(job, epochs=half)]) / (job.epochs - half)
        rows.append(
            {
                "turns": job.turns,
                "intervals": job.intervals,
                "mode": job.mode,
                "seconds": seconds[job] / job.epochs,
                "later_seconds": later,
                "ratio": nopipe * job.epochs / seconds[job],
                "later_ratio": nopipe / later,
                "nopipe_seconds": nopipe,
                "bound_seconds": run_bound(cluster, of) / job.epochs,
                "busiest_resource_seconds": epoch.busiest_resource,
                "exact_critical_path_seconds": epoch.critical_path,
                "best_ratio": nopipe / epoch.busiest_resource,
            }
        )
    return rows


def straggler(options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each mode: seconds an epoch without slow tasks, and what they add, mean over seeds."""
    kinds = {
        "one server": (SLOW_SHARE, 0.0),
        "all servers": (SLOW_SHARE / options.servers, SLOW_SHARE / options.servers),
    }
    cases = {
        (turns, kind, mode): Job(
            mode, options.servers, options.straggler_intervals, turns, options.epochs, slow
        )
        for turns in options.turns
        for kind, slow in kinds.items()
        for mode in STRAGGLING
    }
    jobs = [replace(job, seed=seed) for job in cases.values() for seed in range(options.seeds)]
    seconds = run_all([*jobs, *(replace(job, slow=(0.0, 0.0)) for job in cases.values())], options.processes)
    rows: list[dict[str, Any]] = []
    for (turns, kind, mode), job in cases.items():
        base = seconds[replace(job, slow=(0.0, 0.0))]
        lost = [(seconds[replace(job, seed=seed)] - base) / options.epochs for seed in range(options.seeds)]
        rows.append(
            {
                "turns": turns,
                "slow_tasks_of": kind,
                "mode": mode,
                "intervals": job.intervals,
                "seconds": base / options.epochs,
                "lost_seconds": statistics.mean(lost),
                "lost_deviation": statistics.stdev(lost) if len(lost) > 1 else 0.0,
            }
        )
        pipe = next(
            row for row in rows if (row["turns"], row["slow_tasks_of"], row["mode"]) == (turns, kind, "pipe")
        )
        rows[-1]["lost_of_pipe"] = rows[-1]["lost_seconds"] / pipe["lost_seconds"]
    return rows


def pipelining_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for people."""
    lines = [
        f"{'turns':>5} {'intervals':>9}  {'mode':<10} {'s/epoch':>8} {'x nopipe':>8}   "
        f"{'later':>8} {'x nopipe':>8}   {'bound':>8} {'best x':>7}"
    ]
    for row in rows:
        lines.append(
            f"{row['turns']:>5} {row['intervals']:>9}  {row['mode']:<10} {row['seconds']:8.3f} "
            f"{row['ratio']:8.2f}   {row['later_seconds']:8.3f} {row['later_ratio']:8.2f}   "
            f"{row['bound_seconds']:8.3f} {row['best_ratio']:7.2f}"
        )
    for mode in PIPELINED:
        best = max((row for row in rows if row["mode"] == mode), key=lambda row: row["ratio"])
        verdict = "reaches" if best["ratio"] >= PAPER_RATIO else "stays below"
        lines.append(
            f"{mode}: at best {best['ratio']:.2f} times nopipe ({best['intervals']} intervals, "
            f"{best['turns']} turns), {verdict} the paper's {PAPER_RATIO}"
        )
    return lines


def straggler_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for people."""
    lines = [
        f"{'turns':>5}  {'slow tasks of':<13}  {'mode':<10} {'s/epoch':>8} {'slowed':>8} "
        f"{'lost':>7} {'+-':>6} {'of pipe':>8}"
    ]
    for row in rows:
        lines.append(
            f"{row['turns']:>5}  {row['slow_tasks_of']:<13}  {row['mode']:<10} {row['seconds']:8.3f} "
            f"{row['seconds'] + row['lost_seconds']:8.3f} {row['lost_seconds']:7.3f} "
            f"{row['lost_deviation']:6.3f} {row['lost_of_pipe']:8.2f}"
        )
    for turns, kind in dict.fromkeys((row["turns"], row["slow_tasks_of"]) for row in rows):
        share = next(
            row["lost_of_pipe"]
            for row in rows
            if (row["turns"], row["slow_tasks_of"], row["mode"]) == (turns, kind, "async S=1")
        )
        verdict = "at most half" if share <= 0.5 else "more than half"
        lines.append(
            f"{turns} turns, slow tasks of {kind}: S=1 loses {verdict} of what pipe loses ({share:.2f})"
        )
    return lines


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the ratio to nopipe over the number of intervals, for each number of turns."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {path}: matplotlib is not installed")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    turns = sorted({row["turns"] for row in rows})
    figure, axes = pyplot.subplots(
        1, len(turns), figsize=(1 + 4 * len(turns), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, count in zip(axes[0], turns, strict=True):
        for mode in PIPELINED:
            shown = [row for row in rows if (row["turns"], row["mode"]) == (count, mode)]
            axis.plot(
                [row["intervals"] for row in shown], [row["ratio"] for row in shown], marker="o", label=mode
            )
        axis.axhline(max(row["best_ratio"] for row in rows), color="black", label="busiest resource")
        axis.axhline(PAPER_RATIO, color="grey", linestyle=":", label="paper")
        axis.set(title=f"{count} intervals a Lambda", xlabel="intervals a server", ylim=(1, None))
    axes[0][0].set_ylabel("speed, nopipe = 1")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drawn in {path}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipelining",
        description="What pipelining can gain with the task times of the Dorylus paper, in virtual time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--servers", type=int, default=8, help="graph servers")
    add("--intervals", type=int, nargs="+", default=[8, 16, 32, 64], help="intervals a server")
    add("--turns", type=int, nargs="+", default=[1, 4, 16], help="intervals that share a Lambda")
    add("--epochs", type=int, default=20, help="epochs of a run, the exact first one among them")
    add("--straggler-intervals", type=int, default=16, help="intervals a server, with a straggler")
    add("--seeds", type=int, default=20, help="runs with a straggler")
    add("--processes", type=int, default=2, help="processes")
    add("--json", type=Path, metavar="FILE", help="for the results")
    add("--plot", type=Path, metavar="FILE", help="PNG of the ratios; needs matplotlib")
    options = parser.parse_args(arguments)
    numbers = [options.servers, *options.intervals, *options.turns, options.straggler_intervals]
    if min(*numbers, options.seeds, options.processes) < 1 or options.epochs < 2:
        parser.error("all numbers must be at least 1, and --epochs at least 2")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both experiments; return the exit status."""
    options = parse(arguments)
    ratios = pipelining(options)
    print("\n".join(pipelining_table(ratios)))
    losses = straggler(options)
    print(
        f"\n{SLOW_SHARE:.0%} of the tasks of one server {SLOWER:g} times as long, or as many of all servers'"
    )
    print("\n".join(straggler_table(losses)))
    if options.json:
        write_results(
            options.json,
            {
                "stages": STAGES,
                "servers": options.servers,
                "epochs": options.epochs,
                "seeds": options.seeds,
                "pipelining": ratios,
                "straggler": losses,
            },
        )
    if options.plot:
        plot(ratios, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
