"""Bias, relu and dropout in one pass, and the way back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cython_kernels as ck
from cython_kernels import reference

DTYPES = (np.float32, np.float64)
THREADS = (1, 2, 3)
KEY = {"seed": 11, "epoch": 2, "layer": 2}


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 20), st.sampled_from([0, 1, 3, 16, 65])),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from([0.0, 1e-12, 1e-9, 0.3, 0.8]),
    relu=st.booleans(),
    with_bias=st.booleans(),
    draw=st.integers(0, 2**32 - 1),
)
def test_forward_agrees_with_its_twin(shape, dtype, p, relu, with_bias, draw):
    rng = np.random.default_rng(draw)
    z = rng.standard_normal(shape).astype(dtype)
    z[rng.random(shape) < 0.1] = 0
    bias = rng.standard_normal(shape[1]).astype(dtype) if with_bias else None
    gids = rng.integers(0, 10**9, shape[0])
    want = reference.bias_relu_dropout(z, bias, gids, p, relu=relu, **KEY)
    for threads in THREADS:
        got = ck.bias_relu_dropout(z, bias, gids, p, relu=relu, num_threads=threads, **KEY)
        np.testing.assert_array_equal(got, want)
    in_place = z.copy()
    assert ck.bias_relu_dropout(in_place, bias, gids, p, relu=relu, out=in_place, **KEY) is in_place
    np.testing.assert_array_equal(in_place, want)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 20), st.sampled_from([0, 1, 3, 16, 65])),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from([0.0, 1e-12, 1e-9, 0.3, 0.8]),
    draw=st.integers(0, 2**32 - 1),
)
def test_backward_agrees_with_its_twin(shape, dtype, p, draw):
    rng = np.random.default_rng(draw)
    d_out, z = rng.standard_normal((2, *shape)).astype(dtype)
    activated = ck.bias_relu_dropout(z, None, np.arange(shape[0]), p, **KEY)
    want = reference.relu_dropout_backward(d_out, activated, p)
    for threads in THREADS:
        np.testing.assert_array_equal(
            ck.relu_dropout_backward(d_out, activated, p, num_threads=threads), want
        )
    in_d_out, in_activated = d_out.copy(), activated.copy()
    ck.relu_dropout_backward(in_d_out, activated, p, out=in_d_out)
    ck.relu_dropout_backward(d_out, in_activated, p, out=in_activated)
    np.testing.assert_array_equal(in_d_out, want)
    np.testing.assert_array_equal(in_activated, want)


def test_backward_is_the_derivative():
    rng = np.random.default_rng(0)
    z, bias, y = rng.standard_normal((12, 7)), rng.standard_normal(7), rng.standard_normal((12, 7))
    gids = np.arange(12)

    def value(z, bias):
        return (ck.bias_relu_dropout(z, bias, gids, 0.4, **KEY) * y).sum()

    d_z = ck.relu_dropout_backward(y, ck.bias_relu_dropout(z, bias, gids, 0.4, **KEY), 0.4)
    step = 1e-6
    for at in np.ndindex(z.shape):
        change = np.zeros_like(z)
        change[at] = step
        difference = (value(z + change, bias) - value(z - change, bias)) / (2 * step)
        assert difference == pytest.approx(d_z[at], abs=1e-8)
    for column in range(7):
        change = step * (np.arange(7) == column)
        difference = (value(z, bias + change) - value(z, bias - change)) / (2 * step)
        assert difference == pytest.approx(d_z[:, column].sum(), abs=1e-7)


def test_the_mask_is_that_of_dropout():
    z, gids = np.full((50, 30), 2.0), np.arange(50) * 3
    np.testing.assert_array_equal(
        ck.bias_relu_dropout(z, None, gids, 0.5, **KEY), ck.dropout(z, gids, 0.5, **KEY)
    )


def test_without_dropout_no_ids_are_needed():
    z = np.array([[-1.0, 2.0]])
    np.testing.assert_array_equal(
        ck.bias_relu_dropout(z, np.array([0.5, 0.5]), None, 0.0, **KEY), [[0.0, 2.5]]
    )
    np.testing.assert_array_equal(ck.bias_relu_dropout(z, None, None, 0.0, relu=False, **KEY), z)


def test_relu_does_not_hide_a_nan():
    z = np.array([[np.nan, -np.inf, np.inf, -0.0]])
    np.testing.assert_array_equal(
        ck.bias_relu_dropout(z, None, None, 0.0, **KEY), [[np.nan, 0.0, np.inf, 0.0]]
    )
