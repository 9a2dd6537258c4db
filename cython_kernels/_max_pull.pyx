"""Loops of `max_pull`. Keys are the same memory as the packed rows, read as integers."""

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t

from ._types cimport cut, pieces, real_t
from ._work cimport DORYLUS_BOUNDS_CHECK, LEAST_WORK, PIECES, check_reads, row_of_work, work

ctypedef fused key_t:
    int32_t
    int64_t


def pack_max(
    const int32_t[:, ::1] source,
    const real_t[:, ::1] d_out,
    const int64_t[::1] ids,
    real_t[:, ::1] packed,
    key_t[:, ::1] keys,
    Py_ssize_t start,
    Py_ssize_t stop,
    int num_threads,
):
    """Threads have equal numbers of rows."""
    cdef Py_ssize_t k
    cdef Py_ssize_t n_pieces = pieces(stop - start, num_threads)
    for k in prange(n_pieces, nogil=True, schedule="static", num_threads=num_threads):
        pack_piece(
            source, d_out, ids, packed, keys,
            start + cut(stop - start, n_pieces, k), start + cut(stop - start, n_pieces, k + 1),
        )


cdef int pack_piece(
    const int32_t[:, ::1] source,
    const real_t[:, ::1] d_out,
    const int64_t[::1] ids,
    real_t[:, ::1] packed,
    key_t[:, ::1] keys,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t i, j
    cdef Py_ssize_t f = d_out.shape[1]
    for i in range(start, stop):
        for j in range(f):
            packed[i, j] = d_out[i, j]
        for j in range(f):
            keys[i, f + j] = <key_t>ids[source[i, j]] if source[i, j] >= 0 else -1
    return 0


def gather_max_pull(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[:, ::1] packed,
    const key_t[:, ::1] keys,
    const int64_t[::1] ids,
    real_t[:, ::1] d_x,
    Py_ssize_t start,
    Py_ssize_t stop,
    int num_threads,
):
    """Rows are cut by their entries; each is one thread's."""
    cdef Py_ssize_t k, low, all_work, n_pieces
    cdef int threads
    if start == stop or d_x.shape[1] == 0:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, packed.shape[0], start, stop)
    low = work(&indptr[0], start)
    all_work = work(&indptr[0], stop) - low
    threads = <int>min(<Py_ssize_t>num_threads, all_work // LEAST_WORK + 1)
    n_pieces = min(threads * PIECES, all_work // LEAST_WORK + 1) if threads > 1 else 1
    for k in prange(n_pieces, nogil=True, schedule="dynamic", num_threads=threads):
        pull_piece(
            indptr, indices, packed, keys, ids, d_x,
            row_of_work(&indptr[0], start, stop, low + cut(all_work, n_pieces, k)),
            row_of_work(&indptr[0], start, stop, low + cut(all_work, n_pieces, k + 1)),
        )


cdef int pull_piece(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[:, ::1] packed,
    const key_t[:, ::1] keys,
    const int64_t[::1] ids,
    real_t[:, ::1] d_x,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t i, j, e
    cdef Py_ssize_t f = d_x.shape[1]
    for i in range(start, stop):
        for j in range(f):
            d_x[i, j] = 0
        for e in range(indptr[i], indptr[i + 1]):
            if e > indptr[i] and indices[e] == indices[e - 1]:
                continue  # a repeated edge: the value came over one of them
            add_chosen(&packed[indices[e], 0], &keys[indices[e], f], <key_t>ids[i], &d_x[i, 0], f)
    return 0


cdef inline void add_chosen(
    const real_t* values, const key_t* keys, key_t own, real_t* total, Py_ssize_t f
) noexcept nogil:
    cdef Py_ssize_t j
    cdef real_t value
    for j in range(f):
        value = values[j]  # read in any case: a loop without branches
        if keys[j] != own:
            value = 0
        total[j] += value
