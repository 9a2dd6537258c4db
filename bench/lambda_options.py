"""What task fusion, rematerialisation and streaming save: bytes over the wire, seconds an epoch.

    python -m bench.lambda_options [--latency 0.01] [--bandwidth 75e6] [--rounds 3] [--json F]

One graph server trains a GCN of two layers on a random graph with more classes than hidden units, so that
each layer has a product of its own in Lambda. The workers' lines are modelled. Runs of all cases take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from bench.launch import train
from bench.machine import write_results
from dorylus_hpc.graph.preparation import prepare_folder
from dorylus_hpc.graph.readers import from_arrays

ALL_ON: dict[str, Any] = {"task-fusion": "on", "rematerialisation": "on", "stream-rows": 0}


def cases(rows: int) -> dict[str, dict[str, Any]]:
    """What is compared, by name."""
    return {
        "fusion, rematerialisation": ALL_ON,
        "no fusion": ALL_ON | {"task-fusion": "off"},
        "no rematerialisation": ALL_ON | {"rematerialisation": "off"},
        "neither": ALL_ON | {"task-fusion": "off", "rematerialisation": "off"},
        f"both, streaming {rows} rows": ALL_ON | {"stream-rows": rows},
    }


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Prepare a random graph in one part."""
    rng = np.random.default_rng(0)
    n, degree = options.vertices, options.degree
    indices = rng.integers(n, size=n * degree).astype(np.int32)
    graph = from_arrays(
        sp.csr_array(
            (np.ones(n * degree, np.int8), indices, np.arange(0, n * degree + 1, degree)), shape=(n, n)
        ),
        rng.standard_normal((n, options.features), dtype=np.float32),
        rng.integers(options.classes, size=n),
        n_classes=options.classes,
        name="random",
        seed=0,
    )
    prepare_folder(
        graph, folder, parts=1, partitioner="range", undirected=True, order="none", report=lambda line: None
    )


def measure(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Run all cases in turns; one row a case."""
    epochs = options.warm_up + options.epochs
    fixed = {
        "data": work / "graph", "layers": 2, "hidden": options.hidden, "dropout": 0, "epochs": epochs,
        "eval-every": epochs, "intervals": options.intervals, "backend": "lambda-local",
        "workers": options.workers, "max-workers": options.workers, "local-latency": options.latency,
        "local-bandwidth": options.bandwidth, "trace-events": 0,
    }  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases(options.stream_rows)}
    rng = random.Random(0)
    for _ in range(options.rounds):
        for name, flags in rng.sample(list(cases(options.stream_rows).items()), len(found)):
            found[name].append(train(1, work / "run", fixed | flags))
    rows = []
    for name, summaries in found.items():
        used = [one["lambda"] for one in summaries]
        rows.append(
            {
                "case": name,
                "seconds": statistics.median(one["epoch_seconds"]["median"] for one in summaries),
                "sent": statistics.median(one["bytes_sent"] for one in used) / epochs,
                "received": statistics.median(one["bytes_received"] for one in used) / epochs,
                "invocations": statistics.median(one["invocations"] for one in used) / epochs,
                "compute": statistics.median(one["worker_seconds"]["compute"] for one in used) / epochs,
                "total": statistics.median(one["worker_seconds"]["total"] for one in used) / epochs,
            }
        )
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.lambda_options",
        description="What task fusion, rematerialisation and streaming save.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--vertices", type=int, default=40_000, help="of the graph")
    add("--degree", type=int, default=10, help="arcs a vertex, before their reverses are added")
    add("--features", type=int, default=256, help="columns")
    add("--hidden", type=int, default=128, help="units")
    add("--classes", type=int, default=192, help="classes")
    add("--intervals", type=int, default=16, help="of the graph")
    add("--workers", type=int, default=8, help="invocations at once")
    add("--latency", type=float, default=0.01, help="seconds of a round trip")
    add("--bandwidth", type=float, default=75e6, help="bytes a second of a worker, each direction")
    add("--stream-rows", type=int, default=512, help="rows a chunk of the streaming case")
    add("--epochs", type=int, default=6, help="epochs that count")
    add("--warm-up", type=int, default=2, help="epochs before them")
    add("--rounds", type=int, default=3, help="runs of each case")
    add("--json", type=Path, metavar="FILE", help="for the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(options, work / "graph")
        rows = measure(options, work)
    first = rows[0]
    print(
        f"{'an epoch':<28} {'MB to':>8} {'MB from':>8} {'bytes':>7} {'calls':>6} {'seconds':>8} {'ratio':>6} "
        f"{'worker s':>9} {'maths s':>8}"
    )
    for row in rows:
        bytes_ratio = (row["sent"] + row["received"]) / (first["sent"] + first["received"])
        print(
            f"{row['case']:<28} {row['sent'] / 1e6:8.1f} {row['received'] / 1e6:8.1f} {bytes_ratio:7.2f} "
            f"{row['invocations']:6.0f} {row['seconds']:8.3f} {row['seconds'] / first['seconds']:6.2f} "
            f"{row['total']:9.2f} {row['compute']:8.2f}"
        )
    if options.json:
        write_results(options.json, {"options": {**vars(options), "json": ""}, "cases": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
