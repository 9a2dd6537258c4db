"""Rows that are scaled before a gather, and products with few columns, as layers use them."""

from __future__ import annotations

import numpy as np
import pytest

import cython_kernels as ck
from cython_kernels import dispatch
from dorylus_hpc.nn.gcn import gcn_program
from dorylus_hpc.nn.layers import Choices
from dorylus_hpc.nn.operands import (
    EdgeOperand,
    is_narrow,
    multiply,
    multiply_backward,
    scale_rows,
    weight_gradient,
)
from dorylus_hpc.nn.program import Pass

COMMON = {
    "n_features": 6, "hidden": [5, 5], "n_classes": 9, "sparse_features": False, "dropout": 0.5,
    "input_dropout": 0.0, "weight_decay": 0.0, "decay_scope": "all", "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("width", [5, 16, 41])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_gather_of_scaled_rows(weighted, width, dtype):
    rng, n, n_ghosts = np.random.default_rng(width), 60, 13
    degree = rng.integers(0, 12, n)
    indptr = np.concatenate([[0], np.cumsum(degree)])
    indices = rng.integers(0, n + n_ghosts, indptr[-1]).astype(np.int32)
    row, source = (rng.uniform(0.1, 1, size).astype(dtype) for size in (n, n + n_ghosts))
    values = rng.uniform(0.5, 2, len(indices)).astype(dtype) if weighted else None
    edges = EdgeOperand(indptr, indices, values, row, source)
    x = rng.standard_normal((n + n_ghosts, width)).astype(dtype)
    want, got = np.zeros((2, n, width), dtype)
    edges.aggregate(x, want, (5, n))
    scale_rows(x, source)
    edges.aggregate(x, got, (5, n), scaled=True)
    assert np.abs(want).max() > 0.1
    if weighted:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 if dtype == "f4" else 1e-14)
    else:
        np.testing.assert_array_equal(got, want)


def scaled(order="auto", **changes):
    """What a GCN of three layers scales, by the direction of the gather."""
    model = gcn_program(**{**COMMON, **changes}, choices=Choices(order=order))
    ops = [
        op for stage in (*model.forward, *model.backward) if stage.ops for op in stage.ops(Pass(1, True, 1))
    ]
    return {tuple(op[2]) for op in ops if op[0] == "scale_rows"}


def test_what_is_scaled_is_what_is_gathered():
    into, back = "scale_in", "scale_out"
    assert scaled() == {("Y2", into), ("H2", into), ("dM3", back), ("dH2", back)}
    first = {("H1", into), ("H2", into), ("dM2", back), ("dM3", back)}
    assert scaled("aggregate-first") == first
    later = {("Y2", into), ("Y3", into), ("dH1", back), ("dH2", back), ("dH3", back)}
    assert scaled("transform-first") == later  # Y1 is made on the server


def test_only_what_has_a_scale_is_scaled():
    """The mean of GraphSAGE divides by the degree of the destination: that of the source in the backward."""
    assert scaled("aggregate-first", scales_sources=False) == {("dM2", "scale_out"), ("dM3", "scale_out")}
    assert {name for _, name in scaled("transform-first", scales_sources=False)} == {"scale_out"}


def test_what_others_read_is_not_scaled():
    """A residual adds H1 in layer 2, and dH2 to dH1; jumping knowledge joins H1 and H2."""
    into, back = "scale_in", "scale_out"
    assert scaled("aggregate-first", residual=True) == {("H2", into), ("dM2", back), ("dM3", back)}
    assert scaled("transform-first", residual=True) == {("Y2", into), ("Y3", into), ("dH3", back)}
    assert scaled("aggregate-first", jumping="cat") == {("dM2", back), ("dM3", back)}


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("shape", [(80, 16), (80, 24), (80, 64), (16, 7), (7, 80)])
def test_products(shape, dtype):
    rng = np.random.default_rng(sum(shape))
    h, w, d_out = (rng.standard_normal(s).astype(dtype) for s in ((50, shape[0]), shape, (50, shape[1])))
    exact = [np.asarray(one, np.float64) for one in (h, w, d_out)]
    out, d_w, d_h = np.empty_like(d_out), np.empty_like(w), np.empty_like(h)
    for level in dispatch.available():
        with dispatch.using(level):
            for array in (out, d_w, d_h):
                array.fill(np.nan)
            multiply(h, w, out)
            multiply_backward(h, w, d_out, d_w, d_h)
        limit = 2e-4 if dtype == "f4" else 1e-12
        np.testing.assert_allclose(out, exact[0] @ exact[1], rtol=0, atol=limit)
        np.testing.assert_allclose(d_w, exact[0].T @ exact[2], rtol=0, atol=limit)
        np.testing.assert_allclose(d_h, exact[2] @ exact[1].T, rtol=0, atol=limit)


@pytest.mark.skipif("avx512" not in dispatch.available(), reason="this CPU has no AVX-512")
def test_the_kernel_is_used_where_it_is_faster():
    rng = np.random.default_rng(0)
    h, w, d_out = (rng.standard_normal(s).astype("f4") for s in ((300, 602), (602, 16), (300, 16)))
    out, d_w = np.empty_like(d_out), np.empty_like(w)
    multiply(h, w, out)
    weight_gradient(h, d_out, d_w)
    np.testing.assert_array_equal(out, ck.narrow_product(h, w))
    np.testing.assert_array_equal(d_w, ck.narrow_product_adjoint(h, d_out))
    assert not is_narrow(h, 49, least=1) and not is_narrow(h, 16, least=603)
    with dispatch.using("avx2"):
        assert not is_narrow(h, 16, least=1)
