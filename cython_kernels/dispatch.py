"""Which instructions the kernels use. One binary has them all; the CPU decides, once.

Results are the same bits on every level; the choice is for tests and for measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import _build

LEVELS = ("baseline", "avx2", "avx512")

_best: int = _build.best_level()
_level: int = _best


def available() -> tuple[str, ...]:
    """Name the levels that this CPU can run, the best one last."""
    return LEVELS[: _best + 1]


def instruction_set() -> str:
    """Name the level in use: ``baseline``, ``avx2`` or ``avx512``."""
    return LEVELS[_level]


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use another level inside a ``with`` block, in all threads of the process; one block at a time.

    Parameters
    ----------
    name
        One of `available`.

    Raises
    ------
    ValueError
        A level that there is not, or that this CPU can't run.
    """
    global _level
    if name not in available():
        raise ValueError(f"this CPU can run {', '.join(available())}, got {name!r}")
    before, _level = _level, LEVELS.index(name)
    try:
        yield
    finally:
        _level = before


def level() -> int:
    """Give the loops the level in use."""
    return _level
