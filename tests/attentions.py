"""What the tests of both kinds of graph attention share."""

from __future__ import annotations

import numpy as np

DTYPES = (np.float32, np.float64)
HEADS = [
    (1, 1), (1, 7), (1, 16), (1, 41), (2, 1), (2, 4), (2, 33), (3, 5), (4, 8), (4, 16), (5, 3), (8, 1),
    (8, 4), (8, 8), (16, 4), (16, 16), (17, 2), (33, 1), (1, 1025), (2, 1030), (3, 400),
]  # fmt: skip
KEY = {"seed": 3, "epoch": 7, "layer": 1}


def random_pattern(rng, n_rows, n_cols, *, hub=0, longest=12, in_order=True):
    """A CSR matrix with empty rows and repeated entries; with `hub` one row has so many."""
    lengths = rng.integers(0, longest, n_rows)
    if hub:
        lengths[rng.integers(n_rows)] = hub
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    row = np.repeat(np.arange(n_rows), lengths)
    indices = rng.integers(0, n_cols, indptr[-1]).astype(np.int32)
    if in_order:
        indices = indices[np.lexsort((indices, row))]
    return indptr, indices


def transpose(indptr, indices, n_cols, rng=None):
    """The CSR matrix of the transpose; with a generator its rows are in any order."""
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    order = np.lexsort((row if rng is None else rng.permutation(len(row)), indices))
    starts = np.concatenate([[0], np.cumsum(np.bincount(indices, minlength=n_cols))])
    return starts.astype(np.int64), row[order].astype(np.int32)


def side_by_side(rng, *arrays):
    """Copies of arrays as columns of one matrix, and what gives the columns of nobody between them."""
    widths = [int(np.prod(array.shape[1:])) for array in arrays]
    gaps = rng.integers(0, 4, len(arrays) + 1)
    starts = np.cumsum(gaps[:-1] + [0, *widths[:-1]])
    matrix = np.full((len(arrays[0]), gaps.sum() + sum(widths)), np.nan, arrays[0].dtype)
    used = np.zeros(matrix.shape[1], np.bool_)
    views = []
    for array, start, width in zip(arrays, starts, widths, strict=True):
        used[start : start + width] = True
        views.append(matrix[:, start : start + width].reshape(array.shape))
        assert views[-1].base is not None and np.may_share_memory(views[-1], matrix)
        views[-1][...] = array
    return *views, lambda: matrix[:, ~used]
