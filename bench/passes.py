"""What is measured besides gathers over a graph: passes over rows, and products with sparse features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp

import cython_kernels as ck
from bench import checking
from bench.cases import MAIN, Candidate, Case, Inputs, of_peers
from bench.checking import Check
from bench.graphs import Graph, scaled
from bench.machine import blas_threads
from bench.peers import Matrix, Run
from cython_kernels import reference
from cython_kernels.layout import empty

ROWS = 200_000
P = 0.5  # chance of dropping a value
KEY = {"seed": 1, "epoch": 2, "layer": 1}
DEPTH, UNITS = 602, 16  # columns of dense features, and of a narrow layer
FEATURES, FILLED = 500, 0.05  # columns of sparse features, and the share that is not 0


def no_graph(scale: float) -> Graph:
    """As many vertices as the passes have rows, without entries."""
    n = scaled(ROWS, scale)
    return Graph("none", np.zeros(n + 1, np.int64), np.zeros(0, np.int32))


def _pass(
    inputs: Inputs,
    kernel: str,
    ours: Callable[[int], Any],
    check: Check,
    runs: dict[str, Run],
    *,
    rows: int,
    arrays: int,
    reset: Callable[[], object],
) -> Case:
    """A pass over `rows` rows that reads and writes so many arrays of them."""
    return Case(
        kernel,
        inputs.graph.name,
        inputs.width,
        [Candidate(MAIN, ours, check), *of_peers(runs, check)],
        values=rows * inputs.width,
        moved=arrays * rows * inputs.width,
        limit="sequential",
        reset=reset,
    )


def _indices(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Half of the rows, each once, in any order; and as many random ones, with repeats."""
    n = inputs.graph.n
    once = inputs.rng.permutation(n)[: n // 2].astype(np.int32)
    return once, inputs.rng.integers(n, size=n // 2).astype(np.int32)


def pack_rows(inputs: Inputs) -> Case:
    x, (index, _), torch = inputs.x, _indices(inputs), inputs.peers.torch
    out = empty((len(index), inputs.width), np.float32)
    runs: dict[str, Run] = {}
    if inputs.peers.has("scipy"):
        runs["numpy"] = lambda: np.take(x, index, axis=0, out=out, mode="clip")
    if inputs.peers.has("torch"):
        source, target, at = map(torch.from_numpy, (x, out, index))
        runs["torch"] = lambda: torch.index_select(source, 0, at, out=target).numpy()
    return _pass(
        inputs,
        "pack_rows",
        lambda threads: ck.pack_rows(x, index, out, num_threads=threads, validate=False),
        checking.rows_equal(lambda rows: reference.pack_rows(x, index[rows]), len(index)),
        runs,
        rows=len(index),
        arrays=2,
        reset=partial(out.fill, np.nan),
    )


def unpack_rows(inputs: Inputs) -> Case:
    (index, _), out, torch = _indices(inputs), inputs.out, inputs.peers.torch
    rows = inputs.positive(len(index), inputs.width)
    place = np.full(inputs.graph.n, -1)
    place[index] = np.arange(len(index))

    def wanted(sample: np.ndarray) -> np.ndarray:
        return np.where(place[sample, None] >= 0, rows[place[sample]], 0)

    def assign() -> np.ndarray:
        out[index] = rows
        return out

    runs: dict[str, Run] = {}
    if inputs.peers.has("scipy"):
        runs["numpy"] = assign
    if inputs.peers.has("torch"):
        target, source, at = map(torch.from_numpy, (out, rows, index.astype(np.int64)))
        runs["torch"] = lambda: target.index_copy_(0, at, source).numpy()
    return _pass(
        inputs,
        "unpack_rows",
        lambda threads: ck.unpack_rows(rows, index, out, num_threads=threads, validate=False),
        checking.rows_equal(wanted, inputs.graph.n),
        runs,
        rows=len(index),
        arrays=2,
        reset=partial(out.fill, 0),
    )


def scatter_add_rows(inputs: Inputs) -> Case:
    (_, index), out, torch, n = _indices(inputs), inputs.out, inputs.peers.torch, inputs.graph.n
    rows, m = inputs.positive(len(index), inputs.width), len(index)
    adding = sp.csr_array((np.ones(m, np.float32), (index, np.arange(m))), shape=(n, m))
    pattern = adding.indptr.astype(np.int64), adding.indices.astype(np.int32)
    runs: dict[str, Run] = {}
    if inputs.peers.has("scipy"):
        runs["scipy"] = lambda: np.add(out, adding @ rows, out=out)
    if inputs.peers.has("torch"):
        target, source, at = map(torch.from_numpy, (out, rows, index))
        runs["torch"] = lambda: target.index_add_(0, at, source).numpy()
    return _pass(
        inputs,
        "scatter_add_rows",
        lambda threads: ck.scatter_add_rows(rows, index, out, num_threads=threads, validate=False),
        checking.gathered(*pattern, None, rows),
        runs,
        rows=m,
        arrays=3,
        reset=partial(out.fill, 0),
    )


def dropout(inputs: Inputs) -> Case:
    x, out, gids, torch = inputs.x, inputs.out, np.arange(inputs.graph.n), inputs.peers.torch
    check = checking.rows_equal(lambda rows: reference.dropout(x[rows], gids[rows], P, **KEY), len(x))
    case = _pass(
        inputs,
        "dropout",
        lambda threads: ck.dropout(x, gids, P, **KEY, out=out, num_threads=threads),
        check,
        {},
        rows=len(x),
        arrays=2,
        reset=partial(out.fill, np.nan),
    )
    if inputs.peers.has("torch"):
        source, other_mask = torch.from_numpy(x), checking.dropped(x, P)
        case.candidates.extend(
            of_peers({"torch": lambda: torch.nn.functional.dropout(source, P).numpy()}, other_mask)
        )
    return case


def bias_relu_dropout(inputs: Inputs) -> Case:
    z, out, gids, torch = inputs.x, inputs.out, np.arange(inputs.graph.n), inputs.peers.torch
    bias = -inputs.positive(inputs.width)  # so that relu has something to do

    def wanted(rows: np.ndarray) -> np.ndarray:
        return reference.bias_relu_dropout(z[rows], bias, gids[rows], P, **KEY)

    case = _pass(
        inputs,
        "bias_relu_dropout",
        lambda threads: ck.bias_relu_dropout(z, bias, gids, P, **KEY, out=out, num_threads=threads),
        checking.rows_equal(wanted, len(z), 1e-6),
        {},
        rows=len(z),
        arrays=2,
        reset=partial(out.fill, np.nan),
    )
    if inputs.peers.has("torch"):
        functional, source, shift = torch.nn.functional, torch.from_numpy(z), torch.from_numpy(bias)
        check = checking.dropped(np.maximum(z + bias, 0), P)
        run = lambda: functional.dropout(functional.relu_(source + shift), P).numpy()  # noqa: E731
        case.candidates.extend(of_peers({"torch": run}, check))
    return case


def relu_dropout_backward(inputs: Inputs) -> Case:
    """Peers that drop with a mask of their own are told ours, as the zeros of the result."""
    d_out, out, torch = inputs.positive(*inputs.x.shape), inputs.out, inputs.peers.torch
    activated = np.where(inputs.x > 1, inputs.x, np.float32(0))
    scale = np.float32(1 / (1 - P))
    runs: dict[str, Run] = {}
    if inputs.peers.has("scipy"):
        runs["numpy"] = lambda: np.multiply(d_out, np.where(activated > 0, scale, np.float32(0)), out=out)
    if inputs.peers.has("torch"):
        gradient, value = torch.from_numpy(d_out), torch.from_numpy(activated)
        runs["torch"] = lambda: (
            torch.ops.aten.threshold_backward(gradient, value, 0).mul_(float(scale)).numpy()
        )
    return _pass(
        inputs,
        "relu_dropout_backward",
        lambda threads: ck.relu_dropout_backward(d_out, activated, P, out=out, num_threads=threads),
        checking.rows_equal(
            lambda rows: reference.relu_dropout_backward(d_out[rows], activated[rows], P), len(d_out), 1e-6
        ),
        runs,
        rows=len(d_out),
        arrays=3,
        reset=partial(out.fill, np.nan),
    )


def bias_elu_dropout(inputs: Inputs) -> Case:
    x, out, gids, bias = inputs.x, inputs.out, np.arange(inputs.graph.n), -inputs.positive(inputs.width)
    return _pass(
        inputs,
        "bias_elu_dropout",
        lambda threads: ck.bias_elu_dropout(x, bias, gids, P, **KEY, out=out, num_threads=threads),
        checking.rows_equal(
            lambda rows: reference.bias_elu_dropout(x[rows], bias, gids[rows], P, **KEY), len(x), 1e-6
        ),
        {},
        rows=len(x),
        arrays=2,
        reset=partial(out.fill, np.nan),
    )


def elu_dropout_backward(inputs: Inputs) -> Case:
    d_h, out, gids = inputs.positive(*inputs.x.shape), inputs.out, np.arange(inputs.graph.n)
    h = inputs.x - 1  # of either sign
    return _pass(
        inputs,
        "elu_dropout_backward",
        lambda threads: ck.elu_dropout_backward(d_h, h, gids, P, **KEY, out=out, num_threads=threads),
        checking.rows_equal(
            lambda rows: reference.elu_dropout_backward(d_h[rows], h[rows], gids[rows], P, **KEY),
            len(h),
            1e-6,
        ),
        {},
        rows=len(h),
        arrays=3,
        reset=partial(out.fill, np.nan),
    )


# ---- sparse features ----


def _features(inputs: Inputs) -> sp.csr_array:
    """A matrix [n, FEATURES] with as many values in each row."""
    n, filled = inputs.graph.n, round(FEATURES * FILLED)
    columns = np.argpartition(inputs.rng.random((n, FEATURES), np.float32), filled, axis=1)[:, :filled]
    columns.sort(axis=1)
    indptr = np.arange(n + 1, dtype=np.int64) * filled
    values = inputs.positive(n * filled)
    return sp.csr_array((values, columns.reshape(-1).astype(np.int32), indptr), shape=(n, FEATURES))


def _parts(matrix: sp.csr_array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), matrix.data


def _product(
    inputs: Inputs, kernel: str, matrix: sp.csr_array, factor: np.ndarray, ours: dict[str, Any]
) -> Case:
    """A product of sparse features, which peers may also do without zeros left out."""
    indptr, indices, data = _parts(matrix)
    check = checking.gathered(indptr, indices, data, factor)
    runs = Matrix(inputs.peers, indptr, indices, matrix.shape[1]).products(factor, data)
    candidates = of_peers(runs, check)
    if inputs.peers.has("scipy"):
        full = matrix.toarray()

        def dense(threads: int) -> np.ndarray:
            with blas_threads(threads):
                return full @ factor

        candidates.append(Candidate("numpy dense", dense, check, peer=True))
    out = empty((matrix.shape[0], inputs.width), np.float32)
    return Case(
        kernel,
        inputs.graph.name,
        inputs.width,
        [Candidate(name, partial(run, out), check) for name, run in ours.items()] + candidates,
        flops=2 * matrix.nnz * inputs.width,
        values=out.size,
        moved=matrix.nnz * inputs.width,
        reset=partial(out.fill, np.nan),
    )


def csr_product(inputs: Inputs) -> Case:
    """X W of sparse features: the rows that are gathered are those of the weights, which are cached."""
    x, w = _features(inputs), inputs.positive(FEATURES, inputs.width)
    parts = _parts(x)
    run = lambda out, threads: ck.gather(*parts, w, out, num_threads=threads, validate=False)  # noqa: E731
    return _product(inputs, "csr_product", x, w, {MAIN: run})


def csr_gradient(inputs: Inputs) -> Case:
    """The gradient of the weights, X^T d. All peers have the transposed matrix."""
    x, d_out = _features(inputs), inputs.x
    transposed = x.T.tocsr()
    forward, turned = _parts(x), _parts(transposed)
    ours = {
        MAIN: lambda out, threads: ck.gather_adjoint(
            *forward, d_out, out, n_sources=FEATURES, num_threads=threads, validate=False
        ),
        "transposed": lambda out, threads: ck.gather(
            *turned, d_out, out, num_threads=threads, validate=False
        ),
    }
    return _product(inputs, "csr_gradient", transposed, d_out, ours)


# ---- dense features of many columns times a layer of few units ----


def _narrow(
    inputs: Inputs,
    kernel: str,
    ours: Callable[[np.ndarray, int], np.ndarray],
    product: tuple[np.ndarray, np.ndarray],
) -> Case:
    """A product of two dense matrices, which peers leave to a BLAS."""
    left, right = product
    n, depth = left.shape
    rows = checking.sample(np.zeros(n))
    wanted = left[rows].astype(np.float64) @ right.astype(np.float64)
    tolerance = checking.rounding(np.full(len(rows), depth), np.float32)

    def check(got: np.ndarray) -> None:
        checking.close(got[rows], wanted, tolerance)

    out, torch = empty((n, inputs.width), np.float32), inputs.peers.torch

    def matmul(threads: int) -> np.ndarray:
        with blas_threads(threads):
            return np.matmul(left, right, out=out)

    candidates = [Candidate(MAIN, partial(ours, out), check)]
    if inputs.peers.has("scipy"):
        candidates.append(Candidate("numpy", matmul, check, peer=True))
    if inputs.peers.has("torch"):
        factors, target = (torch.from_numpy(left), torch.from_numpy(right)), torch.from_numpy(out)
        runs: dict[str, Run] = {"torch": lambda: torch.mm(*factors, out=target).numpy()}
        candidates += of_peers(runs, check)
    return Case(
        kernel,
        inputs.graph.name,
        inputs.width,
        candidates,
        flops=2 * n * depth * inputs.width,
        values=out.size,
        moved=left.size,
        limit="sequential",
        reset=partial(out.fill, np.nan),
    )


def narrow_product(inputs: Inputs) -> Case:
    """X W."""
    x, w = inputs.positive(inputs.graph.n, DEPTH), inputs.positive(DEPTH, inputs.width)
    run = lambda out, threads: ck.narrow_product(x, w, out, num_threads=threads)  # noqa: E731
    return _narrow(inputs, "narrow_product", run, (x, w))


def narrow_product_adjoint(inputs: Inputs) -> Case:
    """The gradient of W, X^T d."""
    x, d_out = inputs.positive(inputs.graph.n, DEPTH), inputs.x
    run = lambda out, threads: ck.narrow_product_adjoint(x, d_out, out, num_threads=threads)  # noqa: E731
    return _narrow(inputs, "narrow_product_adjoint", run, (x.T, d_out))


PASSES: dict[str, Callable[[Inputs], Case]] = {
    build.__name__: build
    for build in (
        pack_rows, unpack_rows, scatter_add_rows, dropout, bias_relu_dropout, relu_dropout_backward,
        bias_elu_dropout, elu_dropout_backward, csr_product, csr_gradient, narrow_product,
        narrow_product_adjoint,
    )
}  # fmt: skip
