# How the rows of a CSR matrix are cut among threads, and what the bounds-checked build looks at first.

from libc.stdint cimport int32_t, int64_t

cdef extern from *:
    const int DORYLUS_BOUNDS_CHECK

cdef enum:
    ROW_COST = 8  # what a row costs beside its entries, in entries
    LEAST_WORK = 4096  # of this cost no more threads or pieces are made
    PIECES = 24  # pieces of the rows a thread, so that the last one waits for little


cdef inline Py_ssize_t work(const int64_t* indptr, Py_ssize_t row) noexcept nogil:
    # The work of all rows before this one.
    return indptr[row] + ROW_COST * row


cdef inline Py_ssize_t row_of_work(
    const int64_t* indptr, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t target
) noexcept nogil:
    # The first row that begins at or after this work: rows are cut by edges, each in one piece.
    cdef Py_ssize_t middle
    while start < stop:
        middle = start + (stop - start) // 2
        if work(indptr, middle) < target:
            start = middle + 1
        else:
            stop = middle
    return start


cdef inline int check_reads(
    const int64_t[::1] indptr, const int32_t[::1] indices, Py_ssize_t n_sources, Py_ssize_t start, Py_ssize_t stop
) except -1:
    # Check what C++ is about to read: in the bounds-checked build a fault raises IndexError.
    cdef Py_ssize_t i, e
    for i in range(start, stop):
        for e in range(indptr[i], indptr[i + 1]):
            if not 0 <= indices[e] < n_sources:
                raise IndexError(f"Out of bounds: entry {e} of row {i} reads source {indices[e]} of {n_sources}")
    return 0
