"""A whole graph in memory, before it is cut into parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from dorylus_hpc.graph.csr import Edges

NO_SPLIT, TRAIN, VALIDATION, TEST = 0, 1, 2, 3
SPLIT_NAMES = {TRAIN: "train", VALIDATION: "validation", TEST: "test"}
UNLABELLED = -1
UNKNOWN_MARK = 255  # where vertices may have several classes: not known whether a vertex has this one
MAX_VERTICES = 2**31 - 1  # vertices and rows are int32 everywhere; edges are counted in int64


def is_labelled(labels: np.ndarray) -> np.ndarray:
    """Tell which vertices have labels, given in either form of `GraphData.labels`."""
    return labels != UNLABELLED if labels.ndim == 1 else (labels != UNKNOWN_MARK).any(axis=1)


@dataclass(frozen=True, eq=False)
class GraphData:
    """A checked graph with features, labels and a split, vertices numbered 0..n-1 (gid).

    Attributes
    ----------
    n : int
        Number of vertices.
    indptr : ndarray of int64, shape (n + 1,)
    indices : ndarray of int32, shape (nnz,)
        Out-edges: row i lists the destinations of the edges i -> j, sorted. An undirected edge is
        two arcs.
    weights : ndarray of float64, shape (nnz,), or None
        Edge weights (finite, not negative); None where every edge counts one.
    features : ndarray, shape (n, f), or scipy.sparse.csr_array of that shape
        float32 or float64, finite.
    labels : ndarray of int32, shape (n,), or of uint8, shape (n, n_classes)
        The class of each vertex, -1 where unlabelled; or, where a vertex may have several classes, 1 for each
        of them, 0 for the others and 255 where it is not known: in all columns of an unlabelled vertex.
    n_classes : int
    split : ndarray of uint8, shape (n,)
        0 in no set, 1 train, 2 validation, 3 test. Only labelled vertices are in a set.
    ids : ndarray, shape (n,)
        The user's own ids: int64 or strings; 0..n-1 if none were given.
    name : str
    notes : tuple of str
        What was changed on the way and how often, to be printed.
    """

    n: int
    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray | None
    features: Any
    labels: np.ndarray
    n_classes: int
    split: np.ndarray
    ids: np.ndarray
    name: str = "graph"
    notes: tuple[str, ...] = ()

    @property
    def edges(self) -> Edges:
        """The out-edges as one object."""
        return Edges(self.indptr, self.indices, self.weights)

    @property
    def n_edges(self) -> int:
        """Number of arcs."""
        return len(self.indices)

    @property
    def n_features(self) -> int:
        """Columns of the feature matrix."""
        return int(self.features.shape[1])

    @property
    def sparse_features(self) -> bool:
        """True if the features are a CSR matrix."""
        return bool(sp.issparse(self.features))
