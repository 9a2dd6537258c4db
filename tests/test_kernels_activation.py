"""Bias, relu and dropout in one pass, and the way back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cython_kernels as ck
from cython_kernels import dispatch, matrices, reference
from cython_kernels.layout import empty, empty_tiles

DTYPES = (np.float32, np.float64)
THREADS = (1, 2, 3)
KEY = {"seed": 11, "epoch": 2, "layer": 2}
WIDTHS = [0, 1, 3, 15, 16, 17, 64, 100, 129]


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


@st.composite
def layouts(draw, dtype):
    """How a result is stored: what makes it, from its shape."""
    stored = draw(st.sampled_from([dtype, np.uint16])) if dtype == np.float32 else dtype
    width = draw(st.sampled_from([None, 1, 5, 8, 32]))
    if draw(st.booleans()):
        return lambda shape: np.full(shape, 7, stored)
    return lambda shape: ck.to_tiles(np.full(shape, 7, stored), empty_tiles(*shape, stored, width))


def stored_rows(x):
    return ck.from_tiles(x) if isinstance(x, ck.Tiles) else x


def assert_padded(x):
    """Columns of the last tile beyond those of the matrix are zeros."""
    if isinstance(x, ck.Tiles) and x.columns:
        used = x.columns - (len(x.array) - 1) * x.array.shape[2]
        assert not x.array[-1, :, used:].any()


@settings(max_examples=120)
@given(
    data=st.data(),
    shape=st.tuples(st.integers(0, 9), st.sampled_from(WIDTHS)),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from([0.0, 0.3, 1 - 1e-12]),
    relu=st.booleans(),
    with_bias=st.booleans(),
    scaled=st.booleans(),
    draw=st.integers(0, 2**32 - 1),
)
def test_every_layout_and_level_agrees_with_the_twin(data, shape, dtype, p, relu, with_bias, scaled, draw):
    rng = np.random.default_rng(draw)
    z = rng.standard_normal(shape).astype(dtype)
    z[rng.random(shape) < 0.05] = np.nan
    bias = rng.standard_normal(shape[1]).astype(dtype) if with_bias else None
    row_scale = rng.random(shape[0]).astype(dtype) if scaled else None
    gids = rng.integers(-(2**63), 2**63, shape[0])
    make = data.draw(layouts(dtype))
    options = {"relu": relu, "row_scale": row_scale, **KEY}
    want = stored_rows(reference.bias_relu_dropout(z, bias, gids, p, out=make(shape), **options))
    d_out = rng.standard_normal(shape).astype(dtype)
    make_back = data.draw(layouts(dtype))
    for level in dispatch.available():
        with dispatch.using(level):
            for threads in THREADS:
                out = make(shape)
                assert ck.bias_relu_dropout(z, bias, gids, p, out=out, num_threads=threads, **options) is out
                np.testing.assert_array_equal(stored_rows(out), want, err_msg=f"{level} {threads}")
                assert_padded(out)
                back = make_back(shape)
                got = ck.relu_dropout_backward(
                    d_out, out, p, row_scale=row_scale, out=back, num_threads=threads
                )
                assert got is back
                d_z = reference.relu_dropout_backward(
                    d_out, out, p, row_scale=row_scale, out=make_back(shape)
                )
                np.testing.assert_array_equal(stored_rows(back), stored_rows(d_z))
                assert_padded(back)
                if stored_rows(out).dtype == dtype:
                    ck.relu_dropout_backward(d_out, out, p, row_scale=row_scale, out=out)
                    plain = reference.relu_dropout_backward(
                        d_out, ck.bias_relu_dropout(z, bias, gids, p, **options), p, row_scale=row_scale
                    )
                    np.testing.assert_array_equal(stored_rows(out), plain)
                dropped = ck.dropout(z, gids, p, out=make(shape), num_threads=threads, **KEY)
                np.testing.assert_array_equal(
                    stored_rows(dropped), stored_rows(reference.dropout(z, gids, p, out=make(shape), **KEY))
                )


def test_scaling_is_the_last_step():
    z, scale = np.array([[-1.0, 3.0, 2.0]]), np.array([0.25])
    np.testing.assert_array_equal(
        ck.bias_relu_dropout(z, np.ones(3), None, 0.0, row_scale=scale, **KEY), [[0, 1, 0.75]]
    )
    # Dropping comes before: what is dropped is 0 times the scale.
    gids = np.array([5])
    np.testing.assert_array_equal(
        ck.bias_relu_dropout(z, None, gids, 0.5, row_scale=-scale, relu=False, **KEY),
        ck.dropout(z, gids, 0.5, **KEY) * -0.25,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_result_is_gathered_as_with_a_source_scale(dtype):
    rng = np.random.default_rng(1)
    indptr, indices = np.arange(0, 201, 10), rng.integers(0, 20, 200).astype(np.int32)
    z, scale = rng.standard_normal((20, 40)).astype(dtype), rng.random(20).astype(dtype)
    plain = ck.bias_relu_dropout(z, None, np.arange(20), 0.5, **KEY)
    scaled = ck.bias_relu_dropout(
        z, None, np.arange(20), 0.5, row_scale=scale, out=empty_tiles(20, 40, dtype), **KEY
    )
    want = ck.gather(indptr, indices, None, plain, source_scale=scale, row_scale=scale, self_weight=1.0)
    got = ck.gather(indptr, indices, None, scaled, row_scale=scale, self_weight=1.0)
    np.testing.assert_array_equal(got, want)


def test_backward_with_a_scale_is_the_derivative():
    rng = np.random.default_rng(2)
    z, y, step = rng.standard_normal((3, 12, 7))
    scale, gids = rng.random(12) + 0.1, np.arange(12)
    options = {"row_scale": scale, **KEY}
    d_z = ck.relu_dropout_backward(
        y, ck.bias_relu_dropout(z, None, gids, 0.4, **options), 0.4, row_scale=scale
    )
    step *= 1e-7
    higher, lower = (ck.bias_relu_dropout(z + sign * step, None, gids, 0.4, **options) for sign in (1, -1))
    assert ((higher - lower) / 2 * y).sum() == pytest.approx((d_z * step).sum(), rel=1e-6)


@pytest.mark.parametrize("stored", [np.float32, np.float64, np.uint16])
@pytest.mark.parametrize("tiled", [True, False])
def test_results_larger_than_the_cache(monkeypatch, stored, tiled):
    dtype = np.float64 if stored == np.float64 else np.float32
    rng = np.random.default_rng(3)
    z, d_out = rng.standard_normal((2, 50, 96)).astype(dtype)
    gids = np.arange(50)

    def out():
        return empty_tiles(50, 90, stored) if tiled else empty((50, 96), stored)

    z, d_out = (np.ascontiguousarray(x[:, : out().shape[1]]) for x in (z, d_out))
    cached = ck.bias_relu_dropout(z, None, gids, 0.5, out=out(), **KEY)
    back = ck.relu_dropout_backward(d_out, cached, 0.5, out=out())
    monkeypatch.setattr(matrices, "last_level_cache", lambda: 1)
    for threads in THREADS:
        got = ck.bias_relu_dropout(z, None, gids, 0.5, out=out(), num_threads=threads, **KEY)
        assert matrices.streams(got, z) == tiled
        np.testing.assert_array_equal(stored_rows(got), stored_rows(cached))
        assert_padded(got)
        got = ck.relu_dropout_backward(d_out, cached, 0.5, out=out(), num_threads=threads)
        np.testing.assert_array_equal(stored_rows(got), stored_rows(back))


# ---- ELU ----


def elu_case(draw, shape, dtype):
    rng = np.random.default_rng(draw)
    x, d_h = 3 * rng.standard_normal((2, *shape)).astype(dtype)
    x[rng.random(shape) < 0.1] = 0
    x[rng.random(shape) < 0.05] = np.nan
    return x, rng.standard_normal(shape[1]).astype(dtype), rng.integers(-(2**63), 2**63, shape[0]), d_h


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 9), st.sampled_from(WIDTHS)),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from([0.0, 1e-12, 0.3, 0.8]),
    with_bias=st.booleans(),
    draw=st.integers(0, 2**32 - 1),
)
def test_elu_agrees_with_its_twin_on_all_levels(shape, dtype, p, with_bias, draw):
    x, bias, gids, d_h = elu_case(draw, shape, dtype)
    bias = bias if with_bias else None
    twin = reference.bias_elu_dropout(x, bias, gids, p, **KEY)
    first = ck.bias_elu_dropout(x, bias, gids, p, **KEY)
    np.testing.assert_allclose(first, twin, rtol=4 * np.finfo(dtype).eps, atol=0)
    np.testing.assert_array_equal(first == 0, twin == 0)
    want = reference.elu_dropout_backward(d_h, first, gids, p, **KEY)
    for level in dispatch.available():
        for threads in THREADS:
            with dispatch.using(level):
                how = {"num_threads": threads, **KEY}
                h = ck.bias_elu_dropout(x, bias, gids, p, **how)
                np.testing.assert_array_equal(h, first, err_msg=f"{level} {threads}")
                in_place = x.copy()
                assert ck.bias_elu_dropout(in_place, bias, gids, p, out=in_place, **how) is in_place
                np.testing.assert_array_equal(in_place, first)
                d_x = ck.elu_dropout_backward(d_h, h, gids, p, **how)
                np.testing.assert_array_equal(d_x, want, err_msg=f"{level} {threads}")
                in_d_h, in_h = d_h.copy(), h.copy()
                ck.elu_dropout_backward(in_d_h, h, gids, p, out=in_d_h, **how)
                ck.elu_dropout_backward(d_h, in_h, gids, p, out=in_h, **how)
                np.testing.assert_array_equal(in_d_h, want)
                np.testing.assert_array_equal(in_h, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elu_is_accurate(dtype):
    z = np.concatenate([-np.geomspace(1e-30, 100, 50_001), -np.linspace(0, 5, 50_001), [-1e30, -np.inf]])
    z = z.astype(dtype)[None]
    got = ck.bias_elu_dropout(z, None, None, 0.0, **KEY)
    want = np.expm1(z.astype(np.longdouble))
    assert (np.abs(got - want) / np.spacing(np.abs(want).astype(dtype))).max() < 3
    np.testing.assert_array_equal(got[0, -2:], -1)
    assert np.all(np.diff(got[0, 50_001:100_002]) <= 0)


def test_elu_of_what_is_positive_or_no_number():
    x = np.array([[2.5, np.inf, np.nan, 0.0, -0.0, 1e-300]])
    np.testing.assert_array_equal(ck.bias_elu_dropout(x, None, None, 0.0, **KEY), x)
    np.testing.assert_array_equal(
        ck.elu_dropout_backward(np.full_like(x, 3), x, None, 0.0, **KEY), [[3, 3, np.nan, 3, 3, 3]]
    )


def test_the_mask_of_elu_is_that_of_dropout():
    x, gids, d_h = np.full((50, 30), 2.0), np.arange(50) * 3, np.full((50, 30), 1.5)
    h = ck.bias_elu_dropout(x, None, gids, 0.5, **KEY)
    np.testing.assert_array_equal(h, ck.dropout(x, gids, 0.5, **KEY))
    np.testing.assert_array_equal(
        ck.elu_dropout_backward(d_h, h, gids, 0.5, **KEY), ck.dropout(d_h, gids, 0.5, **KEY)
    )
    # What was dropped has no gradient even where its value would have been 0 anyway.
    zeros = np.zeros_like(x)
    np.testing.assert_array_equal(
        ck.elu_dropout_backward(d_h, zeros, gids, 0.5, **KEY), ck.dropout(d_h, gids, 0.5, **KEY)
    )


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_backward_of_elu_is_the_derivative(p):
    rng = np.random.default_rng(0)
    x, bias, y = rng.standard_normal((12, 7)), rng.standard_normal(7), rng.standard_normal((12, 7))
    gids = np.arange(12)

    def value(x, bias):
        return (ck.bias_elu_dropout(x, bias, gids, p, **KEY) * y).sum()

    d_x = ck.elu_dropout_backward(y, ck.bias_elu_dropout(x, bias, gids, p, **KEY), gids, p, **KEY)
    step = 1e-6
    for at in np.ndindex(x.shape):
        change = np.zeros_like(x)
        change[at] = step
        difference = (value(x + change, bias) - value(x - change, bias)) / (2 * step)
        assert difference == pytest.approx(d_x[at], rel=1e-7, abs=1e-8)
    for column in range(7):
        change = step * (np.arange(7) == column)
        difference = (value(x, bias + change) - value(x, bias - change)) / (2 * step)
        assert difference == pytest.approx(d_x[:, column].sum(), abs=1e-7)
