"""Whether the autotuner finds the number of Lambda workers, in real runs on the local service.

    python -m bench.lambda_autotune [--latency 0.05] [--bandwidth 75e6] [--rounds 3] [--json F]

A graph server trains on the band graph of `bench.overlap`, with dense tasks in the local Lambda service
behind modelled lines. Fixed numbers of workers and the autotuner (``--workers 0``) take turns, in an order
drawn anew each round. For fixed numbers, and for the autotuner from its eleventh epoch on, the median counts;
then the median over the rounds. The smallest number within 10 % of the best epoch is what should be found.
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
from pathlib import Path
from typing import Any

from bench.launch import train
from bench.machine import write_results
from bench.overlap import prepare

SETTLED = 10  # epochs that the autotuner has
CLOSE, FEW = 1.10, 1.5  # to the best epoch; to the smallest number of workers that is that close


def run(work: Path, workers: int, options: argparse.Namespace) -> tuple[list[float], list[tuple[float, str]]]:
    """Train; return the seconds of the epochs that count, and what the autotuner decided."""
    epochs = (SETTLED if not workers else options.warm_up) + options.epochs
    train(
        1,
        work / "run",
        {
            "data": work / "graph", "layers": 2, "hidden": options.width, "dropout": 0, "epochs": epochs,
            "eval-every": epochs, "intervals": options.intervals, "threads": 1, "mode": options.mode,
            "backend": "lambda-local", "workers": workers, "max-workers": options.most,
            "local-latency": options.latency, "local-bandwidth": options.bandwidth,
        },
    )  # fmt: skip
    lines = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    events = json.loads((work / "run" / "trace.json").read_text())["traceEvents"]
    notes = [
        (event["args"]["value"], event["args"]["reason"])
        for event in events
        if event.get("ph") == "i" and event["name"] == "Lambda workers"
    ]
    return [line["seconds"] for line in lines][-options.epochs :], notes


def judge(fixed: dict[int, float], tuned: float, used: float) -> dict[str, Any]:
    """Compare the autotuner with the sweep."""
    best = min(fixed.values())
    smallest = min(number for number, seconds in fixed.items() if seconds <= CLOSE * best)
    return {
        "best_seconds": best,
        "smallest_enough": smallest,
        "tuned_seconds": tuned,
        "tuned_workers": used,
        "of_best": tuned / best,
        "of_smallest": used / smallest,
        "reached": tuned <= CLOSE * best and used <= FEW * smallest,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.lambda_autotune",
        description="Whether the autotuner finds the number of Lambda workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--vertices", type=int, default=12_000, help="of the graph")
    add("--reach", type=int, default=350, help="vertices on each side that one is joined to")
    add("--width", type=int, default=128, help="of the hidden layer and of the output")
    add("--intervals", type=int, default=32, help="of the graph")
    add("--mode", default="pipe", help="schedule")
    add("--latency", type=float, default=0.05, help="seconds of a round trip between worker and server")
    add("--bandwidth", type=float, default=75e6, help="bytes a second of a worker in each direction")
    add(
        "--fixed",
        type=int,
        nargs="+",
        default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32],
        help="numbers to compare with",
    )
    add("--epochs", type=int, default=6, help="epochs that count")
    add("--warm-up", type=int, default=2, help="epochs before them, with a fixed number")
    add("--rounds", type=int, default=3, help="runs of each")
    add("--json", type=Path, metavar="FILE", help="for the results")
    options = parser.parse_args(arguments)
    options.most = max(options.fixed)
    if min(options.epochs, options.warm_up, options.rounds, *options.fixed) < 1:
        parser.error("--epochs, --warm-up, --rounds and --fixed must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; 0 whatever was found."""
    options = parse(arguments)
    rng = random.Random(0)
    seconds: dict[int, list[float]] = {workers: [] for workers in (*options.fixed, 0)}
    decided: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(options.vertices, options.reach, work / "graph", width=options.width, parts=1)
        for _ in range(options.rounds):
            for workers in rng.sample(list(seconds), len(seconds)):
                found, notes = run(work, workers, options)
                seconds[workers].append(statistics.median(found))
                if not workers:
                    decided.append(notes[-1][0])
                    print("autotuner: " + ", ".join(f"{value:.0f}" for value, _ in notes), flush=True)
    fixed = {workers: statistics.median(each) for workers, each in seconds.items() if workers}
    tuned = statistics.median(seconds[0])
    verdict = judge(fixed, tuned, statistics.median(decided))
    print(f"{'workers':>8} {'ms an epoch':>12}")
    for workers, each in fixed.items():
        print(f"{workers:8} {1e3 * each:12.0f}")
    print(
        f"autotuner {1e3 * tuned:.0f} ms with {verdict['tuned_workers']:.0f} workers: "
        f"{verdict['of_best']:.2f} of the best epoch (at most {CLOSE}), "
        f"{verdict['of_smallest']:.2f} of the {verdict['smallest_enough']} that are enough "
        f"(at most {FEW}){'' if verdict['reached'] else ', missed'}; load average {os.getloadavg()[0]:.1f}"
    )
    if options.json:
        write_results(options.json, {"options": {**vars(options), "json": ""}, "fixed": fixed, **verdict})
    return 0


if __name__ == "__main__":
    sys.exit(main())
