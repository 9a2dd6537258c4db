"""Moving rows: pack, unpack, scatter-add."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cython_kernels as ck
from cython_kernels import dispatch, reference
from cython_kernels.layout import empty_tiles

DTYPES = (np.float32, np.float64)
THREADS = (1, 2, 3)
WIDTHS = [0, 1, 3, 15, 16, 17, 64, 100, 129]


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(DTYPES))
    n, f = draw(st.integers(1, 60)), draw(st.sampled_from([0, 1, 3, 16, 17, 50]))
    m = draw(st.integers(0, 120))
    low = draw(st.integers(0, n - 1))  # like ghosts, all targets may be at the end
    index = rng.integers(low, n, m).astype(np.int32)
    return rng.standard_normal((n, f)).astype(dtype), index, rng.standard_normal((m, f)).astype(dtype)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(THREADS), st.booleans())
def test_all_three_agree_with_their_twins(case, threads, validate):
    matrix, index, rows = case
    options = {"num_threads": threads, "validate": validate}
    np.testing.assert_array_equal(ck.pack_rows(matrix, index, **options), reference.pack_rows(matrix, index))
    for name in ("unpack_rows", "scatter_add_rows"):
        got = getattr(ck, name)(rows, index, matrix.copy(), **options)
        want = getattr(reference, name)(rows, index, matrix.copy())
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_results_arrive_in_out():
    x, index = np.arange(12.0).reshape(6, 2), np.array([5, 0], np.int32)
    buffer = np.empty((2, 2))
    assert ck.pack_rows(x, index, buffer) is buffer
    out = np.zeros((6, 2))
    assert ck.unpack_rows(buffer, index, out) is out
    np.testing.assert_array_equal(out[[5, 0]], x[[5, 0]])
    assert ck.scatter_add_rows(buffer, index, out) is out
    np.testing.assert_array_equal(out[[5, 0]], 2 * x[[5, 0]])
    np.testing.assert_array_equal(out[1:5], 0)


@pytest.mark.parametrize("threads", THREADS)
def test_repeated_targets(threads):
    rows = np.arange(1.0, 6.0).repeat(40).reshape(5, 40)
    index = np.array([2, 1, 2, 1, 2], np.int32)
    unpacked = ck.unpack_rows(rows, index, np.zeros((4, 40)), num_threads=threads)
    np.testing.assert_array_equal(unpacked[:, 39], [0, 4, 5, 0])
    added = ck.scatter_add_rows(rows, index, np.ones((4, 40)), num_threads=threads)
    np.testing.assert_array_equal(added[:, 39], [1, 7, 10, 1])


def test_packing_is_the_adjoint_of_adding():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 5)), rng.standard_normal((70, 5))
    index = rng.integers(0, 30, 70).astype(np.int32)
    forward = ck.pack_rows(x, index)
    backward = ck.scatter_add_rows(y, index, np.zeros_like(x))
    assert (forward * y).sum() == pytest.approx((x * backward).sum(), rel=1e-12)


def test_bits_are_copied():
    x = np.array([[np.nan, -0.0, np.inf]], np.float32)
    packed = ck.pack_rows(x, np.zeros(3, np.int32), num_threads=2)
    np.testing.assert_array_equal(packed.view(np.uint32), np.repeat(x.view(np.uint32), 3, axis=0))


@settings(max_examples=100)
@given(
    n=st.integers(1, 40),
    f=st.sampled_from(WIDTHS),
    kinds=st.sampled_from(
        [
            (np.float32, np.float32),
            (np.float64, np.float64),
            (np.uint16, np.uint16),
            (np.float32, np.uint16),
            (np.uint16, np.float32),
        ]
    ),
    width=st.sampled_from([0, None, 1, 5, 32]),
    order=st.sampled_from(["random", "increasing"]),
    draw=st.integers(0, 2**32 - 1),
)
def test_layouts_and_conversions(n, f, kinds, width, order, draw):
    """Width 0 is row-major; None, tiles of a cache line."""
    rng = np.random.default_rng(draw)

    def make(rows, dtype):
        values = (10 * rng.standard_normal((rows, f))).astype(np.float32)
        values[rng.random(values.shape) < 0.05] = np.nan
        return ck.to_bfloat16(values) if dtype == np.uint16 else values.astype(dtype)

    def laid_out(x):
        return x.copy() if width == 0 else ck.to_tiles(x, empty_tiles(*x.shape, x.dtype, width))

    def stored(x):
        return ck.from_tiles(x) if isinstance(x, ck.Tiles) else x

    if order == "random":
        index = rng.integers(0, n, rng.integers(0, 2 * n)).astype(np.int32)
    else:
        index = np.flatnonzero(rng.random(n) < 0.6).astype(np.int32)
    matrix, before, rows = make(n, kinds[0]), make(n, kinds[1]), make(len(index), kinds[0])
    buffer = np.zeros((len(index), f), kinds[1])
    packed = reference.pack_rows(laid_out(matrix), index, buffer.copy())
    unpacked = stored(reference.unpack_rows(rows, index, laid_out(before)))
    np.testing.assert_array_equal(packed, reference.pack_rows(matrix, index, buffer.copy()))
    for level in dispatch.available():
        with dispatch.using(level):
            for threads in THREADS:
                got = ck.pack_rows(laid_out(matrix), index, buffer.copy(), num_threads=threads)
                np.testing.assert_array_equal(got, packed)
                got = ck.unpack_rows(rows, index, laid_out(before), num_threads=threads)
                np.testing.assert_array_equal(stored(got), unpacked)
                if kinds[0] == kinds[1] != np.uint16:
                    got = ck.scatter_add_rows(rows, index, before.copy(), num_threads=threads)
                    want = reference.scatter_add_rows(rows, index, before.copy())
                    np.testing.assert_array_equal(got, want)


def test_a_buffer_is_made_in_the_dtype_of_the_matrix():
    bits = ck.to_bfloat16(np.arange(6, dtype=np.float32).reshape(3, 2))
    packed = ck.pack_rows(ck.to_tiles(bits), np.array([2, 2], np.int32))
    assert packed.dtype == np.uint16
    np.testing.assert_array_equal(ck.from_bfloat16(packed), [[4, 5], [4, 5]])
