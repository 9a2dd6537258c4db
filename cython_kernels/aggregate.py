"""Gather (GA) and its adjoint (dGA): the sparse half of a graph layer.

Both work on a CSR matrix A of shape (n_rows, n_cols) given as `indptr, indices, data`. Row i of the
result of `gather` is ::

    out[i] = row_scale[i] * (self_weight * source_scale[i] * x[i] + sum_e data[e] * source_scale[j] * x[j])

over the entries e of row i, with j = indices[e]. With `mean` the sum over e (not the self term) is
divided by the number of entries of the row. A GCN layer needs no value per edge this way: both
scales are 1/sqrt(degree + 1) and the self weight is 1 (Kipf and Welling, "Semi-supervised
classification with graph convolutional networks", ICLR 2017, eq. 2).

Sums are made in the dtype of `x`. No result depends on `num_threads`, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _aggregate, checks
from .checks import FloatArray, IntArray

MAX_COLUMNS = 2**31  # indices are int32


def check_csr(indptr: IntArray, indices: IntArray, data: FloatArray | None = None, *, n_cols: int) -> None:
    """Check a CSR matrix through and through, once, so that kernels may be called with ``validate=False``.

    Parameters
    ----------
    indptr
        int64 [n_rows + 1], from 0 to nnz, never decreasing.
    indices
        int32 [nnz], each in 0 .. n_cols - 1. Any order, duplicates allowed.
    data
        float32 or float64 [nnz], or None.
    n_cols
        Number of columns.

    Raises
    ------
    TypeError
        An array is none, or of another dtype.
    ValueError
        A layout that does not hold; the message names the first bad position and its value.
    """
    checks.csr_layout(indptr, indices)
    n_cols = checks.integer("n_cols", n_cols, 0, MAX_COLUMNS + 1)
    if data is not None:
        checks.array("data", data, checks.FLOATS, indices.shape)
    checks.monotone(indptr)
    checks.in_range("indices", indices, n_cols, f"the matrix has {n_cols} columns")


def gather(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray | None,
    x: FloatArray,
    out: FloatArray | None = None,
    *,
    row_scale: FloatArray | None = None,
    source_scale: FloatArray | None = None,
    self_weight: float = 0.0,
    mean: bool = False,
    accumulate: bool = False,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Sum the rows of `x` that each row of a CSR matrix names (formula at the top of this module).

    Parameters
    ----------
    indptr, indices
        int64 [n_rows + 1] and int32 [nnz]. Duplicate entries count each time.
    data
        One value per entry, of the dtype of `x`; None stands for ones.
    x
        float32 or float64 [n_cols, f]: the rows of the sources, own rows first, ghosts after them.
    out
        [n_rows, f], apart from every input. If None it is made; rows outside `rows` are then zero.
    row_scale
        [n_rows], of the dtype of `x`, or None.
    source_scale
        [n_cols], of the dtype of `x`, or None.
    self_weight
        Weight of a row's own `x`; other than 0 it needs n_cols >= n_rows.
    mean
        Divide the sum over the entries by their number; an empty row gives 0.
    accumulate
        Add to `out`, which must then be given, instead of overwriting it.
    rows
        (start, stop): compute and write only these rows. None: all.
    num_threads
        Threads over blocks of rows.
    validate
        False skips the check of every entry, for a matrix that passed `check_csr` before.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above, or an index out of range.
    """
    checks.array("x", x, checks.FLOATS, (None, None))
    n_rows = _check_matrix(indptr, indices, data, x.dtype, x.shape[0], validate)
    start, stop = checks.row_range(rows, n_rows)
    scales = _check_scales(row_scale, source_scale, self_weight, x.dtype, n_rows, x.shape[0])
    if out is None and accumulate:
        raise ValueError("accumulate=True adds to out, got out=None")
    result = checks.output("out", out, x.dtype, (n_rows, x.shape[1]))
    checks.apart(
        "out",
        result,
        x=x,
        data=data,
        indptr=indptr,
        indices=indices,
        row_scale=row_scale,
        source_scale=source_scale,
    )
    if out is None:
        result[:start] = 0
        result[stop:] = 0
    _aggregate.gather(
        indptr, indices, _values(data, x.dtype), x, result, *scales,
        bool(mean), bool(accumulate), start, stop, checks.threads(num_threads),
    )  # fmt: skip
    return result


def gather_adjoint(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray | None,
    d_out: FloatArray,
    d_x: FloatArray | None = None,
    *,
    n_sources: int,
    row_scale: FloatArray | None = None,
    source_scale: FloatArray | None = None,
    self_weight: float = 0.0,
    mean: bool = False,
    accumulate: bool = False,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Apply the transpose of `gather` over the same CSR matrix: the gradient of `x` from that of `out`.

    Every entry adds to the row of its source, in the order of rows and entries. Threads split the
    columns and so never meet. Where the transposed matrix is at hand, `gather` over that one is faster.

    Parameters
    ----------
    indptr, indices, data, row_scale, source_scale, self_weight, mean, num_threads, validate
        As they were given to `gather`; n_cols is `n_sources`.
    d_out
        float32 or float64 [n_rows, f].
    d_x
        [n_sources, f], apart from every input; made if None.
    n_sources
        Number of rows of `x`.
    accumulate
        Add to `d_x`, which must then be given, instead of overwriting all of it.
    rows
        (start, stop): only these rows of `d_out` contribute. None: all.

    Returns
    -------
    numpy.ndarray
        `d_x`.

    Raises
    ------
    TypeError, ValueError
        As `gather`.
    """
    checks.array("d_out", d_out, checks.FLOATS, (None, None))
    n_sources = checks.integer("n_sources", n_sources, 0, MAX_COLUMNS + 1)
    n_rows = _check_matrix(indptr, indices, data, d_out.dtype, n_sources, validate)
    checks.array("d_out", d_out, checks.FLOATS, (n_rows, None))
    start, stop = checks.row_range(rows, n_rows)
    scales = _check_scales(row_scale, source_scale, self_weight, d_out.dtype, n_rows, n_sources)
    if d_x is None and accumulate:
        raise ValueError("accumulate=True adds to d_x, got d_x=None")
    result = checks.output("d_x", d_x, d_out.dtype, (n_sources, d_out.shape[1]))
    checks.apart(
        "d_x", result, d_out=d_out, data=data, indptr=indptr, indices=indices,
        row_scale=row_scale, source_scale=source_scale,
    )  # fmt: skip
    _aggregate.gather_adjoint(
        indptr, indices, _values(data, d_out.dtype), d_out, result, *scales,
        bool(mean), bool(accumulate), start, stop, checks.threads(num_threads),
    )  # fmt: skip
    return result


def _check_matrix(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray | None,
    dtype: np.dtype[Any],
    n_cols: int,
    validate: bool,
) -> int:
    """Check the matrix, as far as asked, and return its number of rows."""
    n_rows = checks.csr_layout(indptr, indices)
    if data is not None:
        checks.array("data", data, dtype, indices.shape)
    if validate:
        checks.monotone(indptr)
        checks.in_range("indices", indices, n_cols, f"there are {n_cols} source rows")
    return n_rows


def _check_scales(
    row_scale: FloatArray | None,
    source_scale: FloatArray | None,
    self_weight: float,
    dtype: np.dtype[Any],
    n_rows: int,
    n_cols: int,
) -> tuple[FloatArray, FloatArray, float]:
    """Check the factors around the sum and put them as the loops want them."""
    self_weight = checks.real("self_weight", self_weight)
    if self_weight != 0 and n_cols < n_rows:
        raise ValueError(f"self_weight needs a source row for each row, got {n_cols} for {n_rows}")
    return (
        checks.optional("row_scale", row_scale, dtype, n_rows),
        checks.optional("source_scale", source_scale, dtype, n_cols),
        self_weight,
    )


def _values(data: FloatArray | None, dtype: np.dtype[Any]) -> FloatArray:
    """Give the loops an empty array for ones."""
    return np.empty(0, dtype) if data is None else data
