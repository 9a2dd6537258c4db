"""What is measured: for each kernel its candidates, ours and the peers', and the check all must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import scipy.sparse as sp

import cython_kernels as ck
from bench import checking
from bench.checking import Check
from bench.graphs import Graph
from bench.peers import SINGLE, Matrix, Peers, Run
from cython_kernels.layout import empty

MAIN = "auto"  # the candidate that a user gets, which is compared with the peers


@dataclass(frozen=True)
class Candidate:
    """One way to do the work of a case. `run` takes a number of threads and gives the result."""

    name: str
    run: Callable[[int], Any]
    check: Check
    peer: bool = False
    threaded: bool = True
    itemsize: int = 4  # of the values that are moved


@dataclass(frozen=True)
class Case:
    """One kernel on one input."""

    kernel: str
    graph: str
    width: int
    candidates: list[Candidate]
    flops: int = 0  # for a rate in GFLOP/s; 0: the time of a value is told instead
    values: int = 0  # of the result
    moved: int = 0  # values read (and, in a pass over rows, written) by a call
    limit: str = "random_rows"  # which limit of the machine its traffic is held against
    reset: Callable[[], object] = lambda: None  # before a call that is checked: nothing of another is left
    notes: dict[str, Any] = field(default_factory=dict)


class Inputs:
    """Arrays that the cases of one graph and width share. All values are in [0.5, 1.5)."""

    def __init__(self, graph: Graph, width: int, peers: Peers) -> None:
        self.graph, self.width, self.peers = graph, width, peers
        self.rng = np.random.default_rng(width)

    def positive(self, *shape: int, dtype: Any = np.float32) -> np.ndarray:
        result = empty(shape, dtype)
        self.rng.random(out=result, dtype=dtype)
        result += 0.5
        return result

    @cached_property
    def x(self) -> np.ndarray:
        return self.positive(self.graph.n, self.width)

    @cached_property
    def out(self) -> np.ndarray:
        return empty((self.graph.n, self.width), np.float32)

    @cached_property
    def data(self) -> np.ndarray:
        return self.positive(self.graph.nnz)

    @property
    def pattern(self) -> tuple[np.ndarray, np.ndarray]:
        return self.graph.indptr, self.graph.indices

    @cached_property
    def matrix(self) -> Matrix:
        return Matrix(self.peers, *self.pattern, self.graph.n)

    def case(self, kernel: str, ours: list[Candidate], peers: list[Candidate], **more: Any) -> Case:
        size = {
            "reset": partial(self.out.fill, np.nan),
            "flops": 2 * self.graph.nnz * self.width,
            "values": self.graph.n * self.width,
            "moved": self.graph.nnz * self.width,
        }
        return Case(kernel, self.graph.name, self.width, ours + peers, **(size | more))


def of_peers(runs: dict[str, Run], check: Check, itemsize: int = 4) -> list[Candidate]:
    """Make candidates of what peers do; their threads are set from outside."""
    return [
        Candidate(
            name,
            lambda threads, run=run: run(),
            check,
            peer=True,
            threaded=name not in SINGLE,
            itemsize=itemsize,
        )
        for name, run in runs.items()
    ]


# ---- over a graph ----


def gather_sum(inputs: Inputs) -> Case:
    pattern, x, out = inputs.pattern, inputs.x, inputs.out
    check = checking.gathered(*pattern, None, x)
    tiles, short = ck.to_tiles(x), ck.to_bfloat16(x)
    short_tiles = ck.to_tiles(short)
    check_short = checking.gathered(*pattern, None, ck.from_bfloat16(short))

    def gather(source: Any, target: Any = out, layout: str = "auto") -> Callable[[int], Any]:
        return lambda threads: ck.gather(
            *pattern, None, source, target, layout=layout, num_threads=threads, validate=False
        )

    ours = [
        Candidate("auto", gather(x), check),
        Candidate("auto, new", gather(x, None), check),
        Candidate("rows", gather(x, layout="rows"), check),
        Candidate("tiles", gather(x, layout="tiles"), check),
        Candidate("Tiles", gather(tiles), check),
        Candidate("bf16 rows", gather(short, layout="rows"), check_short, itemsize=2),
        Candidate("bf16 Tiles", gather(short_tiles), check_short, itemsize=2),
    ]
    notes = {"layout": ck.choose_layout(*pattern, x.shape, x.dtype)}
    return inputs.case("gather_sum", ours, of_peers(inputs.matrix.products(x), check), notes=notes)


def gather_float64(inputs: Inputs) -> Case:
    pattern, x = inputs.pattern, inputs.x.astype(np.float64)
    out = empty(x.shape, x.dtype)
    check = checking.gathered(*pattern, None, x)
    ours = Candidate(
        "auto",
        lambda threads: ck.gather(*pattern, None, x, out, num_threads=threads, validate=False),
        check,
        itemsize=8,
    )
    peers = of_peers(inputs.matrix.products(x), check, itemsize=8)
    return inputs.case("gather_float64", [ours], peers, reset=partial(out.fill, np.nan))


def gather_mean(inputs: Inputs) -> Case:
    pattern, x, out = inputs.pattern, inputs.x, inputs.out
    check = checking.gathered(*pattern, None, x, mean=True)
    ours = Candidate(
        "auto",
        lambda threads: ck.gather(*pattern, None, x, out, mean=True, num_threads=threads, validate=False),
        check,
    )
    return inputs.case("gather_mean", [ours], of_peers(inputs.matrix.products(x, reduce="mean"), check))


def gather_weighted(inputs: Inputs) -> Case:
    pattern, data, x, out = inputs.pattern, inputs.data, inputs.x, inputs.out
    check = checking.gathered(*pattern, data, x)
    ours = Candidate(
        "auto",
        lambda threads: ck.gather(*pattern, data, x, out, num_threads=threads, validate=False),
        check,
    )
    return inputs.case("gather_weighted", [ours], of_peers(inputs.matrix.products(x, data), check))


def gather_max(inputs: Inputs) -> Case:
    """The maximum; with the sources of the values, as training needs them; and its gradient."""
    pattern, x, out = inputs.pattern, inputs.x, inputs.out
    source = np.empty(x.shape, np.int32)
    check = checking.gathered(*pattern, None, x, maximum=True)

    def maximum(**more: Any) -> Callable[[int], Any]:
        return lambda threads: ck.gather_max(*pattern, x, out, num_threads=threads, validate=False, **more)

    ours = [
        Candidate("auto", maximum(), check),
        Candidate("with source", maximum(source=source), check),
    ]
    peers = of_peers(inputs.matrix.products(x, reduce="max"), _without_infinity(check))
    return inputs.case("gather_max", ours, peers)


def _without_infinity(check: Check) -> Check:
    """Forgive -inf for 0: DGL's result for rows without entries, which its callers replace."""
    return lambda result: check(np.where(np.isneginf(result), 0, result))


def gcn(inputs: Inputs) -> Case:
    """The GCN form: no weights for us; weights in the matrix, with loops, for SciPy and PyTorch; DGL as its
    GraphConv does it, scaling before and after a plain sum over a graph with loops."""
    graph, pattern, x, out = inputs.graph, inputs.pattern, inputs.x, inputs.out
    scale = (1 / np.sqrt(graph.degrees + 1.0)).astype(np.float32)
    form = {"row_scale": scale, "source_scale": scale, "self_weight": 1.0}
    check = checking.gathered(*pattern, None, x, **form)
    ours = Candidate(
        "auto",
        lambda threads: ck.gather(*pattern, None, x, out, **form, num_threads=threads, validate=False),
        check,
    )
    ones = sp.csr_array((np.ones(graph.nnz, np.float32), graph.indices, graph.indptr), shape=(graph.n,) * 2)
    looped = (ones + sp.eye_array(graph.n, dtype=np.float32)).tocsr()  # adds up repeated entries
    rows = np.repeat(np.arange(graph.n), np.diff(looped.indptr))
    weights = looped.data * scale[rows] * scale[looped.indices]
    matrix = Matrix(inputs.peers, looped.indptr, looped.indices.astype(np.int32), graph.n)
    runs = matrix.products(x, weights.astype(np.float32))
    if inputs.peers.has("dgl"):
        torch = inputs.peers.torch
        factor, source = torch.from_numpy(scale[:, None]), torch.from_numpy(x)
        ops, plain = inputs.peers.dgl.ops, Matrix(inputs.peers, *_with_loops(graph), graph.n).dgl_graph
        runs["dgl"] = lambda: (ops.copy_u_sum(plain, source * factor) * factor).numpy()
    return inputs.case("gcn", [ours], of_peers(runs, check))


def _with_loops(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """The pattern with one more entry a row."""
    indptr = graph.indptr + np.arange(graph.n + 1)
    return indptr, np.insert(graph.indices, graph.indptr[:-1], np.arange(graph.n, dtype=np.int32))


def gather_adjoint(inputs: Inputs) -> Case:
    """The adjoint with the transpose made before, as all peers but SciPy have it; and without."""
    graph, pattern, d_out, d_x = inputs.graph, inputs.pattern, inputs.x, inputs.out
    transposed = ck.transpose_csr(*pattern, n_cols=graph.n, num_threads=2)
    indptr, indices, _ = graph.transposed
    check = checking.gathered(indptr, indices, None, d_out)

    def adjoint(given: ck.Transposed | None) -> Callable[[int], Any]:
        options = {"n_sources": graph.n, "transposed": given, "validate": False}
        return lambda threads: ck.gather_adjoint(*pattern, None, d_out, d_x, num_threads=threads, **options)

    ours = [Candidate(MAIN, adjoint(transposed), check), Candidate("no transpose", adjoint(None), check)]
    runs = Matrix(inputs.peers, indptr, indices, graph.n).products(d_out)
    if inputs.peers.has("scipy"):
        matrix = sp.csr_array((np.ones(graph.nnz, np.float32), *pattern[::-1]), shape=(graph.n,) * 2)
        runs["scipy"] = lambda: matrix.T @ d_out
    return inputs.case("gather_adjoint", ours, of_peers(runs, check))


KERNELS: dict[str, Callable[[Inputs], Case]] = {
    build.__name__: build
    for build in (
        gather_sum, gather_mean, gather_weighted, gather_max, gather_float64, gather_adjoint, gcn
    )
}  # fmt: skip
