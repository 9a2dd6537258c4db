"""Simulate many drawn clusters and check what each mode promises.

    python -m bench.schedules [--count 100000] [--first 0] [--processes 2]

Every seed draws a cluster (servers, parts, intervals, reads, layers, workers, mode, S, weight servers), task
times, message delays and orders of arrival. Exit status 1, with the seeds that replay them, if any promise is
broken: start lead above S, rows read that are older or newer than the bound, a wrong weight version, rows
replaced under a reader, stashes left over, a worker idle beside a task that could run, a cluster that stands
still.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from dorylus_hpc.engine.random_clusters import random_cluster
from dorylus_hpc.engine.simulator import simulate

BATCH = 500


def run_batch(first: int, stop: int) -> tuple[Counter[str], list[str]]:
    """Simulate the seeds first .. stop - 1; return how many of each mode, and what broke."""
    counts: Counter[str] = Counter()
    broken = []
    for seed in range(first, stop):
        cluster = random_cluster(seed)
        name = f"async S={cluster.staleness}" if cluster.mode == "async" else cluster.mode
        counts[name] += 1
        try:
            outcome = simulate(cluster, seed=seed)
        except Exception as error:  # the campaign goes on and tells all of them
            broken.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if outcome.max_lead > cluster.staleness or outcome.max_read_age > cluster.staleness + 1:
            broken.append(f"{name}: seed {seed}: lead {outcome.max_lead}, read age {outcome.max_read_age}")
        if cluster.update == "epoch" and outcome.most_versions > cluster.staleness + 2:
            broken.append(f"{name}: seed {seed}: {outcome.most_versions} versions of the weights at a time")
    return counts, broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.schedules",
        description="Simulate many drawn clusters and check what each mode promises.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=100_000, help="simulations")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--processes", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    start, counts, broken = time.perf_counter(), Counter[str](), []
    end = options.first + options.count
    firsts = range(options.first, end, BATCH)
    with ProcessPoolExecutor(options.processes) as pool:
        for more, wrong in pool.map(run_batch, firsts, [min(first + BATCH, end) for first in firsts]):
            counts.update(more)
            broken += wrong
    for name, count in sorted(counts.items()):
        print(f"{name:12} {count:8} simulations")
    print(
        f"{counts.total()} simulations in {time.perf_counter() - start:.0f} s, {len(broken)} broken promises"
    )
    for text in broken[:20]:
        print(f"  {text}")
    return 1 if broken or counts.total() != options.count else 0


if __name__ == "__main__":
    sys.exit(main())
