"""Time of an epoch on a generated graph, over numbers of ranks, threads and intervals.

    python -m bench.epoch_time [--vertices N] [--edges M] [--ranks 1 2] [--threads 1] [--intervals 0] ...

The graph is made from a seed and prepared once, in as many parts as the largest number of graph servers.
Runs with equal intervals must end with the same weights, bit for bit (exit status 1 if not). Seconds are
the median and the least of the epochs after the warm-up, on rank 0, which waits for all others at the end
of an epoch; none of these epochs has an evaluation. Task seconds are those of the whole run, divided by all
its epochs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from bench.launch import train
from bench.machine import RESULTS, write_results
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.manifest import Manifest
from dorylus_hpc.graph.preparation import prepare_folder
from dorylus_hpc.graph.readers import from_arrays

COUNTS = (
    ("vertices", 50_000, "of the graph"),
    ("edges", 1_000_000, "arcs; half as many pairs are drawn"),
    ("reach", 0, "how far apart the ends of an edge may be; 0: anywhere"),
    ("features", 128, "width of the features, which are dense"),
    ("hidden", 64, "width of the hidden layers"),
    ("classes", 16, "width of the output"),
    ("layers", 2, "number of layers"),
    ("seed", 0, "of the graph and of the training"),
    ("servers", 0, "how many of the ranks are parameter servers"),
    ("epochs", 20, "epochs that count"),
    ("warm-up", 3, "epochs before them"),
)
VARIED = (
    ("ranks", [1, 2], "numbers of ranks"),
    ("threads", [1], "threads a graph server"),
    ("intervals", [0], "intervals a part; 0: as the cost model says"),
)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.epoch_time",
        description="Time of an epoch on a generated graph.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default, text in COUNTS:
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    for name, several, text in VARIED:
        parser.add_argument(f"--{name}", type=int, nargs="+", default=several, help=text)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=RESULTS / "epoch_time.json",
        metavar="FILE",
        help="for the results",
    )
    parser.add_argument("train", nargs="*", metavar="-- ARGUMENTS", help="more arguments for train")
    return parser


def generate(options: argparse.Namespace) -> GraphData:
    """Random pairs of vertices, features and labels. Nothing is to be learned from them."""
    rng = np.random.default_rng(options.seed)
    n, pairs = options.vertices, options.edges // 2
    sources = rng.integers(n, size=pairs)
    reach = min(options.reach, n - 1) or n - 1
    destinations = (sources + rng.integers(1, reach + 1, size=pairs)) % n
    return from_arrays(
        sp.coo_array((np.ones(pairs), (sources, destinations)), shape=(n, n)),
        rng.standard_normal((n, options.features), dtype=np.float32),
        rng.integers(options.classes, size=n),
        n_classes=options.classes,
        name="generated",
        seed=options.seed,
    )


def prepare(options: argparse.Namespace, folder: Path) -> Manifest:
    """Prepare the graph as it was generated: ranges of vertices, in their own order."""
    graph = generate(options)
    return prepare_folder(
        graph,
        folder,
        parts=max(options.ranks) - options.servers,
        partitioner="range",
        undirected=True,
        order="none",
        report=lambda line: None,
    )


def measure(
    options: argparse.Namespace, work: Path, ranks: int, threads: int, intervals: int
) -> dict[str, Any]:
    """Train once; return a row of results."""
    run_dir = work / f"{ranks}-{threads}-{intervals}"
    epochs = options.warm_up + options.epochs
    shape = {name: getattr(options, name) for name in ("layers", "hidden", "servers", "seed")}
    how = {"threads": threads, "intervals": intervals, "epochs": epochs, "eval-every": epochs}
    summary = train(ranks, run_dir, {"data": work / "graph"} | shape | how, options.train)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines][options.warm_up :]
    return {
        "ranks": summary["ranks"],
        "intervals": summary["config"]["intervals"],
        "epochs": len(seconds),
        "epoch_seconds": {"median": statistics.median(seconds), "min": min(seconds)},
        "task_seconds_per_epoch": {
            kind: spent / epochs for kind, spent in summary["task_seconds"].items() if spent
        },
        "setup_seconds": summary["setup_seconds"],
        "ghost_bytes_per_epoch": summary["ghost_bytes_per_epoch"],
        "peak_rss_bytes": summary["peak_rss_bytes"],
        "weights_sha256": summary["weights_sha256"],
        "config": summary["config"],
    }


HEAD = f"{'servers':>7} {'threads':>7} {'intervals':>9} {'median s':>9} {'least s':>9}  task seconds an epoch"


def _line(row: dict[str, Any]) -> str:
    ranks, seconds = row["ranks"], row["epoch_seconds"]
    tasks = "  ".join(f"{kind} {spent:.3f}" for kind, spent in row["task_seconds_per_epoch"].items())
    return (
        f"{ranks['graph_servers']:>7} {ranks['threads']:>7} {row['intervals']:>9} "
        f"{seconds['median']:>9.4f} {seconds['min']:>9.4f}  {tasks}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if runs that must end with the same weights did."""
    options = parser().parse_args(argv)
    if options.epochs < 1 or options.warm_up < 1:
        parser().error("--epochs and --warm-up must be at least 1")
    if min(options.ranks) <= options.servers:
        parser().error(
            f"--ranks {min(options.ranks)} leaves no graph server beside --servers {options.servers}"
        )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        manifest = prepare(options, work / "graph")
        print(f"{manifest.vertices} vertices, {manifest.edges} arcs, {len(manifest.parts)} parts")
        print(HEAD)
        for ranks, threads, intervals in product(options.ranks, options.threads, options.intervals):
            rows.append(measure(options, work, ranks, threads, intervals))
            print(_line(rows[-1]), flush=True)
    weights: dict[int, set[str]] = {}
    for row in rows:
        weights.setdefault(row["intervals"], set()).add(row["weights_sha256"])
    equal = all(len(found) == 1 for found in weights.values())
    print(f"weights of runs with equal intervals {'are bit-equal' if equal else 'DIFFER'}")
    graph = {name: value for name, value in asdict(manifest).items() if name != "parts"}
    write_results(options.output, {"graph": graph, "warm_up_epochs": options.warm_up, "runs": rows})
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
