"""Feature normalisation: values, sparse against dense, parts against the whole."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.feature_norm import (
    check_norm,
    column_sums,
    normalise_rows,
    squared_deviations,
    standardise,
    statistics,
)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_divided_by_their_absolute_sum(dtype: type) -> None:
    x = np.array([[1, -3, 0], [0, 0, 0], [2, 0, 0]], dtype)
    want = np.array([[0.25, -0.75, 0], [0, 0, 0], [1, 0, 0]], dtype)
    dense, csr = normalise_rows(x), normalise_rows(sparse.csr_array(x))
    assert np.array_equal(dense, want)
    assert sparse.issparse(csr) and np.array_equal(csr.toarray(), want)
    assert dense.dtype == csr.dtype == dtype


def test_sparse_and_dense_rows_agree_to_the_last_bit() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((50, 30)).astype(np.float32) * (rng.random((50, 30)) < 0.2)
    assert np.allclose(normalise_rows(sparse.csr_array(x)).toarray(), normalise_rows(x), rtol=1e-7, atol=0)


def test_column_statistics_of_parts_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(5, 3, (9000, 4))
    x[:, 2] = 7.0
    parts = [x[:1], x[1:1], x[1:6000], x[6000:]]
    totals = sum(column_sums(part) for part in parts)
    mean = totals[1:] / totals[0]
    columns = statistics(totals[0], totals[1:], sum(squared_deviations(part, mean) for part in parts))
    assert np.allclose(columns.mean, x.mean(axis=0), rtol=1e-13)
    assert np.allclose(columns.deviation[[0, 1, 3]], x.std(axis=0)[[0, 1, 3]], rtol=1e-12)
    assert columns.deviation[2] == 1.0
    scaled = standardise(x, columns)
    assert np.allclose(scaled.std(axis=0), [1, 1, 0, 1]) and np.allclose(scaled.mean(axis=0), 0, atol=1e-12)


def test_standardising_sparse_features_is_refused() -> None:
    check_norm("standard", sparse_features=False)
    check_norm("row", sparse_features=True)
    with pytest.raises(InputError, match="would make the sparse features of this graph dense"):
        check_norm("standard", sparse_features=True)
