"""Softmax cross-entropy and its gradient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

import cython_kernels as ck
from cython_kernels import reference

DTYPES = (np.float32, np.float64)
THREADS = (1, 2, 3)


def make_case(rng, n, n_classes, dtype):
    logits = (5 * rng.standard_normal((n, n_classes))).astype(dtype)
    mask = (rng.random(n) < 0.6).astype(np.uint8)
    labels = np.where(mask, rng.integers(0, max(n_classes, 1), n), -1).astype(np.int32)
    return logits, labels, mask


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 40),
    n_classes=st.sampled_from([1, 2, 7, 50]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.01, -2.0, 0.0]),
    draw=st.integers(0, 2**32 - 1),
)
def test_agrees_with_its_twin(n, n_classes, dtype, scale, draw):
    logits, labels, mask = make_case(np.random.default_rng(draw), n, n_classes, dtype)
    want_gradient = np.full_like(logits, np.nan)
    want = reference.softmax_cross_entropy(logits, labels, mask, scale=scale, d_logits=want_gradient)
    results = []
    for threads in THREADS:
        gradient = np.full_like(logits, np.nan)
        got = ck.softmax_cross_entropy(
            logits, labels, mask, scale=scale, d_logits=gradient, num_threads=threads
        )
        results.append((got, gradient))
        assert got == results[0][0] == ck.softmax_cross_entropy(logits, labels, mask, num_threads=threads)
        np.testing.assert_array_equal(gradient, results[0][1])
    assert isinstance(got, float)
    assert got == pytest.approx(want, rel=1e-13, abs=1e-13)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(gradient, want_gradient, rtol=4 * eps, atol=1e-14 * abs(scale))
    np.testing.assert_array_equal(gradient[mask == 0], 0)


def test_against_log_softmax_in_the_order_of_rows():
    logits, labels, mask = make_case(np.random.default_rng(1), 500, 9, np.float64)
    total = 0.0
    for row in np.flatnonzero(mask):
        total -= log_softmax(logits[row])[labels[row]]
    assert ck.softmax_cross_entropy(logits, labels, mask) == pytest.approx(total, rel=1e-14)


def test_gradient_by_finite_differences():
    logits, labels, mask = make_case(np.random.default_rng(2), 8, 5, np.float64)
    gradient = np.empty_like(logits)
    ck.softmax_cross_entropy(logits, labels, mask, scale=0.25, d_logits=gradient)
    step = 1e-5
    for at in np.ndindex(logits.shape):
        change = np.zeros_like(logits)
        change[at] = step
        up, down = (ck.softmax_cross_entropy(logits + sign * change, labels, mask) for sign in (1, -1))
        assert 0.25 * (up - down) / (2 * step) == pytest.approx(gradient[at], abs=1e-9)


def test_gradient_may_replace_the_logits():
    logits, labels, mask = make_case(np.random.default_rng(3), 30, 6, np.float32)
    gradient = np.empty_like(logits)
    want = ck.softmax_cross_entropy(logits, labels, mask, d_logits=gradient)
    assert ck.softmax_cross_entropy(logits, labels, mask, d_logits=logits) == want
    np.testing.assert_array_equal(logits, gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_do_not_overflow(dtype):
    logits = np.array([[1e30, 0.0], [-1e30, -1e30], [0.0, 800.0]], dtype)
    labels, mask = np.array([0, 1, 0], np.int32), np.ones(3, bool)
    gradient = np.empty_like(logits)
    total = ck.softmax_cross_entropy(logits, labels, mask, d_logits=gradient)
    assert total == pytest.approx(np.log(2) + 800)
    np.testing.assert_array_equal(gradient, np.array([[0, 0], [0.5, -0.5], [-1, 1]], dtype))


def test_a_nan_is_seen_inside_the_mask_only():
    logits = np.array([[0.0, np.nan], [np.nan, 0.0], [0.0, 0.0]])
    labels = np.zeros(3, np.int32)
    assert np.isnan(ck.softmax_cross_entropy(logits, labels, np.array([1, 0, 0], np.uint8)))
    assert np.isnan(ck.softmax_cross_entropy(logits, labels, np.array([0, 1, 0], np.uint8)))
    gradient = np.empty_like(logits)
    total = ck.softmax_cross_entropy(logits, labels, np.array([0, 0, 1], np.uint8), d_logits=gradient)
    assert total == pytest.approx(np.log(2))
    np.testing.assert_array_equal(gradient, [[0, 0], [0, 0], [-0.5, 0.5]])


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (4, 0), (4, 1)])
def test_nothing_to_learn_from(shape):
    logits, gradient = np.ones(shape), np.full(shape, np.nan)
    labels, mask = np.full(shape[0], -1, np.int32), np.zeros(shape[0], np.uint8)
    assert ck.softmax_cross_entropy(logits, labels, mask, d_logits=gradient, num_threads=2) == 0.0
    np.testing.assert_array_equal(gradient, 0)


def test_any_nonzero_byte_is_a_set_mask():
    logits, labels = np.zeros((2, 4)), np.zeros(2, np.int32)
    assert ck.softmax_cross_entropy(logits, labels, np.array([2, 255], np.uint8)) == pytest.approx(
        2 * np.log(4)
    )
