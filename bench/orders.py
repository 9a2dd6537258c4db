"""What an order of the vertices costs, and what it saves a gather.

    python -m bench.orders [--quick] [--graphs planted ...] [--layout rows] [--data FOLDER] [--json FILE]

Planted communities, R-MAT, uniform random edges and a stencil are generated, all but one in a shuffled
order; public graphs are read from FOLDER if it is given. Each graph is gathered (sums of neighbour
rows, float32, in the layout that the kernel chooses or by rows) as it is and in each order, in turns,
so that a busy machine slows down all of them; times are medians. `ratio` is how many gathers' savings
pay for the ordering; it is a dash where nothing is saved. METIS, which `vertex_order` does not offer,
is here for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import write_results
from cython_kernels import gather
from dorylus_hpc.graph import csr
from dorylus_hpc.graph.csr import Edges
from dorylus_hpc.graph.order import ORDERS, vertex_order

WIDTHS = (128, 64)
PUBLIC = ("amazon_photo", "tolokers", "debian12_packages")
CACHED_ROWS = 2048  # rows in a part of METIS, as in a community


def planted(n: int, arcs: int, rng: np.random.Generator) -> Edges:
    """Communities of 500 to 2000 vertices; one edge in five has an end anywhere."""
    ends = np.cumsum(rng.integers(500, 2001, size=n // 500))
    first = np.concatenate([[0], ends[ends < n]])
    size = np.diff(np.append(first, n))
    i = rng.integers(n, size=arcs // 2)
    home = np.searchsorted(first, i, side="right") - 1
    j = first[home] + rng.integers(size[home])
    return shuffled(n, i, np.where(rng.random(len(i)) < 0.2, rng.integers(n, size=len(i)), j), rng)


def rmat(n: int, arcs: int, rng: np.random.Generator) -> Edges:
    """R-MAT with a = 0.57, b = c = 0.19 over the next power of two (Chakrabarti et al., SDM 2004)."""
    scale = int(n - 1).bit_length()
    i, j = np.zeros((2, arcs // 2), np.int64)
    for _ in range(scale):
        quarter = np.searchsorted([0.57, 0.76, 0.95], rng.random(arcs // 2))
        i, j = 2 * i + (quarter >> 1), 2 * j + (quarter & 1)
    return shuffled(1 << scale, i, j, rng)


def uniform(n: int, arcs: int, rng: np.random.Generator) -> Edges:
    """Edges from anywhere to anywhere."""
    return shuffled(n, *rng.integers(n, size=(2, arcs // 2)), rng)


def stencil(n: int, arcs: int, rng: np.random.Generator) -> Edges:
    """A square grid where all within a square around a vertex are its neighbours."""
    return shuffled(*_stencil(n, arcs), rng)


def ordered_stencil(n: int, arcs: int, rng: np.random.Generator) -> Edges:
    """The same, row by row of the grid."""
    return _both_ways(*_stencil(n, arcs))


def _stencil(n: int, arcs: int) -> tuple[int, np.ndarray, np.ndarray]:
    side, reach = int(n**0.5), max(1, round(((arcs / n + 1) ** 0.5 - 1) / 2))
    at = np.arange(side * side).reshape(side, side)
    i, j = [], []
    for down in range(reach + 1):
        for right in range(-reach if down else 1, reach + 1):
            left, stop = max(0, -right), side - max(0, right)
            i.append(at[: side - down, left:stop].ravel())
            j.append(at[down:, left + right : stop + right].ravel())
    return side * side, np.concatenate(i), np.concatenate(j)


GENERATED: dict[str, Callable[[int, int, np.random.Generator], Edges]] = {
    "planted": planted,
    "rmat": rmat,
    "uniform": uniform,
    "stencil": stencil,
    "ordered_stencil": ordered_stencil,
}


def shuffled(n: int, i: np.ndarray, j: np.ndarray, rng: np.random.Generator) -> Edges:
    """Both directions of the pairs, under a random numbering."""
    name = rng.permutation(n)
    return _both_ways(n, name[i], name[j])


def _both_ways(n: int, i: np.ndarray, j: np.ndarray) -> Edges:
    edges = csr.from_pairs(n, np.concatenate([i, j]).astype(np.int32), np.concatenate([j, i]), None)
    return edges.select(~csr.repeats(edges))


def public(folder: Path, name: str) -> Edges:
    """A public graph as it is."""
    with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
        return Edges(file["indptr"].astype(np.int64), file["indices"])


def by_metis(edges: Edges) -> np.ndarray:
    """Parts of METIS, one after the other."""
    import pymetis

    parts = max(2, edges.n_rows // CACHED_ROWS)
    adjacency = pymetis.CSRAdjacency(edges.indptr, edges.indices.astype(np.int64))
    _, owner = pymetis.part_graph(parts, adjacency=adjacency)
    return np.argsort(np.asarray(owner), kind="stable")


def renumbered(edges: Edges, order: np.ndarray) -> Edges:
    """The graph in the order of its rows."""
    place = np.empty(edges.n_rows, np.int32)
    place[order] = np.arange(edges.n_rows, dtype=np.int32)
    rows = edges.take(order)
    return csr.canonical(Edges(rows.indptr, place[rows.indices]), edges.n_rows)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def make_orders(edges: Edges, repeats: int, metis: bool) -> dict[str, tuple[float, np.ndarray]]:
    """Each order with the seconds that it took (median)."""
    makers: dict[str, Callable[[], np.ndarray]] = {
        kind: lambda kind=kind: vertex_order(edges, kind) for kind in ORDERS
    }  # type: ignore[misc]
    results = {}
    for name, maker in makers.items():
        runs = [timed(maker) for _ in range(repeats)]
        results[name] = statistics.median(seconds for seconds, _ in runs), runs[0][1]
    if metis:
        results["metis"] = timed(lambda: by_metis(edges))
    return results


def gather_seconds(
    graphs: Mapping[str, Edges], width: int, repeats: int, threads: int, layout: str
) -> dict[str, float]:
    """Median seconds of a gather over each graph, taken in turns, after a first one that warms up."""
    n = next(iter(graphs.values())).n_rows
    x = np.random.default_rng(0).random((n, width), dtype=np.float32)
    out = np.empty_like(x)
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats + 1):
        for name, edges in graphs.items():
            call = lambda edges=edges: gather(  # noqa: E731
                edges.indptr, edges.indices, None, x, out, layout=layout, num_threads=threads, validate=False
            )
            seconds[name].append(timed(call)[0])
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def measure(edges: Edges, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of results for each order of one graph."""
    orders = make_orders(edges, 1 if options.quick else 3, options.metis)
    graphs = {name: renumbered(edges, order) for name, (_, order) in orders.items()}
    how = options.repeats, options.threads, options.layout
    times = {width: gather_seconds(graphs, width, *how) for width in WIDTHS}
    chosen = orders["auto"][1]
    rows = []
    for name, (seconds, order) in orders.items():
        row: dict[str, Any] = {"order": name, "order_seconds": seconds}
        row["is_auto"] = bool(np.array_equal(order, chosen))
        for width, measured in times.items():
            before, after = measured["none"], measured[name]
            ratio = seconds / (before - after) if before > after and name != "none" else None
            row[f"width_{width}"] = {
                "gather_seconds": after, "speed_up": before / after, "ratio": ratio
            }  # fmt: skip
        rows.append(row)
    return rows


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    text = f"  {row['order']:<10} {1e3 * row['order_seconds']:>9.1f}"
    for width in WIDTHS:
        cell = row[f"width_{width}"]
        ratio = "-" if cell["ratio"] is None else f"{cell['ratio']:.1f}"
        text += f" {1e3 * cell['gather_seconds']:>10.2f} {cell['speed_up']:>6.2f} {ratio:>7}"
    return text + ("  = auto" if row["is_auto"] and row["order"] != "auto" else "")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.orders", description="What orders of vertices cost, and save a gather."
    )
    parser.add_argument("--quick", action="store_true", help="graphs of a tenth of the size, fewer repeats")
    parser.add_argument("--graphs", nargs="+", choices=[*GENERATED, *PUBLIC], help="default: all there are")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where the public graphs are")
    parser.add_argument("--metis", action="store_true", help="METIS too, which takes seconds a graph")
    parser.add_argument("--threads", type=int, default=2, help="of the gather; default: %(default)s")
    parser.add_argument(
        "--layout", choices=("auto", "rows"), default="auto",
        help="of the features: what the kernel chooses, or rows, as in training; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, help="gathers that count; default: 11, quick: 21")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the results")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser().parse_args(argv)
    options.repeats = options.repeats or (21 if options.quick else 11)
    n, arcs = (20_000, 1_000_000) if options.quick else (200_000, 10_000_000)
    results = {}
    head = "".join(f" {f'w{width} ms':>10} {'speed':>6} {'ratio':>7}" for width in WIDTHS)
    for name in options.graphs or [*GENERATED, *(PUBLIC if options.data else ())]:
        if name in PUBLIC and not options.data:
            parser().error(f"{name} needs --data")
        make = GENERATED.get(name)
        edges = make(n, arcs, np.random.default_rng(0)) if make else public(options.data, name)
        print(f"{name}: {edges.n_rows} vertices, {len(edges)} arcs\n  {'order':<10} {'order ms':>9}{head}")
        rows = measure(edges, options)
        print("\n".join(map(line, rows)), flush=True)
        results[name] = {"vertices": edges.n_rows, "arcs": len(edges), "orders": rows}
    if options.json:
        write_results(
            options.json, {"threads": options.threads, "repeats": options.repeats, "graphs": results}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
