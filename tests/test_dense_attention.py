"""Dense maths of graph attention: head by head, and gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from lambda_pkg import attention

SHAPES = [(7, 5, 3, 4), (1, 2, 1, 6), (0, 3, 2, 2), (9, 4, 6, 1)]  # rows, f_in, heads, columns of a head


def made(n, f_in, heads, columns, dtype="float64"):
    rng = np.random.default_rng(n + heads)
    shapes = [(n, f_in), (f_in, heads * columns), (heads, columns), (heads, columns)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-13)])
@pytest.mark.parametrize("shape", SHAPES)
def test_transform_head_by_head(shape, dtype, tolerance):
    n, _, heads, columns = shape
    h, w, a_source, a_target = made(*shape, dtype)
    packed, score_target = attention.transform(h, w, a_source, a_target)
    assert packed.dtype == score_target.dtype == np.dtype(dtype)
    y = (h @ w).reshape(n, heads, columns)
    np.testing.assert_allclose(packed[:, : heads * columns], h @ w, rtol=tolerance, atol=tolerance)
    for k in range(heads):
        of_head = y[:, k]
        got = packed[:, heads * columns + k], score_target[:, k]
        for score, a in zip(got, (a_source, a_target), strict=True):
            np.testing.assert_allclose(score, of_head @ a[k], rtol=tolerance, atol=10 * tolerance)


def test_transform_fills_the_buffers_it_is_given():
    inputs = made(7, 5, 3, 4)
    packed, score = np.full((7, 15), np.nan), np.full((7, 3), np.nan)
    got = attention.transform(*inputs, packed=packed, score_target=score)
    assert got[0] is packed and got[1] is score
    want = attention.transform(*inputs)
    np.testing.assert_array_equal(packed, want[0])
    np.testing.assert_array_equal(score, want[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_transform_backward_by_finite_differences(shape):
    n, _, heads, columns = shape
    inputs = made(*shape)
    rng = np.random.default_rng(5)
    d_y, d_source, d_target = (rng.standard_normal((n, width)) for width in (heads * columns, heads, heads))

    def value():
        packed, target = attention.transform(*inputs)
        y, source = packed[:, : heads * columns], packed[:, heads * columns :]
        return (y * d_y).sum() + (source * d_source).sum() + (target * d_target).sum()

    packed, _ = attention.transform(*inputs)
    d_w, d_as, d_at, d_h = attention.transform_backward(*inputs, packed, d_y, d_source, d_target)
    for array, gradient in zip(inputs, (d_h, d_w, d_as, d_at), strict=True):
        numeric = np.empty_like(array)
        for position in np.ndindex(array.shape):
            old, step = array[position], 1e-5
            array[position] = old + step
            above = value()
            array[position] = old - step
            numeric[position] = (above - value()) / (2 * step)
            array[position] = old
        np.testing.assert_allclose(gradient, numeric, rtol=1e-7, atol=1e-8)


def test_scores_backward_may_write_over_the_gradient_of_the_products():
    _, _, a_source, a_target = inputs = made(7, 5, 3, 4)
    packed, _ = attention.transform(*inputs)
    rng = np.random.default_rng(6)
    d_y, d_source, d_target = (rng.standard_normal((7, width)) for width in (12, 3, 3))
    want = attention.scores_backward(packed, a_source, a_target, d_y, d_source, d_target)
    buffers = np.full((3, 4), np.nan), np.full((3, 4), np.nan)
    got = attention.scores_backward(
        packed, a_source, a_target, d_y, d_source, d_target,
        out=d_y, d_a_source=buffers[0], d_a_target=buffers[1],
    )  # fmt: skip
    assert got[0] is d_y and got[1] is buffers[0] and got[2] is buffers[1]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("heads", [1, 3])
def test_mean_of_heads_and_its_gradient(heads):
    rng = np.random.default_rng(7)
    z, bias = rng.standard_normal((6, heads * 4)), rng.standard_normal(4)
    want = np.array([[row[c::4].sum() / heads + bias[c] for c in range(4)] for row in z])
    np.testing.assert_allclose(attention.mean_heads(z, bias), want, rtol=1e-14)
    d_out = rng.standard_normal((6, 4))
    d_z, d_bias = attention.mean_heads_backward(d_out, heads)
    np.testing.assert_allclose(d_bias, d_out.sum(axis=0), rtol=1e-14)
    np.testing.assert_allclose(d_z, np.tile(d_out / heads, heads), rtol=1e-15)
