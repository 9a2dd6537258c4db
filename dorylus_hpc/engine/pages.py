"""Memory straight from the system: pages that are there once they are touched, and can be given back.

What numpy allocates stays as long as any view of it does. Of an array in a `Room` the system can have some
rows back, and an array of zeros costs nothing where nobody writes.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt

_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; Python knows it from 3.13 on
_LARGE = 4 << 20  # bytes from which large pages pay, as numpy has it


class Room:
    """An array of zeros in pages of its own.

    Parameters
    ----------
    shape, dtype
        Of the array.
    sparse
        Most of it is never touched: it takes addresses, but the system is not to put memory by for it.

    Raises
    ------
    OSError
        The system has no room for it.

    Attributes
    ----------
    array : ndarray
        C-contiguous; it begins at a page, and lives on without the room.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, sparse: bool = False) -> None:
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        flags = _PRIVATE | (_UNRESERVED if sparse else 0)
        self._map = mmap.mmap(-1, max(size, 1), flags=flags)
        if size >= _LARGE:
            self._advise("MADV_HUGEPAGE", 0, size)
        self.array: np.ndarray = np.frombuffer(self._map, np.uint8, size).view(dtype).reshape(shape)

    def release(self, row: int) -> None:
        """Give back the pages behind a row; what is there is lost."""
        page = mmap.PAGESIZE
        row_bytes = math.prod(self.array.shape[1:]) * self.array.itemsize
        start = -(-row * row_bytes // page) * page
        if start < self.array.nbytes:
            self._advise("MADV_DONTNEED", start, self.array.nbytes - start)

    def _advise(self, what: str, start: int, length: int) -> None:
        """Tell the system, which need not listen: no result depends on it."""
        advice = getattr(mmap, what, None)
        if advice is None:
            return
        try:
            self._map.madvise(advice, start, length)
        except OSError:
            return
