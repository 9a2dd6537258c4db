"""What every door asks before a loop runs. Each function raises with the value it received."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.integer[Any]]
Bfloat16Array = npt.NDArray[np.uint16]  # the bits
StoredArray = npt.NDArray[np.floating[Any] | np.uint16]  # what features and messages may be stored in

FLOATS = ("float32", "float64")
FLOAT64: np.dtype[Any] = np.dtype(np.float64)
# A thread that the system refuses ends the process. Cores are counted once: each count reads a file.
MOST_THREADS = max(64, os.cpu_count() or 1)


def describe(value: object) -> str:
    """Name a value the way an error message needs it."""
    if isinstance(value, np.ndarray) and type(value) in (np.ndarray, np.memmap):
        return f"a {value.dtype} array of shape {value.shape}"
    return f"{value!r} ({type(value).__name__})" if np.isscalar(value) else f"a {type(value).__name__}"


def array(
    name: str,
    value: object,
    dtype: str | np.dtype[Any] | Sequence[str],
    shape: tuple[int | None, ...],
    *,
    writable: bool = False,
    apart_rows: bool = False,
) -> npt.NDArray[Any]:
    """Require a C-contiguous array of one of the dtypes; None in `shape` stands for any length.

    With `apart_rows` it may also be some columns of a wider C-contiguous matrix: its rows are contiguous and
    equally far apart.

    Subclasses are refused (but for memory maps): a masked array answers the checks below for its unmasked
    entries, while a loop reads all of them.
    """
    if not isinstance(value, np.ndarray) or type(value) not in (np.ndarray, np.memmap):
        raise TypeError(f"{name} must be a NumPy array, got {describe(value)}")
    accepted = [np.dtype(one) for one in ([dtype] if isinstance(dtype, str | np.dtype) else dtype)]
    if value.dtype not in accepted:
        names = " or ".join(one.name for one in accepted)
        raise TypeError(f"{name} must be {names}, got {describe(value)}")
    if value.ndim != len(shape):
        raise ValueError(f"{name} must have {len(shape)} dimension(s), got {describe(value)}")
    if any(want is not None and want != got for want, got in zip(shape, value.shape, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {describe(value)}")
    contiguous = value.flags.c_contiguous or (apart_rows and _has_contiguous_rows(value))
    if not contiguous or not value.flags.aligned:
        wider = ", or columns of a matrix that is" if apart_rows else ""
        raise ValueError(
            f"{name} must be C-contiguous and aligned{wider}, got {describe(value)} with strides "
            f"{value.strides}; use numpy.ascontiguousarray"
        )
    if writable and not value.flags.writeable:
        raise ValueError(f"{name} must be writable, got a read-only array of shape {value.shape}")
    return value


def _row_bytes(value: npt.NDArray[Any]) -> int:
    return math.prod(value.shape[1:]) * value.itemsize


def _has_contiguous_rows(value: npt.NDArray[Any]) -> bool:
    """Tell whether an array of more than one row is made of contiguous ones that do not overlap."""
    step = value.strides[0]
    return value[0].flags.c_contiguous and step >= _row_bytes(value) and step % value.itemsize == 0


def optional(name: str, value: object, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    """Require a vector if there is one; the loops take an empty array for an absent one."""
    if value is None:
        return np.empty(0, dtype)
    return array(name, value, dtype, (length,))


def output(
    name: str, out: object, dtype: np.dtype[Any], shape: tuple[int, ...], *, apart_rows: bool = False
) -> npt.NDArray[Any]:
    """Require a writable array of this shape, or make one (uninitialised) if there is none."""
    if out is None:
        return np.empty(shape, dtype)
    return array(name, out, dtype, shape, writable=True, apart_rows=apart_rows)


def apart(name: str, out: npt.NDArray[Any], /, **inputs: object) -> None:
    """Refuse an output that shares memory with an input; both have contiguous rows."""
    for other, value in inputs.items():
        if isinstance(value, np.ndarray) and np.may_share_memory(out, value) and not _beside(out, value):
            raise ValueError(f"{name} must not share memory with {other}")


def _beside(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Tell whether two arrays are different columns of the rows of one matrix.

    Their rows are then equally far apart, and those of either fit into the gaps of the other, wherever each
    begins. For arrays whose extents in memory overlap.
    """
    steps = {value.strides[0] for value in (one, other) if value.ndim > 1 and len(value) > 1}
    if one.ndim < 2 or other.ndim < 2 or len(steps) != 1:
        return False
    step = steps.pop()
    ahead = (address(other) - address(one)) % step
    return _row_bytes(one) <= ahead <= step - _row_bytes(other)


def same_or_apart(name: str, out: npt.NDArray[Any], other: str, value: npt.NDArray[Any]) -> None:
    """Accept an output that is an input of the same shape, element for element, or apart from it."""
    if np.may_share_memory(out, value) and address(out) != address(value):
        raise ValueError(
            f"{name} overlaps {other} without being the same array; use {other} itself, or apart memory"
        )


def address(value: npt.NDArray[Any]) -> int:
    """Where the first element of an array is."""
    return int(value.__array_interface__["data"][0])


def integer(name: str, value: object, low: int, high: int) -> int:
    """Require an integer with low <= value < high."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {describe(value)}") from None
    if not low <= number < high:
        raise ValueError(f"{name} must be at least {low} and below {high}, got {number}")
    return number


def threads(num_threads: object) -> int:
    """Require a positive number of threads; no result depends on it, so an excessive one is cut down."""
    return min(integer("num_threads", num_threads, 1, 2**31), MOST_THREADS)


def real(name: str, value: object, dtype: np.dtype[Any] = FLOAT64) -> float:
    """Require a number that is finite, also in the dtype that a loop has it in."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    try:
        number = float(value)
    except OverflowError:  # of an int or a fraction
        number = math.inf
    if not math.isfinite(number) or abs(number) > float(np.finfo(dtype).max):
        raise ValueError(f"{name} must be finite in {dtype.name}, got {number}")
    return number


def flag(name: str, value: object) -> bool:
    """Require True or False: of anything else ('no', an array) the truth may not be what is meant."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {describe(value)}")
    return bool(value)


def probability(p: object) -> float:
    """Require a probability of dropping: 0 <= p < 1."""
    number = real("p", p)
    if not 0 <= number < 1:
        raise ValueError(f"p must be at least 0 and below 1, got {number}")
    return number


def row_range(rows: object, n_rows: int) -> tuple[int, int]:
    """Require (start, stop) within the rows; None stands for all of them."""
    if rows is None:
        return 0, n_rows
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise TypeError(f"rows must be (start, stop) or None, got {rows!r}")
    start = integer("rows[0]", rows[0], 0, n_rows + 1)
    stop = integer("rows[1]", rows[1], 0, n_rows + 1)
    if stop < start:
        raise ValueError(f"rows must not end before they start, got {(start, stop)}")
    return start, stop


def csr_layout(indptr: object, indices: object) -> int:
    """Require what can be seen of a CSR matrix without reading it through; return its rows."""
    starts = array("indptr", indptr, "int64", (None,))
    columns = array("indices", indices, "int32", (None,))
    if starts.shape[0] == 0:
        raise ValueError("indptr must have one entry more than there are rows, got an empty array")
    if starts[0] != 0 or starts[-1] != columns.shape[0]:
        raise ValueError(
            f"indptr must run from 0 to the length of indices ({columns.shape[0]}), "
            f"got {starts[0]} to {starts[-1]}"
        )
    return len(starts) - 1


def monotone(indptr: IntArray, name: str = "indptr") -> None:
    """Refuse row starts that decrease. O(rows)."""
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        at = int(falls.argmax())
        raise ValueError(
            f"{name} must not decrease, got {name}[{at}] = {indptr[at]}, {name}[{at + 1}] = {indptr[at + 1]}"
        )


def in_range(name: str, index: IntArray, size: int, what: str) -> None:
    """Refuse an index outside 0 .. size - 1, naming the first. O(length), no memory unless it fails."""
    if index.size and (index.min() < 0 or index.max() >= size):
        at = int(((index < 0) | (index >= size)).argmax())
        raise ValueError(f"{name}[{at}] = {index[at]} is outside 0..{size - 1} ({what})")
