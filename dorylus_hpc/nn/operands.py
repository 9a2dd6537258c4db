"""A part as the stages read it: edges with their scales, features, labels, in the dtype of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cython_kernels import (
    AttentionSaved,
    AttentionV2Saved,
    attention,
    attention_adjoint,
    attention_v2,
    attention_v2_adjoint,
    attention_v2_targets,
    bias_relu_dropout,
    dispatch,
    dropout,
    dropout_csr,
    gather,
    gather_adjoint,
    gather_max,
    gather_max_pull,
    narrow_product,
    narrow_product_adjoint,
)
from cython_kernels.narrow import most_columns
from lambda_pkg.dense import apply_vertex


@dataclass(frozen=True)
class AttentionKey:
    """Slope of attention's LeakyReLU, and what the dropout of its weights depends on beside edge and head."""

    p: float
    seed: int
    layer: int
    slope: float


@dataclass(frozen=True, eq=False)
class EdgeOperand:
    """One direction of a part's edges and what it computes.

        out_i = row_scale_i (sum_j w_ij source_scale_j x_j + self_weight source_scale_i x_i)

    Attributes
    ----------
    indptr, indices
        CSR over the part's local rows: own rows first, ghosts after.
    values
        The user's edge weights, or None.
    row_scale, source_scale
        Factors after and before the sum, of the own rows, and of own and ghost rows; None: 1.
    self_weight
        Of a row's own x.
    gids
        Vertex ids of all that rows read, own ones first; only where attention wants them.
    """

    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray | None
    row_scale: np.ndarray | None
    source_scale: np.ndarray | None
    self_weight: float = 1.0
    gids: np.ndarray | None = None

    def aggregate(
        self,
        x: np.ndarray,
        out: np.ndarray,
        rows: tuple[int, int],
        *,
        accumulate: bool = False,
        scaled: bool = False,
    ) -> None:
        """Write rows `rows` of the aggregate of `x` to `out`, or add them to what is there.

        `scaled`: rows of `x` have been multiplied by their source scale, which saves that once an edge.
        """
        n_own = len(self.indptr) - 1
        gather(
            self.indptr,
            self.indices,
            self.values,
            x,
            out[:n_own],
            row_scale=self.row_scale,
            source_scale=None if scaled else self.source_scale,
            self_weight=self.self_weight,
            accumulate=accumulate,
            rows=rows,
            validate=False,
        )

    def maximum(
        self, x: np.ndarray, out: np.ndarray, rows: tuple[int, int], source: np.ndarray | None
    ) -> None:
        """Write rows `rows` of the largest values of `x` to `out`, and where they came from to `source`."""
        n_own = len(self.indptr) - 1
        gather_max(self.indptr, self.indices, x, out[:n_own], source=source, rows=rows, validate=False)

    def pull(self, packed: np.ndarray, gids: np.ndarray, out: np.ndarray, rows: tuple[int, int]) -> None:
        """Write rows `rows` of the gradient of `maximum`'s x to `out`: over the reversed edges."""
        gather_max_pull(self.indptr, self.indices, packed, gids, out, rows=rows, validate=False)

    def attend(
        self,
        y: np.ndarray,
        score_source: np.ndarray,
        score_target: np.ndarray,
        out: np.ndarray,
        saved: AttentionSaved | None,
        rows: tuple[int, int],
        key: AttentionKey,
        epoch: int,
    ) -> None:
        """Write rows `rows` of attention's sums of `y` to `out`; `saved` is None in an evaluation."""
        attention(
            self.indptr, self.indices, y, score_source, score_target, out, slope=key.slope, saved=saved,
            **self._masks(key, saved is not None, epoch, source_gids=self.gids, target_gids=self._own_gids),
            rows=rows, validate=False,
        )  # fmt: skip

    def attend_backward(
        self,
        y: np.ndarray,
        score_source: np.ndarray,
        record: np.ndarray,
        d_out: np.ndarray,
        d_y: np.ndarray,
        d_score_source: np.ndarray,
        rows: tuple[int, int],
        key: AttentionKey,
        epoch: int,
    ) -> None:
        """Write rows `rows` of the gradients of y and its scores as sources: over the reversed edges."""
        attention_adjoint(
            self.indptr, self.indices, y, score_source, record, d_out, d_y, d_score_source=d_score_source,
            slope=key.slope,
            **self._masks(key, True, epoch, source_gids=self._own_gids, target_gids=self.gids),
            rows=rows, validate=False,
        )  # fmt: skip

    def attend_v2(
        self,
        y: np.ndarray,
        r: np.ndarray,
        a: np.ndarray,
        out: np.ndarray,
        saved: AttentionV2Saved | None,
        rows: tuple[int, int],
        key: AttentionKey,
        epoch: int,
    ) -> None:
        """As `attend`, with scores of y and of the targets' r."""
        attention_v2(
            self.indptr, self.indices, y, r, a, out, slope=key.slope, saved=saved,
            **self._masks(key, saved is not None, epoch, source_gids=self.gids, target_gids=self._own_gids),
            rows=rows, validate=False,
        )  # fmt: skip

    def attend_v2_targets(
        self,
        y: np.ndarray,
        r: np.ndarray,
        a: np.ndarray,
        out: np.ndarray,
        d_out: np.ndarray,
        saved: AttentionV2Saved,
        d_r: np.ndarray,
        d_a: np.ndarray,
        record: np.ndarray,
        rows: tuple[int, int],
        key: AttentionKey,
        epoch: int,
    ) -> None:
        """Write rows `rows` of the gradient of r, their share of that of a, and what sources need of them."""
        attention_v2_targets(
            self.indptr, self.indices, y, r, a, out, d_out, saved, d_r, d_a, record=record, slope=key.slope,
            **self._masks(key, True, epoch, source_gids=self.gids, target_gids=self._own_gids),
            rows=rows, validate=False,
        )  # fmt: skip

    def attend_v2_backward(
        self,
        y: np.ndarray,
        r: np.ndarray,
        a: np.ndarray,
        record: np.ndarray,
        d_out: np.ndarray,
        d_y: np.ndarray,
        rows: tuple[int, int],
        key: AttentionKey,
        epoch: int,
    ) -> None:
        """Write rows `rows` of the gradient of y: over the reversed edges."""
        attention_v2_adjoint(
            self.indptr, self.indices, y, r, a, record, d_out, d_y, slope=key.slope,
            **self._masks(key, True, epoch, source_gids=self._own_gids, target_gids=self.gids),
            rows=rows, validate=False,
        )  # fmt: skip

    @property
    def _own_gids(self) -> np.ndarray | None:
        return None if self.gids is None else self.gids[: len(self.indptr) - 1]

    @staticmethod
    def _masks(key: AttentionKey, drops: bool, epoch: int, **gids: np.ndarray | None) -> dict[str, Any]:
        if not (drops and key.p):
            return {}
        return {"p": key.p, "seed": key.seed, "epoch": epoch, "layer": key.layer, **gids}


@dataclass(frozen=True)
class DropoutKey:
    """What a dropout mask depends on beside the vertex and the column: nothing about the run's layout."""

    p: float
    seed: int
    layer: int


@dataclass(eq=False)
class DenseFeatures:
    """Dense input rows of own and ghost vertices, or of own ones alone where nothing reads those of ghosts.

    Attributes
    ----------
    x
        (n_local or n_own, f_in); no rows once it was given up.
    gids
        Vertex ids of the rows, at least.
    load
        Returns once these own rows of `x` are there; None: they are.
    release
        Gives back the memory of `x` from a row on.
    """

    x: np.ndarray
    gids: np.ndarray
    load: Callable[[tuple[int, int]], None] | None = None
    release: Callable[[int], None] | None = None

    sparse = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.x.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the values."""
        return self.x.dtype

    def give_up(self, n_rows: int) -> np.ndarray:
        """Return rows of `x` for something else, and drop the others: no features are here any more."""
        x, self.x = self.x[:n_rows], self.x[:0]
        if self.release is not None:
            self.release(n_rows)
        return x

    def buffer(self) -> np.ndarray:
        """Return room for what `drop` writes."""
        return np.empty_like(self.x)

    def drop(self, rows: tuple[int, int], key: DropoutKey, epoch: int, buffer: np.ndarray) -> None:
        """Write the rows with dropout to `buffer`."""
        part = slice(*rows)
        dropout(
            self.x[part],
            self.gids[part],
            key.p,
            seed=key.seed,
            epoch=epoch,
            layer=key.layer,
            out=buffer[part],
        )

    def times(
        self,
        rows: tuple[int, int],
        values: np.ndarray | None,
        w: np.ndarray,
        out: np.ndarray,
        *,
        accumulate: bool = False,
    ) -> None:
        """Write rows of ``X @ w`` to the same rows of `out`, or add them; `values` replaces X if given."""
        part = slice(*rows)
        x = (self.x if values is None else values)[part]
        if accumulate:
            apply_vertex(x, w, out=out[part], accumulate=True)
        else:
            multiply(x, w, out[part])

    def weight_gradient(
        self, rows: tuple[int, int], values: np.ndarray | None, d_out: np.ndarray, d_w: np.ndarray
    ) -> None:
        """Write ``X[rows].T @ d_out[rows]`` to `d_w`."""
        part = slice(*rows)
        weight_gradient((self.x if values is None else values)[part], d_out[part], d_w)


@dataclass(frozen=True, eq=False)
class SparseFeatures:
    """CSR input rows of own and ghost vertices, or of own ones alone: never made dense.

    Attributes
    ----------
    indptr, indices, data
        CSR of shape (n_local or n_own, n_columns).
    n_columns
        Input width.
    gids
        Vertex ids of the rows, at least.
    """

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray
    n_columns: int
    gids: np.ndarray

    sparse = True

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.indptr) - 1, self.n_columns

    @property
    def dtype(self) -> np.dtype:
        """Of the values."""
        return self.data.dtype

    def buffer(self) -> np.ndarray:
        """Return room for what `drop` writes: the stored values."""
        return np.empty_like(self.data)

    def drop(self, rows: tuple[int, int], key: DropoutKey, epoch: int, buffer: np.ndarray) -> None:
        """Write the stored values of the rows with dropout to `buffer`."""
        start, stop = rows
        first, last = self.indptr[start], self.indptr[stop]
        dropout_csr(
            self.indptr[start : stop + 1] - first,
            self.indices[first:last],
            self.data[first:last],
            self.gids[start:stop],
            key.p,
            seed=key.seed,
            epoch=epoch,
            layer=key.layer,
            out=buffer[first:last],
        )

    def times(
        self,
        rows: tuple[int, int],
        values: np.ndarray | None,
        w: np.ndarray,
        out: np.ndarray,
        *,
        accumulate: bool = False,
    ) -> None:
        """Write rows of ``X @ w`` to the same rows of `out`, or add them; `values` replaces X if given."""
        data = self.data if values is None else values
        n_rows = min(len(out), len(self.indptr) - 1)  # of the own vertices, or of ghosts too
        gather(
            self.indptr[: n_rows + 1],
            self.indices[: self.indptr[n_rows]],
            data[: self.indptr[n_rows]],
            w,
            out[:n_rows],
            accumulate=accumulate,
            rows=rows,
            validate=False,
        )

    def weight_gradient(
        self, rows: tuple[int, int], values: np.ndarray | None, d_out: np.ndarray, d_w: np.ndarray
    ) -> None:
        """Write ``X[rows].T @ d_out[rows]`` to `d_w`."""
        data = self.data if values is None else values
        n_own = len(d_out)  # gradients exist for own rows only, features for ghosts too
        stored = self.indptr[n_own]
        gather_adjoint(
            self.indptr[: n_own + 1],
            self.indices[:stored],
            data[:stored],
            d_out,
            d_w,
            n_sources=self.n_columns,
            rows=rows,
            validate=False,
        )


@dataclass(frozen=True, eq=False)
class EdgeSlice:
    """Edges of one direction of an interval, over rows that are collected for it.

    Attributes
    ----------
    indptr, indices
        CSR of the interval's rows; indices count `sources`.
    sources : ndarray, (m,), int32
        Local rows of the part that the interval's edges read, each once, in order.
    place
        Where these are, (start, stop), in a row tensor that has them for all intervals of the part.
    """

    indptr: np.ndarray
    indices: np.ndarray
    sources: np.ndarray
    place: tuple[int, int]


def slice_edges(edges: EdgeOperand, intervals: Sequence[tuple[int, int]]) -> tuple[EdgeSlice, ...]:
    """Cut the edges of a part by its intervals. O(edges log edges) time, 4 bytes an edge."""
    made, at = [], 0
    for start, stop in intervals:
        indptr = edges.indptr[start : stop + 1] - edges.indptr[start]
        read = edges.indices[edges.indptr[start] : edges.indptr[stop]]
        sources, indices = np.unique(read, return_inverse=True)
        place = (at, at + len(sources))
        made.append(EdgeSlice(indptr, indices.astype(np.int32), sources.astype(np.int32), place))
        at += len(sources)
    return tuple(made)


Features = DenseFeatures | SparseFeatures


@dataclass(frozen=True, eq=False)
class PartOperands:
    """Everything of a part that no epoch changes.

    Attributes
    ----------
    index
        Number of the part.
    gids
        Vertex ids of the own rows.
    in_edges, out_edges
        Forward and backward direction; the same arrays, and where the scales are too the same object, if
        the graph is symmetric.
    n_in_ghosts, n_out_ghosts
        Ghost rows after the own ones, a direction.
    features
        Input rows of own vertices and, where the model reads them, of the ghosts of in-edges.
    labels
        Class of each own vertex, -1 if unlabelled; or a row of 0, 1 and 255 (not known), a column a class.
    split
        0 none, 1 train, 2 validation, 3 test.
    train_mask
        1 where the loss counts: a labelled training vertex.
    """

    index: int
    gids: np.ndarray
    in_edges: EdgeOperand
    out_edges: EdgeOperand
    n_in_ghosts: int
    n_out_ghosts: int
    features: Features
    labels: np.ndarray
    split: np.ndarray
    train_mask: np.ndarray

    @property
    def n_own(self) -> int:
        """Number of owned vertices."""
        return len(self.gids)

    @property
    def scale_in(self) -> np.ndarray:
        """What rows are multiplied by before a gather over in-edges; own ones first, ghosts after."""
        return self._scale(self.in_edges, self.n_in_ghosts)

    @property
    def scale_out(self) -> np.ndarray:
        """The same over out-edges."""
        return self._scale(self.out_edges, self.n_out_ghosts)

    def _scale(self, edges: EdgeOperand, n_ghosts: int) -> np.ndarray:
        if edges.source_scale is not None:
            return edges.source_scale
        return np.ones(self.n_own + n_ghosts, self.features.dtype)


def activate(
    block: np.ndarray,
    bias: np.ndarray,
    gids: np.ndarray,
    key: DropoutKey,
    *,
    epoch: int,
    training: bool,
    scale: np.ndarray | None = None,
) -> None:
    """Apply bias, ReLU, in training the dropout of the next layer's input, then scales of rows, in place."""
    bias_relu_dropout(
        block,
        bias,
        gids,
        key.p if training else 0.0,
        seed=key.seed,
        epoch=epoch,
        layer=key.layer,
        row_scale=scale,
        out=block,
    )


def multiply(h: np.ndarray, w: np.ndarray, out: np.ndarray) -> None:
    """Write ``h @ w`` to `out`."""
    if is_narrow(h, w.shape[1], least=_LEAST_DEPTH):
        narrow_product(h, np.ascontiguousarray(w), out)
    else:
        apply_vertex(h, w, out=out)


def multiply_backward(
    h: np.ndarray, w: np.ndarray, d_out: np.ndarray, d_w: np.ndarray, d_h: np.ndarray | None
) -> None:
    """Write the gradients of ``h @ w`` to `d_w` and, unless it is None, `d_h`."""
    weight_gradient(h, d_out, d_w)
    if d_h is not None:
        multiply(d_out, w.T, d_h)


def weight_gradient(h: np.ndarray, d_out: np.ndarray, d_w: np.ndarray) -> None:
    """Write ``h.T @ d_out`` to `d_w`."""
    if is_narrow(h, d_out.shape[1], least=_LEAST_ROWS):
        narrow_product_adjoint(h, d_out, d_w)
    else:
        np.matmul(h.T, d_out, out=d_w)


# Columns of `h` from which a kernel of its own is faster than BLAS: of a product, and of a weight gradient.
_LEAST_DEPTH, _LEAST_ROWS = 64, 16


def is_narrow(h: np.ndarray, columns: int, *, least: int) -> bool:
    """Tell whether a product of rows and a matrix of few columns is faster by a kernel of its own.

    By widths and the CPU alone: all intervals, threads and ranks choose the same. Other instructions than
    AVX-512 add half as much at a time, or less, and then BLAS is as fast.
    """
    few = columns <= most_columns(h.dtype) and h.shape[1] >= least
    return few and dispatch.instruction_set() == "avx512"


def scale_rows(block: np.ndarray, scale: np.ndarray) -> None:
    """Multiply each row by its scale, in place."""
    bias_relu_dropout(
        block, None, None, 0.0, seed=0, epoch=0, layer=0, relu=False, row_scale=scale, out=block
    )
