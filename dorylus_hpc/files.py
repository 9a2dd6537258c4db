"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success make it durable and rename it.

    A reader sees the old file or the new one, never a part of one. On an exception the temporary
    file is removed and `path` stays as it was.

    Parameters
    ----------
    path
        The file to make. Its folder must exist.

    Yields
    ------
    pathlib.Path
        Where to write. The file must exist when the block ends.

    Raises
    ------
    OSError
        Of the block or from here, such as a full disk, with the file's name.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)  # the rename itself must survive a power cut too
    except OSError as error:
        if error.errno is not None and error.filename is None:  # writing to an open file tells no name
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
