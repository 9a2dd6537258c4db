"""bfloat16: the upper half of a float32. NumPy has no such dtype; its bits are kept as uint16.

A row takes half the memory and half the traffic; sums over it are made in float32. Eight bits of
exponent keep the range of float32, eight of precision (one of them hidden) its size to 1 part in 256.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import _aggregate, checks, dispatch
from .checks import Bfloat16Array, FloatArray, IntArray
from .layout import empty


def sum_dtype(stored: npt.DTypeLike) -> np.dtype[Any]:
    """Tell in which dtype rows of this one are summed: float32 for bfloat16, else the same."""
    return np.dtype(np.float32) if np.dtype(stored) == np.uint16 else np.dtype(stored)


def to_bfloat16(x: FloatArray, out: Bfloat16Array | None = None, *, num_threads: int = 1) -> Bfloat16Array:
    """Round float32 to bfloat16: to nearest, ties to even; a NaN stays one. O(size) time.

    Parameters
    ----------
    x
        float32, of any shape, C-contiguous.
    out
        uint16, of the same shape, apart from `x`; made if None.
    num_threads
        Threads over equal pieces.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above.
    """
    shape = x.shape if isinstance(x, np.ndarray) else (None,)
    checks.array("x", x, "float32", shape)
    result = (
        empty(x.shape, np.uint16)
        if out is None
        else checks.array("out", out, "uint16", x.shape, writable=True)
    )
    checks.apart("out", result, x=x)
    _aggregate.to_bfloat16(x.reshape(-1), result.reshape(-1), dispatch.level(), checks.threads(num_threads))
    return result


def from_bfloat16(x: IntArray, out: FloatArray | None = None, *, num_threads: int = 1) -> FloatArray:
    """Widen bfloat16 to float32, exactly. O(size) time.

    Parameters
    ----------
    x
        uint16, of any shape, C-contiguous: the bits.
    out
        float32, of the same shape, apart from `x`; made if None.
    num_threads
        Threads over equal pieces.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above.
    """
    shape = x.shape if isinstance(x, np.ndarray) else (None,)
    checks.array("x", x, "uint16", shape)
    result = (
        empty(x.shape, np.float32)
        if out is None
        else checks.array("out", out, "float32", x.shape, writable=True)
    )
    checks.apart("out", result, x=x)
    _aggregate.from_bfloat16(x.reshape(-1), result.reshape(-1), dispatch.level(), checks.threads(num_threads))
    return result
