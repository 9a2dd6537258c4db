"""What the binary says about itself is what it does."""

from __future__ import annotations

import numpy as np
import pytest

import cython_kernels as ck
from cython_kernels import _aggregate, _loss, _rows


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
        _aggregate.gather_max(indptr, index, x[None], out, np.empty((0, 0), np.int32), 0, 2, 0, threads)
    with pytest.raises(IndexError):
        _aggregate.gather_max_adjoint(4 * index[:, None].repeat(3, 1) + 4, x, out, False, 0, 2, threads)
    with pytest.raises(IndexError):
        _aggregate.gather_adjoint(
            indptr, index, none, x, out, none, none, 0.0, False, False, 0, 2, 0, threads
        )
    for kernel in (_rows.pack_rows, _rows.unpack_rows, _rows.scatter_add_rows):
        with pytest.raises(IndexError):
            kernel(x, index, out, threads)
    with pytest.raises(IndexError):
        _loss.softmax_cross_entropy(x, 4 * index, np.ones(2, np.uint8), np.empty(2), out, True, 1.0, threads)
