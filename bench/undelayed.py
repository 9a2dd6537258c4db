"""What pipelining costs, or gains, where no worker is far away: epochs in ``pipe`` over those in ``nopipe``.

    python -m bench.undelayed [--graphs band uniform] [--ours 1x2 2x1] [--rounds 5] [--json F]

A GCN of two layers on all cores, without any delay. In ``band`` a vertex is joined to the next ones, so an
interval reads itself and its neighbours; in ``uniform`` every interval reads rows of every other. Runs of
both modes take turns, first one, then the other first. Seconds are medians over the epochs of a run, without
its first ones, and then over runs. The results of both modes must be the same to the bit.

All cores are busy in both modes, so there is little to hide: what ``pipe`` gains is what ranks would wait
for each other between stages, and what it costs is the schedule's own time, which is that of the same cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from bench.launch import Layout, epochs_of, train
from bench.machine import busy_of_others, busy_seconds, write_results
from dorylus_hpc.graph.preparation import prepare_folder
from dorylus_hpc.graph.readers import from_arrays

FEATURES, HIDDEN, CLASSES = 64, 64, 16
MODES = ("nopipe", "pipe")
TARGETS = {1: 1.03}  # by ranks; more than one rank must be faster


def band(vertices: int, edges: int) -> sp.csr_array:
    """Edges to as many next vertices each."""
    reach = max(1, edges // vertices)
    ends = (np.arange(vertices)[:, None] + np.arange(1, reach + 1)) % vertices
    indptr = np.arange(0, vertices * reach + 1, reach)
    indices = ends.astype(np.int32).reshape(-1)
    return sp.csr_array((np.ones(len(indices), np.int8), indices, indptr), shape=(vertices, vertices))


def uniform(vertices: int, edges: int) -> sp.csr_array:
    """Edges between any two."""
    rng = np.random.default_rng(0)
    ends = rng.integers(vertices, size=(2, edges))
    found = sp.csr_array((np.ones(edges, np.int8), (ends[0], ends[1])), shape=(vertices, vertices))
    found.data[:] = 1
    return found


GRAPHS: dict[str, Callable[[int, int], sp.csr_array]] = {"band": band, "uniform": uniform}


def prepare(name: str, options: argparse.Namespace, parts: int, folder: Path) -> None:
    """Prepare a graph, in a part a rank. Nothing is to be learned from it."""
    rng, vertices = np.random.default_rng(1), options.vertices
    graph = from_arrays(
        GRAPHS[name](vertices, options.edges),
        rng.standard_normal((vertices, FEATURES), dtype=np.float32),
        rng.integers(CLASSES, size=vertices),
        n_classes=CLASSES,
        name=name,
        seed=0,
    )
    prepare_folder(
        graph, folder, parts=parts, partitioner="range", undirected=True, order="none",
        report=lambda line: None,
    )  # fmt: skip


def row_of(graph: str, layout: Layout, seconds: dict[str, Sequence[float]]) -> dict[str, Any]:
    """A line of the results, of the seconds of an epoch in each run."""
    median = {mode: statistics.median(found) for mode, found in seconds.items()}
    ratio = median["pipe"] / median["nopipe"]
    target = TARGETS.get(layout.ranks, 1.0)
    return {
        "graph": graph,
        "layout": repr(layout),
        **{f"{mode}_seconds": value for mode, value in median.items()},
        "ratio": ratio,
        "ratios": [pipe / nopipe for nopipe, pipe in zip(seconds["nopipe"], seconds["pipe"], strict=True)],
        "target": target,
        "reached": ratio <= target if layout.ranks == 1 else ratio < target,
    }


def measure(graph: str, layout: Layout, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Runs of both modes in turns.

    Raises
    ------
    SystemExit
        The modes do not give the same losses.
    """
    prepare(graph, options, layout.ranks, work / "graph")
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    losses: set[tuple[float, ...]] = set()
    epochs = options.warm_up + options.epochs
    fixed = {
        "data": work / "graph", "layers": 2, "hidden": HIDDEN, "dropout": 0.5, "threads": layout.threads,
        "epochs": epochs, "eval-every": epochs,
    }  # fmt: skip
    for turn in range(options.rounds):
        for mode in MODES if turn % 2 == 0 else MODES[::-1]:
            train(layout.ranks, work / "run", fixed | {"mode": mode})
            found = epochs_of(work / "run")
            seconds[mode].append(statistics.median(one["seconds"] for one in found[options.warm_up :]))
            losses.add(tuple(one["loss"] for one in found))
    if len(losses) > 1:
        raise SystemExit(f"{graph} {layout}: the modes do not give the same losses")
    return row_of(graph, layout, seconds)


def line_of(row: dict[str, Any]) -> str:
    """A line for people, times in milliseconds."""
    sign = "<=" if row["target"] != 1.0 else "<"
    return (
        f"{row['graph']:<8} {row['layout']:>6} {1e3 * row['nopipe_seconds']:9.2f} "
        f"{1e3 * row['pipe_seconds']:9.2f} {row['ratio']:8.3f} ({min(row['ratios']):.3f}-"
        f"{max(row['ratios']):.3f})  {sign} {row['target']:.2f}{'' if row['reached'] else '  missed'}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.undelayed",
        description="What pipelining costs where no worker is far away.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS), help="which")
    add("--ours", nargs="+", type=Layout.parse, metavar="RxT", default=[Layout(1, 2), Layout(2, 1)],
        help="ranks and threads of each")  # fmt: skip
    add("--vertices", type=int, default=50_000, help="of the graphs")
    add("--edges", type=int, default=1_000_000, help="of the graphs, each of two arcs")
    add("--rounds", type=int, default=5, help="runs of each mode")
    add("--epochs", type=int, default=40, help="epochs that count")
    add("--warm-up", type=int, default=5, help="epochs before them")
    add("--json", type=Path, metavar="FILE", help="for the results")
    options = parser.parse_args(arguments)
    if min(options.vertices, options.edges, options.rounds, options.epochs, options.warm_up) < 1:
        parser.error("--vertices, --edges, --rounds, --epochs and --warm-up must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; 0 whatever was found."""
    options, busy, rows = parse(arguments), busy_seconds(), []
    print(f"{'graph':<8} {'ranks':>6} {'nopipe ms':>9} {'pipe ms':>9}    ratio (of pairs)       target")
    for graph in options.graphs:
        for layout in options.ours:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure(graph, layout, options, Path(folder)))
            print(line_of(rows[-1]), flush=True)
    if (others := busy_of_others(busy)) is not None:
        print(f"others used {others:.1f} cores")
    if options.json:
        given = {name: str(value) for name, value in vars(options).items() if name != "json"}
        write_results(options.json, {"options": given, "cores_used_by_others": others, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
