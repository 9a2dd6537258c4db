"""The transpose of a CSR matrix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

import cython_kernels as ck
from cython_kernels import reference

THREADS = (1, 2, 3, 50)


@st.composite
def matrices(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_rows, n_cols = draw(st.integers(0, 40)), draw(st.sampled_from([1, 2, 17, 200]))
    lengths = rng.integers(0, draw(st.sampled_from([1, 3, 30])), n_rows)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return rng, indptr, rng.integers(0, n_cols, indptr[-1]).astype(np.int32), n_cols


@given(matrices(), st.booleans())
def test_agrees_with_its_twin(case, validate):
    _, indptr, indices, n_cols = case
    want = reference.transpose_csr(indptr, indices, n_cols=n_cols)
    for threads in THREADS:
        got = ck.transpose_csr(indptr, indices, n_cols=n_cols, num_threads=threads, validate=validate)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
        assert [one.dtype for one in got] == [np.int64, np.int32, np.int64]


@given(matrices())
def test_is_the_transpose_and_its_own_inverse(case):
    rng, indptr, indices, n_cols = case
    n_rows, data = len(indptr) - 1, rng.standard_normal(len(indices))
    indptr_t, indices_t, entries = ck.transpose_csr(indptr, indices, n_cols=n_cols, num_threads=2)
    ck.check_csr(indptr_t, indices_t, n_cols=n_rows)
    matrix = csr_array((data, indices, indptr), shape=(n_rows, n_cols)).toarray()
    got = csr_array((data[entries], indices_t, indptr_t), shape=(n_cols, n_rows)).toarray()
    np.testing.assert_allclose(got, matrix.T, atol=1e-14)
    # Twice transposed: the same matrix, each row sorted by column with equal columns in their order.
    back, columns, again = ck.transpose_csr(indptr_t, indices_t, n_cols=n_rows)
    rows = np.repeat(np.arange(n_rows), np.diff(indptr))
    order = np.lexsort((indices, rows))
    np.testing.assert_array_equal(back, indptr)
    np.testing.assert_array_equal(columns, indices[order])
    np.testing.assert_array_equal(entries[again], order)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_gather_over_it_is_the_adjoint(dtype):
    rng = np.random.default_rng(4)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 9, 300))]).astype(np.int64)
    indices = rng.integers(0, 80, indptr[-1]).astype(np.int32)
    data = rng.standard_normal(indptr[-1]).astype(dtype)
    d_out = rng.standard_normal((300, 16)).astype(dtype)
    indptr_t, indices_t, entries = ck.transpose_csr(indptr, indices, n_cols=80)
    want = ck.gather_adjoint(indptr, indices, data, d_out, n_sources=80)
    for threads in THREADS:
        got = ck.gather(indptr_t, indices_t, data[entries], d_out, num_threads=threads)
        # The same products in the same order: even the same bits.
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("self_weight", [0.0, 0.7])
def test_scales_carry_over_to_a_gather_over_it(mean, self_weight):
    """They change places, and a mean is a factor of one of them, or of the values."""
    rng = np.random.default_rng(5)
    n, degrees = 200, rng.integers(0, 9, 200)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, n, indptr[-1]).astype(np.int32)
    data, d_out = rng.standard_normal(indptr[-1]), rng.standard_normal((n, 5))
    row_scale, source_scale = rng.uniform(0.5, 2, (2, n))
    want = ck.gather_adjoint(
        indptr, indices, data, d_out, n_sources=n, row_scale=row_scale, source_scale=source_scale,
        self_weight=self_weight, mean=mean,
    )  # fmt: skip
    indptr_t, indices_t, entries = ck.transpose_csr(indptr, indices, n_cols=n)
    degree = np.maximum(degrees, 1) if mean else np.ones(n)
    values, scale = data[entries], row_scale / degree
    if self_weight:
        values, scale = values * np.repeat(1 / degree, degrees)[entries], row_scale
    got = ck.gather(
        indptr_t,
        indices_t,
        values,
        d_out,
        row_scale=source_scale,
        source_scale=scale,
        self_weight=self_weight,
    )
    np.testing.assert_allclose(got, want, atol=1e-12)
