"""Loops of `rows`: moving whole rows between a matrix and a message buffer."""

from cython.parallel cimport prange
from libc.stdint cimport int32_t
from libc.string cimport memcpy

from ._types cimport cut, pieces, real_t

cdef enum:
    STRIP = 16  # columns below which a sum of rows is not cut further


def pack_rows(const real_t[:, ::1] x, const int32_t[::1] index, real_t[:, ::1] out, int num_threads):
    """Threads take equal pieces of `index`."""
    cdef Py_ssize_t k
    cdef Py_ssize_t n = index.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if x.shape[1] == 0:
        return
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        pack_piece(x, index, out, cut(n, parts, k), cut(n, parts, k + 1))


cdef int pack_piece(
    const real_t[:, ::1] x, const int32_t[::1] index, real_t[:, ::1] out, Py_ssize_t start, Py_ssize_t stop
) except -1 nogil:
    cdef Py_ssize_t k
    cdef size_t row_bytes = <size_t>x.shape[1] * sizeof(real_t)
    for k in range(start, stop):
        memcpy(&out[k, 0], &x[index[k], 0], row_bytes)
    return 0


def unpack_rows(const real_t[:, ::1] rows, const int32_t[::1] index, real_t[:, ::1] out, int num_threads):
    """Threads take ranges of the rows of `out`, each in the order of `index`: the last one wins."""
    cdef Py_ssize_t k, lowest, span, parts
    if index.shape[0] == 0 or rows.shape[1] == 0:
        return
    # Only the rows between the smallest and the largest target are cut: ghosts are all at the end.
    lowest = index[0]
    span = index[0]
    for k in range(index.shape[0]):
        lowest = min(lowest, <Py_ssize_t>index[k])
        span = max(span, <Py_ssize_t>index[k])
    span += 1 - lowest
    parts = pieces(span, num_threads)
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        unpack_range(rows, index, out, lowest + cut(span, parts, k), lowest + cut(span, parts, k + 1))


cdef int unpack_range(
    const real_t[:, ::1] rows, const int32_t[::1] index, real_t[:, ::1] out, Py_ssize_t low, Py_ssize_t high
) except -1 nogil:
    cdef Py_ssize_t k
    cdef size_t row_bytes = <size_t>rows.shape[1] * sizeof(real_t)
    for k in range(index.shape[0]):
        if low <= index[k] < high:
            memcpy(&out[index[k], 0], &rows[k, 0], row_bytes)
    return 0


def scatter_add_rows(const real_t[:, ::1] rows, const int32_t[::1] index, real_t[:, ::1] out, int num_threads):
    """Threads take strips of columns, so that a target met often is no bottleneck."""
    cdef Py_ssize_t k
    cdef Py_ssize_t f = out.shape[1]
    cdef Py_ssize_t strips = pieces((f + STRIP - 1) // STRIP, num_threads)
    for k in prange(strips, nogil=True, schedule="static", num_threads=num_threads):
        add_strip(rows, index, out, cut(f, strips, k), cut(f, strips, k + 1))


cdef int add_strip(
    const real_t[:, ::1] rows, const int32_t[::1] index, real_t[:, ::1] out, Py_ssize_t left, Py_ssize_t right
) except -1 nogil:
    cdef const real_t* row
    cdef real_t* target
    cdef Py_ssize_t k, j
    if left == right:
        return 0
    for k in range(index.shape[0]):
        row = &rows[k, left]
        target = &out[index[k], left]
        for j in range(right - left):
            target[j] += row[j]
    return 0
