"""Layouts of a feature matrix: rows in memory one after the other, or tiles of columns.

`simd/isa.hpp` tells with a picture why tiles are faster on a graph without locality. A tile is
one cache line a row: 16 columns of float32, 8 of float64, 32 of bfloat16.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _locality, checks
from .checks import IntArray, StoredArray

LINE = 64  # bytes of a cache line
LAYOUTS = ("auto", "rows", "tiles")

# Nanoseconds an edge takes for each cache line of columns, and a row of the matrix beside its edges: with two
# threads, fitted to measurements (python -m bench.kernels) on uniform and R-MAT graphs of degree 20 to 170
# and widths 32 to 602. Only their ratios matter.
CACHED = 0.42
MISSED = 1.2  # more, for a line that is not in the last-level cache
ROW_BY_ROWS = 36.0  # once
ROW_BY_TILES = 21.0  # for every tile
TILE_SHARE = 0.6  # of the last-level cache that a tile can have: indices and results pass through it too
SAMPLE = 1 << 17  # entries that choose_layout looks at, at most
FEW_SETS = 1 << 12  # a simulated cache of more rows is sampled itself


@dataclass(frozen=True, eq=False)
class Tiles:
    """A feature matrix in tiles of columns.

    Attributes
    ----------
    array
        float32, float64, or uint16 for the bits of bfloat16; [n_tiles, n_rows, columns of a tile], with
        n_tiles = ceil(columns / columns of a tile); C-contiguous. Column c of the matrix is column
        ``c % array.shape[2]`` of tile ``c // array.shape[2]``. Columns beyond the last are not read.
    columns
        Columns of the matrix.

    Raises
    ------
    TypeError, ValueError
        The array is none, of another dtype, not C-contiguous or not of this many tiles; `columns` is no
        integer, or negative.
    """

    array: npt.NDArray[Any]
    columns: int

    def __post_init__(self) -> None:
        """Refuse what is no set of tiles."""
        self.check()

    def check(self) -> None:
        """Raise unless these are tiles; every door asks again, as the shape of an array can be set."""
        checks.array("Tiles.array", self.array, (*checks.FLOATS, "uint16"), (None, None, None))
        checks.integer("Tiles.columns", self.columns, 0, 2**31)
        n_tiles, _, width = self.array.shape
        if width < 1 or n_tiles != math.ceil(self.columns / width):
            raise ValueError(
                f"{self.columns} columns do not make {n_tiles} tiles of {width}, got {self.array.shape}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.array.shape[1], self.columns

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.array.dtype


def tile_columns(dtype: npt.DTypeLike) -> int:
    """Columns that make a cache line."""
    return LINE // np.dtype(dtype).itemsize


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Make an uninitialised array that begins at a cache line.

    Parameters
    ----------
    shape
        Lengths, none negative.
    dtype
        Any dtype without Python objects.

    Returns
    -------
    numpy.ndarray
        The array, C-contiguous.

    Raises
    ------
    TypeError, ValueError
        A length is no integer, or negative.
    """
    dtype = np.dtype(dtype)
    shape = tuple(checks.integer("a length in shape", length, 0, 2**62) for length in shape)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + LINE, np.uint8)
    skip = -checks.address(memory) % LINE
    return memory[skip : skip + size].view(dtype).reshape(shape)


def empty_tiles(n_rows: int, columns: int, dtype: npt.DTypeLike, width: int | None = None) -> Tiles:
    """Make uninitialised tiles.

    Parameters
    ----------
    n_rows, columns
        Shape of the matrix.
    dtype
        float32, float64, or uint16 for the bits of bfloat16.
    width
        Columns of a tile; None: as many as make a cache line.

    Returns
    -------
    Tiles
        New tiles; what is beyond the last column is uninitialised, too.

    Raises
    ------
    TypeError, ValueError
        Another dtype, or a number that is no integer or out of range.
    """
    n_rows = checks.integer("n_rows", n_rows, 0, 2**62)
    columns = checks.integer("columns", columns, 0, 2**31)
    if np.dtype(dtype) not in (np.float32, np.float64, np.uint16):
        raise TypeError(f"dtype must be float32, float64 or uint16, got {np.dtype(dtype)}")
    width = tile_columns(dtype) if width is None else checks.integer("width", width, 1, 2**31)
    return Tiles(empty((math.ceil(columns / width), n_rows, width), dtype), columns)


def _tiles(name: str, value: object) -> Tiles:
    """Require tiles."""
    if not isinstance(value, Tiles):
        raise TypeError(f"{name} must be Tiles, got {checks.describe(value)}")
    value.check()
    return value


def to_tiles(x: StoredArray, out: Tiles | None = None) -> Tiles:
    """Copy a row-major matrix into tiles. O(n f) time, in one thread.

    Parameters
    ----------
    x
        [n, f]: float32, float64, or uint16 for the bits of bfloat16.
    out
        Tiles of the same shape and dtype, of any width, apart from `x`; made, a cache line wide, if None.

    Returns
    -------
    Tiles
        `out`; its columns beyond f are 0.

    Raises
    ------
    TypeError, ValueError
        `x` is no C-contiguous matrix of these dtypes; `out` is not of its shape and dtype, cannot be
        written, or shares memory with it.
    """
    checks.array("x", x, (*checks.FLOATS, "uint16"), (None, None))
    result = empty_tiles(x.shape[0], x.shape[1], x.dtype) if out is None else _tiles("out", out)
    if result.shape != x.shape or result.dtype != x.dtype:
        raise ValueError(
            f"out must be tiles of {x.dtype} for shape {x.shape}, got {result.dtype} for {result.shape}"
        )
    checks.array("out", result.array, (x.dtype.name,), result.array.shape, writable=True)
    checks.apart("out", result.array, x=x)
    width = result.array.shape[2]
    for tile, start in enumerate(range(0, x.shape[1], width)):
        piece = x[:, start : start + width]
        result.array[tile, :, : piece.shape[1]] = piece
        result.array[tile, :, piece.shape[1] :] = 0
    return result


def from_tiles(tiles: Tiles, out: StoredArray | None = None) -> npt.NDArray[Any]:
    """Copy tiles into a row-major matrix. O(n f) time, in one thread.

    Parameters
    ----------
    tiles
        Of shape [n, f], of any width.
    out
        [n, f] of the dtype of `tiles`, apart from them; made if None.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        `tiles` are none; `out` is not of their shape and dtype, not C-contiguous, cannot be written, or
        shares memory with them.
    """
    result = checks.output("out", out, _tiles("tiles", tiles).dtype, tiles.shape)
    checks.apart("out", result, tiles=tiles.array)
    width = tiles.array.shape[2]
    for tile, start in enumerate(range(0, tiles.columns, width)):
        piece = result[:, start : start + width]
        piece[...] = tiles.array[tile, :, : piece.shape[1]]
    return result


@cache
def last_level_cache() -> int:
    """Bytes of the largest cache that the first core sees; 32 MiB where the system does not tell."""
    sizes = [_cache_size(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    if not sizes and "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names:
        sizes = [os.sysconf("SC_LEVEL3_CACHE_SIZE")]
    return max((size for size in sizes if size > 0), default=32 << 20)


def _cache_size(path: Path) -> int:
    """Read a size such as ``32768K``; 0 if there is none."""
    try:
        text = path.read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
        return int(text[:-1]) * factor if factor else int(text)
    except (OSError, ValueError):
        return 0


def choose_layout(
    indptr: IntArray,
    indices: IntArray,
    shape: tuple[int, int],
    dtype: npt.DTypeLike,
    *,
    cache_bytes: int | None = None,
) -> str:
    """Choose how a gather over all rows of a matrix reads features of this shape: by rows, or by tiles.

    Tiles win where a tile fits into the last-level cache, many rows of a row-major matrix would not
    be found there, and rows of the sparse matrix have more than a few entries. How many are found is counted
    on a sample of the entries, in their order, with a simulated cache; no clock is read. O(sample) time,
    and memory for one number per cached row.

    Parameters
    ----------
    indptr, indices
        int64 [n_rows + 1] and int32 [nnz]: the CSR matrix that gathers.
    shape
        Rows and columns of the features.
    dtype
        Of the features; uint16 for bfloat16.
    cache_bytes
        Size of the last-level cache; None: of this machine.

    Returns
    -------
    str
        ``rows`` or ``tiles``.

    Raises
    ------
    TypeError, ValueError
        The matrix is none (its entries are not checked), another dtype, or a number that is no integer or
        out of range.
    """
    checks.csr_layout(indptr, indices)
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise TypeError(f"shape must be (rows, columns), got {shape!r}")
    n_rows, columns = (checks.integer("shape", length, 0, 2**62) for length in shape)
    if np.dtype(dtype) not in (np.float32, np.float64, np.uint16):
        raise TypeError(f"dtype must be float32, float64 or uint16, got {np.dtype(dtype)}")
    itemsize = np.dtype(dtype).itemsize
    cached = (
        last_level_cache() if cache_bytes is None else checks.integer("cache_bytes", cache_bytes, 1, 2**40)
    )
    row_bytes = columns * itemsize
    if row_bytes <= LINE or n_rows * row_bytes <= cached or len(indices) == 0:
        return "rows"
    rows_per_edge = (len(indptr) - 1) / len(indices)
    by_tiles = CACHED + ROW_BY_TILES * rows_per_edge
    by_rows = CACHED + ROW_BY_ROWS * rows_per_edge * LINE / row_bytes
    by_rows += MISSED * miss_rate(indices, max(1, cached // row_bytes))
    if by_tiles < by_rows and n_rows * LINE > TILE_SHARE * cached:
        by_tiles += MISSED * miss_rate(indices, max(1, int(TILE_SHARE * cached) // LINE))
    return "tiles" if by_tiles < by_rows else "rows"


def miss_rate(indices: IntArray, cached_rows: int, sample: int = SAMPLE) -> float:
    """Estimate which share of the rows that entries read would not be found in a cache.

    Parameters
    ----------
    indices
        int32 [nnz], in the order of reading.
    cached_rows
        Rows that the cache holds.
    sample
        Entries that are counted, after as many as fill the cache.

    Returns
    -------
    float
        0 to 1; 0 for no entries.
    """
    checks.array("indices", indices, "int32", (None,))
    cached_rows = checks.integer("cached_rows", cached_rows, 1, 2**31)
    count = min(len(indices), checks.integer("sample", sample, 1, 2**31))
    warm = min(len(indices) - count, 2 * cached_rows)
    first = (len(indices) - count - warm) // 2
    skip_bits = 3 if cached_rows > FEW_SETS else 0
    return float(_locality.miss_rate(indices[first : first + warm + count], warm, cached_rows, skip_bits))
