"""Edges in row-compressed form: sorting, transposing, selecting, without a loop over edges.

Canonical form: within a row, entries are sorted by index, and repeated edges by weight. Two edge
sets are equal exactly if their canonical forms are. Counts are int64, indices int32; SciPy does the
counting sorts, and picks 64-bit indices by itself once there are more than 2^31 edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp


@dataclass(frozen=True, eq=False)
class Edges:
    """One direction of a graph's edges.

    Attributes
    ----------
    indptr : ndarray of int64, shape (n_rows + 1,)
    indices : ndarray of int32, shape (nnz,)
    weights : ndarray of float64, shape (nnz,), or None
    """

    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1

    def __len__(self) -> int:
        return len(self.indices)

    def matrix(self, n_cols: int) -> sp.csr_array:
        """A SciPy matrix over the same arrays; int8 ones where there are no weights."""
        data = np.ones(len(self.indices), np.int8) if self.weights is None else self.weights
        return narrow(data, self.indices, self.indptr, (self.n_rows, n_cols))

    def rows(self) -> np.ndarray:
        """Row of every entry, int32, shape (nnz,)."""
        return np.repeat(np.arange(self.n_rows, dtype=np.int32), np.diff(self.indptr))

    def select(self, keep: np.ndarray) -> Edges:
        """The entries where `keep` (bool, shape (nnz,)) is true, in the same rows."""
        kept_before = np.zeros(len(keep) + 1, np.int64)
        np.cumsum(keep, out=kept_before[1:])
        weights = None if self.weights is None else self.weights[keep]
        return Edges(kept_before[self.indptr], self.indices[keep], weights)

    def take(self, rows: np.ndarray) -> Edges:
        """The given rows, in the given order."""
        if len(rows) == 0:
            weights = None if self.weights is None else np.empty(0)
            return Edges(np.zeros(1, np.int64), np.empty(0, np.int32), weights)
        return _edges(self._tight_matrix[rows], self.weights is not None)

    @cached_property
    def _tight_matrix(self) -> sp.csr_array:
        """The matrix that `take` reads, with as many columns as occur; made once."""
        return self.matrix(int(self.indices.max(initial=0)) + 1)


def narrow(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: tuple[int, int]) -> sp.csr_array:
    """A SciPy matrix over `data` and, where they are int32, `indices`.

    SciPy has one index type for both arrays: int32 here as long as the number of entries allows.
    """
    wide = len(indices) > np.iinfo(np.int32).max
    index_type = np.int64 if wide else np.int32
    arrays = (data, indices.astype(index_type, copy=False), indptr.astype(index_type, copy=False))
    return sp.csr_array(arrays, shape=shape, copy=False)


def _edges(matrix: sp.csr_array | sp.csc_array, weighted: bool) -> Edges:
    """Take the arrays of a SciPy matrix back, in our types."""
    weights = matrix.data.astype(np.float64, copy=False) if weighted else None
    return Edges(
        matrix.indptr.astype(np.int64, copy=False), matrix.indices.astype(np.int32, copy=False), weights
    )


def group(keys: np.ndarray, n_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of every key value: a stable counting sort.

    Parameters
    ----------
    keys : ndarray of int, shape (m,)
        Values in 0..n_groups-1.
    n_groups : int

    Returns
    -------
    indptr : ndarray of int64, shape (n_groups + 1,)
    positions : ndarray of int, shape (m,)
        ``positions[indptr[g]:indptr[g + 1]]`` are the ascending positions where `keys` is g.
    """
    one_a_row = np.arange(len(keys) + 1, dtype=np.int64)
    grouped = narrow(np.ones(len(keys), np.int8), keys, one_a_row, (len(keys), n_groups)).tocsc()
    return grouped.indptr.astype(np.int64, copy=False), grouped.indices


def from_pairs(n: int, sources: np.ndarray, destinations: np.ndarray, weights: np.ndarray | None) -> Edges:
    """Canonical out-edges from a list of pairs; repeated pairs stay."""
    indptr, order = group(sources, n)
    picked = None if weights is None else weights[order]
    return canonical(Edges(indptr, destinations[order].astype(np.int32, copy=False), picked), n)


def transpose(edges: Edges, n_cols: int) -> Edges:
    """The other direction, in canonical form."""
    turned = _edges(edges.matrix(n_cols).tocsc(), edges.weights is not None)
    return _sort_repeated(turned)


def canonical(edges: Edges, n_cols: int) -> Edges:
    """Sort entries within rows by index, repeated edges by weight."""
    indices = edges.indices
    if len(indices) > 1:
        falls = indices[1:] < indices[:-1]
        falls[_inner_starts(edges) - 1] = False
        if falls.any():  # transposing twice is a stable, linear sort of all rows
            turned = edges.matrix(n_cols).tocsc().T.tocsc()
            edges = _edges(turned, edges.weights is not None)
    return _sort_repeated(edges)


def _inner_starts(edges: Edges) -> np.ndarray:
    """Where rows start inside the entries: positions in 1..nnz-1."""
    starts = edges.indptr[1:-1]
    return starts[(starts > 0) & (starts < len(edges))]


def repeats(edges: Edges) -> np.ndarray:
    """True for entries whose index equals the one before in the same row (rows sorted), shape (nnz,)."""
    again = np.zeros(len(edges), bool)
    if len(edges) > 1:
        np.equal(edges.indices[1:], edges.indices[:-1], out=again[1:])
        again[_inner_starts(edges)] = False
    return again


def _sort_repeated(edges: Edges) -> Edges:
    """Order repeated weighted edges by weight (rows sorted by index already)."""
    if edges.weights is None or not repeats(edges).any():
        return edges
    order = np.lexsort((edges.weights, edges.indices, edges.rows()))
    return Edges(edges.indptr, edges.indices, edges.weights[order])


def loops(edges: Edges) -> np.ndarray:
    """True for self loops, shape (nnz,)."""
    return np.asarray(edges.indices == edges.rows())


def same(a: Edges, b: Edges) -> bool:
    """Whether two canonical edge sets are equal in structure and weights."""
    if not (np.array_equal(a.indptr, b.indptr) and np.array_equal(a.indices, b.indices)):
        return False
    if a.weights is None or b.weights is None:
        return a.weights is b.weights
    return np.array_equal(a.weights, b.weights)


def both_directions(out_edges: Edges) -> tuple[Edges, Edges]:
    """Out-edges and in-edges of a square, canonical edge set; one object if it is symmetric."""
    in_edges = transpose(out_edges, out_edges.n_rows)
    return (out_edges, out_edges) if same(out_edges, in_edges) else (out_edges, in_edges)


def symmetric_pattern(edges: Edges) -> sp.csr_array:
    """How many arcs join two vertices, counted both ways, without loops; int32 data, rows sorted."""
    n = edges.n_rows
    plain = edges.select(~loops(edges))
    counts = narrow(np.ones(len(plain), np.int32), plain.indices, plain.indptr, (n, n))
    both = sp.csr_array(counts + counts.T.tocsr())
    both.sum_duplicates()
    return both


def degrees(edges: Edges) -> np.ndarray:
    """Sum of weights (or number of entries) of every row without self loops, float64, shape (n_rows,)."""
    is_loop = loops(edges)
    if edges.weights is None:
        full = np.diff(edges.indptr).astype(np.float64)
        return full - np.bincount(edges.indices[is_loop], minlength=edges.n_rows)
    # a loop is zeroed, not subtracted: the degree is then the very number it is without loops
    weights = np.where(is_loop, 0.0, edges.weights)
    n_cols = int(edges.indices.max(initial=0)) + 1
    return np.asarray(Edges(edges.indptr, edges.indices, weights).matrix(n_cols) @ np.ones(n_cols))
