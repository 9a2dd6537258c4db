"""The gradient of the maximum as a gather equals the scattered one, and its slow twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cython_kernels as ck
from cython_kernels import dispatch, reference


def csr(rng, n_rows, n_cols, entries):
    """Rows with sorted, repeated entries, some rows empty."""
    rows = np.sort(rng.integers(0, n_rows, entries))
    indices = rng.integers(0, n_cols, entries).astype(np.int32)
    order = np.lexsort((indices, rows))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n_rows))])
    return indptr, indices[order]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["f4", "f8"]))
def test_pulled_equals_scattered_and_the_twin(seed, dtype):
    rng = np.random.default_rng(seed)
    n, m, f = (int(rng.integers(1, high)) for high in (40, 40, 200))
    indptr, indices = csr(rng, n, m, int(rng.integers(0, 150)))
    x = np.round(2 * rng.standard_normal((m, f))).astype(dtype)  # ties
    source = np.empty((n, f), np.int32)
    out = ck.gather_max(indptr, indices, x, source=source)
    d_out = rng.standard_normal(out.shape).astype(dtype)
    ids = rng.permutation(2**31 - 1 - np.arange(m))
    packed = ck.pack_max(source, d_out, ids, num_threads=2)
    np.testing.assert_array_equal(
        packed.view(np.uint8), reference.pack_max(source, d_out, ids).view(np.uint8)
    )
    turned, back, _ = ck.transpose_csr(indptr, indices, n_cols=m)
    want = ck.gather_max_adjoint(source, d_out, n_sources=m)
    got = ck.gather_max_pull(turned, back, packed, ids)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        got, reference.gather_max_pull(turned, back, packed, ids), rtol=1e-5, atol=1e-6
    )
    for level in dispatch.available():
        with dispatch.using(level):
            np.testing.assert_array_equal(ck.gather_max_pull(turned, back, packed, ids), got)
    some = np.full_like(got, 7)
    ck.gather_max_pull(turned, back, packed, ids, some, rows=(m // 2, m), num_threads=2)
    np.testing.assert_array_equal(some[: m // 2], 7)
    np.testing.assert_array_equal(some[m // 2 :], got[m // 2 :])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads):
    rng = np.random.default_rng(3)
    indptr, indices = csr(rng, 700, 700, 30_000)
    source = np.empty((700, 33), np.int32)
    ck.gather_max(indptr, indices, rng.standard_normal((700, 33)), source=source)
    packed = ck.pack_max(source, rng.standard_normal(source.shape), np.arange(700), num_threads=threads)
    turned, back, _ = ck.transpose_csr(indptr, indices, n_cols=700)
    got = ck.gather_max_pull(turned, back, packed, np.arange(700), num_threads=threads)
    np.testing.assert_array_equal(got, ck.gather_max_pull(turned, back, packed, np.arange(700)))


def test_there_may_be_room_for_more_rows():
    """Of ghosts, which come from elsewhere."""
    source, d_out = np.array([[1, -1]], np.int32), np.array([[2.0, 3.0]])
    packed = np.full((2, 4), 9.0)
    ck.pack_max(source, d_out, np.array([5, 6]), packed)
    assert packed[0, :2].tolist() == [2.0, 3.0] and packed.view(np.int64)[0, 2:].tolist() == [6, -1]
    assert (packed[1] == 9).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.array([0, 2**31])}, r"ids\[1\] = 2147483648 is outside"),
        ({"source": np.array([[2]], np.int32)}, r"source\[0, 0\] = 2 is outside -1..1"),
        ({"out": np.zeros((0, 2))}, "out must have the 1 rows of d_out at least, got 0"),
    ],
)
def test_what_packing_refuses(change, message):
    right = {"source": np.array([[0]], np.int32), "d_out": np.ones((1, 1)), "ids": np.array([3, 4])}
    with pytest.raises(ValueError, match=message):
        ck.pack_max(**right | change)


def test_packed_rows_have_two_halves():
    with pytest.raises(ValueError, match=r"even number of columns, got shape \(1, 3\)"):
        ck.gather_max_pull(np.array([0, 0]), np.empty(0, np.int32), np.ones((1, 3)), np.array([0]))


@pytest.mark.parametrize("bad", [-1, 2**31, 2**32 + 7])
def test_ids_of_31_bits(bad):
    """-1 would be given what came from nobody, and 2**32 + 7 what came from 7."""
    turned, back = np.array([0, 1, 2]), np.zeros(2, np.int32)
    packed = ck.pack_max(np.array([[-1, 0]], np.int32), np.array([[2.0, 3.0]], np.float32), np.array([7]))
    assert ck.gather_max_pull(turned, back, packed, np.array([7, 8])).tolist() == [[0, 3], [0, 0]]
    with pytest.raises(ValueError, match=rf"ids\[1\] = {bad} is outside 0..2147483647"):
        ck.gather_max_pull(turned, back, packed, np.array([7, bad]))
