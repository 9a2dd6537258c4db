"""Loops of `aggregate`: sums over the entries of a CSR matrix. The door has checked everything.

An empty array stands for an absent one (data, row_scale, source_scale). A tile of columns is kept
in a buffer on the stack, which no argument can alias: that is what lets the compiler vectorise the
inner loops without run-time overlap tests.
"""

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t

from ._types cimport cut, pieces, real_t

cdef enum:
    TILE = 128  # columns in the buffer
    BLOCK = 32  # rows a thread takes at a time: small enough to even out hubs
    STRIP = 16  # columns below which the adjoint is not cut further


def gather(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[::1] data,
    const real_t[:, ::1] x,
    real_t[:, ::1] out,
    const real_t[::1] row_scale,
    const real_t[::1] source_scale,
    double self_weight,
    bint mean,
    bint accumulate,
    Py_ssize_t start,
    Py_ssize_t stop,
    int num_threads,
):
    """Threads take blocks of rows; a row is summed by one thread, in the order of its entries."""
    cdef Py_ssize_t block
    cdef Py_ssize_t n_blocks = (stop - start + BLOCK - 1) // BLOCK
    for block in prange(n_blocks, nogil=True, schedule="dynamic", num_threads=num_threads):
        gather_block(
            indptr, indices, data, x, out, row_scale, source_scale, <real_t>self_weight, mean, accumulate,
            start + block * BLOCK, min(start + (block + 1) * BLOCK, stop),
        )


cdef int gather_block(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[::1] data,
    const real_t[:, ::1] x,
    real_t[:, ::1] out,
    const real_t[::1] row_scale,
    const real_t[::1] source_scale,
    real_t self_weight,
    bint mean,
    bint accumulate,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef real_t total[TILE]
    cdef const real_t* row
    cdef real_t* target
    cdef real_t weight
    cdef Py_ssize_t i, e, j, tile, first, width
    cdef Py_ssize_t f = x.shape[1]
    cdef bint has_data = data.shape[0] > 0
    cdef bint has_row_scale = row_scale.shape[0] > 0
    cdef bint has_source_scale = source_scale.shape[0] > 0

    for i in range(start, stop):
        for tile in range((f + TILE - 1) // TILE):
            first = tile * TILE
            width = min(<Py_ssize_t>TILE, f - first)
            for j in range(width):
                total[j] = 0
            for e in range(indptr[i], indptr[i + 1]):
                row = &x[indices[e], first]
                weight = data[e] if has_data else <real_t>1
                if has_source_scale:
                    weight = weight * source_scale[indices[e]]
                for j in range(width):
                    total[j] += weight * row[j]
            if mean and indptr[i + 1] > indptr[i]:
                weight = <real_t>(indptr[i + 1] - indptr[i])
                for j in range(width):
                    total[j] /= weight
            if self_weight != 0:
                row = &x[i, first]
                weight = self_weight * source_scale[i] if has_source_scale else self_weight
                for j in range(width):
                    total[j] += weight * row[j]
            if has_row_scale:
                weight = row_scale[i]
                for j in range(width):
                    total[j] *= weight
            target = &out[i, first]
            if accumulate:
                for j in range(width):
                    target[j] += total[j]
            else:
                for j in range(width):
                    target[j] = total[j]
    return 0


def gather_adjoint(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[::1] data,
    const real_t[:, ::1] d_out,
    real_t[:, ::1] d_x,
    const real_t[::1] row_scale,
    const real_t[::1] source_scale,
    double self_weight,
    bint mean,
    bint accumulate,
    Py_ssize_t start,
    Py_ssize_t stop,
    int num_threads,
):
    """Threads take strips of columns: rows of `d_x` are shared by many rows, columns by none."""
    cdef Py_ssize_t k
    cdef Py_ssize_t f = d_x.shape[1]
    cdef Py_ssize_t strips = pieces((f + STRIP - 1) // STRIP, num_threads)
    for k in prange(strips, nogil=True, schedule="static", num_threads=num_threads):
        adjoint_strip(
            indptr, indices, data, d_out, d_x, row_scale, source_scale, <real_t>self_weight, mean, accumulate,
            start, stop, cut(f, strips, k), cut(f, strips, k + 1),
        )


cdef int adjoint_strip(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[::1] data,
    const real_t[:, ::1] d_out,
    real_t[:, ::1] d_x,
    const real_t[::1] row_scale,
    const real_t[::1] source_scale,
    real_t self_weight,
    bint mean,
    bint accumulate,
    Py_ssize_t start,
    Py_ssize_t stop,
    Py_ssize_t left,
    Py_ssize_t right,
) except -1 nogil:
    cdef real_t gradient[TILE]
    cdef const real_t* row
    cdef real_t* target
    cdef real_t weight, scale
    cdef Py_ssize_t i, e, j, tile, first, width
    cdef bint has_data = data.shape[0] > 0
    cdef bint has_source_scale = source_scale.shape[0] > 0

    if not accumulate:
        for i in range(d_x.shape[0]):
            for j in range(left, right):
                d_x[i, j] = 0

    for i in range(start, stop):
        scale = row_scale[i] if row_scale.shape[0] > 0 else <real_t>1
        for tile in range((right - left + TILE - 1) // TILE):
            first = left + tile * TILE
            width = min(<Py_ssize_t>TILE, right - first)
            row = &d_out[i, first]
            for j in range(width):
                gradient[j] = scale * row[j]
            if self_weight != 0:
                target = &d_x[i, first]
                weight = self_weight * source_scale[i] if has_source_scale else self_weight
                for j in range(width):
                    target[j] += weight * gradient[j]
            if mean and indptr[i + 1] > indptr[i]:
                weight = <real_t>(indptr[i + 1] - indptr[i])
                for j in range(width):
                    gradient[j] /= weight
            for e in range(indptr[i], indptr[i + 1]):
                target = &d_x[indices[e], first]
                weight = data[e] if has_data else <real_t>1
                if has_source_scale:
                    weight = weight * source_scale[indices[e]]
                for j in range(width):
                    target[j] += weight * gradient[j]
    return 0
