"""Graph attention whose scores see both ends through a rectifier (GATv2), forward and backward.

Row i of a CSR matrix holds the in-edges of target i, with sources j = indices[e]. For each head h, with
columns h D .. h D + D - 1 of a row, ::

    raw   = left[j, h] + right[i, h]                                            D numbers
    s     = sum over the D columns of a[h] * (raw if raw > 0 else slope * raw)
    alpha = exp(s) / sum over the entries of row i of exp(s)
    out[i, h] = sum over the entries of row i of mask * alpha * left[j, h]

where mask is 0 with probability p and else 1/(1 - p) (Brody, Alon, Yahav, "How attentive are graph attention
networks?", ICLR 2022, eq. 7, with a matrix for the features of either end). The rectifier acts on the sum of
both ends, so that a target may rank its sources in another order than other targets do, which
`cython_kernels.graph_attention` cannot. Nothing of the size of the edges is stored: backward makes scores
and weights again from the rows of both ends and two numbers a target and head.

A backward pass is `attention_v2_targets`, over the in-edges of the targets, then `attention_v2_adjoint`, a
pull over the out-edges: the CSR matrix of the transpose, whose rows are the sources (of a symmetric graph it
is the same). `simd/attention_v2.hpp` has the formulas of the gradients.

The masks are those of `cython_kernels.graph_attention`, which tells their keys, also where entries repeat.

`left`, `right`, `d_out`, `record` and the gradients `d_left` and `d_right` may each be some columns of a
wider row-major matrix: a product with both weight matrices side by side makes `left` and `right` as one, and
rows that go to another rank hold several side by side ::

    packed = np.empty((n, 2 * H * D + 3 * H), dtype)
    right, d_out = packed[:, : H * D], packed[:, H * D : 2 * H * D]
    record = packed[:, 2 * H * D :].reshape(n, 3, H)  # a view

No result depends on `num_threads`, on `rows` (but for `d_a`, which is a sum over them), on how far rows are
apart or on the instructions of the CPU, bit for bit. Exponentials are within 1.5 units in the last place;
weights about as small as the smallest normal number are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _attention_v2, checks, dispatch
from .attention_checks import Masks, check_entries, check_slope
from .checks import FloatArray, IntArray

RECORD = 3  # numbers of a record of `attention_v2_targets`


class AttentionV2Saved(NamedTuple):
    """What a forward pass leaves to the backward pass, by target; an empty row has zeros.

    All arrays are C-contiguous, of the dtype of `left`, float32 or float64.

    Attributes
    ----------
    row_max, row_sum
        [n_rows, H]: the largest s of a row, and its sum of exp(s - row_max).
    """

    row_max: FloatArray
    row_sum: FloatArray


def attention_v2_saved(n_rows: int, heads: int, dtype: npt.DTypeLike) -> AttentionV2Saved:
    """Make arrays for `attention_v2` to fill, of zeros.

    O(n_rows H) time and memory: 2 H numbers a target.

    Parameters
    ----------
    n_rows, heads
        Targets and H, which is at least 1.
    dtype
        float32 or float64.

    Returns
    -------
    AttentionV2Saved
        New arrays.

    Raises
    ------
    TypeError
        Another dtype, or a number that is no integer.
    ValueError
        A number out of range.
    """
    heads = checks.integer("heads", heads, 1, 2**31)
    n_rows = checks.integer("n_rows", n_rows, 0, 2**31)
    kind = np.dtype(dtype)
    if kind not in [np.dtype(one) for one in checks.FLOATS]:
        raise TypeError(f"dtype must be float32 or float64, got {kind}")
    return AttentionV2Saved(*(np.zeros((n_rows, heads), kind) for _ in AttentionV2Saved._fields))


def attention_v2(
    indptr: IntArray,
    indices: IntArray,
    left: FloatArray,
    right: FloatArray,
    a: FloatArray,
    out: FloatArray | None = None,
    *,
    slope: float = 0.2,
    p: float = 0.0,
    seed: int = 0,
    epoch: int = 0,
    layer: int = 0,
    source_gids: IntArray | None = None,
    target_gids: IntArray | None = None,
    saved: AttentionV2Saved | None = None,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Sum the features of each row's sources, weighed by attention: see `cython_kernels.graph_attention_v2`.

    O(nnz H D) time; no memory but that of the results. A row with many entries is summed in pieces, which
    threads share; the others are cut among the threads by their entries. A head of more than 1,024 columns
    has its scores made again for every 1,024 of them.

    With p > 0 a row whose columns are not sorted also costs a search for repeated entries, as in `attention`.

    Parameters
    ----------
    indptr, indices
        int64 [n_rows + 1] and int32 [nnz]: the in-edges of each target. Duplicates count each time.
    left
        float32 or float64 [n_cols, H D], row-major, or columns of such a matrix: the sources' features, head
        after head, which are summed and scored.
    right
        [n_rows, H D] of the dtype of `left`, also columns: the targets' features, which are scored only.
    a
        [H, D] of the dtype of `left`: what a score is made with; tells H and D.
    out
        [n_rows, H D] of the dtype of `left`, apart from every input; made if None, rows outside `rows` then
        being 0. An empty row becomes 0.
    slope
        Of the leaky rectifier; not negative.
    p
        Probability of dropping a weight, 0 <= p < 1. With 0 the keys and gids have no effect.
    seed, epoch, layer
        As in `dropout`. Masks differ from those of features with the same.
    source_gids, target_gids
        int64 [n_cols] and [n_rows]: the vertices' indices before partitioning; needed iff p > 0.
    saved
        Arrays that `attention_v2_saved` made, of which the rows in `rows` are filled in; None: no backward
        pass follows.
    rows
        (start, stop): compute and write only these rows. None: all.
    num_threads
        Threads over pieces of the rows.
    validate
        False skips the check of every entry, for a matrix that passed `check_csr` before.

    Returns
    -------
    numpy.ndarray
        `out`. A row with a score that is NaN or +inf, or with none but -inf, is NaN.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.

    Notes
    -----
    S. Brody, U. Alon, E. Yahav, "How attentive are graph attention networks?", ICLR 2022, eq. 7; dropout of
    weights as in Velickovic et al., ICLR 2018, section 3.3.
    """
    n_rows, n_cols = checks.csr_layout(indptr, indices), _rows("left", left)
    heads, columns = _check_factor(a, left)
    checks.array("right", right, left.dtype, (n_rows, columns), apart_rows=True)
    if validate:
        check_entries(indptr, indices, n_cols, "source")
    slope = check_slope(slope, left.dtype)
    start, stop = checks.row_range(rows, n_rows)
    masks = Masks(p, seed, epoch, layer, source_gids, n_cols, target_gids, n_rows)
    result = checks.output("out", out, left.dtype, (n_rows, columns))
    inputs = {
        "indptr": indptr, "indices": indices, "left": left, "right": right, "a": a,
        "source_gids": source_gids, "target_gids": target_gids,
    }  # fmt: skip
    checks.apart("out", result, **inputs)
    if saved is None:
        filled = AttentionV2Saved(*(np.empty((0, 0), left.dtype) for _ in AttentionV2Saved._fields))
    else:
        filled = _check_saved(saved, left.dtype, n_rows, heads, writable=True)
        checks.apart("saved.row_sum", filled.row_sum, **{"saved.row_max": filled.row_max})
        for name, array in zip(AttentionV2Saved._fields, filled, strict=True):
            checks.apart(f"saved.{name}", array, out=result, **inputs)
    if out is None:
        result[:start] = 0
        result[stop:] = 0
    _attention_v2.forward(
        indptr, indices, left, right, a, result, *filled, slope,
        masks.source_gids, masks.target_gids, masks.key, masks.threshold, masks.scale,
        start, stop, dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result


def attention_v2_targets(
    indptr: IntArray,
    indices: IntArray,
    left: FloatArray,
    right: FloatArray,
    a: FloatArray,
    out: FloatArray,
    d_out: FloatArray,
    saved: AttentionV2Saved,
    d_right: FloatArray | None = None,
    d_a: FloatArray | None = None,
    *,
    record: FloatArray | None = None,
    slope: float = 0.2,
    p: float = 0.0,
    seed: int = 0,
    epoch: int = 0,
    layer: int = 0,
    source_gids: IntArray | None = None,
    target_gids: IntArray | None = None,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Begin the backward pass: the gradients of `right` and `a`, and what the sources need of a target.

    O(nnz H D) time; 256 H D numbers of memory beside the results.

    Parameters
    ----------
    indptr, indices, left, right, a, slope, p, seed, epoch, layer, source_gids, target_gids
        As `attention_v2` took them. `left` sets the dtype of all floating arrays, float32 or float64.
    out, saved
        As `attention_v2` left them.
    d_out
        [n_rows, H D]: the gradient of `out`. May be columns of a wider matrix.
    d_right
        [n_rows, H D], apart from the inputs, also columns; made if None, rows outside `rows` then being 0.
    d_a
        [H, D], apart from the inputs; made if None. Overwritten by the sum over the rows in `rows`, made in
        float64 in an order that depends on them alone.
    record
        [n_rows, 3, H], apart from the inputs; made if None, rows outside `rows` then being 0. May be 3 H
        columns of a wider matrix, as that of `d_out`. Is given, for each head, row_max, 1 / row_sum (0 for an
        empty row) and d_out[i, h] . out[i, h].
    rows
        (start, stop): compute and write only these rows. None: all.
    num_threads
        Threads over pieces of the rows.
    validate
        As for `attention_v2`.

    Returns
    -------
    tuple of numpy.ndarray
        `d_right`, `d_a`, `record`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.

    Notes
    -----
    S. Brody, U. Alon, E. Yahav, "How attentive are graph attention networks?", ICLR 2022, eq. 7.
    `cython_kernels.graph_attention_v2` has the formulas.
    """
    n_rows, n_cols = checks.csr_layout(indptr, indices), _rows("left", left)
    heads, columns = _check_factor(a, left)
    dtype, shape = left.dtype, (n_rows, columns)
    checks.array("right", right, dtype, shape, apart_rows=True)
    checks.array("out", out, dtype, shape)
    checks.array("d_out", d_out, dtype, shape, apart_rows=True)
    _check_saved(saved, dtype, n_rows, heads)
    if validate:
        check_entries(indptr, indices, n_cols, "source")
    slope = check_slope(slope, left.dtype)
    start, stop = checks.row_range(rows, n_rows)
    masks = Masks(p, seed, epoch, layer, source_gids, n_cols, target_gids, n_rows)
    gradient = checks.output("d_right", d_right, dtype, shape, apart_rows=True)
    factor = checks.output("d_a", d_a, dtype, a.shape)
    records = checks.output("record", record, dtype, (n_rows, RECORD, heads), apart_rows=True)
    inputs = {
        "indptr": indptr, "indices": indices, "left": left, "right": right, "a": a, "out": out,
        "d_out": d_out, "source_gids": source_gids, "target_gids": target_gids,
    }  # fmt: skip
    inputs |= {f"saved.{name}": array for name, array in saved._asdict().items()}
    checks.apart("d_right", gradient, d_a=factor, record=records, **inputs)
    checks.apart("d_a", factor, record=records, **inputs)
    checks.apart("record", records, **inputs)
    for made, given in ((gradient, d_right), (records, record)):
        if given is None:
            made[:start] = 0
            made[stop:] = 0
    _attention_v2.targets(
        indptr, indices, left, right, a, out, d_out, *saved, gradient, factor, records, slope,
        masks.source_gids, masks.target_gids, masks.key, masks.threshold, masks.scale,
        start, stop, dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return gradient, factor, records


def attention_v2_adjoint(
    indptr: IntArray,
    indices: IntArray,
    left: FloatArray,
    right: FloatArray,
    a: FloatArray,
    record: FloatArray,
    d_out: FloatArray,
    d_left: FloatArray | None = None,
    *,
    slope: float = 0.2,
    p: float = 0.0,
    seed: int = 0,
    epoch: int = 0,
    layer: int = 0,
    source_gids: IntArray | None = None,
    target_gids: IntArray | None = None,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """End the backward pass: the gradient of `left`, a pull over out-edges.

    O(nnz H D) time; no memory but that of the result.

    Parameters
    ----------
    indptr, indices
        int64 [n_sources + 1] and int32 [nnz]: the out-edges of each source, the transpose of what
        `attention_v2` was given. With ghosts among the sources their rows are what this rank adds to the
        gradients of others' vertices.
    left, right, a
        [n_sources, H D], [n_targets, H D] and [H, D], as `attention_v2` took them. `left` sets the dtype of
        all floating arrays, float32 or float64. `left`, `right` and the three below may be columns of wider
        matrices.
    record
        [n_targets, 3, H], of all targets, from `attention_v2_targets`.
    d_out
        [n_targets, H D]: the gradient of the result of `attention_v2`.
    d_left
        [n_sources, H D], apart from the inputs; made if None, rows outside `rows` then being 0.
    slope, p, seed, epoch, layer, num_threads, validate
        As `attention_v2` took them.
    source_gids, target_gids
        int64 [n_sources] and [n_targets], as `attention_v2` took them.
    rows
        (start, stop): compute and write the gradients of only these sources. None: all.

    Returns
    -------
    numpy.ndarray
        `d_left`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.

    Notes
    -----
    S. Brody, U. Alon, E. Yahav, "How attentive are graph attention networks?", ICLR 2022, eq. 7.
    `cython_kernels.graph_attention_v2` has the formulas.
    """
    n_sources, n_left = checks.csr_layout(indptr, indices), _rows("left", left)
    heads, columns = _check_factor(a, left)
    if n_left != n_sources:
        checks.array("left", left, left.dtype, (n_sources, columns), apart_rows=True)
    checks.array("right", right, left.dtype, (None, columns), apart_rows=True)
    n_targets = right.shape[0]
    checks.array("record", record, left.dtype, (n_targets, RECORD, heads), apart_rows=True)
    checks.array("d_out", d_out, left.dtype, (n_targets, columns), apart_rows=True)
    if validate:
        check_entries(indptr, indices, n_targets, "target")
    slope = check_slope(slope, left.dtype)
    start, stop = checks.row_range(rows, n_sources)
    masks = Masks(p, seed, epoch, layer, source_gids, n_sources, target_gids, n_targets)
    result = checks.output("d_left", d_left, left.dtype, left.shape, apart_rows=True)
    checks.apart(
        "d_left", result, indptr=indptr, indices=indices, left=left, right=right, a=a, record=record,
        d_out=d_out, source_gids=source_gids, target_gids=target_gids,
    )  # fmt: skip
    if d_left is None:
        result[:start] = 0
        result[stop:] = 0
    _attention_v2.adjoint(
        indptr, indices, left, right, a, record, d_out, result, slope,
        masks.source_gids, masks.target_gids, masks.key, masks.threshold, masks.scale,
        start, stop, dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result


def _rows(name: str, value: FloatArray) -> int:
    """Check the array that sets the dtype and return its rows."""
    return checks.array(name, value, checks.FLOATS, (None, None), apart_rows=True).shape[0]


def _check_factor(a: FloatArray, left: FloatArray) -> tuple[int, int]:
    """Check `a` beside the features of the sources and return the heads and the columns of all."""
    heads, width = checks.array("a", a, left.dtype, (None, None)).shape
    if heads == 0 or width == 0 or heads * width != left.shape[1]:
        raise ValueError(
            f"a has {heads} head(s) of {width} column(s) for {left.shape[1]} columns of left: expected as "
            "many in all, at least 1"
        )
    return heads, heads * width


def _check_saved(
    saved: object, dtype: np.dtype[Any], n_rows: int, heads: int, *, writable: bool = False
) -> AttentionV2Saved:
    """Check the arrays that are passed from forward to backward."""
    if not isinstance(saved, AttentionV2Saved):
        raise TypeError(f"saved must be an AttentionV2Saved, got {checks.describe(saved)}")
    for name, array in saved._asdict().items():
        checks.array(f"saved.{name}", array, dtype, (n_rows, heads), writable=writable)
    return saved
