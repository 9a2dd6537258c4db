"""Products of a long matrix with one of few columns: a layer of few units, and its weight gradient.

A dense layer of 16 units reads 600 inputs a vertex for 20,000 operations: memory could give them in a third
of the time that a general matrix product takes, which copies its operands into an order of its own first.
These products read the long matrix once, as it is, and keep sums in registers.

Every product is rounded before it is added. Sums are made in the order of rows and columns, so results are
the same bits for any threads and any CPU, and a row of a product does not depend on those made with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _narrow, checks, dispatch
from .checks import FloatArray
from .layout import LINE

LINES = 3  # most cache lines of columns


def most_columns(dtype: np.dtype[Any]) -> int:
    """Return the columns that a narrow matrix may have: 48 of float32, 24 of float64."""
    return LINES * LINE // dtype.itemsize


def narrow_product(
    a: FloatArray, b: FloatArray, out: FloatArray | None = None, *, num_threads: int = 1
) -> FloatArray:
    """Return ``a @ b`` for a `b` of few columns.

    O(n k f) time; `a` is read once.

    Parameters
    ----------
    a
        float32 or float64 [n, k].
    b
        [k, f], of the dtype of `a`; f at most `most_columns`.
    out
        [n, f] of the same dtype, apart from the inputs; made if None.
    num_threads
        Threads over pieces of the rows; the result does not depend on it.

    Returns
    -------
    numpy.ndarray
        `out`. Each value is summed over k in order.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above.
    """
    checks.array("a", a, checks.FLOATS, (None, None))
    checks.array("b", b, a.dtype, (a.shape[1], None))
    _check_columns("b", b)
    result = checks.output("out", out, a.dtype, (a.shape[0], b.shape[1]))
    checks.apart("out", result, a=a, b=b)
    _narrow.narrow_product(a, _padded(b), result, dispatch.level(), checks.threads(num_threads))
    return result


def narrow_product_adjoint(
    a: FloatArray, d_out: FloatArray, d_b: FloatArray | None = None, *, num_threads: int = 1
) -> FloatArray:
    """Return ``a.T @ d_out`` for a `d_out` of few columns: the gradient of `b` in `narrow_product`.

    O(n k f) time; `a` is read once.

    Parameters
    ----------
    a
        float32 or float64 [n, k].
    d_out
        [n, f], of the dtype of `a`; f at most `most_columns`.
    d_b
        [k, f] of the same dtype, apart from the inputs; made if None.
    num_threads
        Threads over pieces of the columns of `a`; the result does not depend on it.

    Returns
    -------
    numpy.ndarray
        `d_b`. Blocks of 64 rows are summed in order, and then their sums; zeros if there are no rows.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above.
    """
    checks.array("a", a, checks.FLOATS, (None, None))
    checks.array("d_out", d_out, a.dtype, (a.shape[0], None))
    _check_columns("d_out", d_out)
    result = checks.output("d_b", d_b, a.dtype, (a.shape[1], d_out.shape[1]))
    checks.apart("d_b", result, a=a, d_out=d_out)
    _narrow.narrow_product_adjoint(a, d_out, result, dispatch.level(), checks.threads(num_threads))
    return result


def _check_columns(name: str, array: FloatArray) -> None:
    most = most_columns(array.dtype)
    if array.shape[1] > most:
        raise ValueError(
            f"{name} must have at most {most} columns of {array.dtype}, got {checks.describe(array)}; "
            f"use numpy.matmul"
        )


def _padded(b: FloatArray) -> FloatArray:
    """Return a matrix whose rows are whole cache lines, with zeros at their ends."""
    lanes = LINE // b.itemsize
    if b.shape[1] % lanes == 0:
        return b
    padded = np.zeros((b.shape[0], -(-b.shape[1] // lanes) * lanes), b.dtype)
    padded[:, : b.shape[1]] = b
    return padded
