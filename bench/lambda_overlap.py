"""How much of the time that tasks spend in Lambda each mode hides, against a lower bound.

    python -m bench.lambda_overlap [--latency 0.05] [--bandwidth 75e6] [--workers 4] [--json F]

Like `bench.overlap`, with real workers: two graph servers of 32 intervals and one thread each train on the
band graph; dense tasks run in the local Lambda service, whose network model gives each worker a round trip
of `--latency` and so many bytes a second. The number of workers is fixed, and such that dense work and graph
work of an epoch take about equally long: that is where there is most to hide.

The bounds have the wiring of these runs and fixed task times: the means in the ``nopipe`` runs, of gathers
and of dense tasks (from the call to the result accepted). What calls, the local service, the workers' maths,
encryption and the modelled lines cost in time of *these* cores, which the gathers need too, is measured as
what all processes worked in the ``nopipe`` epochs beyond gathers, and counted as work of the servers' threads
in the bound. The share of the possible gain is ::

    (nopipe measured - mode measured) / (nopipe measured - bound of the mode)

Runs of all modes take turns, in an order drawn anew each round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import busy_seconds, cores, write_results
from bench.overlap import (
    SERVERS,
    TARGETS,
    Run,
    cluster_of,
    epoch_seconds,
    gain_share,
    group_seconds,
    in_mode,
    on_these_cores,
    prepare,
    run,
    seconds_of,
    simulated,
    steady_bound,
)
from dorylus_hpc.engine.bounds import epoch_bound, nopipe_seconds
from dorylus_hpc.engine.runner import DENSE
from dorylus_hpc.engine.simulator import Cluster
from dorylus_hpc.engine.wiring import GRAPH

INTERVALS = 32
MODES = ("nopipe", "pipe", "async S=0", "async S=1")


@dataclass(frozen=True)
class Measured:
    """A run, the seconds that all processes of the machine worked meanwhile, and those that a call took."""

    run: Run
    worked: float
    call_seconds: float


def measure(options: argparse.Namespace, work: Path) -> dict[str, list[Measured]]:
    """Runs by mode; all take turns."""
    flags = {
        "backend": "lambda-local", "workers": options.workers, "max-workers": options.workers,
        "local-latency": options.latency, "local-bandwidth": options.bandwidth,
    }  # fmt: skip
    runs: dict[str, list[Measured]] = {mode: [] for mode in (*MODES, "brief")}
    rng = random.Random(options.seed)
    brief = argparse.Namespace(warm_up=options.warm_up, epochs=1)
    for _ in range(options.rounds):
        for mode in rng.sample(list(runs), len(runs)):
            before = busy_seconds()
            found = run(
                work, "nopipe" if mode == "brief" else mode, brief if mode == "brief" else options,
                intervals=INTERVALS, width=options.width, **flags,
            )  # fmt: skip
            after = busy_seconds()
            worked = after[1] - before[1] if before and after else 0.0
            used = json.loads((work / "run" / "summary.json").read_text())["lambda"]
            runs[mode].append(Measured(found, worked, used["call_seconds"] / used["invocations"]))
            print(f"{mode}: {1e3 * statistics.fmean(found.seconds):.0f} ms an epoch", flush=True)
    return runs


def overhead(options: argparse.Namespace, runs: dict[str, list[Measured]], graph: float) -> float:
    """Seconds an epoch that all processes worked in ``nopipe``, beyond the gathers of all servers."""
    long, short = (statistics.median(one.worked for one in runs[mode]) for mode in ("nopipe", "brief"))
    return max(0.0, (long - short) / (options.epochs - 1) - SERVERS * graph)


def rows_of(
    cluster: Cluster, times: dict[str, float], extra: float, calls: float, measured: dict[str, float]
) -> list[dict[str, Any]]:
    """For each mode: what was measured, bounds, and share of the possible gain."""
    loaded = on_these_cores(cluster, times, extra / cores())
    rows = []
    for mode, seconds in measured.items():
        row: dict[str, Any] = {"mode": mode, "seconds": seconds}
        if mode == "nopipe":
            row["arithmetic_seconds"] = nopipe_seconds(in_mode(cluster, mode, 1), seconds_of(times))
        else:
            for name, which in (("bound", loaded), ("bound_without_overhead", times)):
                bound = epoch_bound(cluster, seconds_of(which))
                steady = steady_bound(cluster, mode, which) if mode == "async S=1" else bound.exact
                row[f"{name}_seconds"] = max(calls, steady)
                row[f"{name}_path_or_resource_seconds"] = max(
                    calls, bound.busiest_resource, bound.critical_path
                )
            row["simulated_seconds"] = simulated(cluster, mode, loaded)
            row["gain_share"] = gain_share(measured["nopipe"], seconds, row["bound_seconds"])
            row["gain_share_of_path_or_resource"] = gain_share(
                measured["nopipe"], seconds, row["bound_path_or_resource_seconds"]
            )
            row["target"] = TARGETS[mode]
            row["reached"] = row["gain_share"] >= row["target"]
        rows.append(row)
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.lambda_overlap",
        description="How much of the time in Lambda each mode hides, against a lower bound.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--latency", type=float, default=0.05, help="seconds of a round trip between worker and server")
    add("--bandwidth", type=float, default=75e6, help="bytes a second of a worker in each direction")
    add("--workers", type=int, default=4, help="invocations a graph server at once")
    add("--vertices", type=int, default=24_000, help="of the graph")
    add("--reach", type=int, default=2_500, help="vertices on each side that one is joined to")
    add("--width", type=int, default=512, help="of the hidden layer and of the output")
    add("--epochs", type=int, default=4, help="epochs that count")
    add("--warm-up", type=int, default=1, help="epochs before them")
    add("--rounds", type=int, default=3, help="runs of each mode")
    add("--seed", type=int, default=0, help="of the order of runs")
    add("--json", type=Path, metavar="FILE", help="for the results")
    options = parser.parse_args(arguments)
    if min(options.epochs - 1, options.warm_up, options.rounds, options.reach, options.workers) < 1:
        parser.error("--warm-up, --rounds, --reach and --workers must be at least 1, --epochs 2")
    if options.vertices < max(2 * options.reach + 1, SERVERS * INTERVALS):
        parser.error(f"--vertices {options.vertices} are too few for --reach {options.reach}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; 0 whatever was found."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(options.vertices, options.reach, work / "graph", width=options.width)
        cluster = cluster_of(
            work / "graph", intervals=INTERVALS, dense_workers=options.workers, width=options.width
        )
        runs = measure(options, work)
    groups = cluster.groups["train"]
    found = [group_seconds(one.run.spans, groups, whole=True) for one in runs["nopipe"]]
    times = {one.name: statistics.median(each[one.name] for each in found) for one in groups}
    graph = INTERVALS * sum(times[one.name] for one in groups if one.resource == GRAPH)
    dense = INTERVALS * sum(times[one.name] for one in groups if one.resource == DENSE) / options.workers
    extra = overhead(options, runs, graph)
    # A place for an invocation is free when the call returns, a while after the result was accepted.
    call = statistics.median(one.call_seconds for one in runs["nopipe"])
    calls = INTERVALS * sum(one.resource == DENSE for one in groups) * call / options.workers
    print("task times, ms: " + ", ".join(f"{name} {1e3 * value:.1f}" for name, value in times.items()))
    print(
        f"an epoch of a server: gathers {graph:.2f} s, dense work by {options.workers} workers "
        f"{dense:.2f} s, until their calls return {calls:.2f} s; all else worked {extra:.2f} s of the "
        f"{cores()} cores; load average {os.getloadavg()[0]:.1f}"
    )
    measured = {mode: epoch_seconds(mode, [one.run for one in runs[mode]]) for mode in MODES}
    rows = rows_of(cluster, times, extra, calls, measured)
    print(
        f"{'mode':<10} {'seconds':>8} {'bound':>8} {'no overhead':>12} {'simulated':>10} "
        f"{'path/resource':>14}   share of the possible gain"
    )
    for row in rows:
        if row["mode"] == "nopipe":
            print(f"{row['mode']:<10} {row['seconds']:8.3f}   arithmetic {row['arithmetic_seconds']:.3f}")
            continue
        verdict = "" if row["reached"] else ", missed"
        print(
            f"{row['mode']:<10} {row['seconds']:8.3f} {row['bound_seconds']:8.3f} "
            f"{row['bound_without_overhead_seconds']:12.3f} {row['simulated_seconds']:10.3f} "
            f"{row['bound_path_or_resource_seconds']:14.3f}   "
            f"{row['gain_share']:.1%} (target {row['target']:.0%}{verdict}); "
            f"{row['gain_share_of_path_or_resource']:.1%} of path/resource"
        )
    if options.json:
        write_results(options.json, {"options": vars(options) | {"json": ""}, "task_seconds": times,
                                     "overhead_seconds": extra, "modes": rows})  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
