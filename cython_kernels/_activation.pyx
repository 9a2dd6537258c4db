"""Loops of `activation`: what follows a dense product, in one pass over the rows."""

from cython.parallel cimport prange
from libc.stdint cimport int64_t, uint32_t, uint64_t

from ._philox cimport Mask, drop_row, make_mask
from ._types cimport cut, pieces, real_t


def bias_relu_dropout(
    const real_t[:, ::1] z,
    const real_t[::1] bias,
    const int64_t[::1] gids,
    real_t[:, ::1] out,
    bint relu,
    uint64_t key,
    uint32_t epoch,
    uint64_t threshold,
    double scale,
    int num_threads,
):
    """Threads take equal pieces of the rows; an empty `bias` is none. `gids` is not read if p = 0."""
    cdef Py_ssize_t k
    cdef Py_ssize_t n = z.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    cdef Mask mask = make_mask(key, epoch, threshold)
    if z.shape[1] == 0:
        return
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        activate_piece(z, bias, gids, out, relu, mask, <real_t>scale, cut(n, parts, k), cut(n, parts, k + 1))


cdef int activate_piece(
    const real_t[:, ::1] z,
    const real_t[::1] bias,
    const int64_t[::1] gids,
    real_t[:, ::1] out,
    bint relu,
    Mask mask,
    real_t scale,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t i, j
    cdef Py_ssize_t f = z.shape[1]
    cdef real_t value
    for i in range(start, stop):
        if bias.shape[0] > 0:
            for j in range(f):
                out[i, j] = z[i, j] + bias[j]
        else:
            for j in range(f):
                out[i, j] = z[i, j]
        if relu:
            for j in range(f):
                value = out[i, j]
                out[i, j] = 0 if value <= 0 else value  # this way round a NaN stays visible
        if mask.threshold > 0 or scale != 1:
            drop_row(&out[i, 0], &out[i, 0], f, &mask, gids[i], scale)
    return 0


def relu_dropout_backward(
    const real_t[:, ::1] d_out, const real_t[:, ::1] activated, real_t[:, ::1] out, double scale, int num_threads
):
    """Threads take equal pieces of the rows."""
    cdef Py_ssize_t k
    cdef Py_ssize_t n = d_out.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        backward_piece(d_out, activated, out, <real_t>scale, cut(n, parts, k), cut(n, parts, k + 1))


cdef int backward_piece(
    const real_t[:, ::1] d_out,
    const real_t[:, ::1] activated,
    real_t[:, ::1] out,
    real_t scale,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t i, j
    for i in range(start, stop):
        for j in range(d_out.shape[1]):
            out[i, j] = d_out[i, j] * scale if activated[i, j] > 0 else <real_t>0
    return 0
