"""Pages from the system: zeros, memory only where something was written, and back again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dorylus_hpc.engine.pages import Room

MEGABYTE = 1 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7), (3000, 700)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_zeros_that_can_be_written(shape: tuple[int, int], dtype: type) -> None:
    array = Room(shape, dtype).array
    assert array.shape == shape
    assert array.dtype == dtype
    assert not array.any()
    array[...] = 3
    assert (array == 3).all()
    assert array.flags.c_contiguous
    assert array.ctypes.data % 64 == 0


def test_only_what_is_written_takes_memory() -> None:
    before = resident()
    array = Room((1 << 22, 64), np.float32, sparse=True).array  # 1 GB
    array[1 << 20 : (1 << 20) + 1000] = 1
    assert resident() - before < 64 * MEGABYTE
    assert array[1 << 20 : (1 << 20) + 1000].all()


def test_rows_are_given_back() -> None:
    room = Room((1 << 16, 512), np.float32)  # 128 MB
    room.array[...] = 7
    full = resident()
    room.release(1000)
    assert full - resident() > 100 * MEGABYTE
    assert (room.array[:1000] == 7).all()
    assert not room.array[2000:].any()
    room.release(1 << 16)  # nothing is behind the last row
    assert (room.array[:1000] == 7).all()
