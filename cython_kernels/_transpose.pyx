"""Loops of `transpose`: a counting sort of the entries by column."""

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t

from ._types cimport cut


def transpose_csr(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    int64_t[::1] indptr_t,
    int32_t[::1] indices_t,
    int64_t[::1] entries,
    int64_t[:, ::1] begin,
):
    """Each row of `begin` [threads, n_cols], zeros, is one thread's; it gets a piece of the rows.

    A thread counts its entries of each column; sums over columns, and threads in order, then tell where
    it begins to write. So an entry's place depends on no thread.
    """
    cdef Py_ssize_t k, column
    cdef int64_t total = 0
    cdef int64_t count
    cdef Py_ssize_t n_rows = indptr.shape[0] - 1
    cdef Py_ssize_t n_cols = indptr_t.shape[0] - 1
    cdef int threads = <int>begin.shape[0]
    for k in prange(threads, nogil=True, schedule="static", num_threads=threads):
        count_piece(indptr, indices, begin, k, cut(n_rows, threads, k), cut(n_rows, threads, k + 1))
    for column in range(n_cols):
        indptr_t[column] = total
        for k in range(threads):
            count = begin[k, column]
            begin[k, column] = total
            total += count
    indptr_t[n_cols] = total
    for k in prange(threads, nogil=True, schedule="static", num_threads=threads):
        place_piece(
            indptr, indices, indices_t, entries, begin, k, cut(n_rows, threads, k), cut(n_rows, threads, k + 1)
        )


cdef int count_piece(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    int64_t[:, ::1] begin,
    Py_ssize_t k,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t e
    for e in range(indptr[start], indptr[stop]):
        begin[k, indices[e]] += 1
    return 0


cdef int place_piece(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    int32_t[::1] indices_t,
    int64_t[::1] entries,
    int64_t[:, ::1] begin,
    Py_ssize_t k,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t i, e
    cdef int64_t place
    for i in range(start, stop):
        for e in range(indptr[i], indptr[i + 1]):
            place = begin[k, indices[e]]
            begin[k, indices[e]] = place + 1
            indices_t[place] = <int32_t>i
            entries[place] = e
    return 0
