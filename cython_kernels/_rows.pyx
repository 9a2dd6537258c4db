"""Pieces of an index for the loops of `rows`; a matrix is [tiles, rows, columns of a tile].

The innermost loops are C++ (simd/rowwise.hpp).
"""

from cython.parallel cimport prange
from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free

from ._rowwise cimport Move, add_rows, move_rows
from ._types cimport cut, pieces, real_t, stored_t

cdef extern from *:
    const int DORYLUS_BOUNDS_CHECK

cdef enum:
    STRIP = 16  # columns below which a sum of rows is not cut further

ctypedef fused moved_t:  # `stored_t` once more: rows may be stored differently in buffer and matrix
    float
    double
    unsigned short


def pack_rows(
    const moved_t[:, :, ::1] x, const int32_t[::1] index, stored_t[:, ::1] out, int level, int num_threads
):
    """Threads take equal pieces of `index`."""
    cdef Move[moved_t, stored_t] move
    cdef Py_ssize_t k
    cdef Py_ssize_t n = index.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if n == 0 or out.shape[1] == 0:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_index(index, x.shape[1], out.shape[0])
    move.x = &x[0, 0, 0]
    move.x_width = x.shape[2]
    move.x_tile = x.shape[1] * x.shape[2]
    move.x_index = &index[0]
    move.out = &out[0, 0]
    move.out_width = out.shape[1]
    move.out_tile = 0
    move.out_index = NULL
    move.columns = out.shape[1]
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        move_rows(level, move, cut(n, parts, k), cut(n, parts, k + 1))


def unpack_rows(
    const moved_t[:, ::1] rows, const int32_t[::1] index, stored_t[:, :, ::1] out, int level, int num_threads
):
    """Threads take equal pieces of an index that meets no row twice; else one takes it all: the last one wins."""
    cdef Move[moved_t, stored_t] move
    cdef Py_ssize_t k, parts
    cdef Py_ssize_t n = index.shape[0]
    if n == 0 or rows.shape[1] == 0:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_index(index, out.shape[1], rows.shape[0])
    move.x = &rows[0, 0]
    move.x_width = rows.shape[1]
    move.x_tile = 0
    move.x_index = NULL
    move.out = &out[0, 0, 0]
    move.out_width = out.shape[2]
    move.out_tile = out.shape[1] * out.shape[2]
    move.out_index = &index[0]
    move.columns = rows.shape[1]
    parts = pieces(n, num_threads)
    if parts > 1 and not (increases(index) or distinct(index)):
        parts = 1
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        move_rows(level, move, cut(n, parts, k), cut(n, parts, k + 1))


def scatter_add_rows(
    const real_t[:, ::1] rows, const int32_t[::1] index, real_t[:, ::1] out, int level, int num_threads
):
    """Threads take pieces of an index that increases, else strips of columns: no target is shared."""
    cdef Py_ssize_t k, parts
    cdef Py_ssize_t n = index.shape[0]
    cdef Py_ssize_t f = out.shape[1]
    if n == 0 or f == 0:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_index(index, out.shape[0], rows.shape[0])
    if num_threads == 1 or increases(index):
        parts = pieces(n, num_threads)
        for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
            add_rows(
                level, &rows[0, 0], &index[0], &out[0, 0], f, cut(n, parts, k), cut(n, parts, k + 1), 0, f
            )
        return
    parts = pieces((f + STRIP - 1) // STRIP, num_threads)
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        add_rows(level, &rows[0, 0], &index[0], &out[0, 0], f, 0, n, cut(f, parts, k), cut(f, parts, k + 1))


cdef bint increases(const int32_t[::1] index) noexcept nogil:
    """Whether every row is met once, in order."""
    cdef Py_ssize_t k
    for k in range(1, index.shape[0]):
        if index[k] <= index[k - 1]:
            return False
    return True


cdef bint distinct(const int32_t[::1] index) except -1 nogil:
    """Whether no row is met twice, in any order: one bit a row between the smallest and the largest."""
    cdef Py_ssize_t k, place
    cdef Py_ssize_t lowest = index[0]
    cdef Py_ssize_t highest = index[0]
    cdef bint found = True
    cdef unsigned char* seen
    for k in range(index.shape[0]):
        lowest = min(lowest, <Py_ssize_t>index[k])
        highest = max(highest, <Py_ssize_t>index[k])
    seen = <unsigned char*>calloc((highest - lowest) // 8 + 1, 1)
    if seen == NULL:
        with gil:
            raise MemoryError(f"no room for {highest - lowest + 1} bits")
    for k in range(index.shape[0]):
        place = index[k] - lowest
        if seen[place >> 3] >> (place & 7) & 1:
            found = False
            break
        seen[place >> 3] |= 1 << (place & 7)
    free(seen)
    return found


cdef int check_index(const int32_t[::1] index, Py_ssize_t n_matrix, Py_ssize_t n_buffer) except -1:
    """Check what C++ is about to read: in the bounds-checked build a fault raises IndexError."""
    cdef Py_ssize_t k
    if index.shape[0] > n_buffer:
        raise IndexError(f"Out of bounds: {index.shape[0]} numbers for {n_buffer} rows")
    for k in range(index.shape[0]):
        if not 0 <= index[k] < n_matrix:
            raise IndexError(f"Out of bounds: number {k} is row {index[k]} of {n_matrix}")
    return 0
