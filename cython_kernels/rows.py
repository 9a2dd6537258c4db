"""Rows between a matrix and a message buffer: what scatter (SC) does before and after the wire.

All three take `index`, int32: the row of the matrix that belongs to row k of the buffer.
No result depends on `num_threads`, bit for bit. A buffer of bfloat16 halves a message: the conversion
is part of the copy. Rows of one dtype are copied bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import _rows, checks, dispatch, matrices
from .checks import FloatArray, IntArray, StoredArray
from .matrices import Matrix, Result

STORED = (*checks.FLOATS, "uint16")


def pack_rows(
    x: Matrix,
    index: IntArray,
    out: StoredArray | None = None,
    *,
    num_threads: int = 1,
    validate: bool = True,
) -> npt.NDArray[Any]:
    """Copy rows of a matrix into a buffer: ``out[k] = x[index[k]]``. O(m f) time.

    Parameters
    ----------
    x
        [n, f], row-major or `Tiles`: float32, float64, or uint16 for the bits of bfloat16.
    index
        int32 [m], each in 0 .. n - 1, in any order, repeats allowed.
    out
        [m, f], apart from `x` and `index`; made, of the dtype of `x`, if None. Of the dtype of `x`, or
        float32 and uint16 for one another: then rounded to bfloat16 (to nearest, ties to even) or widened.
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
    matrices.matrix("x", x, STORED, (None, None))
    _check_index(index, x.shape[0], validate)
    shape = index.shape[0], x.shape[1]
    if out is None:
        result = np.empty(shape, x.dtype)
    else:
        result = checks.array("out", out, _partners(x.dtype), shape, writable=True)
    checks.apart("out", result, x=matrices.as_tiles(x), index=index)
    _rows.pack_rows(matrices.as_tiles(x), index, result, dispatch.level(), checks.threads(num_threads))
    return result


def unpack_rows(
    rows: StoredArray, index: IntArray, out: Matrix, *, num_threads: int = 1, validate: bool = True
) -> Result:
    """Copy a buffer into rows of a matrix: ``out[index[k]] = rows[k]``; other rows stay as they are.

    If `index` repeats a row the last one wins, for any number of threads. O(m f) time. An index that does
    not increase strictly is first looked through for repeats, with a bit a row between its smallest and its
    largest; where there are any, one thread does all the work.

    Parameters
    ----------
    rows
        [m, f]: float32, float64, or uint16 for the bits of bfloat16.
    index
        int32 [m], each in 0 .. n - 1, in any order.
    out
        [n, f], row-major or `Tiles`, apart from the inputs. Of the dtype of `rows`, or float32 and uint16
        for one another, as in `pack_rows`.
    num_threads
        Threads over equal pieces of an index without repeats; with any, one.
    validate
        False skips the range check of `index`.

    Returns
    -------
    numpy.ndarray or Tiles
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above, or an index out of range.
    """
    buffer = checks.array("rows", rows, STORED, (None, None))
    matrices.matrix("out", out, _partners(rows.dtype), (None, rows.shape[1]), writable=True)
    _check_index(index, out.shape[0], validate)
    checks.array("index", index, "int32", (rows.shape[0],))
    checks.apart("out", matrices.as_tiles(out), rows=rows, index=index)
    _rows.unpack_rows(buffer, index, matrices.as_tiles(out), dispatch.level(), checks.threads(num_threads))
    return out


def scatter_add_rows(
    rows: FloatArray, index: IntArray, out: FloatArray, *, num_threads: int = 1, validate: bool = True
) -> FloatArray:
    """Add a buffer to rows of a matrix, in the order of k: ``out[index[k]] += rows[k]``. O(m f) time.

    If `index` does not increase strictly, threads split the columns, in strips of about 16: no more than
    ceil(f / 16) of them have work, and with up to 16 columns more than one thread does not help.

    Parameters
    ----------
    rows
        float32 or float64 [m, f].
    index
        int32 [m], each in 0 .. n - 1, in any order; every repeat adds.
    out
        [n, f], of the dtype of `rows`, apart from the inputs.
    num_threads
        Threads over pieces of an index that increases strictly, else over strips of columns, at most
        ceil(f / 16) of them.
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
    checks.array("rows", rows, checks.FLOATS, (None, None))
    checks.array("out", out, rows.dtype, (None, rows.shape[1]), writable=True)
    _check_index(index, out.shape[0], validate)
    checks.array("index", index, "int32", (rows.shape[0],))
    checks.apart("out", out, rows=rows, index=index)
    _rows.scatter_add_rows(rows, index, out, dispatch.level(), checks.threads(num_threads))
    return out


def _check_index(index: IntArray, size: int, validate: bool) -> None:
    """Check an index into a matrix of `size` rows."""
    checks.array("index", index, "int32", (None,))
    if validate:
        checks.in_range("index", index, size, f"the matrix has {size} rows")


def _partners(dtype: np.dtype[Any]) -> tuple[str, ...]:
    """Name what rows of this dtype are copied or converted into: float64 has no partner but itself."""
    return ("float64",) if dtype == np.float64 else ("float32", "uint16")
