"""Batch normalisation over all vertices of a graph whose rows are spread over intervals, parts and ranks.

Each interval writes a row of sums into a table; when all rows of all intervals are there, everyone adds them
up alike, in their order. So the statistics are those of the whole graph and equal to the last bit on all
ranks, whatever came first. With a column x of N rows, n its normed values and G the gradient of their
multiple ``y = n g + s``,

    forward     an interval's row   [rows, mean, sum of (x - mean)^2]        all merged: mean, variance
                n = (x - mean) / sqrt(variance + 1e-5)
    backward    an interval's row   [sum G, sum G n]                         all added up
                dx = g / sqrt(variance + 1e-5) * (G - sum(G) / N - n sum(G n) / N)

Rows of the table are float64, and distances are from means, so nothing cancels. Arrays of an interval are
walked through in pieces: temporary memory does not grow with them.

References: Ioffe and Szegedy, Batch normalization, ICML 2015, algorithms 1 and 2; Chan, Golub and LeVeque,
Updating formulae and a pairwise algorithm for computing sample variances, 1979, equation 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

EPSILON = 1e-5  # added to the variance
MOMENTUM = 0.1  # share of an epoch's statistics in the running averages
_PIECE = 1 << 15  # elements


def forward_width(columns: int) -> int:
    """Return the columns of a row of `sum_rows` for so many columns."""
    return 1 + 2 * columns


def backward_width(columns: int) -> int:
    """Return the columns of a row of `sum_gradients` for so many columns."""
    return 2 * columns


@dataclass(frozen=True, eq=False)
class Statistics:
    """Of all rows.

    Attributes
    ----------
    count
        Rows.
    mean, variance : ndarray, (f,), float64
        The variance is that of these rows: squares are divided by their number.
    """

    count: float
    mean: np.ndarray
    variance: np.ndarray

    @property
    def unbiased(self) -> np.ndarray:
        """The variance of what the rows are a sample of; of a single row 0."""
        return self.variance * (self.count / max(self.count - 1.0, 1.0))

    @property
    def inverse(self) -> np.ndarray:
        """What distances from the mean are multiplied by."""
        return inverse_deviation(self.variance)


def inverse_deviation(variance: np.ndarray) -> np.ndarray:
    """Return ``1 / sqrt(variance + 1e-5)`` in float64."""
    return 1.0 / np.sqrt(variance.astype(np.float64) + EPSILON)


def sum_rows(a: np.ndarray, out: np.ndarray) -> None:
    """Write an interval's row of the forward table.

    Parameters
    ----------
    a : ndarray, (n, f)
        What is to be normed.
    out : ndarray, (1 + 2 f,), float64
        Number of rows, their mean, and the sum of squared distances from it; zeros for no rows.
    """
    n, f = a.shape
    mean, squares = out[1 : 1 + f], out[1 + f :]
    out[...] = 0
    out[0] = n
    for piece in _pieces(n, f):
        mean += a[piece].sum(axis=0, dtype=np.float64)
    mean /= max(n, 1)
    for piece in _pieces(n, f):
        distance = a[piece] - mean
        squares += np.multiply(distance, distance, out=distance).sum(axis=0)


def merge(table: np.ndarray) -> Statistics:
    """Return the statistics of all rows from those of intervals.

    Parameters
    ----------
    table : ndarray, (intervals, 1 + 2 f), float64
        Rows of `sum_rows`, always in the same order.
    """
    f = (table.shape[1] - 1) // 2
    counts, means = table[:, :1], table[:, 1 : 1 + f]
    n = float(counts.sum())
    mean = (counts * means).sum(axis=0) / n
    squares = table[:, 1 + f :].sum(axis=0) + (counts * (means - mean) ** 2).sum(axis=0)
    return Statistics(n, mean, squares / n)


def norm(a: np.ndarray, mean: np.ndarray, inverse: np.ndarray, scale: np.ndarray, *, out: np.ndarray) -> None:
    """Write ``(a - mean) inverse scale`` of an interval's rows.

    Parameters
    ----------
    a, out : ndarray, (n, f)
    mean, inverse : ndarray, (f,)
        Of all rows, or running averages; see `inverse_deviation`.
    scale : ndarray, (f,)
    """
    np.subtract(a, mean.astype(a.dtype), out=out)
    np.multiply(out, (inverse * scale).astype(a.dtype), out=out)


def sum_gradients(d_out: np.ndarray, a: np.ndarray, known: Statistics, out: np.ndarray) -> None:
    """Write an interval's row of the backward table.

    Parameters
    ----------
    d_out : ndarray, (n, f)
        Gradient of ``n g + s``.
    a : ndarray, (n, f)
        What was normed.
    known
        From `merge`.
    out : ndarray, (2 f,), float64
        Sums of the gradient, and of the gradient times normed values: an interval's share of the gradients of
        s and g.
    """
    n, f = a.shape
    out[...] = 0
    inverse = known.inverse
    for piece in _pieces(n, f):
        normed = a[piece] - known.mean
        normed *= inverse
        normed *= d_out[piece]
        out[:f] += d_out[piece].sum(axis=0, dtype=np.float64)
        out[f:] += normed.sum(axis=0)


def norm_backward(
    d_out: np.ndarray, a: np.ndarray, known: Statistics, scale: np.ndarray, table: np.ndarray
) -> None:
    """Turn the gradient of ``n g + s`` into that of what was normed, in place.

    Parameters
    ----------
    d_out, a : ndarray, (n, f)
        As for `sum_gradients`.
    known
        From `merge`.
    scale : ndarray, (f,)
    table : ndarray, (intervals, 2 f), float64
        Rows of `sum_gradients`, always in the same order.
    """
    n, f = a.shape
    dtype, inverse = a.dtype, known.inverse
    total = table.sum(axis=0) / known.count
    mean, factor = known.mean.astype(dtype), (inverse * total[f:]).astype(dtype)
    shift, outer = total[:f].astype(dtype), (inverse * scale).astype(dtype)
    for piece in _pieces(n, f):
        along = a[piece] - mean
        along *= factor
        along += shift
        d_x = d_out[piece]
        np.subtract(d_x, along, out=d_x)
        np.multiply(d_x, outer, out=d_x)


def _pieces(n: int, f: int) -> Iterator[slice]:
    """Cut rows into pieces that fit a cache."""
    step = max(1, _PIECE // max(f, 1))
    return (slice(start, start + step) for start in range(0, n, step))
