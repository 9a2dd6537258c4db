"""Softmax and sigmoid cross-entropy and their gradients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, log_softmax

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


# ---- weights of classes


@pytest.mark.parametrize("dtype", DTYPES)
def test_class_weights_multiply_rows(dtype):
    logits, labels, mask = make_case(np.random.default_rng(4), 60, 5, dtype)
    weights = np.array([0.0, 0.5, 1.0, 2.0, 30.0])
    plain, weighted, twin = (np.full_like(logits, np.nan) for _ in range(3))
    ck.softmax_cross_entropy(logits, labels, mask, scale=0.1, d_logits=plain)
    rows = np.flatnonzero(mask)
    each = [ck.softmax_cross_entropy(logits, labels, np.arange(60) == row) for row in rows]
    want = float(weights[labels[rows]] @ each)
    options = {"class_weights": weights, "scale": 0.1}
    for threads in THREADS:
        got = ck.softmax_cross_entropy(
            logits, labels, mask, d_logits=weighted, num_threads=threads, **options
        )
        assert got == pytest.approx(want, rel=1e-13)
    assert reference.softmax_cross_entropy(logits, labels, mask, d_logits=twin, **options) == pytest.approx(
        got
    )
    eps = np.finfo(dtype).eps
    expected = plain * np.where(mask, weights[labels], 0)[:, None]
    np.testing.assert_allclose(weighted, expected, rtol=4 * eps, atol=1e-15)
    np.testing.assert_allclose(weighted, twin, rtol=4 * eps, atol=1e-14)


# ---- any number of classes


def make_marks(rng, n, n_classes, dtype):
    logits, _, mask = make_case(rng, n, n_classes, dtype)
    labels = (rng.random((n, n_classes)) < 0.3).astype(np.uint8)
    labels[rng.random((n, n_classes)) < 0.1] = 255
    labels[mask == 0] = 77
    return logits, labels, mask


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 40),
    n_classes=st.sampled_from([1, 2, 7, 50]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.01, -2.0, 0.0]),
    weighted=st.booleans(),
    draw=st.integers(0, 2**32 - 1),
)
def test_sigmoid_agrees_with_its_twin(n, n_classes, dtype, scale, weighted, draw):
    rng = np.random.default_rng(draw)
    logits, labels, mask = make_marks(rng, n, n_classes, dtype)
    options = {"pos_weight": 3 * rng.random(n_classes) if weighted else None, "scale": scale}
    want_gradient = np.full_like(logits, np.nan)
    want = reference.sigmoid_cross_entropy(logits, labels, mask, d_logits=want_gradient, **options)
    results = []
    for threads in THREADS:
        gradient = np.full_like(logits, np.nan)
        got = ck.sigmoid_cross_entropy(
            logits, labels, mask, d_logits=gradient, num_threads=threads, **options
        )
        results.append((got, gradient))
        assert got == results[0][0]
        np.testing.assert_array_equal(gradient, results[0][1])
    assert ck.sigmoid_cross_entropy(logits, labels, mask, **options) == got
    assert isinstance(got, float)
    assert got == pytest.approx(want, rel=1e-13, abs=1e-13)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(gradient, want_gradient, rtol=8 * eps, atol=1e-14 * abs(scale))
    np.testing.assert_array_equal(gradient[(mask == 0)[:, None] | (labels == 255)], 0)


def test_sigmoid_is_the_sum_of_binary_cross_entropies():
    """As torch's BCEWithLogitsLoss(pos_weight=..., reduction="sum") has it."""
    logits, labels, mask = make_marks(np.random.default_rng(1), 300, 9, np.float64)
    weight = np.linspace(0.2, 4, 9)
    rows = mask == 1
    y, p = labels[rows], expit(logits[rows])
    want = -(weight * (y == 1) * np.log(p) + (y == 0) * np.log1p(-p)).sum()
    assert ck.sigmoid_cross_entropy(logits, labels, mask, pos_weight=weight) == pytest.approx(want, rel=1e-11)


def test_sigmoid_gradient_by_finite_differences():
    logits, labels, mask = make_marks(np.random.default_rng(2), 8, 5, np.float64)
    options = {"pos_weight": np.array([1.0, 2.0, 0.5, 3.0, 0.0])}
    gradient = np.empty_like(logits)
    ck.sigmoid_cross_entropy(logits, labels, mask, scale=0.25, d_logits=gradient, **options)
    step = 1e-5
    for at in np.ndindex(logits.shape):
        change = np.zeros_like(logits)
        change[at] = step
        up, down = (
            ck.sigmoid_cross_entropy(logits + sign * change, labels, mask, **options) for sign in (1, -1)
        )
        assert 0.25 * (up - down) / (2 * step) == pytest.approx(gradient[at], abs=1e-9)


def test_sigmoid_gradient_may_replace_the_logits():
    logits, labels, mask = make_marks(np.random.default_rng(3), 30, 6, np.float32)
    gradient = np.empty_like(logits)
    want = ck.sigmoid_cross_entropy(logits, labels, mask, d_logits=gradient)
    assert ck.sigmoid_cross_entropy(logits, labels, mask, d_logits=logits) == want
    np.testing.assert_array_equal(logits, gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_of_large_logits_does_not_overflow(dtype):
    logits = np.array([[800.0, -800.0, 1e30, 0.0], [800.0, -800.0, -1e30, -60.0]], dtype)
    labels, mask = np.array([[0, 1, 1, 0], [1, 0, 0, 0]], np.uint8), np.ones(2, bool)
    gradient = np.empty_like(logits)
    total = ck.sigmoid_cross_entropy(logits, labels, mask, d_logits=gradient)
    assert total == pytest.approx(1600 + np.log(2))
    tiny = np.array(np.exp(-60.0), dtype)
    np.testing.assert_allclose(gradient, np.array([[1, -1, 0, 0.5], [0, 0, 0, tiny]], dtype), rtol=1e-6)
    alone = np.array([False, True])
    assert ck.sigmoid_cross_entropy(logits, labels, alone) == pytest.approx(np.exp(-60.0), rel=1e-12)


def test_sigmoid_sees_a_nan_inside_the_mask_only():
    logits, labels = np.array([[0.0, np.nan], [0.0, 0.0]]), np.zeros((2, 2), np.uint8)
    assert np.isnan(ck.sigmoid_cross_entropy(logits, labels, np.array([1, 0], np.uint8)))
    assert ck.sigmoid_cross_entropy(logits, labels, np.array([0, 1], np.uint8)) == pytest.approx(
        2 * np.log(2)
    )


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (4, 0), (4, 1)])
def test_sigmoid_of_nothing_to_learn_from(shape):
    logits, gradient = np.ones(shape), np.full(shape, np.nan)
    labels, mask = np.full(shape, 255, np.uint8), np.zeros(shape[0], np.uint8)
    assert ck.sigmoid_cross_entropy(logits, labels, mask, d_logits=gradient, num_threads=2) == 0.0
    np.testing.assert_array_equal(gradient, 0)
