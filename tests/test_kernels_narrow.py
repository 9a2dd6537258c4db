"""Products with a matrix of few columns: the bits of their slow twins, for any threads and instructions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cython_kernels as ck
from cython_kernels import _narrow, dispatch, reference
from cython_kernels.narrow import most_columns


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(0, 150), st.integers(0, 70), st.integers(1, 48),
    st.sampled_from(["f4", "f8"]),
)  # fmt: skip
def test_bits_are_those_of_the_slow_twins(seed, n, depth, columns, dtype):
    rng = np.random.default_rng(seed)
    columns = min(columns, most_columns(np.dtype(dtype)))
    a, b, d_out = (
        rng.standard_normal(shape).astype(dtype) for shape in ((n, depth), (depth, columns), (n, columns))
    )
    want, want_back = reference.narrow_product(a, b), reference.narrow_product_adjoint(a, d_out)
    scale = 1e-5 if dtype == "f4" else 1e-13
    np.testing.assert_allclose(want, a @ b, atol=scale * 70)
    np.testing.assert_allclose(want_back, a.T @ d_out, atol=scale * 150)
    for level in dispatch.available():
        for threads in (1, 3):
            out, d_b = np.full_like(want, np.nan), np.full_like(want_back, np.nan)
            with dispatch.using(level):
                assert ck.narrow_product(a, b, out, num_threads=threads) is out
                assert ck.narrow_product_adjoint(a, d_out, d_b, num_threads=threads) is d_b
            np.testing.assert_array_equal(out, want)
            np.testing.assert_array_equal(d_b, want_back)


@pytest.mark.parametrize("columns", [1, 16, 17, 41, 48])
def test_a_row_does_not_depend_on_the_others(columns):
    rng = np.random.default_rng(columns)
    a, b = rng.standard_normal((101, 33), np.float32), rng.standard_normal((33, columns), np.float32)
    whole = ck.narrow_product(a, b)
    for start, stop in ((0, 1), (3, 40), (100, 101), (50, 50)):
        np.testing.assert_array_equal(ck.narrow_product(a[start:stop], b), whole[start:stop])


def test_blocks_keep_rounding_small():
    """A million equal summands: one after the other, float32 would lose one in a thousand."""
    assert _narrow.block_rows() == 64
    a = np.full((1_000_000, 1), 0.1, np.float32)
    got = ck.narrow_product_adjoint(a, np.ones((len(a), 1), np.float32))[0, 0]
    assert got == pytest.approx(100_000, rel=2e-4)


@pytest.mark.parametrize("call", ["narrow_product", "narrow_product_adjoint"])
@pytest.mark.parametrize(("dtype", "most"), [("f4", 48), ("f8", 24)])
def test_too_many_columns_are_refused(call, dtype, most):
    a, b = np.ones((3, 3), dtype), np.ones((3, most + 1), dtype)
    with pytest.raises(ValueError, match=rf"must have at most {most} columns .*got a float.*numpy.matmul"):
        getattr(ck, call)(a, b)
    assert getattr(ck, call)(a, b[:, :most].copy()).shape == (3, most)


def test_a_nan_or_infinity_reaches_its_row_alone():
    a = np.ones((20, 4), np.float32)
    a[7, 2], a[9, 1] = np.nan, np.inf
    out = ck.narrow_product(a, np.ones((4, 3), np.float32))
    assert np.isnan(out[7]).all() and np.isinf(out[9]).all()
    assert (np.delete(out, [7, 9], axis=0) == 4).all()
