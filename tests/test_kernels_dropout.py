"""Counter-based dropout: the generator, and masks that depend on the vertex alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.sparse import csr_array

import cython_kernels as ck
from cython_kernels import dispatch, reference
from cython_kernels.dropout_masks import mask_key

DTYPES = (np.float32, np.float64)
THREADS = (1, 2, 3)
KEY = {"seed": 3, "epoch": 7, "layer": 1}

# kat_vectors of the Random123 library, philox4x32 with 10 rounds: counter, key, words.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize("philox", [ck.philox4x32, reference.philox4x32])
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_published_known_answers(philox, counter, key, answer):
    for level in dispatch.available():
        with dispatch.using(level):
            assert philox(words(counter), words(key)) == words(answer)


def test_the_key_is_splitmix64():
    # The first output of splitmix64 with seed 0, as published with the algorithm.
    assert mask_key(0.5, 0, 0, 0).key == 0xE220A8397B1DCDAF
    assert len({mask_key(0.5, seed, 0, layer).key for seed in range(50) for layer in range(20)}) == 1000


def test_a_mask_is_made_of_the_documented_words():
    gid, p, key = -5, 0.3, mask_key(0.3, **KEY)
    x = np.ones((1, 11))
    got = ck.dropout(x, np.array([gid]), p, **KEY)[0] != 0
    low, high = gid % 2**32, (gid >> 32) % 2**32
    for column in range(11):
        block = ck.philox4x32((column // 4, KEY["epoch"], low, high), (key.key % 2**32, key.key >> 32))
        assert got[column] == (block[column % 4] >= round(p * 2**32))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**32 - 1),
    layer=st.integers(0, 2**32 - 1),
    p=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 1e-12, 1e-12])),
    shape=st.tuples(st.integers(0, 20), st.sampled_from([0, 1, 3, 4, 5, 63, 64, 65, 130])),
    dtype=st.sampled_from(DTYPES),
    draw=st.integers(0, 2**32 - 1),
)
def test_dense_agrees_with_its_twin(seed, epoch, layer, p, shape, dtype, draw):
    rng = np.random.default_rng(draw)
    x = rng.standard_normal(shape).astype(dtype)
    gids = rng.integers(-(2**63), 2**63, shape[0])
    key = {"seed": seed, "epoch": epoch, "layer": layer}
    want = reference.dropout(x, gids, p, **key)
    for level in dispatch.available():
        with dispatch.using(level):
            for threads in THREADS:
                np.testing.assert_array_equal(ck.dropout(x, gids, p, num_threads=threads, **key), want)
    in_place = x.copy()
    assert ck.dropout(in_place, gids, p, out=in_place, **key) is in_place
    np.testing.assert_array_equal(in_place, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("width", [3, 300])
def test_sparse_agrees_with_dense_and_its_twin(dtype, is_sorted, p, width):
    rng = np.random.default_rng(5)
    dense = rng.standard_normal((40, width)).astype(dtype)
    dense[rng.random(dense.shape) < 0.6] = 0
    dense[[0, 17, 39]] = 0
    sparse = csr_array(dense)
    indptr, indices, data = sparse.indptr.astype(np.int64), sparse.indices.astype(np.int32), sparse.data
    if not is_sorted:
        for start, stop in pairwise(indptr):
            order = start + rng.permutation(stop - start)
            indices[start:stop], data[start:stop] = indices[order], data[order]
    gids = rng.permutation(40)
    want = ck.dropout(dense, gids, p, **KEY)
    for threads in THREADS:
        for level in dispatch.available():
            with dispatch.using(level):
                other = ck.dropout_csr(indptr, indices, data, gids, p, num_threads=threads, **KEY)
            if level == "baseline":
                dropped = other
            np.testing.assert_array_equal(other.view(np.uint8), dropped.view(np.uint8))
        np.testing.assert_array_equal(
            csr_array((dropped, indices, indptr), shape=dense.shape).toarray(), want
        )
    np.testing.assert_array_equal(dropped, reference.dropout_csr(indptr, indices, data, gids, p, **KEY))
    in_place = data.copy()
    assert ck.dropout_csr(indptr, indices, in_place, gids, p, out=in_place, validate=False, **KEY) is in_place
    np.testing.assert_array_equal(in_place, dropped)


def test_sparse_without_rows_or_entries():
    none, empty = np.zeros(1, np.int64), np.zeros(0, np.int32)
    assert ck.dropout_csr(none, empty, np.zeros(0), np.zeros(0, np.int64), 0.5, **KEY).shape == (0,)
    indptr = np.zeros(4, np.int64)
    assert ck.dropout_csr(indptr, empty, np.zeros(0), np.arange(3), 0.5, num_threads=2, **KEY).shape == (0,)


def test_masks_do_not_depend_on_order_company_or_dtype():
    rng = np.random.default_rng(6)
    x, gids = rng.standard_normal((90, 37)), rng.permutation(1000)[:90]
    whole = ck.dropout(x, gids, 0.4, **KEY)
    order = rng.permutation(90)
    np.testing.assert_array_equal(ck.dropout(x[order], gids[order], 0.4, **KEY), whole[order])
    np.testing.assert_array_equal(ck.dropout(x[20:25], gids[20:25], 0.4, **KEY), whole[20:25])
    single = ck.dropout(x.astype(np.float32), gids, 0.4, **KEY)
    np.testing.assert_array_equal(single != 0, whole != 0)


@pytest.mark.parametrize("change", [{"seed": 4}, {"epoch": 8}, {"layer": 2}])
def test_masks_of_other_keys_are_unrelated(change):
    x, gids = np.ones((400, 100)), np.arange(400)
    first = ck.dropout(x, gids, 0.5, **KEY) != 0
    second = ck.dropout(x, gids, 0.5, **{**KEY, **change}) != 0
    assert stats.binomtest(int((first == second).sum()), x.size, 0.5).pvalue > 1e-6


@pytest.mark.parametrize("p", [0.01, 0.25, 0.5, 0.9])
def test_statistics(p):
    x, gids = np.ones((2000, 64)), np.arange(2000)
    kept = ck.dropout(x, gids, p, **KEY) != 0
    assert stats.binomtest(int(kept.sum()), kept.size, 1 - p).pvalue > 1e-6
    for sums, trials in ((kept.sum(axis=0), 2000), (kept.sum(axis=1), 64)):
        chi_square = ((sums - trials * (1 - p)) ** 2 / (trials * p * (1 - p))).sum()
        assert 1e-6 < stats.chi2.cdf(chi_square, len(sums)) < 1 - 1e-6
    neighbours = (kept[:, 1:] & kept[:, :-1]).mean()
    assert neighbours == pytest.approx((1 - p) ** 2, abs=0.01)


def test_kept_values_are_scaled_and_dropped_ones_vanish():
    x = np.full((300, 20), 3.0, np.float32)
    dropped = ck.dropout(x, np.arange(300), 0.25, **KEY)
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(3) * np.float32(1 / 0.75)}
    poisoned = np.where(dropped == 0, np.float32(np.nan), x)
    np.testing.assert_array_equal(ck.dropout(poisoned, np.arange(300), 0.25, **KEY), dropped)


def test_probability_zero_copies_and_nearly_one_drops_all():
    x, gids = np.array([[np.nan, -0.0, np.inf]]), np.array([9])
    copied = ck.dropout(x, gids, 0.0, **KEY)
    assert copied is not x
    np.testing.assert_array_equal(copied.view(np.uint64), x.view(np.uint64))
    assert not ck.dropout(np.ones((1, 5000)), gids, 1 - 1e-15, **KEY).any()


def test_dropout_is_its_own_adjoint():
    rng = np.random.default_rng(8)
    x, y, gids = rng.standard_normal((30, 9)), rng.standard_normal((30, 9)), np.arange(30)
    left = (ck.dropout(x, gids, 0.5, **KEY) * y).sum()
    assert left == pytest.approx((x * ck.dropout(y, gids, 0.5, **KEY)).sum(), rel=1e-12)
