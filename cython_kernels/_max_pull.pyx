"""Loops over threads of `max_pull`; the innermost ones are C++ (simd/max_pull.hpp)."""

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t

from ._types cimport cut, pieces, real_t
from ._work cimport DORYLUS_BOUNDS_CHECK, LEAST_WORK, PIECES, check_reads, row_of_work, work

cdef extern from "simd/max_pull.hpp" namespace "dorylus" nogil:
    cdef cppclass MaxPull[A]:
        const int64_t* indptr
        const int32_t* indices
        int64_t nnz
        const A* packed
        const int64_t* ids
        A* d_x
        int64_t columns

    void max_pull_rows[A](int level, const MaxPull[A]& g, int64_t start, int64_t stop)

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
    """Threads have equal numbers of rows. Keys are the memory of `packed`, read as integers of that size."""
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
    const int64_t[::1] ids,
    real_t[:, ::1] d_x,
    Py_ssize_t start,
    Py_ssize_t stop,
    int level,
    int num_threads,
):
    """Rows are cut by their entries; each is one thread's."""
    cdef MaxPull[real_t] g
    cdef Py_ssize_t k, low, all_work, n_pieces
    cdef int threads
    if start == stop or d_x.shape[1] == 0:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, packed.shape[0], start, stop)
    g.indptr = &indptr[0]
    g.indices = &indices[0] if indices.shape[0] > 0 else NULL
    g.nnz = indices.shape[0]
    g.packed = &packed[0, 0] if packed.shape[0] > 0 else NULL
    g.ids = &ids[0]
    g.d_x = &d_x[0, 0]
    g.columns = d_x.shape[1]
    low = work(&indptr[0], start)
    all_work = work(&indptr[0], stop) - low
    threads = <int>min(<Py_ssize_t>num_threads, all_work // LEAST_WORK + 1)
    n_pieces = min(threads * PIECES, all_work // LEAST_WORK + 1) if threads > 1 else 1
    for k in prange(n_pieces, nogil=True, schedule="dynamic", num_threads=threads):
        max_pull_rows(
            level, g,
            row_of_work(&indptr[0], start, stop, low + cut(all_work, n_pieces, k)),
            row_of_work(&indptr[0], start, stop, low + cut(all_work, n_pieces, k + 1)),
        )
