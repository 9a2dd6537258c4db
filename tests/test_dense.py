"""lambda_pkg.dense against float64 einsum, elementwise, within the rounding error of a dot product."""

from __future__ import annotations

import numpy as np
import pytest

from lambda_pkg import dense
from lambda_pkg.dense import (
    add_self,
    apply_vertex,
    apply_vertex_backward,
    bias_gradient,
    l2_normalise,
    l2_normalise_backward,
    l2_normalise_dropout,
    self_gradient,
)

DTYPES = [np.float32, np.float64]
SHAPES = [(7, 5, 3), (1, 1, 1), (0, 4, 2), (64, 33, 17), (3, 200, 1)]  # n, f_in, f_out


def _draw(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _assert_product(got, subscripts, a, b, extra=0.0):
    """`got` is the product within (length + 2) roundings of the sum of absolute terms."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    want = np.einsum(subscripts, a, b) + extra
    size = np.einsum(subscripts, np.abs(a), np.abs(b)) + np.abs(extra)
    bound = (sum(a.shape) + 2) * np.finfo(got.dtype).eps * size
    assert got.shape == want.shape
    assert (np.abs(got - want) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_values(shape, dtype):
    n, f_in, f_out = shape
    h, w, bias = _draw((n, f_in), dtype), _draw((f_in, f_out), dtype, 1), _draw(f_out, dtype, 2)
    plain = apply_vertex(h, w)
    assert plain.dtype == dtype
    _assert_product(plain, "ni,io->no", h, w)
    with_bias = apply_vertex(h, w, bias)
    _assert_product(with_bias, "ni,io->no", h, w, bias.astype(np.float64))
    activated = apply_vertex(h, w, bias, relu=True)
    assert activated.dtype == dtype
    np.testing.assert_array_equal(activated, np.where(with_bias > 0, with_bias, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_values(shape, dtype):
    n, f_in, f_out = shape
    h, w, d_out = _draw((n, f_in), dtype), _draw((f_in, f_out), dtype, 1), _draw((n, f_out), dtype, 2)
    d_w, d_h = apply_vertex_backward(h, w, d_out)
    assert d_w.dtype == d_h.dtype == dtype
    _assert_product(d_w, "ni,no->io", h, d_out)
    _assert_product(d_h, "no,io->ni", d_out, w)
    only_d_w, nothing = apply_vertex_backward(h, w, d_out, need_d_h=False)
    assert nothing is None
    np.testing.assert_array_equal(only_d_w, d_w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_is_the_adjoint_of_forward(dtype):
    h, w, d_out = _draw((9, 6), dtype), _draw((6, 4), dtype, 1), _draw((9, 4), dtype, 2)
    d_w, d_h = apply_vertex_backward(h, w, d_out)
    inner = np.vdot(apply_vertex(h, w), d_out)
    tolerance = 200 * float(np.finfo(dtype).eps)
    assert np.vdot(h, d_h) == pytest.approx(inner, rel=tolerance, abs=tolerance)
    assert np.vdot(w, d_w) == pytest.approx(inner, rel=tolerance, abs=tolerance)


def test_no_rows_give_zero_gradients():
    h, w, d_out = np.empty((0, 3)), np.ones((3, 2)), np.empty((0, 2))
    d_w, d_h = apply_vertex_backward(h, w, d_out, d_w=np.full((3, 2), np.nan))
    np.testing.assert_array_equal(d_w, np.zeros((3, 2)))
    assert d_h.shape == (0, 3)
    np.testing.assert_array_equal(bias_gradient(d_out, np.full(2, np.nan)), np.zeros(2))
    assert apply_vertex(h, w, np.ones(2), relu=True).shape == (0, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_are_used_and_overwritten(dtype):
    h, w, bias, d_out = (_draw(s, dtype, k) for k, s in enumerate([(8, 5), (5, 3), (3,), (8, 3)]))
    out, d_w, d_h, d_b = (np.full(s, np.nan, dtype) for s in [(8, 3), (5, 3), (8, 5), (3,)])
    assert apply_vertex(h, w, bias, relu=True, out=out) is out
    np.testing.assert_array_equal(out, apply_vertex(h, w, bias, relu=True))
    got = apply_vertex_backward(h, w, d_out, d_w=d_w, d_h=d_h)
    assert got[0] is d_w and got[1] is d_h
    for buffer, fresh in zip(got, apply_vertex_backward(h, w, d_out), strict=True):
        np.testing.assert_array_equal(buffer, fresh)
    assert bias_gradient(d_out, d_b) is d_b
    np.testing.assert_array_equal(d_b, bias_gradient(d_out))


def test_inputs_are_not_changed():
    arrays = [_draw(s, np.float64, k) for k, s in enumerate([(8, 5), (5, 3), (3,), (8, 3)])]
    before = [a.copy() for a in arrays]
    h, w, bias, d_out = arrays
    apply_vertex(h, w, bias, relu=True)
    apply_vertex_backward(h, w, d_out)
    bias_gradient(d_out)
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_views_give_the_values_of_copies():
    h = _draw((20, 12), np.float32)[3:17:2, 1::2]
    w = _draw((4, 6), np.float32, 1).T
    d_out = _draw((7, 4), np.float32, 2)
    _assert_product(apply_vertex(h, w), "ni,io->no", h, w)
    d_w, d_h = apply_vertex_backward(h, w, d_out)
    _assert_product(d_w, "ni,no->io", h, d_out)
    _assert_product(d_h, "no,io->ni", d_out, w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_gradient_does_not_lose_digits_with_many_rows(dtype):
    d_out = (_draw((100_000, 3), np.float64) + 0.3).astype(dtype)
    got = bias_gradient(d_out)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, d_out.astype(np.float64).sum(axis=0), rtol=1e-11 + np.finfo(dtype).eps)


def test_relu_keeps_nan_visible():
    h = np.array([[np.nan], [-1.0], [2.0]])
    np.testing.assert_array_equal(apply_vertex(h, np.ones((1, 1)), relu=True), [[np.nan], [0.0], [2.0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_added_to_what_is_there(shape, dtype, monkeypatch):
    monkeypatch.setattr(dense, "_BLOCK", 50)  # a few rows at a time
    n, f_in, f_out = shape
    h, w, d_out = _draw((n, f_in), dtype), _draw((f_in, f_out), dtype, 1), _draw((n, f_out), dtype, 2)
    there = d_out.copy()
    assert apply_vertex(h, w, out=there, accumulate=True) is there
    _assert_product(there, "ni,io->no", h, w, d_out.astype(np.float64))
    d_h = h.copy()
    d_w, same = apply_vertex_backward(h, w, d_out, d_h=d_h, accumulate=True)
    assert same is d_h
    _assert_product(d_h, "no,io->ni", d_out, w, h.astype(np.float64))
    np.testing.assert_array_equal(d_w, apply_vertex_backward(h, w, d_out)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_norm_one(dtype):
    a = np.array([[3, 4, 0], [0, 0, 0], [1e-3, 0, 0]], dtype)
    np.testing.assert_allclose(l2_normalise(a), [[0.6, 0.8, 0], [0, 0, 0], [1, 0, 0]], rtol=1e-6)
    assert l2_normalise(a).dtype == dtype
    assert l2_normalise(a, out=a) is a
    assert l2_normalise(a[:0]).shape == (0, 3)
    dropped = l2_normalise_dropout(a, np.arange(3), 0.5, seed=1, epoch=1, layer=1)
    kept = dense.bias_relu_dropout(a, np.zeros(3, dtype), np.arange(3), 0.5, seed=1, epoch=1, layer=1)
    np.testing.assert_array_equal(dropped, kept)


def test_gradient_of_the_norm_by_finite_differences():
    a, d_out = _draw((5, 4), float), _draw((5, 4), float, 1)
    a[2] *= 1e-15  # below the smallest norm: divided by a constant
    got = l2_normalise_backward(d_out, a)
    for place in np.ndindex(a.shape):
        step = 1e-6 * np.linalg.norm(a[place[0]])
        up, down = a.copy(), a.copy()
        up[place] += step
        down[place] -= step
        want = ((l2_normalise(up) - l2_normalise(down)) * d_out).sum() / (2 * step)
        assert got[place] == pytest.approx(want, rel=1e-6, abs=1e-8)
    want = l2_normalise_backward(d_out, a)
    np.testing.assert_array_equal(l2_normalise_backward(d_out, a, out=d_out), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_vertex_itself_and_its_epsilon(dtype):
    x, own, eps = _draw((6, 3), dtype), _draw((6, 3), dtype, 1), np.array([0.25], dtype)
    np.testing.assert_allclose(add_self(x, own, eps), x + 1.25 * own, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(self_gradient(x, own), [(x * own).sum()], rtol=1e-5)
    assert self_gradient(x, own).dtype == dtype
    assert not self_gradient(x[:0], own[:0]).any()


H, W, B, D = np.ones((4, 3)), np.ones((3, 2)), np.ones(2), np.ones((4, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: apply_vertex(H, W.T), ValueError, r"h has 3 columns but w has 2 rows"),
        (lambda: apply_vertex(H[0], W), ValueError, r"h must have 2 dimension\(s\), got shape \(3,\)"),
        (lambda: apply_vertex(H, W, np.ones(3)), ValueError, r"bias must have shape \(2,\), got \(3,\)"),
        (lambda: apply_vertex(H, W, B[None]), ValueError, r"bias must have 1 dimension"),
        (lambda: apply_vertex(H, W, out=np.ones((4, 3))), ValueError, r"out must have shape \(4, 2\)"),
        (lambda: apply_vertex(H, W.astype("f4")), TypeError, "w must be float64 like the other arrays"),
        (lambda: apply_vertex(H, W, out=D.astype("f4")), TypeError, "out must be float64"),
        (lambda: apply_vertex(H.astype(int), W), TypeError, "h must be float32 or float64, got int64"),
        (lambda: apply_vertex(H.astype("f2"), W), TypeError, "h must be float32 or float64, got float16"),
        (lambda: apply_vertex([[1.0]], W), TypeError, "h must be a NumPy array, got list"),
        (lambda: apply_vertex_backward(H, [[1.0]], D), TypeError, "w must be a NumPy array, got list"),
        (lambda: apply_vertex_backward(H, W.T, D), ValueError, "h has 3 columns but w has 2 rows"),
        (lambda: apply_vertex_backward(H, W, H), ValueError, r"d_out must have shape \(4, 2\), got \(4, 3\)"),
        (lambda: apply_vertex_backward(H, W, D, d_w=D), ValueError, r"d_w must have shape \(3, 2\)"),
        (lambda: apply_vertex_backward(H, W, D, d_h=D), ValueError, r"d_h must have shape \(4, 3\)"),
        (lambda: apply_vertex_backward(H, W, D, d_h=H, need_d_h=False), ValueError, "need_d_h=False"),
        (
            lambda: apply_vertex(H, W, accumulate=True),
            ValueError,
            "accumulate=True adds to out, got out=None",
        ),
        (lambda: apply_vertex_backward(H, W, D, accumulate=True), ValueError, "adds to d_h, got d_h=None"),
        (lambda: l2_normalise(B), ValueError, r"a must have 2 dimension\(s\)"),
        (lambda: l2_normalise(D, out=H), ValueError, r"out must have shape \(4, 2\), got \(4, 3\)"),
        (lambda: l2_normalise_backward(D, H), ValueError, r"a must have shape \(4, 2\), got \(4, 3\)"),
        (lambda: add_self(D, H, B[:1]), ValueError, r"own must have shape \(4, 2\), got \(4, 3\)"),
        (lambda: add_self(D, D, B), ValueError, r"eps must have shape \(1,\), got \(2,\)"),
        (lambda: self_gradient(D, H), ValueError, r"own must have shape \(4, 2\), got \(4, 3\)"),
        (lambda: bias_gradient(B), ValueError, r"d_out must have 2 dimension\(s\)"),
        (lambda: bias_gradient(D, np.ones(3)), ValueError, r"out must have shape \(2,\), got \(3,\)"),
        (lambda: bias_gradient(D, B.astype("f4")), TypeError, "out must be float64"),
    ],
)
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
