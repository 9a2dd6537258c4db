"""A matrix of either layout at the doors of the row passes: row-major, or `Tiles`; maybe bfloat16.

The loops take both as [tiles, rows, columns of a tile]; a row-major matrix is a single tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import checks
from .layout import LINE, Tiles, empty, last_level_cache

Matrix = npt.NDArray[Any] | Tiles
# An array, or the Tiles that were given as `out`. Of a union of both a type checker refuses every use as an
# array.
Result: TypeAlias = Any


def matrix(
    name: str,
    value: object,
    dtype: Sequence[str],
    shape: tuple[int | None, int | None],
    *,
    writable: bool = False,
) -> Matrix:
    """Require a matrix of either layout and of one of the dtypes; None in `shape` stands for any length."""
    if not isinstance(value, Tiles):
        return checks.array(name, value, dtype, shape, writable=writable)
    value.check()
    if value.dtype not in [np.dtype(one) for one in dtype]:
        names = " or ".join(dtype)
        raise TypeError(f"{name} must be {names}, got {value.dtype} tiles of shape {value.shape}")
    if any(want is not None and want != got for want, got in zip(shape, value.shape, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {value.dtype} tiles of shape {value.shape}")
    if writable and not value.array.flags.writeable:
        raise ValueError(f"{name} must be writable, got read-only tiles of shape {value.shape}")
    return value


def result(name: str, out: object, dtype: np.dtype[Any], shape: tuple[int, int]) -> Matrix:
    """Require an output of either layout, or make a row-major one.

    The result of float32 may also be stored as bfloat16.
    """
    if out is None:
        return empty(shape, dtype)
    return matrix(name, out, stored_as(dtype), shape, writable=True)


def stored_as(dtype: np.dtype[Any]) -> tuple[str, ...]:
    """Name what values of this dtype may be stored in."""
    return (dtype.name, "uint16") if dtype == np.float32 else (dtype.name,)


def as_tiles(value: Matrix) -> npt.NDArray[Any]:
    """View a matrix as the loops want it."""
    return value.array if isinstance(value, Tiles) else value[None]


def same_or_apart(name: str, out: Matrix, other: str, value: Matrix) -> None:
    """Accept an output that is an input of the same layout and dtype, or apart from it."""
    result, source = as_tiles(out), as_tiles(value)
    if result.shape == source.shape and result.dtype == source.dtype:
        checks.same_or_apart(name, result, other, source)
    elif np.may_share_memory(result, source):
        raise ValueError(f"{name} overlaps {other} without being the same array of the same layout")


def streams(out: Matrix, *inputs: Matrix) -> bool:
    """Tell whether to write past the caches: tiles larger than they are, in whole lines, not in place.

    Rows of a row-major result are written from end to end, which the CPU sees by itself.
    """
    array = as_tiles(out)
    return (
        len(array) > 1
        and array.nbytes > last_level_cache()
        and checks.address(array) % LINE == 0
        and array.shape[2] * array.itemsize % LINE == 0
        and not any(np.may_share_memory(array, as_tiles(value)) for value in inputs)
    )
