"""What the binary says about itself is what it does."""

from __future__ import annotations

import numpy as np
import pytest

import cython_kernels as ck
from cython_kernels import _activation, _aggregate, _attention, _dropout_masks, _loss, _rows, _transpose


def test_build_info():
    info = ck.build_info()
    assert info.keys() == {"bounds_check", "openmp"}
    assert all(isinstance(value, bool) for value in info.values())


@pytest.mark.skipif(not ck.build_info()["bounds_check"], reason="not built with DORYLUS_BOUNDS_CHECK=1")
@pytest.mark.parametrize("bad", [-1, 2])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_bounds_checked_build_checks_behind_the_doors(bad, threads):
    none, x, out = np.empty(0), np.ones((2, 3)), np.zeros((2, 3))
    indptr, index = np.array([0, 1, 2]), np.array([0, bad], np.int32)
    scratch = np.empty((0, 0))
    with pytest.raises(IndexError):
        _aggregate.gather(
            indptr, index, none, x[None], out[None], 3, none, none, 0.0, False, False, False, 0, 2, scratch,
            0, threads,
        )  # fmt: skip
    with pytest.raises(IndexError):
        _aggregate.gather_max(
            indptr, index, x[None], out, np.empty((0, 0), np.int32), 0, 2, scratch, 0, threads
        )
    with pytest.raises(IndexError):
        _aggregate.gather_max_adjoint(4 * index[:, None].repeat(3, 1) + 4, x, out, False, 0, 2, threads)
    with pytest.raises(IndexError):
        _aggregate.gather_adjoint(
            indptr, index, none, x, out, none, none, 0.0, False, False, 0, 2, 0, threads
        )
    with pytest.raises(IndexError):
        _rows.pack_rows(x[None], index, out, 0, threads)
    with pytest.raises(IndexError):
        _rows.unpack_rows(x, index, out[None], 0, threads)
    with pytest.raises(IndexError):
        _rows.scatter_add_rows(x, index, out, 0, threads)
    with pytest.raises(IndexError):
        _activation.bias_relu_dropout(
            x, none, np.zeros(1, np.int64), none, out[None], True, 1, 1, 5, 1.0, False, 0, threads
        )
    with pytest.raises(IndexError):
        entries = np.array([0, 1, 4 * bad])
        _dropout_masks.dropout_csr(
            entries, index, np.ones(2), np.arange(2), np.ones(2), 1, 1, 5, 1.0, 0, threads
        )
    with pytest.raises(IndexError):
        _transpose.transpose_csr(
            indptr, index, np.zeros(3, np.int64), np.zeros(2, np.int32), np.zeros(2, np.int64),
            np.zeros((threads, 2), np.int64),
        )  # fmt: skip
    ids, masks = np.empty(0, np.int64), (0, 0, 1.0, 0, 2, 0, threads)
    with pytest.raises(IndexError):
        _attention.forward(indptr, index, x, x, x, out, *[np.empty((0, 0))] * 4, 0.2, ids, ids, *masks)
    with pytest.raises(IndexError):
        _attention.backward(
            indptr, index, x, x, np.ones((2, 4, 3)), x, out, out.copy(), 0.2, ids, ids, *masks
        )
    with pytest.raises(IndexError):
        _attention.weights(indptr, index, x, x, out, 0.2, ids, ids, *masks)
    with pytest.raises(IndexError):
        _loss.softmax_cross_entropy(x, 4 * index, np.ones(2, np.uint8), np.empty(2), out, True, 1.0, threads)
