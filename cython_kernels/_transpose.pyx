"""Loops of `transpose`: a counting sort of the entries by column."""

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t

from ._types cimport cut, pieces, real_t
from ._work cimport row_of_work, work


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
    cdef Py_ssize_t k
    cdef Py_ssize_t n_rows = indptr.shape[0] - 1
    cdef int threads = <int>begin.shape[0]
    for k in prange(threads, nogil=True, schedule="static", num_threads=threads):
        count_piece(indptr, indices, begin, k, cut(n_rows, threads, k), cut(n_rows, threads, k + 1))
    add_up(indptr_t, begin)
    for k in prange(threads, nogil=True, schedule="static", num_threads=threads):
        place_piece(
            indptr, indices, indices_t, entries, begin, k, cut(n_rows, threads, k), cut(n_rows, threads, k + 1)
        )


def transpose_rows(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[::1] data,
    const real_t[::1] source_scale,
    Py_ssize_t start,
    Py_ssize_t stop,
    int64_t[::1] indptr_t,
    int32_t[::1] indices_t,
    real_t[::1] values_t,
    int64_t[:, ::1] begin,
):
    """Transpose some rows, with their values times the scales of the columns; empty `data` are not there."""
    cdef Py_ssize_t k
    cdef Py_ssize_t n = stop - start
    cdef int threads = <int>begin.shape[0]
    for k in prange(threads, nogil=True, schedule="static", num_threads=threads):
        count_piece(indptr, indices, begin, k, start + cut(n, threads, k), start + cut(n, threads, k + 1))
    add_up(indptr_t, begin)
    for k in prange(threads, nogil=True, schedule="static", num_threads=threads):
        place_values(
            indptr, indices, data, source_scale, indices_t, values_t, begin, k,
            start + cut(n, threads, k), start + cut(n, threads, k + 1),
        )


def permute(
    const int64_t[::1] indptr_t,
    const int64_t[::1] entries,
    const real_t[::1] data,
    const real_t[::1] source_scale,
    real_t[::1] values_t,
    int num_threads,
):
    """Put values into the order of the transpose, times the scales of its rows if there are any."""
    cdef Py_ssize_t k
    cdef Py_ssize_t n = indptr_t.shape[0] - 1
    cdef Py_ssize_t parts = pieces(n, num_threads)
    cdef Py_ssize_t all_work
    if n == 0:
        return
    all_work = work(&indptr_t[0], n)
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        permute_piece(
            indptr_t, entries, data, source_scale, values_t,
            row_of_work(&indptr_t[0], 0, n, cut(all_work, parts, k)),
            row_of_work(&indptr_t[0], 0, n, cut(all_work, parts, k + 1)),
        )


def first_wrong(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const int64_t[::1] indptr_t,
    const int32_t[::1] indices_t,
    const int64_t[::1] entries,
    int64_t[::1] wrong,
):
    """Give the first place where a transpose is not that of the matrix, or the number of its entries.

    Each of `wrong` [threads] is one thread's. The rows of both begin where they should, that is checked.
    """
    cdef Py_ssize_t k
    cdef Py_ssize_t n = indptr_t.shape[0] - 1
    cdef int threads = <int>wrong.shape[0]
    for k in prange(threads, nogil=True, schedule="static", num_threads=threads):
        wrong[k] = first_wrong_of(
            indptr, indices, indptr_t, indices_t, entries, cut(n, threads, k), cut(n, threads, k + 1)
        )


cdef int64_t first_wrong_of(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const int64_t[::1] indptr_t,
    const int32_t[::1] indices_t,
    const int64_t[::1] entries,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t j, e
    cdef int64_t entry, row
    for j in range(start, stop):
        for e in range(indptr_t[j], indptr_t[j + 1]):
            entry = entries[e]
            row = indices_t[e]
            if not (0 <= entry < indices.shape[0] and 0 <= row < indptr.shape[0] - 1):
                return e
            if not (indptr[row] <= entry < indptr[row + 1] and indices[entry] == j):
                return e
            if e > indptr_t[j] and entry <= entries[e - 1]:
                return e
    return indices.shape[0]


cdef int add_up(int64_t[::1] indptr_t, int64_t[:, ::1] begin) except -1:
    """From numbers of entries to where each column's begin, and each thread's of them."""
    cdef Py_ssize_t k, column
    cdef int64_t total = 0
    cdef int64_t count
    for column in range(begin.shape[1]):
        indptr_t[column] = total
        for k in range(begin.shape[0]):
            count = begin[k, column]
            begin[k, column] = total
            total += count
    indptr_t[begin.shape[1]] = total
    return 0


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


cdef int place_values(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[::1] data,
    const real_t[::1] source_scale,
    int32_t[::1] indices_t,
    real_t[::1] values_t,
    int64_t[:, ::1] begin,
    Py_ssize_t k,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t i, e
    cdef int64_t place
    cdef bint valued = data.shape[0] > 0
    cdef bint scaled = source_scale.shape[0] > 0
    for i in range(start, stop):
        for e in range(indptr[i], indptr[i + 1]):
            place = begin[k, indices[e]]
            begin[k, indices[e]] = place + 1
            indices_t[place] = <int32_t>i
            if valued:
                values_t[place] = data[e] * source_scale[indices[e]] if scaled else data[e]
    return 0


cdef int permute_piece(
    const int64_t[::1] indptr_t,
    const int64_t[::1] entries,
    const real_t[::1] data,
    const real_t[::1] source_scale,
    real_t[::1] values_t,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t j, e
    cdef bint scaled = source_scale.shape[0] > 0
    for j in range(start, stop):
        for e in range(indptr_t[j], indptr_t[j + 1]):
            values_t[e] = data[entries[e]] * source_scale[j] if scaled else data[entries[e]]
    return 0
