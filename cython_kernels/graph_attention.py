"""Graph attention: softmax weights of in-edges that weigh their sources' features, forward and backward.

Row i of a CSR matrix holds the in-edges of target i, with sources j = indices[e]. For each head h ::

    raw   = score_source[j, h] + score_target[i, h]
    s     = raw if raw > 0 else slope * raw
    alpha = exp(s) / sum over the entries of row i of exp(s)
    out[i, h] = sum over the entries of row i of mask * alpha * x[j, h]

where x[j, h] is columns h D .. h D + D - 1 of a row, and mask is 0 with probability p and else 1/(1 - p)
(Velickovic, Cucurull, Casanova, Romero, Lio, Bengio, "Graph attention networks", ICLR 2018, eq. 3 and 6
and section 3.3; the scores are what its vector a makes of either end). Nothing of the size of the edges
is stored: backward makes the weights again from the scores and two numbers a target and head.

A backward pass is `attention_targets`, over targets and without any edge, then `attention_adjoint`, a
pull over the out-edges: the CSR matrix of the transpose, whose rows are the sources (of a symmetric
graph it is the same). A score above its row's maximum, which only a record of older scores can have,
counts as the maximum. `simd/attention.hpp` tells how the gradients come from sums that are made anyway.

The masks come from Philox4x32-10, as those of `dropout` do, under keys of their own::

    base    = mix(mix(K ^ 0x617474656E74696F) + 0x9E3779B97F4A7C15 * (epoch + 1))
    key     = mix(base + 0x9E3779B97F4A7C15 * (2**32 * occurrence + head // 4 + 1)), its low word first
    counter = (source gid, target gid), low words first
    word    = output number head % 4

where K = mix(mix(seed) + 0x9E3779B97F4A7C15 * (layer + 1)) is the key in `dropout`, mix the finaliser of
splitmix64 that `cython_kernels.dropout_masks` spells out, and all arithmetic is modulo 2**64. An entry is
kept iff word >= round(p * 2**32). `occurrence` counts equal (source, target) entries, so a mask depends on
no numbering but the global one. It takes no time in rows whose columns are sorted; in others entries that
are repeated, or that a filter of 65,536 bits takes for it, look back through their row: quadratic in the
row's length if it has many repeats or many more than 10,000 entries.

What belongs to sources, and what sources read of targets (`x`, `score_source`, `d_out`, `record` and the
gradients `d_x` and `d_score_source`), may each be some columns of a wider row-major matrix: rows that go to
another rank, or come from it, hold several of them side by side ::

    packed = np.empty((n, H * D + H), dtype)
    x, score_source = packed[:, : H * D], packed[:, H * D :]
    packed = np.empty((n, H * D + 4 * H), dtype)
    d_out, record = packed[:, : H * D], packed[:, H * D :].reshape(n, 4, H)  # a view

No result depends on `num_threads`, on `rows`, on how far rows are apart or on the instructions of the CPU,
bit for bit. Exponentials are within 1.5 units in the last place; weights about as small as the smallest
normal number are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _attention, checks, dispatch
from .attention_checks import Masks, check_entries, check_slope
from .checks import FloatArray, IntArray

RECORD = 4  # numbers of a record of `attention_targets`


class AttentionSaved(NamedTuple):
    """What a forward pass leaves to the backward pass, by target; an empty row has zeros.

    All arrays are C-contiguous, of the dtype of `x`, float32 or float64.

    Attributes
    ----------
    row_max, row_sum
        [n_rows, H]: the largest s of a row, and its sum of exp(s - row_max).
    negative
        [n_rows, H D]: the part of `out` that comes from entries with raw <= 0.
    negative_weight
        [n_rows, H]: the sum of their alpha.
    """

    row_max: FloatArray
    row_sum: FloatArray
    negative: FloatArray
    negative_weight: FloatArray


def attention_saved(n_rows: int, heads: int, columns: int, dtype: npt.DTypeLike) -> AttentionSaved:
    """Make arrays for `attention` to fill, of zeros.

    O(n_rows H D) time and memory: 3 H + H D numbers a target.

    Parameters
    ----------
    n_rows, heads, columns
        Targets, H and H D; columns is a multiple of heads, both at least 1.
    dtype
        float32 or float64.

    Returns
    -------
    AttentionSaved
        New arrays.

    Raises
    ------
    TypeError
        Another dtype, or a number that is no integer.
    ValueError
        A number out of range, or columns that the heads do not divide.
    """
    heads = checks.integer("heads", heads, 1, 2**31)
    n_rows = checks.integer("n_rows", n_rows, 0, 2**31)
    columns = checks.integer("columns", columns, 1, 2**31)
    kind = np.dtype(dtype)
    if kind not in [np.dtype(one) for one in checks.FLOATS]:
        raise TypeError(f"dtype must be float32 or float64, got {kind}")
    if columns % heads != 0:
        raise ValueError(f"columns must be a multiple of heads, got {columns} columns for {heads} heads")
    shapes = ((n_rows, heads), (n_rows, heads), (n_rows, columns), (n_rows, heads))
    return AttentionSaved(*(np.zeros(shape, kind) for shape in shapes))


def attention(
    indptr: IntArray,
    indices: IntArray,
    x: FloatArray,
    score_source: FloatArray,
    score_target: FloatArray,
    out: FloatArray | None = None,
    *,
    slope: float = 0.2,
    p: float = 0.0,
    seed: int = 0,
    epoch: int = 0,
    layer: int = 0,
    source_gids: IntArray | None = None,
    target_gids: IntArray | None = None,
    saved: AttentionSaved | None = None,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Sum the features of each row's sources, weighed by attention: see `cython_kernels.graph_attention`.

    O(nnz (H D + H)) time; no memory but that of the results. A row with many entries is summed in pieces,
    which threads share; the others are cut among the threads by their entries.

    With p > 0 a row whose columns are not sorted also costs a search for repeated entries, which is quadratic
    in the row's length (of 100,000 entries: 0.28 s and 0.001 s sorted, as measured). Sort the columns of a
    row first: SciPy's `sort_indices` does, and what `transpose_csr` makes is sorted.

    Parameters
    ----------
    indptr, indices
        int64 [n_rows + 1] and int32 [nnz]: the in-edges of each target. Duplicates count each time.
    x
        float32 or float64 [n_cols, H D], row-major, or columns of such a matrix: the sources' features, head
        after head.
    score_source, score_target
        [n_cols, H] and [n_rows, H], of the dtype of `x`; they tell H. The first may be columns of a wider
        matrix. Of a row whose scores are all -inf
        the weights are NaN, as of one with a NaN or +inf; with slope 0 of one with any -inf.
    out
        [n_rows, H D] of the dtype of `x`, apart from every input; made if None, rows outside `rows` then
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
        Arrays that `attention_saved` made, of which the rows in `rows` are filled in; None: no backward
        pass follows, which is faster.
    rows
        (start, stop): compute and write only these rows. None: all.
    num_threads
        Threads over pieces of the rows.
    validate
        False skips the check of every entry, for a matrix that passed `check_csr` before.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.

    Notes
    -----
    P. Velickovic, G. Cucurull, A. Casanova, A. Romero, P. Lio, Y. Bengio, "Graph attention networks", ICLR
    2018, eq. 3 and 6 and, for p, section 3.3. `cython_kernels.graph_attention` has the formulas and the
    masks' keys.
    """
    checks.array("x", x, checks.FLOATS, (None, None), apart_rows=True)
    n_rows, n_cols = checks.csr_layout(indptr, indices), x.shape[0]
    heads = _check_heads("score_source", score_source, x.dtype, n_cols, x.shape[1], apart_rows=True)
    checks.array("score_target", score_target, x.dtype, (n_rows, heads))
    if validate:
        check_entries(indptr, indices, n_cols, "source")
    slope = check_slope(slope, x.dtype)
    start, stop = checks.row_range(rows, n_rows)
    masks = Masks(p, seed, epoch, layer, source_gids, n_cols, target_gids, n_rows)
    result = checks.output("out", out, x.dtype, (n_rows, x.shape[1]))
    inputs = {
        "indptr": indptr, "indices": indices, "x": x, "score_source": score_source,
        "score_target": score_target, "source_gids": source_gids, "target_gids": target_gids,
    }  # fmt: skip
    checks.apart("out", result, **inputs)
    if saved is None:
        filled = AttentionSaved(*(np.empty((0, 0), x.dtype) for _ in AttentionSaved._fields))
    else:
        filled = _check_saved(saved, x.dtype, n_rows, heads, x.shape[1], writable=True)
        for name, array in zip(AttentionSaved._fields, filled, strict=True):
            checks.apart(f"saved.{name}", array, out=result, **inputs)
    if out is None:
        result[:start] = 0
        result[stop:] = 0
    _attention.forward(
        indptr, indices, x, score_source, score_target, result, *filled, slope,
        masks.source_gids, masks.target_gids, masks.key, masks.threshold, masks.scale,
        start, stop, dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result


def attention_targets(
    out: FloatArray,
    d_out: FloatArray,
    score_target: FloatArray,
    saved: AttentionSaved,
    d_score_target: FloatArray | None = None,
    *,
    record: FloatArray | None = None,
    slope: float = 0.2,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
) -> tuple[FloatArray, FloatArray]:
    """Begin the backward pass: the gradient of the targets' scores, and what the sources need of a target.

    O(n_rows H D) time: no edge is read.

    Parameters
    ----------
    out, score_target, saved, slope
        As `attention` took and left them. `out` sets the dtype of all arrays, float32 or float64.
    d_out
        [n_rows, H D], of the dtype of `out`: its gradient. May be columns of a wider matrix.
    d_score_target
        [n_rows, H] of the dtype of `out`, apart from the inputs; made if None, rows outside `rows` then
        being 0.
    record
        [n_rows, 4, H] of the dtype of `out`, apart from the inputs; made if None, rows outside `rows` then
        being 0. May be 4 H columns of a wider matrix, as that of `d_out`. Is given, for each head,
        score_target, row_max, 1 / row_sum (0 for an empty row) and d_out[i, h] . out[i, h].
    rows
        (start, stop): compute and write only these rows. None: all.
    num_threads
        Threads over pieces of the rows.

    Returns
    -------
    tuple of numpy.ndarray
        `d_score_target`, `record`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.

    Notes
    -----
    P. Velickovic, G. Cucurull, A. Casanova, A. Romero, P. Lio, Y. Bengio, "Graph attention networks", ICLR
    2018, eq. 3 and 6 and, for p, section 3.3. `cython_kernels.graph_attention` has the formulas and the
    masks' keys.
    """
    checks.array("out", out, checks.FLOATS, (None, None))
    n_rows, columns = out.shape
    checks.array("d_out", d_out, out.dtype, out.shape, apart_rows=True)
    heads = _check_heads("score_target", score_target, out.dtype, n_rows, columns)
    _check_saved(saved, out.dtype, n_rows, heads, columns)
    slope = check_slope(slope, out.dtype)
    start, stop = checks.row_range(rows, n_rows)
    gradient = checks.output("d_score_target", d_score_target, out.dtype, (n_rows, heads))
    records = checks.output("record", record, out.dtype, (n_rows, RECORD, heads), apart_rows=True)
    inputs = {"out": out, "d_out": d_out, "score_target": score_target}
    inputs |= {f"saved.{name}": array for name, array in saved._asdict().items()}
    checks.apart("d_score_target", gradient, record=records, **inputs)
    checks.apart("record", records, **inputs)
    for made, given in ((gradient, d_score_target), (records, record)):
        if given is None:
            made[:start] = 0
            made[stop:] = 0
    _attention.targets(
        out, d_out, score_target, *saved, gradient, records, slope,
        start, stop, dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return gradient, records


def attention_adjoint(
    indptr: IntArray,
    indices: IntArray,
    x: FloatArray,
    score_source: FloatArray,
    record: FloatArray,
    d_out: FloatArray,
    d_x: FloatArray | None = None,
    *,
    d_score_source: FloatArray | None = None,
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
) -> tuple[FloatArray, FloatArray]:
    """End the backward pass: the gradients of the sources' features and scores, a pull over out-edges.

    O(nnz (H D + H)) time; no memory but that of the results.

    With p > 0 a row whose columns are not sorted also costs a search for repeated entries, which is quadratic
    in the row's length (of 100,000 entries: 0.28 s and 0.001 s sorted, as measured). Sort the columns of a
    row first: SciPy's `sort_indices` does, and what `transpose_csr` makes is sorted.

    Parameters
    ----------
    indptr, indices
        int64 [n_sources + 1] and int32 [nnz]: the out-edges of each source, the transpose of what
        `attention` was given. With ghosts among the sources their rows are what this rank adds to the
        gradients of others' vertices.
    x, score_source
        [n_sources, H D] and [n_sources, H], as `attention` took them. `x` sets the dtype of all floating
        arrays, float32 or float64. These and the four below may be columns of wider matrices.
    record
        [n_targets, 4, H] of the dtype of `x`, of all targets, from `attention_targets`.
    d_out
        [n_targets, H D] of the dtype of `x`: the gradient of the result of `attention`.
    d_x
        [n_sources, H D] of the dtype of `x`, apart from the inputs; made if None, rows outside `rows` then
        being 0.
    d_score_source
        [n_sources, H] of the dtype of `x`, apart from the inputs and `d_x` (of whose matrix it may be other
        columns); made if None, rows outside `rows` then being 0.
    slope, p, seed, epoch, layer, num_threads, validate
        As `attention` took them.
    source_gids, target_gids
        int64 [n_sources] and [n_targets], as `attention` took them.
    rows
        (start, stop): compute and write the gradients of only these sources. None: all.

    Returns
    -------
    tuple of numpy.ndarray
        `d_x`, `d_score_source`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.

    Notes
    -----
    P. Velickovic, G. Cucurull, A. Casanova, A. Romero, P. Lio, Y. Bengio, "Graph attention networks", ICLR
    2018, eq. 3 and 6 and, for p, section 3.3. `cython_kernels.graph_attention` has the formulas and the
    masks' keys.
    """
    checks.array("x", x, checks.FLOATS, (None, None), apart_rows=True)
    n_sources = checks.csr_layout(indptr, indices)
    checks.array("x", x, checks.FLOATS, (n_sources, None), apart_rows=True)
    checks.array("d_out", d_out, x.dtype, (None, x.shape[1]), apart_rows=True)
    n_targets = d_out.shape[0]
    heads = _check_heads("score_source", score_source, x.dtype, n_sources, x.shape[1], apart_rows=True)
    checks.array("record", record, x.dtype, (n_targets, RECORD, heads), apart_rows=True)
    if validate:
        check_entries(indptr, indices, n_targets, "target")
    slope = check_slope(slope, x.dtype)
    start, stop = checks.row_range(rows, n_sources)
    masks = Masks(p, seed, epoch, layer, source_gids, n_sources, target_gids, n_targets)
    result = checks.output("d_x", d_x, x.dtype, x.shape, apart_rows=True)
    gradient = checks.output("d_score_source", d_score_source, x.dtype, (n_sources, heads), apart_rows=True)
    inputs = {
        "indptr": indptr, "indices": indices, "x": x, "score_source": score_source, "record": record,
        "d_out": d_out, "source_gids": source_gids, "target_gids": target_gids,
    }  # fmt: skip
    checks.apart("d_x", result, d_score_source=gradient, **inputs)
    checks.apart("d_score_source", gradient, **inputs)
    for made, given in ((result, d_x), (gradient, d_score_source)):
        if given is None:
            made[:start] = 0
            made[stop:] = 0
    _attention.backward(
        indptr, indices, x, score_source, record, d_out, result, gradient, slope,
        masks.source_gids, masks.target_gids, masks.key, masks.threshold, masks.scale,
        start, stop, dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result, gradient


def attention_weights(
    indptr: IntArray,
    indices: IntArray,
    score_source: FloatArray,
    score_target: FloatArray,
    out: FloatArray | None = None,
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
    """Write down the weights that `attention` makes and forgets, one for each entry and head.

    O(nnz H) time. A row is one thread's, however long. With a slope of 1 it is the softmax of score_source[j]
    over the in-edges of a vertex.

    With p > 0 a row whose columns are not sorted also costs a search for repeated entries, which is quadratic
    in the row's length (of 100,000 entries: 0.28 s and 0.001 s sorted, as measured). Sort the columns of a
    row first: SciPy's `sort_indices` does, and what `transpose_csr` makes is sorted.

    Parameters
    ----------
    indptr, indices, score_source, score_target, slope, rows, validate
        As for `attention`; n_cols is the length of `score_source`, whose dtype holds.
    out
        [nnz, H] of the dtype of `score_source`, apart from every input; made if None, entries of rows
        outside `rows` then being 0.
    p, seed, epoch, layer, source_gids, target_gids
        As for `attention`: with p > 0 the weights are mask * alpha.
    num_threads
        Threads over pieces of the rows.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        As `attention`.

    Notes
    -----
    P. Velickovic, G. Cucurull, A. Casanova, A. Romero, P. Lio, Y. Bengio, "Graph attention networks", ICLR
    2018, eq. 3 and 6 and, for p, section 3.3. `cython_kernels.graph_attention` has the formulas and the
    masks' keys.
    """
    checks.array("score_source", score_source, checks.FLOATS, (None, None), apart_rows=True)
    dtype, (n_cols, heads) = score_source.dtype, score_source.shape
    n_rows = checks.csr_layout(indptr, indices)
    _check_heads("score_source", score_source, dtype, n_cols, heads, apart_rows=True)
    checks.array("score_target", score_target, dtype, (n_rows, heads))
    if validate:
        check_entries(indptr, indices, n_cols, "source")
    slope = check_slope(slope, dtype)
    start, stop = checks.row_range(rows, n_rows)
    masks = Masks(p, seed, epoch, layer, source_gids, n_cols, target_gids, n_rows)
    result = checks.output("out", out, dtype, (len(indices), heads))
    checks.apart(
        "out", result, indptr=indptr, indices=indices, score_source=score_source, score_target=score_target,
        source_gids=source_gids, target_gids=target_gids,
    )  # fmt: skip
    if out is None:
        result[: indptr[start]] = 0
        result[indptr[stop] :] = 0
    _attention.weights(
        indptr, indices, score_source, score_target, result, slope,
        masks.source_gids, masks.target_gids, masks.key, masks.threshold, masks.scale,
        start, stop, dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result


def _check_heads(
    name: str, score: object, dtype: np.dtype[Any], length: int, columns: int, *, apart_rows: bool = False
) -> int:
    """Check scores beside features of so many columns and return the number of heads."""
    heads = checks.array(name, score, dtype, (length, None), apart_rows=apart_rows).shape[1]
    if heads == 0 or columns == 0 or columns % heads != 0:
        raise ValueError(
            f"{name} has {heads} head(s) for {columns} columns: expected a divisor, both at least 1"
        )
    return heads


def _check_saved(
    saved: object, dtype: np.dtype[Any], n_rows: int, heads: int, columns: int, *, writable: bool = False
) -> AttentionSaved:
    """Check every array of what is passed from forward to backward, and that they are apart."""
    if not isinstance(saved, AttentionSaved):
        raise TypeError(f"saved must be an AttentionSaved, got {checks.describe(saved)}")
    widths = (heads, heads, columns, heads)
    for k, (name, width) in enumerate(zip(AttentionSaved._fields, widths, strict=True)):
        checks.array(f"saved.{name}", saved[k], dtype, (n_rows, width), writable=writable)
        if writable:
            before = {f"saved.{other}": saved[n] for n, other in enumerate(AttentionSaved._fields[:k])}
            checks.apart(f"saved.{name}", saved[k], **before)
    return saved
