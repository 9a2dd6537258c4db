"""Normalisation of input features: none, by row, or standardised by column.

Rows are independent. Column statistics are sums over all vertices: each part contributes its own, they
are added in the order of the parts (by the caller, who can communicate), and the result is kept with
the model, so that a prediction on other data uses the statistics of the training graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from dorylus_hpc.errors import InputError


@dataclass(frozen=True, eq=False)
class ColumnStatistics:
    """Mean and population standard deviation of each column, float64; a deviation of 0 counts as 1."""

    mean: np.ndarray
    deviation: np.ndarray


def normalise_rows(features: Any) -> Any:
    """Divide each row by the sum of its absolute values; rows of zeros stay.

    Parameters
    ----------
    features : ndarray or csr_array, (n, f)

    Returns
    -------
    The same kind and dtype; sparse stays sparse.
    """
    if sparse.issparse(features):
        lengths = np.diff(features.indptr)
        totals = np.zeros(features.shape[0])
        rows = np.repeat(np.arange(features.shape[0]), lengths)
        np.add.at(totals, rows, np.abs(features.data.astype(np.float64)))
        totals[totals == 0] = 1.0
        data = (features.data / np.repeat(totals, lengths)).astype(features.dtype)
        return sparse.csr_array((data, features.indices, features.indptr), shape=features.shape)
    totals = np.abs(features).sum(axis=1, keepdims=True, dtype=np.float64)
    totals[totals == 0] = 1.0
    return (features / totals).astype(features.dtype)


def column_sums(features: np.ndarray) -> np.ndarray:
    """Return [number of rows, column sums...] of a part, float64, (1 + f,)."""
    return np.concatenate([[len(features)], features.sum(axis=0, dtype=np.float64)])


def squared_deviations(features: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return the column sums of (features - mean)^2 of a part, float64, (f,)."""
    total = np.zeros(features.shape[1])
    for start in range(0, len(features), 4096):  # no second copy of the features
        total += np.square(features[start : start + 4096] - mean).sum(axis=0)
    return total


def statistics(count: float, sums: np.ndarray, squares: np.ndarray) -> ColumnStatistics:
    """Return the statistics of totals over all parts."""
    deviation = np.sqrt(squares / max(count, 1.0))
    deviation[deviation == 0] = 1.0
    return ColumnStatistics(sums / max(count, 1.0), deviation)


def standardise(features: np.ndarray, columns: ColumnStatistics) -> np.ndarray:
    """Return (features - mean) / deviation in the dtype of `features`."""
    return ((features - columns.mean) / columns.deviation).astype(features.dtype)


def check_norm(kind: str, *, sparse_features: bool) -> None:
    """Refuse a normalisation that would make sparse features dense.

    Raises
    ------
    InputError
        `kind` is ``standard`` and the features are sparse.
    """
    if kind == "standard" and sparse_features:
        raise InputError(
            "--feature-norm standard would make the sparse features of this graph dense: use row or none, or "
            "store the features as a dense array"
        )
