"""Vertex intervals: contiguous ranges of a part's vertices, balanced by the edges they gather.

Their number comes from a static cost model, never from a clock: it decides in which pieces partial
gradients are summed, so a timing would make results differ between runs.
"""

from __future__ import annotations

import numpy as np

_TASK_WORK = 30_000_000  # gathered numbers of an interval: tasks of one to a few milliseconds
_DENSE = 8  # multiply-adds of a product that take as long as a gathered number
_MULTIPLE = 4  # so that a few threads share them evenly
_MOST = 64


def interval_count(n_own: int, n_edges: int, gathered: int, product: int = 0) -> int:
    """Return the number of intervals of a part.

    Few: a task costs some ten microseconds of the interpreter, however short it is.

    Parameters
    ----------
    n_own, n_edges
        Vertices and in-edges of the part.
    gathered
        Columns of the widest gather of an epoch.
    product
        Elements of the largest weight matrix: multiply-adds a vertex.
    """
    count = -(-((n_own + n_edges) * gathered + n_own * product // _DENSE) // _TASK_WORK)
    if count > 1:
        count = -(-count // _MULTIPLE) * _MULTIPLE
    return max(1, min(count, _MOST))


def cut_intervals(indptr: np.ndarray, count: int) -> tuple[tuple[int, int], ...]:
    """Cut a part's rows so that every interval has about the same number of edges and vertices.

    Parameters
    ----------
    indptr : ndarray, (n_own + 1,)
        Of the part's in-edges.
    count
        Intervals wanted. A part of fewer vertices gets one a vertex, an empty one none.

    Returns
    -------
    tuple of (start, stop)
        Not empty, in order, together all rows.
    """
    n_own = len(indptr) - 1
    count = min(count, n_own)
    if count == 0:
        return ()
    cost = indptr + np.arange(n_own + 1)  # an edge and a row cost one each
    inner = np.searchsorted(cost, cost[-1] * np.arange(1, count) / count)
    bounds = np.concatenate([[0], inner, [n_own]])
    # A hub can swallow several shares: every interval keeps at least one row, to its left and right.
    steps = np.arange(count + 1)
    bounds = np.maximum.accumulate(bounds - steps) + steps
    bounds = np.minimum(bounds, n_own - (count - steps))
    return tuple(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
