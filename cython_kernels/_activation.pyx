"""Pieces of rows for the passes of `activation` and `dropout_masks`; the door has checked everything.

A matrix of any layout comes as [tiles, rows, columns of a tile]: a row-major one is one tile. An empty
array stands for an absent one. The passes themselves are C++ (simd/rowwise.hpp).
"""

from cython.parallel cimport prange
from libc.stdint cimport int64_t, uint32_t, uint64_t

from ._rowwise cimport (
    EluBack, RowPass, RowPassBack, activate_rows, activate_rows_back, elu_rows, elu_rows_back, make_mask,
)
from ._types cimport cut, pieces, real_t, stored_t

cdef extern from *:
    const int DORYLUS_BOUNDS_CHECK

ctypedef fused kept_t:  # `stored_t` once more: two matrices of one call may be stored differently
    float
    double
    unsigned short


def bias_relu_dropout(
    const real_t[:, ::1] z,
    const real_t[::1] bias,
    const int64_t[::1] gids,
    const real_t[::1] row_scale,
    stored_t[:, :, ::1] out,
    bint relu,
    uint64_t key,
    uint32_t epoch,
    uint64_t threshold,
    double scale,
    bint stream,
    int level,
    int num_threads,
):
    """Threads take equal pieces of the rows. `gids` is not read if nothing is dropped."""
    cdef RowPass[stored_t, real_t] work
    cdef Py_ssize_t k
    cdef Py_ssize_t n = z.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if n == 0 or z.shape[1] == 0:
        return
    if DORYLUS_BOUNDS_CHECK and threshold > 0 and gids.shape[0] < n:
        raise IndexError(f"Out of bounds: {gids.shape[0]} ids for {n} rows")
    work.x = &z[0, 0]
    work.columns = z.shape[1]
    work.bias = &bias[0] if bias.shape[0] > 0 else NULL
    work.gids = &gids[0] if gids.shape[0] > 0 else NULL
    work.row_scale = &row_scale[0] if row_scale.shape[0] > 0 else NULL
    work.relu = relu
    work.scale = <real_t>scale
    work.mask = make_mask(key, epoch, threshold)
    work.out = &out[0, 0, 0]
    work.out_width = out.shape[2]
    work.out_tile = out.shape[1] * out.shape[2]
    work.stream = stream
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        activate_rows(level, work, cut(n, parts, k), cut(n, parts, k + 1))


def relu_dropout_backward(
    const real_t[:, ::1] d_out,
    const kept_t[:, :, ::1] activated,
    const real_t[::1] row_scale,
    stored_t[:, :, ::1] out,
    double scale,
    bint stream,
    int level,
    int num_threads,
):
    """Threads take equal pieces of the rows."""
    cdef RowPassBack[kept_t, stored_t, real_t] work
    cdef Py_ssize_t k
    cdef Py_ssize_t n = d_out.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if n == 0 or d_out.shape[1] == 0:
        return
    work.d_out = &d_out[0, 0]
    work.columns = d_out.shape[1]
    work.activated = &activated[0, 0, 0]
    work.activated_width = activated.shape[2]
    work.activated_tile = activated.shape[1] * activated.shape[2]
    work.row_scale = &row_scale[0] if row_scale.shape[0] > 0 else NULL
    work.scale = <real_t>scale
    work.out = &out[0, 0, 0]
    work.out_width = out.shape[2]
    work.out_tile = out.shape[1] * out.shape[2]
    work.stream = stream
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        activate_rows_back(level, work, cut(n, parts, k), cut(n, parts, k + 1))


def bias_elu_dropout(
    const real_t[:, ::1] x,
    const real_t[::1] bias,
    const int64_t[::1] gids,
    real_t[:, ::1] out,
    uint64_t key,
    uint32_t epoch,
    uint64_t threshold,
    double scale,
    int level,
    int num_threads,
):
    """Threads take equal pieces of the rows. `gids` is not read if nothing is dropped."""
    cdef RowPass[real_t, real_t] work
    cdef Py_ssize_t k
    cdef Py_ssize_t n = x.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if n == 0 or x.shape[1] == 0:
        return
    if DORYLUS_BOUNDS_CHECK and threshold > 0 and gids.shape[0] < n:
        raise IndexError(f"Out of bounds: {gids.shape[0]} ids for {n} rows")
    work.x = &x[0, 0]
    work.columns = x.shape[1]
    work.bias = &bias[0] if bias.shape[0] > 0 else NULL
    work.gids = &gids[0] if gids.shape[0] > 0 else NULL
    work.scale = <real_t>scale
    work.mask = make_mask(key, epoch, threshold)
    work.out = &out[0, 0]
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        elu_rows(level, work, cut(n, parts, k), cut(n, parts, k + 1))


def elu_dropout_backward(
    const real_t[:, ::1] d_h,
    const real_t[:, ::1] h,
    const int64_t[::1] gids,
    real_t[:, ::1] out,
    uint64_t key,
    uint32_t epoch,
    uint64_t threshold,
    double scale,
    double keep,
    int level,
    int num_threads,
):
    """Threads take equal pieces of the rows. `gids` is not read if nothing is dropped."""
    cdef EluBack[real_t] work
    cdef Py_ssize_t k
    cdef Py_ssize_t n = d_h.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if n == 0 or d_h.shape[1] == 0:
        return
    if DORYLUS_BOUNDS_CHECK and threshold > 0 and gids.shape[0] < n:
        raise IndexError(f"Out of bounds: {gids.shape[0]} ids for {n} rows")
    work.d_out = &d_h[0, 0]
    work.activated = &h[0, 0]
    work.columns = d_h.shape[1]
    work.gids = &gids[0] if gids.shape[0] > 0 else NULL
    work.scale = <real_t>scale
    work.keep = <real_t>keep
    work.mask = make_mask(key, epoch, threshold)
    work.out = &out[0, 0]
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        elu_rows_back(level, work, cut(n, parts, k), cut(n, parts, k + 1))
