"""Loops over threads, units and hubs of `graph_attention_v2`; the door has checked everything.

An empty array stands for an absent one. Matrices have contiguous rows, which may be apart. The innermost loops
are C++ (simd/attention_v2.hpp), where their design is told.
"""

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from ._attention_v2 cimport (
    ADJOINT, ATTENTION_HUB, FORWARD, TARGETS, AttentionV2, SumsV2, Unit, attention_v2_finish, attention_v2_merge,
    attention_v2_piece, attention_v2_records, attention_v2_rows, count_units, make_unit,
)
from ._types cimport cut, pieces, real_t
from ._work cimport DORYLUS_BOUNDS_CHECK, LEAST_WORK, PIECES, check_reads, row_of_work, work

cdef enum:
    GROUP = 16  # pieces of a hub that are summed at a time
    PARTS = 256  # pieces of the rows, each with its part of d_a, which are as many for any number of threads


cdef inline int64_t stride(Py_ssize_t step, Py_ssize_t itemsize) noexcept nogil:
    # In elements; that of a single row does not matter.
    return step // itemsize


cdef int describe(
    AttentionV2[real_t]* a,
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[:, :] own,
    const real_t[:, :] other,
    const real_t[:, ::1] factor,
    double slope,
    const int64_t[::1] row_gids,
    const int64_t[::1] column_gids,
    uint64_t key,
    uint64_t threshold,
    double scale,
    int walk,
) except -1:
    """Fill in what all calls have, and no results."""
    a.indptr = &indptr[0]
    a.indices = &indices[0] if indices.shape[0] > 0 else NULL
    a.nnz = indices.shape[0]
    a.heads = factor.shape[0]
    a.width = factor.shape[1]
    a.slope = <real_t>slope
    a.row_gids = &row_gids[0] if row_gids.shape[0] > 0 else NULL
    a.column_gids = &column_gids[0] if column_gids.shape[0] > 0 else NULL
    a.key = key
    a.threshold = threshold
    a.kept_scale = <real_t>scale
    a.rows_are_sources = walk == ADJOINT
    a.walk = walk
    a.factor = &factor[0, 0]
    a.own = &own[0, 0]
    a.own_stride = stride(own.strides[0], sizeof(real_t))
    a.other = &other[0, 0] if other.shape[0] > 0 else NULL
    a.other_stride = stride(other.strides[0], sizeof(real_t))
    a.weighed = a.other  # but backward
    a.weighed_stride = a.other_stride
    a.paired = a.record = NULL
    a.paired_stride = a.record_stride = 0
    a.row_max = a.row_sum = NULL
    return 0


def forward(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[:, :] left,
    const real_t[:, :] right,
    const real_t[:, ::1] factor,
    real_t[:, ::1] out,
    real_t[:, ::1] row_max,
    real_t[:, ::1] row_sum,
    double slope,
    const int64_t[::1] source_gids,
    const int64_t[::1] target_gids,
    uint64_t key,
    uint64_t threshold,
    double scale,
    Py_ssize_t start,
    Py_ssize_t stop,
    int level,
    int num_threads,
):
    """`row_max` and `row_sum` are both there, or neither."""
    cdef AttentionV2[real_t] a
    if start == stop:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, left.shape[0], start, stop)
    describe(
        &a, indptr, indices, right, left, factor, slope, target_gids, source_gids, key, threshold, scale, FORWARD
    )
    a.out = &out[0, 0]
    a.out_stride = out.shape[1]
    if row_max.shape[0] > 0:
        a.row_max = &row_max[0, 0]
        a.row_sum = &row_sum[0, 0]
    with nogil:
        all_rows(&a, start, stop, NULL, level, num_threads)


def targets(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[:, :] left,
    const real_t[:, :] right,
    const real_t[:, ::1] factor,
    const real_t[:, ::1] out,
    const real_t[:, :] d_out,
    const real_t[:, ::1] row_max,
    const real_t[:, ::1] row_sum,
    real_t[:, :] d_right,
    real_t[:, ::1] d_factor,
    real_t[:, :, :] record,
    double slope,
    const int64_t[::1] source_gids,
    const int64_t[::1] target_gids,
    uint64_t key,
    uint64_t threshold,
    double scale,
    Py_ssize_t start,
    Py_ssize_t stop,
    int level,
    int num_threads,
):
    """Of the arrays only `d_right`, `d_factor` and `record` are written."""
    cdef AttentionV2[real_t] a
    cdef Py_ssize_t columns = factor.shape[0] * factor.shape[1]
    cdef Py_ssize_t n = stop - start
    cdef Py_ssize_t parts = pieces(n, num_threads)
    cdef Py_ssize_t k, c
    cdef double* sums
    d_factor[:, :] = 0
    if start == stop:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, left.shape[0], start, stop)
    describe(
        &a, indptr, indices, right, left, factor, slope, target_gids, source_gids, key, threshold, scale, TARGETS
    )
    a.paired = &d_out[0, 0]
    a.paired_stride = stride(d_out.strides[0], sizeof(real_t))
    a.record = &record[0, 0, 0]
    a.record_stride = stride(record.strides[0], sizeof(real_t))
    a.out = &d_right[0, 0]
    a.out_stride = stride(d_right.strides[0], sizeof(real_t))
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        attention_v2_records(
            level, a, &out[0, 0], &row_max[0, 0], &row_sum[0, 0], &record[0, 0, 0], start + cut(n, parts, k),
            start + cut(n, parts, k + 1),
        )
    sums = <double*>calloc((PARTS + 1) * columns, sizeof(double))
    if sums == NULL:
        raise MemoryError("no memory for the parts of d_a")
    try:
        with nogil:
            all_rows(&a, start, stop, sums, level, num_threads)
            for k in range(1, PARTS + 1):
                for c in range(columns):
                    sums[c] += sums[k * columns + c]
        for c in range(columns):
            d_factor[c // factor.shape[1], c % factor.shape[1]] = <real_t>sums[c]
    finally:
        free(sums)


def adjoint(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[:, :] left,
    const real_t[:, :] right,
    const real_t[:, ::1] factor,
    const real_t[:, :, :] record,
    const real_t[:, :] d_out,
    real_t[:, :] d_left,
    double slope,
    const int64_t[::1] source_gids,
    const int64_t[::1] target_gids,
    uint64_t key,
    uint64_t threshold,
    double scale,
    Py_ssize_t start,
    Py_ssize_t stop,
    int level,
    int num_threads,
):
    """Rows are sources and columns targets."""
    cdef AttentionV2[real_t] a
    if start == stop:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, right.shape[0], start, stop)
    describe(
        &a, indptr, indices, left, right, factor, slope, source_gids, target_gids, key, threshold, scale, ADJOINT
    )
    a.weighed = &d_out[0, 0] if d_out.shape[0] > 0 else NULL
    a.weighed_stride = stride(d_out.strides[0], sizeof(real_t))
    a.paired = a.own
    a.paired_stride = a.own_stride
    a.record = &record[0, 0, 0] if record.shape[0] > 0 else NULL
    a.record_stride = stride(record.strides[0], sizeof(real_t))
    a.out = &d_left[0, 0]
    a.out_stride = stride(d_left.strides[0], sizeof(real_t))
    with nogil:
        all_rows(&a, start, stop, NULL, level, num_threads)


cdef int all_rows(
    AttentionV2[real_t]* a, Py_ssize_t start, Py_ssize_t stop, double* d_factor, int level, int num_threads
) except -1 nogil:
    """Cut the rows into pieces of equal work, a unit after the other, then share each hub among the threads.

    `d_factor` has PARTS + 1 rows: each piece has one of its own, and the hubs have the last.
    """
    cdef Py_ssize_t k, i, n_pieces, unit
    cdef Py_ssize_t columns = a.heads * a.width
    cdef Py_ssize_t first = work(a.indptr, start)
    cdef Py_ssize_t all_work = work(a.indptr, stop) - first
    cdef int threads = <int>min(<Py_ssize_t>num_threads, all_work // LEAST_WORK + 1)
    cdef double* of_hubs = NULL
    cdef Unit u
    if d_factor != NULL:
        n_pieces = min(<Py_ssize_t>PARTS, all_work // LEAST_WORK + 1)
        of_hubs = d_factor + PARTS * columns
    else:
        n_pieces = min(threads * PIECES, all_work // LEAST_WORK + 1) if threads > 1 else 1
        columns = 0
    for unit in range(count_units(a[0])):
        u = make_unit(a[0], unit)
        for k in prange(n_pieces, schedule="dynamic", num_threads=threads):
            attention_v2_rows(
                level, a[0], u, row_of_work(a.indptr, start, stop, first + cut(all_work, n_pieces, k)),
                row_of_work(a.indptr, start, stop, first + cut(all_work, n_pieces, k + 1)), d_factor + k * columns,
            )
        for i in range(start, stop):
            if a.indptr[i + 1] - a.indptr[i] > ATTENTION_HUB:
                hub(a, &u, i, of_hubs, level, threads)
    return 0


cdef int hub(
    AttentionV2[real_t]* a, Unit* u, Py_ssize_t row, double* d_factor, int level, int num_threads
) except -1 nogil:
    """Sum the pieces of one row by all threads and add them in order."""
    cdef Py_ssize_t first = a.indptr[row]
    cdef Py_ssize_t end = a.indptr[row + 1]
    cdef Py_ssize_t n_parts = (end - first + ATTENTION_HUB - 1) // ATTENTION_HUB
    cdef Py_ssize_t group = 0
    cdef Py_ssize_t group_end, k
    cdef SumsV2[real_t]* sums = <SumsV2[real_t]*>malloc((GROUP + 1) * sizeof(SumsV2[real_t]))
    if sums == NULL:
        with gil:
            raise MemoryError("no memory for the sums of a hub")
    while group < n_parts:
        group_end = min(group + GROUP, n_parts)
        for k in prange(group, group_end, schedule="dynamic", num_threads=num_threads):
            attention_v2_piece(
                level, a[0], u[0], row, first + k * ATTENTION_HUB, min(first + (k + 1) * ATTENTION_HUB, end),
                sums[0 if k == 0 else 1 + k - group],
            )
        for k in range(max(group, 1), group_end):
            attention_v2_merge(level, a[0], u[0], sums[0], sums[1 + k - group])
        group = group_end
    attention_v2_finish(level, a[0], u[0], row, sums[0], d_factor)
    free(sums)
    return 0
