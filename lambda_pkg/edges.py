"""Attention over edges, for a worker that has the rows which an interval's edges read, each once.

A *slice* of a CSR matrix is what belongs to an interval of its rows: `indptr` from 0, and `indices` that
count rows of what was collected. Of H heads of D columns, rows of sources are packed ``[H D columns | H
scores]``, rows of targets ``[H D columns of the gradient | 4 H numbers]``: the score, the largest score of
the row, the inverse of its sum, and the product of gradient and output. With raw = score of source + score
of target,

    s = raw if raw > 0 else slope raw     alpha = exp(s) / sum of a target's exp(s)     z = sum of alpha y

Sums are made in float64, entry after entry; arrays of the size of the edges exist for a piece at a time.

Reference: Velickovic et al., Graph attention networks, ICLR 2018, equations 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

RECORD = 4  # numbers a target and head, beside its gradient
_PIECE = 1 << 19  # elements of a piece, more only if a single row has more


def attend(
    packed: np.ndarray,
    indptr: np.ndarray,
    indices: np.ndarray,
    score_target: np.ndarray,
    *,
    slope: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return attention's sums of an interval, and what its gradient needs.

    Parameters
    ----------
    packed : ndarray, (m, H D + H)
        Rows of sources.
    indptr, indices : ndarray, (n + 1,) and (entries,), int
        Slice of the in-edges.
    score_target : ndarray, (n, H)
    slope : float

    Returns
    -------
    z : ndarray, (n, H D)
    most, total : ndarray, (n, H)
        The largest s of each target, and its sum of exp(s - most); zeros without entries.
    negative : ndarray, (n, H D)
        What of z comes from entries with raw <= 0.
    below : ndarray, (n, H)
        The sum of their alpha.

    Raises
    ------
    ValueError
        Arrays that do not fit together, or a slice that is none.
    """
    n, heads = score_target.shape
    width = packed.shape[1] - heads
    _check(packed, indptr, indices, n, heads, width)
    dtype = packed.dtype
    z, negative = np.zeros((2, n, heads, width // heads), dtype)
    most, total, below = np.zeros((3, n, heads), dtype)
    y, score_source = packed[:, :width].reshape(len(packed), heads, width // heads), packed[:, width:]
    for rows, row, columns, filled, starts in _pieces(indptr, indices, width):
        raw = score_source[columns] + score_target[rows][row]
        s = np.where(raw > 0, raw, raw * dtype.type(slope))
        most[rows][filled] = np.maximum.reduceat(s, starts, axis=0)
        alpha = np.exp(s - most[rows][row])
        total[rows][filled] = _sums(alpha, starts)
        alpha /= total[rows][row]
        values = alpha[:, :, None] * y[columns]
        z[rows][filled] = _sums(values, starts)
        alpha[raw > 0] = 0
        values[raw > 0] = 0
        negative[rows][filled] = _sums(values, starts)
        below[rows][filled] = _sums(alpha, starts)
    return z.reshape(n, width), most, total, negative.reshape(n, width), below


def attend_targets(
    z: np.ndarray,
    d_z: np.ndarray,
    score_target: np.ndarray,
    most: np.ndarray,
    total: np.ndarray,
    negative: np.ndarray,
    below: np.ndarray,
    *,
    slope: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradient of the targets' scores, and rows of targets for `attend_sources`.

    Parameters
    ----------
    z, most, total, negative, below
        From `attend`.
    d_z : ndarray, (n, H D)
    score_target : ndarray, (n, H)
    slope : float

    Returns
    -------
    d_score_target : ndarray, (n, H)
    packed : ndarray, (n, H D + 4 H)
    """
    n, heads = score_target.shape
    shape = (n, heads, z.shape[1] // heads)
    change = d_z.reshape(shape)
    t = (change * z.reshape(shape)).sum(axis=2)
    d_target = (change * negative.reshape(shape)).sum(axis=2) - t * below
    d_target *= z.dtype.type(slope - 1)
    inverse = np.divide(1, total, out=np.zeros_like(total), where=total != 0)
    return d_target, np.hstack([d_z, score_target, most, inverse, t])


def attend_sources(
    packed: np.ndarray, indptr: np.ndarray, indices: np.ndarray, sources: np.ndarray, *, slope: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of an interval's rows as sources.

    Parameters
    ----------
    packed : ndarray, (m, H D + 4 H)
        Rows of targets.
    indptr, indices : ndarray, (n + 1,) and (entries,), int
        Slice of the out-edges.
    sources : ndarray, (n, H D + H)
        Rows of the interval, packed as those of sources.
    slope : float

    Returns
    -------
    d_y : ndarray, (n, H D)
    d_score_source : ndarray, (n, H)

    Raises
    ------
    ValueError
        As for `attend`.
    """
    heads, n = (packed.shape[1] - sources.shape[1]) // (RECORD - 1), len(sources)
    width = sources.shape[1] - heads
    if heads < 1 or packed.shape[1] != width + RECORD * heads:
        raise ValueError(f"rows of {packed.shape[1]} and {sources.shape[1]} columns do not fit together")
    _check(packed, indptr, indices, n, heads, width)
    dtype, columns_of = packed.dtype, width // heads
    d_y, d_score = np.zeros((n, heads, columns_of), dtype), np.zeros((n, heads), dtype)
    d_out = packed[:, :width].reshape(len(packed), heads, columns_of)
    record = packed[:, width:].reshape(len(packed), RECORD, heads)
    y, score_source = sources[:, :width].reshape(n, heads, columns_of), sources[:, width:]
    for rows, row, columns, filled, starts in _pieces(indptr, indices, width):
        score, most, inverse, t = (record[columns, number] for number in range(RECORD))
        raw = score_source[rows][row] + score
        s = np.where(raw > 0, raw, raw * dtype.type(slope))
        alpha = np.exp(np.minimum(s - most, 0)) * inverse
        change = d_out[columns]
        d_alpha = (change * y[rows][row]).sum(axis=2) - t
        d_y[rows][filled] = _sums(alpha[:, :, None] * change, starts)
        d_s = alpha * d_alpha
        d_score[rows][filled] = _sums(np.where(raw > 0, d_s, d_s * dtype.type(slope)), starts)
    return d_y.reshape(n, width), d_score


def _check(
    packed: np.ndarray, indptr: np.ndarray, indices: np.ndarray, n: int, heads: int, width: int
) -> None:
    if width < heads or width % heads:
        raise ValueError(f"{packed.shape[1]} columns are not those of {heads} heads and their scores")
    if (
        indptr.shape != (n + 1,)
        or indptr[0] != 0
        or indptr[-1] != len(indices)
        or (np.diff(indptr) < 0).any()
    ):
        raise ValueError(f"indptr of shape {indptr.shape} is not that of {n} rows and {len(indices)} entries")
    if len(indices) and not 0 <= indices.min() <= indices.max() < len(packed):
        raise ValueError(f"indices must be below {len(packed)}, got {indices.min()} to {indices.max()}")


def _pieces(
    indptr: np.ndarray, indices: np.ndarray, width: int
) -> Iterator[tuple[slice, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Cut rows into pieces: rows, each entry's row and column, the rows with entries, their first ones."""
    n, most, start = len(indptr) - 1, max(1, _PIECE // max(width, 1)), 0
    while start < n:
        stop = int(np.searchsorted(indptr, indptr[start] + most, side="right")) - 1
        stop = min(n, max(stop, start + 1))
        first, last = int(indptr[start]), int(indptr[stop])
        if first < last:
            counts = np.diff(indptr[start : stop + 1])
            filled = np.flatnonzero(counts)
            row = np.repeat(np.arange(stop - start), counts)
            yield slice(start, stop), row, indices[first:last], filled, indptr[start:stop][filled] - first
        start = stop


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, starts, axis=0, dtype=np.float64)
