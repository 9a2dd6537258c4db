"""Does the autotuner find the number of Lambda workers? In virtual time, against a sweep of fixed ones.

    python -m bench.autotune [--servers 8] [--intervals 100] [--settings NAME ...] [--modes MODE ...]

Each case is a setting and a mode. The sweep runs it with fixed numbers of workers, the same on all servers:
`best` is the fastest epoch of all, `least` the smallest number whose epochs are within 10 % of it. Then one
autotuner a server starts where it always starts, and has 10 epochs. What counts is what comes after them::

    x time       seconds an epoch / best                                      at most 1.1
    x workers    mean over servers, in the epoch with the most, / least       at most 1.5

Exit status 1 if a case misses one of them. `last move` is the last epoch after which any server changed.

Modelled: a GCN of two layers, whose dense tasks (AV, dAV) run in Lambda. An environment starts cold, takes
at most 10 invocations a second, and at most 1,000 more of them start every 10 seconds. A task moves its
inputs and results at 75 MB/s an environment, and shares its server's line with the others where the setting
has one. An interval reads all others of its server, and every tenth of each other server.

Times and sizes of tasks vary evenly by +-20 %, as intervals differ. Where all are exactly alike, servers fall
into step: all intervals transfer, then all compute. Such a step holds for ever, makes 67 workers slower than
64, and depends on how it was reached; nothing real keeps it.

`nopipe` is left out by default: its time goes in steps with intervals / workers, rounded up. Between two
steps more workers gain nothing, so a search that tries few numbers can take the start of one for its end.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.machine import write_results
from bench.pipelining import MODES, Job, cluster_of
from dorylus_hpc.engine.schedule import Group
from dorylus_hpc.engine.simulator import Cluster, Lambdas, Outcome, simulate
from dorylus_hpc.serverless.autotuner import Autotuner

GROUPS = (
    Group("GA1"),
    Group("AV1", "dense", weights=True, writes=0),
    Group("GA2", reads=0),
    Group("AV2+dAV2", "dense", weights=True, writes=1),
    Group("dGA2", reads=1),
    Group("dAV1", "dense", weights=True),
)
GIVEN, AFTER = 10, 10  # epochs to settle, and those that are measured
FIXED = 6  # epochs of a run with a fixed number; 3 are measured, from the third on
SLOWER, FEWER = 1.1, 1.5
READ = 10
VARY = 0.2
MB = 1e6


@dataclass(frozen=True)
class Setting:
    """What a task takes.

    Attributes
    ----------
    graph, dense
        Seconds of a task of a core, and of a worker's computation.
    megabytes
        Of a dense task's inputs, and of its results.
    cores
        Of a server.
    line
        Megabytes a second, each way, of a server; None: enough for all workers.
    latency
        Seconds of an invocation.
    slow
        Probability that a task of the first server takes twice as long.
    """

    graph: float
    dense: float
    megabytes: tuple[float, float] = (2.0, 1.0)
    cores: int = 4
    line: float | None = None
    latency: float = 0.03
    slow: float = 0.0


SETTINGS = {
    "graph work leads": Setting(graph=0.04, dense=0.1),
    "short tasks": Setting(graph=0.01, dense=0.004, megabytes=(0.5, 0.25)),
    "balanced": Setting(graph=0.04, dense=0.4, megabytes=(4.0, 2.0)),
    "dense work leads": Setting(graph=0.01, dense=1.0, megabytes=(4.0, 2.0)),
    "shared line": Setting(graph=0.03, dense=0.2, megabytes=(10.0, 5.0), line=1200.0),
    "narrow line": Setting(graph=0.01, dense=0.05, megabytes=(10.0, 5.0), line=300.0),
    "far away": Setting(graph=0.03, dense=0.05, latency=0.2),
    "straggler": Setting(graph=0.04, dense=0.3, megabytes=(4.0, 2.0), slow=0.25),
}


@dataclass(frozen=True)
class Case:
    """A setting and a mode on some cluster."""

    setting: str
    mode: str
    servers: int
    intervals: int
    seed: int = 0


def cluster(case: Case, epochs: int, workers: int) -> Cluster:
    """Make the cluster of a case."""
    setting, n = SETTINGS[case.setting], case.intervals
    moved = tuple(MB * amount for amount in setting.megabytes)
    whole = cluster_of(Job(case.mode, case.servers, n, 1, epochs))
    blocks = range((case.servers - 1) * n)  # of one other server after the other
    read = [tuple(block for block in blocks if (block % n - unit) % READ == 0) for unit in range(n)]
    return replace(
        whole,
        topologies=[
            replace(topology, ghost_reads=dict.fromkeys(topology.ghost_reads, read))
            for topology in whole.topologies
        ],
        groups={"train": GROUPS},
        workers={"cpu": setting.cores, "dense": workers},
        lambdas=Lambdas(
            transfers={group.name: (moved[0], moved[1]) for group in GROUPS if group.resource == "dense"},
            spread=VARY,
            latency=setting.latency,
            line=None if setting.line is None else MB * setting.line,
        ),
    )


def run(case: Case, epochs: int, workers: int | None) -> Outcome:
    """Run a case with a fixed number of workers, or with autotuners."""
    setting = SETTINGS[case.setting]

    def seconds(rng: random.Random, server: int, group: Group) -> float:
        base = setting.dense if group.resource == "dense" else setting.graph
        slow = server == 0 and setting.slow > 0 and rng.random() < setting.slow
        return base * rng.uniform(1 - VARY, 1 + VARY) * (2 if slow else 1)

    made = cluster(case, epochs, workers or 1)
    return simulate(
        made,
        seed=case.seed,
        task_seconds=seconds,
        message_seconds=lambda *_: 0.002,
        check_idle=False,
        autotuner=None
        if workers
        else lambda _: Autotuner(case.intervals, case.intervals, lead=made.staleness),
    )


def epoch_seconds(outcome: Outcome, first: int, stop: int) -> float:
    """Mean seconds of the epochs first .. stop - 1, from 0, each until the last server has done it."""
    ends = [max(times) for times in zip(*outcome.ends.values(), strict=True)]
    return (ends[stop - 1] - ends[first - 1]) / (stop - first)


def sweep(case: Case) -> tuple[dict[int, float], int]:
    """Seconds an epoch by number of workers, and the smallest number within the limit of the best."""

    @cache
    def fixed(workers: int) -> float:
        return epoch_seconds(run(case, FIXED, workers), 2, FIXED - 1)

    curve: dict[int, float] = {}
    workers = case.intervals
    while True:
        curve[workers] = fixed(workers)
        # Where few workers are so slow, fewer are no better.
        if workers == 1 or curve[workers] > 1.3 * min(curve.values()):
            break
        workers = min(workers - 1, round(workers / 1.3))
    limit = SLOWER * min(curve.values())
    least = min(number for number, seconds in curve.items() if seconds <= limit)
    few = max((number for number in curve if number < least), default=0)
    while least - few > 1:
        middle = (least + few) // 2
        curve[middle] = fixed(middle)
        least, few = (middle, few) if curve[middle] <= limit else (least, middle)
    return dict(sorted(curve.items())), least


def judge(case: Case) -> dict[str, Any]:
    """Run the sweep and the autotuners of a case."""
    curve, least = sweep(case)
    best = min(curve.values())
    outcome = run(case, GIVEN + AFTER + 1, None)
    seconds = epoch_seconds(outcome, GIVEN, GIVEN + AFTER)  # in the last epoch no server leads
    decided = [[one.workers for one in outcome.decisions[server]] for server in range(case.servers)]
    # What is decided after an epoch holds in the next.
    used = [statistics.fmean(numbers) for numbers in zip(*decided, strict=True)][
        GIVEN - 1 : GIVEN + AFTER - 1
    ]
    moves = [
        epoch + 1
        for numbers in decided
        for epoch, (before, after) in enumerate(zip(numbers, numbers[1:], strict=False), 1)
        if before != after
    ]
    row = {
        **asdict(case),
        "curve": curve,
        "best_seconds": best,
        "least_workers": least,
        "seconds": seconds,
        "workers": max(used),
        "workers_by_server": [numbers[GIVEN - 1] for numbers in decided],
        "last_move": max(moves, default=0),
        "times_seconds": seconds / best,
        "times_workers": max(used) / least,
        "decisions": [asdict(one) for one in outcome.decisions[0]],
        "environments": outcome.environments,
        "refused": outcome.refused,
    }
    row["reached"] = row["times_seconds"] <= SLOWER and row["times_workers"] <= FEWER
    return row


HEAD = (
    f"{'setting':<17} {'mode':<10} {'best':>8} {'least':>6} {'tuned':>8} {'workers':>8} "
    f"{'x time':>7} {'x workers':>10} {'last move':>10}"
)


def line_of(row: dict[str, Any]) -> str:
    """The line of a case."""
    return (
        f"{row['setting']:<17} {row['mode']:<10} {row['best_seconds']:8.3f} {row['least_workers']:>6} "
        f"{row['seconds']:8.3f} {row['workers']:8.1f} "
        f"{row['times_seconds']:7.3f} {row['times_workers']:10.2f} "
        f"{row['last_move']:>10}{'' if row['reached'] else '   missed'}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.autotune",
        description="Does the autotuner find the number of Lambda workers? In virtual time, against a sweep.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--servers", type=int, default=8, help="graph servers")
    add("--intervals", type=int, default=100, help="intervals a server")
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="what tasks take")
    add("--modes", nargs="+", choices=MODES, default=["pipe", "async S=0", "async S=1"], help="modes")
    add("--seed", type=int, default=0, help="of the times of tasks")
    add("--processes", type=int, default=2, help="processes")
    add("--decisions", action="store_true", help="print those of the first server")
    add("--json", type=Path, metavar="FILE", help="for the results")
    options = parser.parse_args(arguments)
    if min(options.servers, options.intervals, options.processes) < 1:
        parser.error("all numbers must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; return the exit status."""
    options = parse(arguments)
    cases = [
        Case(setting, mode, options.servers, options.intervals, options.seed)
        for setting in options.settings
        for mode in options.modes
    ]
    print(HEAD)
    rows = []
    with ProcessPoolExecutor(options.processes) as pool:
        for row in pool.map(judge, cases):
            rows.append(row)
            print(line_of(row), flush=True)
            if options.decisions:
                for epoch, one in enumerate(row["decisions"], 1):
                    print(f"    after epoch {epoch:>2}: {one['workers']:>3}  {one['reason']}")
    missed = sum(not row["reached"] for row in rows)
    print(
        f"{len(rows) - missed} of {len(rows)} cases: within {SLOWER - 1:.0%} of the best time "
        f"with at most {FEWER} times the least workers after {GIVEN} epochs"
    )
    if options.json:
        write_results(options.json, {"settings": {k: asdict(v) for k, v in SETTINGS.items()}, "cases": rows})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
