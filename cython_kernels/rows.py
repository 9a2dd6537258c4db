"""Rows between a matrix and a message buffer: what scatter (SC) does before and after the wire.

All three take `index`, int32: the row of the matrix that belongs to row k of the buffer.
No result depends on `num_threads`, bit for bit.
"""

from __future__ import annotations

from . import _rows, checks
from .checks import FloatArray, IntArray


def pack_rows(
    x: FloatArray,
    index: IntArray,
    out: FloatArray | None = None,
    *,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Copy rows of a matrix into a buffer: ``out[k] = x[index[k]]``.

    Parameters
    ----------
    x
        float32 or float64 [n, f].
    index
        int32 [m], each in 0 .. n - 1, in any order, repeats allowed.
    out
        [m, f], apart from `x` and `index`; made if None.
    num_threads
        Threads over equal pieces of `index`.
    validate
        False skips the range check of `index`, for one that was checked when the exchange was planned.

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
    _check_index(index, x.shape[0], validate)
    result = checks.output("out", out, x.dtype, (index.shape[0], x.shape[1]))
    checks.apart("out", result, x=x, index=index)
    _rows.pack_rows(x, index, result, checks.threads(num_threads))
    return result


def unpack_rows(
    rows: FloatArray, index: IntArray, out: FloatArray, *, num_threads: int = 1, validate: bool = True
) -> FloatArray:
    """Copy a buffer into rows of a matrix: ``out[index[k]] = rows[k]``; other rows stay as they are.

    If `index` repeats a row the last one wins, for any number of threads.

    Parameters
    ----------
    rows
        float32 or float64 [m, f].
    index
        int32 [m], each in 0 .. n - 1, in any order.
    out
        [n, f], of the dtype of `rows`, apart from the inputs.
    num_threads
        Threads over ranges of the rows of `out`.
    validate
        False skips the range check of `index`.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above, or an index out of range.
    """
    _check_into(rows, index, out, validate)
    _rows.unpack_rows(rows, index, out, checks.threads(num_threads))
    return out


def scatter_add_rows(
    rows: FloatArray, index: IntArray, out: FloatArray, *, num_threads: int = 1, validate: bool = True
) -> FloatArray:
    """Add a buffer to rows of a matrix, in the order of k: ``out[index[k]] += rows[k]``.

    Parameters
    ----------
    rows
        float32 or float64 [m, f].
    index
        int32 [m], each in 0 .. n - 1, in any order; every repeat adds.
    out
        [n, f], of the dtype of `rows`, apart from the inputs.
    num_threads
        Threads over strips of columns.
    validate
        False skips the range check of `index`.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above, or an index out of range.
    """
    _check_into(rows, index, out, validate)
    _rows.scatter_add_rows(rows, index, out, checks.threads(num_threads))
    return out


def _check_index(index: IntArray, size: int, validate: bool) -> None:
    """Check an index into a matrix of `size` rows."""
    checks.array("index", index, "int32", (None,))
    if validate:
        checks.in_range("index", index, size, f"the matrix has {size} rows")


def _check_into(rows: FloatArray, index: IntArray, out: FloatArray, validate: bool) -> None:
    """Check the arguments of a kernel that writes a buffer into a matrix."""
    checks.array("rows", rows, checks.FLOATS, (None, None))
    checks.array("out", out, rows.dtype, (None, rows.shape[1]), writable=True)
    _check_index(index, out.shape[0], validate)
    checks.array("index", index, "int32", (rows.shape[0],))
    checks.apart("out", out, rows=rows, index=index)
