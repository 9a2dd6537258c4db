"""Strong and weak scaling over ranks and threads: time, what is sent, memory.

    python -m bench.scaling [--graphs communities uniform] [--layouts 1x2 1x1 2x1 4x1] [--scale 0.01] ...

Graphs are those of `bench.tasks`: planted communities, which a partitioner can find, and uniform edges, in
which there is nothing to find. A layout is ranks x threads. Each number of ranks has a prepared graph with as
many parts, unless ``--parts`` says otherwise. Runs of all layouts take turns; of a run the median of the
epochs after the warm-up counts, on rank 0, which waits for all others at the end of an epoch; of the runs of
a layout the median again. No epoch that counts has an evaluation.

- **Strong**: the same graph for all layouts. ``x`` is how many times as fast as the first layout, in brackets
  the least and the greatest over runs that followed each other.
- **Weak**: vertices and edges grow with the ranks; the largest number of ranks has the whole graph.
  Efficiency is the time of one rank over that of so many, with as many threads each. More ranks and threads
  than cores make it worse than on a cluster; the table marks them.
- **Ghost bytes** of an epoch against the least that could be sent, computed from the edges and the owners of
  the vertices alone: each vertex with an edge into another rank, once a rank, forward and backward, at the
  narrower width of a layer; nothing for the first layer, whose input never changes.
- **Bytes an arc**: how much more memory one rank has held at most for the whole graph than for the same
  vertices with half the edges, over the arcs that these are more.

Runs that start from one prepared graph with equal intervals must end with the same weights, bit for bit; all
runs of a graph must have the same losses (1e-4). Exit status 1 if not, or if fewer bytes were sent than can
be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from bench.launch import Layout, epochs_of, not_passed_on, train
from bench.machine import (
    RESULTS,
    busy_of_others,
    busy_seconds,
    cores,
    unwritable,
    warnings,
    write_results,
)
from bench.table import unplottable
from bench.tasks import PRESETS, generate
from dorylus_hpc.comm.roles import Placement
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.manifest import read_manifest
from dorylus_hpc.graph.preparation import prepare_folder

LAYOUTS = [Layout(1, 2), Layout(1, 1), Layout(2, 1), Layout(4, 1)]
TOLERANCE = 1e-4  # of losses, relative
ITEM = 4  # bytes of a float32
BUSY = 0.1  # cores of others from which a run is doubtful
COUNTS = (
    ("hidden", 128, "width of the hidden layers"),
    ("layers", 2, "number of layers"),
    ("parts", 0, "parts of every prepared graph; 0: as many as graph servers"),
    ("servers", 0, "parameter servers, besides the ranks of a layout"),
    ("repetitions", 3, "runs of each layout, in turns"),
    ("epochs", 10, "epochs of a run that count"),
    ("warm-up", 3, "epochs before them"),
    ("seed", 0, "of the graph and of the training"),
)


@dataclass(frozen=True)
class Run:
    """What one run has left.

    Attributes
    ----------
    folder
        Of the prepared graph.
    seconds, loss
        Of each epoch.
    task_seconds
        By kind, of one epoch, all ranks together.
    """

    layout: Layout
    folder: str
    seconds: list[float]
    loss: list[float]
    peak_rss_bytes: list[int]
    ghost_bytes: int
    task_seconds: dict[str, float]
    setup_seconds: float
    intervals: int
    weights_sha256: str
    busy_others: float | None

    def median(self, warm_up: int) -> float:
        """Seconds of an epoch."""
        return statistics.median(self.seconds[warm_up:])


# ---- graphs ----


def half_of(graph: GraphData) -> GraphData:
    """The same vertices with every other pair of arcs, drawn by a hash of the pair."""
    rows = np.repeat(np.arange(graph.n), np.diff(graph.indptr))
    low, high = np.minimum(rows, graph.indices), np.maximum(rows, graph.indices)
    mixed = (low * np.int64(0x9E3779B1) + high * np.int64(0x85EBCA77)) >> 15
    kept = mixed & 1 == 0
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows[kept], minlength=graph.n))])
    return replace(graph, indptr=indptr, indices=graph.indices[kept])


def prepare(graph: GraphData, folder: Path, parts: int, partitioner: str, seed: int) -> Path:
    """Prepare a graph, once."""
    if not folder.exists():
        prepare_folder(
            graph, folder, parts=parts, partitioner=partitioner, seed=seed, report=lambda line: None
        )
    return folder


def owners(folder: Path, ranks: int) -> np.ndarray:
    """Return the graph server of each vertex."""
    manifest = read_manifest(folder)
    placement = Placement(len(manifest.parts), ranks)
    owner = np.empty(manifest.vertices, np.int32)
    for index, entry in enumerate(manifest.parts):
        with h5py.File(folder / entry.file, "r", locking=False) as file:
            owner[file["gid"][()]] = placement.host(index)
    return owner


def boundary_rows(graph: GraphData, owner: np.ndarray) -> int:
    """Return how many rows must be sent for one gather: sources of arcs into another server, once each."""
    rows = np.repeat(np.arange(graph.n), np.diff(graph.indptr))
    far = owner[rows] != owner[graph.indices]
    servers = int(owner.max(initial=0)) + 1
    return len(np.unique(rows[far] * servers + owner[graph.indices[far]]))


def least_bytes(rows: int, widths: Sequence[int]) -> int:
    """Return the least bytes of an epoch, given the rows of a gather and all widths from the features on.

    Of a symmetric graph, so that a gather of gradients needs as many rows as one of the forward pass.
    """
    narrower = [min(before, after) for before, after in itertools.pairwise(widths)]
    return 2 * rows * ITEM * sum(narrower[1:])


# ---- runs ----


def run(layout: Layout, folder: Path, run_dir: Path, options: argparse.Namespace) -> Run:
    """Train once."""
    epochs = options.warm_up + options.epochs
    flags: dict[str, Any] = {
        "model": options.model,
        "data": folder,
        "threads": layout.threads,
        "epochs": epochs,
        "eval-every": epochs,
    }
    flags |= {name: getattr(options, name) for name in ("hidden", "layers", "servers", "dropout", "seed")}
    start = busy_seconds()
    summary = train(layout.ranks + options.servers, run_dir, flags, options.train)
    lines = epochs_of(run_dir)
    return Run(
        layout,
        folder.name,
        seconds=[line["seconds"] for line in lines],
        loss=[line["loss"] for line in lines],
        peak_rss_bytes=summary["peak_rss_bytes"],
        ghost_bytes=summary["ghost_bytes_per_epoch"],
        task_seconds={kind: spent / epochs for kind, spent in summary["task_seconds"].items() if spent},
        setup_seconds=summary["setup_seconds"],
        intervals=summary["config"]["intervals"],
        weights_sha256=summary["weights_sha256"],
        busy_others=busy_of_others(start),
    )


def take_turns(
    folders: Mapping[Layout, Path], work: Path, options: argparse.Namespace
) -> dict[Layout, list[Run]]:
    """Run all layouts one after the other, so many times."""
    runs: dict[Layout, list[Run]] = {layout: [] for layout in folders}
    for repetition in range(options.repetitions):
        for layout, folder in folders.items():
            run_dir = work / f"{folder.name}-run-{layout}-{repetition}"
            runs[layout].append(run(layout, folder, run_dir, options))
            print(
                f"    {layout}: {runs[layout][-1].median(options.warm_up):.4f} s", file=sys.stderr, flush=True
            )
    return runs


def complaints(runs: Sequence[Run]) -> list[str]:
    """Say what cannot be right about runs of one graph: their weights and losses."""
    found = []
    weights: dict[tuple[str, int], set[str]] = {}
    for one in runs:
        weights.setdefault((one.folder, one.intervals), set()).add(one.weights_sha256)
    for (folder, intervals), different in weights.items():
        if len(different) > 1:
            found.append(f"{folder}, {intervals} intervals: runs end with {len(different)} different weights")
    wanted = runs[0]
    for one in runs[1:]:
        apart = max(abs(a - b) / abs(a) for a, b in zip(wanted.loss, one.loss, strict=True))
        if not apart <= TOLERANCE:
            found.append(
                f"losses of {one.layout} ({one.folder}) are {apart:.2g} from those of {wanted.layout}, "
                f"allowed is {TOLERANCE:g}"
            )
    return list(dict.fromkeys(found))


# ---- rows ----


def row_of(
    layout: Layout, runs: Sequence[Run], base: Sequence[Run], least: int, arcs: int, warm_up: int
) -> dict[str, Any]:
    """Return the figures of one layout; `base` are the runs of the one that it is held against."""
    medians = [one.median(warm_up) for one in runs]
    against = [one.median(warm_up) for one in base]
    ratios = [b / a for a, b in zip(medians, against, strict=True)]
    seconds = statistics.median(medians)
    sent = runs[0].ghost_bytes
    return {
        "ranks": layout.ranks,
        "threads": layout.threads,
        "epoch_seconds": {
            "median": seconds,
            "min": min(min(one.seconds[warm_up:]) for one in runs),
            "of_runs": medians,
        },
        "times_as_fast": statistics.median(against) / seconds,
        "times_as_fast_range": [min(ratios), max(ratios)],
        "arcs": arcs,
        "arcs_per_second": arcs / seconds,
        "ghost_bytes_per_epoch": sent,
        "least_ghost_bytes": least,
        "ghost_ratio": sent / least if least else None,
        "peak_rss_bytes": {
            "largest": statistics.median(max(one.peak_rss_bytes) for one in runs),
            "all": statistics.median(sum(one.peak_rss_bytes) for one in runs),
        },
        "task_seconds_per_epoch": runs[0].task_seconds,
        "setup_seconds": statistics.median(one.setup_seconds for one in runs),
        "intervals": runs[0].intervals,
        "weights_sha256": runs[0].weights_sha256,
        "busy_others": max((one.busy_others or 0.0 for one in runs), default=0.0),
        "oversubscribed": layout.ranks * layout.threads > cores(),
    }


HEAD = (
    f"  {'layout':>6} {'epoch s':>9} {'least s':>9} {'x':>5} {'(range)':>12} {'M arcs/s':>9} {'ghost MB':>9} "
    f"{'least MB':>9} {'MB a rank':>10} {'MB of all':>10}  task seconds an epoch"
)


def line_of(row: Mapping[str, Any]) -> str:
    """The line of a row."""
    seconds, peak = row["epoch_seconds"], row["peak_rss_bytes"]
    spread = "({:.2f}-{:.2f})".format(*row["times_as_fast_range"])
    tasks = "  ".join(f"{kind} {spent:.3f}" for kind, spent in row["task_seconds_per_epoch"].items())
    marks = "  (more than the cores)" if row["oversubscribed"] else ""
    marks += "  (others were busy)" if row["busy_others"] > BUSY else ""
    return (
        f"  {row['ranks']}x{row['threads']:<4} {seconds['median']:>9.4f} {seconds['min']:>9.4f} "
        f"{row['times_as_fast']:>5.2f} {spread:>12} {row['arcs_per_second'] / 1e6:>9.1f} "
        f"{row['ghost_bytes_per_epoch'] / 1e6:>9.3f} {row['least_ghost_bytes'] / 1e6:>9.3f} "
        f"{peak['largest'] / 1e6:>10.0f} {peak['all'] / 1e6:>10.0f}  {tasks}{marks}"
    )


def too_few(row: Mapping[str, Any]) -> list[str]:
    """Say so if fewer bytes were sent than can be."""
    sent, least = row["ghost_bytes_per_epoch"], row["least_ghost_bytes"]
    if sent >= least:
        return []
    return [f"{row['ranks']}x{row['threads']} has sent {sent} bytes an epoch, {least} are needed"]


def plot(graphs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw seconds of an epoch over ranks: strong and weak, a panel a graph."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(graphs), figsize=(1 + 5 * len(graphs), 4), squeeze=False, layout="constrained"
    )
    for axis, (name, found) in zip(axes[0], graphs.items(), strict=True):
        for kind in ("strong", "weak"):
            rows = found[kind]
            for threads in sorted({row["threads"] for row in rows}):
                mine = sorted(
                    (row for row in rows if row["threads"] == threads), key=lambda row: row["ranks"]
                )
                axis.plot(
                    [row["ranks"] for row in mine],
                    [row["epoch_seconds"]["median"] for row in mine],
                    label=f"{kind}, {threads} threads each",
                    marker="o" if kind == "strong" else "x",
                    linestyle="-" if kind == "strong" else "--",
                )
        ranks = sorted({row["ranks"] for row in found["strong"]})
        axis.set(title=name, xlabel="ranks", ylim=(0, None))
        axis.set_xticks(ranks, [str(count) for count in ranks])
        axis.legend(fontsize="small")
    axes[0][0].set_ylabel("seconds an epoch")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drawn in {path}")


# ---- what is measured ----


def widths_of(graph: GraphData, options: argparse.Namespace) -> list[int]:
    """Widths from the features to the classes."""
    return [graph.n_features, *[options.hidden] * (options.layers - 1), graph.n_classes]


def bound(graph: GraphData, folder: Path, ranks: int, options: argparse.Namespace) -> int:
    """Return the least bytes of an epoch of one layout."""
    return least_bytes(boundary_rows(graph, owners(folder, ranks)), widths_of(graph, options))


def strong(graph: GraphData, work: Path, options: argparse.Namespace) -> tuple[list[dict], list[str]]:
    """Measure all layouts on the same graph; the first one is what the others are held against."""
    folders = {
        layout: prepare(
            graph, work / f"parts-{options.parts or layout.ranks}", options.parts or layout.ranks,
            options.partitioner, options.seed,
        )
        for layout in options.layouts
    }  # fmt: skip
    runs = take_turns(folders, work, options)
    rows = []
    for layout, mine in runs.items():
        least = bound(graph, folders[layout], layout.ranks, options)
        base = runs[options.layouts[0]]
        rows.append(row_of(layout, mine, base, least, graph.n_edges, options.warm_up))
    wrong = complaints([one for mine in runs.values() for one in mine])
    return rows, wrong + [line for row in rows for line in too_few(row)]


def weak(name: str, work: Path, options: argparse.Namespace) -> tuple[list[dict], list[str]]:
    """Measure graphs that grow with the ranks, for each number of threads with several numbers of ranks."""
    most = max(layout.ranks for layout in options.layouts)
    chosen = [
        layout
        for layout in sorted(options.layouts)
        if sum(other.threads == layout.threads for other in options.layouts) > 1
    ]
    folders: dict[Layout, Path] = {}
    facts: dict[Layout, tuple[int, int]] = {}
    for ranks, group in itertools.groupby(chosen, key=lambda layout: layout.ranks):
        graph = generate(name, options.scale * ranks / most, options.seed)
        parts = options.parts or ranks
        folder = prepare(
            graph, work / f"weak-{ranks}-parts-{parts}", parts, options.partitioner, options.seed
        )
        known = graph.n_edges, bound(graph, folder, ranks, options)
        for layout in group:
            folders[layout], facts[layout] = folder, known
    runs = take_turns(folders, work, options)
    rows = []
    for layout, mine in runs.items():
        base = next(found for other, found in runs.items() if other.threads == layout.threads)
        arcs, least = facts[layout]
        row = row_of(layout, mine, base, least, arcs, options.warm_up)
        rows.append(row | {"efficiency": row["times_as_fast"]})
    return rows, [line for row in rows for line in too_few(row)]


def bytes_per_arc(graph: GraphData, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the memory of one rank on the graph, and on half its edges."""
    peaks, arcs = {}, {}
    for name, this in {"whole": graph, "half": half_of(graph)}.items():
        folder = prepare(this, work / f"memory-{name}", 1, "range", options.seed)
        alone = argparse.Namespace(**vars(options) | {"servers": 0, "epochs": 1})
        found = run(Layout(1, options.layouts[0].threads), folder, work / f"memory-{name}-run", alone)
        peaks[name], arcs[name] = found.peak_rss_bytes[0], this.n_edges
    return {
        "arcs": arcs,
        "peak_rss_bytes": peaks,
        "bytes_per_arc": (peaks["whole"] - peaks["half"]) / max(1, arcs["whole"] - arcs["half"]),
        "all_bytes_per_arc": peaks["whole"] / arcs["whole"],
    }


def measure(name: str, work: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure one graph, and tell it."""
    graph = generate(name, options.scale, options.seed)
    print(f"{name}: {graph.n} vertices, {graph.n_edges} arcs, widths {widths_of(graph, options)}")
    results: dict[str, Any] = {"vertices": graph.n, "arcs": graph.n_edges, "strong": [], "weak": []}
    wrong: list[str] = []
    if "strong" in options.kinds:
        results["strong"], wrong = strong(graph, work / name, options)
        print("\n".join([" strong", HEAD, *map(line_of, results["strong"])]), flush=True)
    if "weak" in options.kinds:
        results["weak"], more = weak(name, work / name, options)
        wrong += more
        print("\n".join([" weak (x is the efficiency)", HEAD, *map(line_of, results["weak"])]), flush=True)
    if "memory" in options.kinds:
        memory = results["memory"] = bytes_per_arc(graph, work / name, options)
        print(
            f" memory of one rank: {memory['bytes_per_arc']:.1f} bytes more an arc; "
            f"{memory['all_bytes_per_arc']:.1f} bytes an arc with all that is no edge",
            flush=True,
        )
    return results, [f"{name}: {line}" for line in wrong]


# ---- command line ----


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.scaling",
        description="Strong and weak scaling, ghost bytes and memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--graphs", nargs="+", choices=PRESETS, default=["communities", "uniform"], help="generated graphs")
    add("--scale", type=float, default=1.0, help="of the graphs: less for trying it out")
    add("--layouts", type=Layout.parse, nargs="+", default=LAYOUTS, metavar="RxT",
        help="ranks and threads; the first one is compared with")  # fmt: skip
    add("--kinds", nargs="+", choices=["strong", "weak", "memory"], default=["strong", "weak", "memory"],
        help="what is measured")  # fmt: skip
    add("--model", choices=["gcn", "sage"], default="gcn", help="model")
    add("--dropout", type=float, default=0.5, help="on hidden values")
    for name, default, text in COUNTS:
        add(f"--{name}", type=int, default=default, help=text)
    add("--partitioner", default="metis", help="of the prepared graphs")
    add("--work", type=Path, metavar="DIR", help="for the prepared graphs, some GB; default: temporary")
    add("-o", "--output", type=Path, default=RESULTS / "scaling.json", metavar="FILE", help="for the results")
    add("--plot", type=Path, metavar="FILE", help="picture of the times; needs matplotlib")
    add("train", nargs="*", metavar="-- ARGUMENTS", help="more arguments for train")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and refuse what cannot be run."""
    accepting = parser()
    options = accepting.parse_args(argv)
    options.layouts = list(dict.fromkeys(options.layouts))
    if min(options.hidden, options.layers, options.repetitions, options.epochs, options.warm_up) < 1:
        accepting.error("--hidden, --layers, --repetitions, --epochs and --warm-up must be at least 1")
    if not 0 < options.scale <= 10:
        accepting.error(f"--scale must be more than 0 and at most 10, got {options.scale}")
    most = max(layout.ranks for layout in options.layouts)
    if options.parts and options.parts < most:
        accepting.error(f"--parts {options.parts} is too few for {most} ranks")
    problem = unwritable(options.output)
    if options.plot:
        problem = problem or unplottable(options.plot) or unwritable(options.plot)
    if problem:
        accepting.error(problem)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if nothing that must be equal differs."""
    options = parse(argv)
    for line in [*not_passed_on(), *warnings(products=False)]:
        print(f"note: {line}")
    graphs: dict[str, Any] = {}
    wrong: list[str] = []
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for name in dict.fromkeys(options.graphs):
            graphs[name], more = measure(name, Path(work).resolve(), options)
            shutil.rmtree(Path(work, name), ignore_errors=True)
            wrong += more
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "plot")}
    told = {"options": json.loads(json.dumps(settings, default=str)), "wrong": wrong, "graphs": graphs}
    write_results(options.output, told)
    if options.plot:
        plot(graphs, options.plot)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
