"""A part file as bytes: its checksums, what is told when it cannot be read, and features in slices.

    [ structure | feature values | structure ]

There is a checksum of the whole, of the structure and of the values.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.manifest import MANIFEST, VERSION

_BUFFER_BYTES = 4 * 1024 * 1024


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a part file is read into an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot read the part: {error}{_lock_hint(error)}") from error
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{path}: not a part file of format {VERSION}: {error}; run prepare again"
        ) from error


def check_sum(path: Path, found: str, wanted: str) -> None:
    """Compare a checksum with that of the manifest.

    Raises
    ------
    InputError
        They differ.
    """
    if found != wanted:
        raise InputError(
            f"{path}: checksum is {found[:12]}..., {MANIFEST} says {wanted[:12]}...: "
            "the file was changed or damaged; run prepare again"
        )


def _lock_hint(error: OSError) -> str:
    """What to do where the file system has no locks."""
    if "lock" not in str(error).lower() and error.errno not in (errno.EAGAIN, errno.ENOLCK):
        return ""
    return " (the file system refuses file locks: set HDF5_USE_FILE_LOCKING=FALSE)"


def checksums(path: Path, ranges: Sequence[int]) -> tuple[str, str, str]:
    """Return those of a file, of its bytes outside of ranges, and of those inside; in one pass."""
    whole, outside, inside = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for is_inside, piece in _bytes_of(path, ranges):
        whole.update(piece)
        (inside if is_inside else outside).update(piece)
    return whole.hexdigest(), outside.hexdigest(), inside.hexdigest()


def checksum_outside(path: Path, ranges: Sequence[int]) -> str:
    """Return the checksum of a file but for ranges, which are not read."""
    digest = hashlib.sha256()
    for _, piece in _bytes_of(path, ranges, inside=False):
        digest.update(piece)
    return digest.hexdigest()


def _bytes_of(path: Path, ranges: Sequence[int], *, inside: bool = True) -> Iterator[tuple[bool, memoryview]]:
    """Go through a file: whether bytes lie inside of a range, and the bytes, valid until the next come."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        place = 0
        for number, stop in enumerate((*ranges, None)):
            if number % 2 and not inside:
                place = file.seek(cast("int", stop))
                continue
            while stop is None or place < stop:
                count = file.readinto(buffer if stop is None else buffer[: stop - place])
                if not count:
                    break
                yield bool(number % 2), buffer[:count]
                place += count


@dataclass(frozen=True)
class StoredArray:
    """Where an array lies in a file: its name, first byte, shape and dtype there."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def n_bytes(self) -> int:
        """Its size."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class StoredFeatures:
    """The features of a part in its file: read from there in order, and checked once all are read.

    Bytes are read as they lie in the file, not through HDF5, which would keep all other threads waiting
    meanwhile. One thread at a time may read.

    Parameters
    ----------
    path
        The part file.
    arrays
        In the order in which they are to be read.
    sha256
        Checksum of all their bytes in this order; empty if there is nothing to check.
    """

    def __init__(self, path: Path, arrays: Sequence[StoredArray], sha256: str) -> None:
        self.path, self.arrays = path, {array.name: array for array in arrays}
        self._wanted = sha256
        self._digest = hashlib.sha256()

    def read(self, name: str, start: int, out: np.ndarray) -> None:
        """Read rows of an array, the next that were not read yet.

        Parameters
        ----------
        name
            Of the array.
        start
            The first row.
        out
            As many rows as are wanted, of the dtype in the file, C-contiguous; overwritten.

        Raises
        ------
        InputError
            The file cannot be read.
        """
        if not out.size:
            return
        array, place = self.arrays[name], out.reshape(-1).view(np.uint8)
        with reading(self.path), self.path.open("rb", buffering=0) as file:
            file.seek(array.offset + start * (out.nbytes // len(out)))
            done = 0
            while done < len(place):  # Linux reads 2 GB at once at most
                count = file.readinto(place[done:].data)
                if not count:
                    raise OSError("it ends early")
                done += count
        if self._wanted:
            self._digest.update(place.data)

    def check(self) -> None:
        """Compare the checksum, after all was read.

        Raises
        ------
        InputError
            It is not that of the manifest.
        """
        if self._wanted:
            check_sum(self.path, self._digest.hexdigest(), self._wanted)
