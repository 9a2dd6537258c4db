"""Whether a result is right: what measured candidates must pass before a number of theirs is shown.

Wanted values come from `cython_kernels.reference` in float64. On a large input they are computed for a
sample of the rows (among them the first, the last and the largest), and the rest is held to one number a
row: the product of the result with a positive vector, which is known from a gather of one column.
All inputs of the cases are positive, so no error cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cython_kernels import reference

SAMPLE = 256  # rows
LARGEST = 3  # rows with the most entries, which are in the sample
STRIP = 64  # columns that are wanted at a time: memory

Check = Callable[[np.ndarray], None]


class WrongResult(Exception):
    """A candidate computed something else than it should."""


def sample(degrees: np.ndarray, whole: bool = False) -> np.ndarray:
    """Rows to look at; all of them where there are few."""
    n = len(degrees)
    if n <= 2 * SAMPLE or whole:
        return np.arange(n)
    chosen = np.random.default_rng(3).integers(n, size=SAMPLE)
    return np.unique(np.concatenate([chosen, [0, n - 1], np.argsort(degrees)[-LARGEST:]]))


def close(
    got: np.ndarray,
    wanted: np.ndarray,
    tolerance: np.ndarray | float,
    what: str = "value",
    *,
    size: np.ndarray | None = None,
) -> None:
    """Refuse another shape, and values that are off by more than `tolerance` (of a row) of their size.

    `size` is what a value is made of where its terms cancel; if None the value itself.
    """
    if got.shape != wanted.shape:
        raise WrongResult(f"shape {got.shape}, wanted {wanted.shape}")
    bound = np.broadcast_to(np.asarray(tolerance, float).reshape(-1, *[1] * (wanted.ndim - 1)), wanted.shape)
    wrong = ~(np.abs(got - wanted) <= bound * np.abs(wanted if size is None else size) + 1e-30)
    if wrong.any():
        at = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise WrongResult(f"{what} at {at} is {got[at]!r}, wanted {wanted[at]!r} ({wrong.sum()} are wrong)")


def rounding(degrees: np.ndarray, dtype: Any) -> np.ndarray:
    """How far, relatively, a sum of so many positive numbers may be off: its errors add up at random."""
    return 8 * np.finfo(dtype).eps * (4 + np.sqrt(degrees))


def gathered(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray | None,
    x: np.ndarray,
    *,
    maximum: bool = False,
    row_scale: np.ndarray | None = None,
    source_scale: np.ndarray | None = None,
    **how: Any,
) -> Check:
    """Check a gather (arguments as of `cython_kernels.gather`; x float32 or float64) or a maximum."""
    degrees = np.diff(indptr)
    rows = sample(degrees)
    counts = degrees[rows]
    starts = np.concatenate([[0], np.cumsum(counts)])
    places = np.repeat(indptr[rows] - starts[:-1], counts) + np.arange(starts[-1])
    # Sources of the sample. A self term finds x[k] of row k if its own rows come first.
    own = rows if how.get("self_weight") else rows[:0]
    sources = np.concatenate([own, np.setdiff1d(indices[places], own)])
    number = np.empty(len(x), np.int32)
    number[sources] = np.arange(len(sources))
    small = starts, number[indices[places]], None if data is None else data[places]
    scales = {
        "row_scale": None if row_scale is None else row_scale[rows],
        "source_scale": None if source_scale is None else source_scale[sources],
    }
    tolerance = rounding(degrees, x.dtype)

    def check(result: np.ndarray) -> None:
        if result.shape != (len(degrees), x.shape[1]):
            raise WrongResult(f"shape {result.shape}, wanted {(len(degrees), x.shape[1])}")
        for first in range(0, x.shape[1], STRIP):
            strip = x[sources, first : first + STRIP].astype(np.float64)
            if maximum:
                wanted = reference.gather_max(small[0], small[1], strip)
            else:
                wanted = reference.gather(*small, strip, **scales, **how)
            close(
                result[rows, first : first + STRIP],
                wanted,
                tolerance[rows],
                f"sampled, from column {first}, value",
            )
        if not maximum and len(rows) < len(degrees):
            close(_project(result), projected(), tolerance, "the projection of row")

    known: list[np.ndarray] = []

    def projected() -> np.ndarray:
        if not known:
            scaled = {"row_scale": row_scale, "source_scale": source_scale}
            column = _project(x)[:, None]
            known.append(reference.gather(indptr, indices, data, column, **scaled, **how)[:, 0])
        return known[0]

    return check


def _project(x: np.ndarray) -> np.ndarray:
    """Multiply the rows by a positive vector."""
    vector = np.random.default_rng(5).random(x.shape[1]) + 0.5
    result = np.empty(len(x))
    for first in range(0, len(x), 4096):  # float64 for a piece at a time
        result[first : first + 4096] = x[first : first + 4096].astype(np.float64) @ vector
    return result


def rows_equal(wanted: Callable[[np.ndarray], np.ndarray], n: int, tolerance: float = 0.0) -> Check:
    """Check a row pass on a sample of its rows, given what those should be."""
    rows = sample(np.zeros(n, int))
    return lambda result: close(result[rows], wanted(rows), tolerance)


def dropped(whole: np.ndarray, p: float) -> Check:
    """Check a dropout with masks of another generator: values are kept and scaled, or 0, in right numbers."""

    def check(result: np.ndarray) -> None:
        kept = result != 0
        could = whole != 0
        close(result[kept], whole[kept] / (1 - p), 1e-5)
        share, spread = kept.sum() / could.sum(), 6 * np.sqrt(p * (1 - p) / could.sum())
        if abs(share - (1 - p)) > spread:
            raise WrongResult(f"{share:.4f} of the values are kept, wanted {1 - p}")

    return check
