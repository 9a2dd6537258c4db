"""Loops over threads, units and hubs of `graph_attention`; the door has checked everything.

An empty array stands for an absent one. Matrices that are no C-contiguous views have contiguous rows, which
may be apart. The innermost loops are C++ (simd/attention.hpp), where their
design is told.
"""

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc

from ._attention cimport (
    ATTENTION_HUB, Attention, Maxima, Sums, Unit, add_sums, attention_finish, attention_maxima, attention_piece,
    attention_rows, attention_targets, attention_weights, count_units, make_unit, merge_maxima,
)
from ._types cimport cut, pieces, real_t
from ._work cimport DORYLUS_BOUNDS_CHECK, LEAST_WORK, PIECES, check_reads, row_of_work, work

cdef enum:
    GROUP = 16  # pieces of a hub that are summed at a time


def hub_degree():
    """Entries above which a row is summed in pieces."""
    return ATTENTION_HUB


cdef inline real_t* matrix(real_t[:, ::1] values) noexcept nogil:
    return &values[0, 0] if values.shape[0] > 0 else NULL


cdef inline int64_t stride(Py_ssize_t step, Py_ssize_t itemsize) noexcept nogil:
    # In elements; that of a single row does not matter.
    return step // itemsize


cdef int describe(
    Attention[real_t]* a,
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[:, :] row_score,
    Py_ssize_t width,
    double slope,
    const int64_t[::1] row_gids,
    const int64_t[::1] column_gids,
    uint64_t key,
    uint64_t threshold,
    double scale,
    bint rows_are_sources,
) except -1:
    """Fill in what all calls have, and no results."""
    a.indptr = &indptr[0]
    a.indices = &indices[0] if indices.shape[0] > 0 else NULL
    a.nnz = indices.shape[0]
    a.heads = row_score.shape[1]
    a.width = width
    a.slope = <real_t>slope
    a.row_score = &row_score[0, 0]
    a.score_stride = stride(row_score.strides[0], sizeof(real_t))
    a.weighed = a.column_part = a.x = NULL
    a.weighed_stride = a.part_stride = a.out_stride = a.x_stride = a.d_score_stride = 0
    a.out = a.row_max = a.row_sum = a.negative = a.negative_weight = a.d_row_score = NULL
    a.row_gids = &row_gids[0] if row_gids.shape[0] > 0 else NULL
    a.column_gids = &column_gids[0] if column_gids.shape[0] > 0 else NULL
    a.key = key
    a.threshold = threshold
    a.kept_scale = <real_t>scale
    a.rows_are_sources = rows_are_sources
    return 0


def forward(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[:, :] x,
    const real_t[:, :] score_source,
    const real_t[:, :] score_target,
    real_t[:, ::1] out,
    real_t[:, ::1] row_max,
    real_t[:, ::1] row_sum,
    real_t[:, ::1] negative,
    real_t[:, ::1] negative_weight,
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
    """The last four results are all there, or none."""
    cdef Attention[real_t] a
    if start == stop:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, x.shape[0], start, stop)
    describe(
        &a, indptr, indices, score_target, x.shape[1] // score_target.shape[1], slope, target_gids, source_gids,
        key, threshold, scale, False,
    )
    a.weighed = &x[0, 0] if x.shape[0] > 0 else NULL
    a.weighed_stride = stride(x.strides[0], sizeof(real_t))
    a.column_part = &score_source[0, 0] if x.shape[0] > 0 else NULL
    a.part_stride = stride(score_source.strides[0], sizeof(real_t))
    a.out = &out[0, 0]
    a.out_stride = out.shape[1]
    a.row_max = matrix(row_max)
    a.row_sum = matrix(row_sum)
    a.negative = matrix(negative)
    a.negative_weight = matrix(negative_weight)
    with nogil:
        all_rows(&a, start, stop, level, num_threads)


def backward(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[:, :] x,
    const real_t[:, :] score_source,
    const real_t[:, :, :] record,
    const real_t[:, :] d_out,
    real_t[:, :] d_x,
    real_t[:, :] d_score_source,
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
    cdef Attention[real_t] a
    if start == stop:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, d_out.shape[0], start, stop)
    describe(
        &a, indptr, indices, score_source, x.shape[1] // score_source.shape[1], slope, source_gids, target_gids,
        key, threshold, scale, True,
    )
    a.weighed = &d_out[0, 0] if d_out.shape[0] > 0 else NULL
    a.weighed_stride = stride(d_out.strides[0], sizeof(real_t))
    a.column_part = &record[0, 0, 0] if d_out.shape[0] > 0 else NULL
    a.part_stride = stride(record.strides[0], sizeof(real_t))
    a.x = &x[0, 0]
    a.x_stride = stride(x.strides[0], sizeof(real_t))
    a.out = &d_x[0, 0]
    a.out_stride = stride(d_x.strides[0], sizeof(real_t))
    a.d_row_score = &d_score_source[0, 0]
    a.d_score_stride = stride(d_score_source.strides[0], sizeof(real_t))
    with nogil:
        all_rows(&a, start, stop, level, num_threads)


cdef int all_rows(
    Attention[real_t]* a, Py_ssize_t start, Py_ssize_t stop, int level, int num_threads
) except -1 nogil:
    """Cut the rows into pieces of equal work, a unit after the other, then share each hub among the threads."""
    cdef Py_ssize_t k, i, n_pieces, unit
    cdef Py_ssize_t first = work(a.indptr, start)
    cdef Py_ssize_t all_work = work(a.indptr, stop) - first
    cdef int threads = <int>min(<Py_ssize_t>num_threads, all_work // LEAST_WORK + 1)
    cdef Unit u
    n_pieces = min(threads * PIECES, all_work // LEAST_WORK + 1) if threads > 1 else 1
    for unit in range(count_units(a[0])):
        u = make_unit(a[0], unit)
        for k in prange(n_pieces, schedule="dynamic", num_threads=threads):
            attention_rows(
                level, a[0], u, row_of_work(a.indptr, start, stop, first + cut(all_work, n_pieces, k)),
                row_of_work(a.indptr, start, stop, first + cut(all_work, n_pieces, k + 1)),
            )
        for i in range(start, stop):
            if a.indptr[i + 1] - a.indptr[i] > ATTENTION_HUB:
                hub(a, &u, i, level, threads)
    return 0


cdef int hub(Attention[real_t]* a, Unit* u, Py_ssize_t row, int level, int num_threads) except -1 nogil:
    """Sum the pieces of one row by all threads and add them in order."""
    cdef Py_ssize_t first = a.indptr[row]
    cdef Py_ssize_t end = a.indptr[row + 1]
    cdef Py_ssize_t n_parts = (end - first + ATTENTION_HUB - 1) // ATTENTION_HUB
    cdef Py_ssize_t group = 0
    cdef Py_ssize_t group_end, k
    cdef Sums[real_t]* sums = <Sums[real_t]*>malloc((GROUP + 1) * sizeof(Sums[real_t]))
    cdef Maxima[real_t]* maxima = <Maxima[real_t]*>malloc(n_parts * sizeof(Maxima[real_t]))
    if sums == NULL or maxima == NULL:
        free(sums)
        free(maxima)
        with gil:
            raise MemoryError("no memory for the sums of a hub")
    if a.d_row_score == NULL:
        for k in prange(n_parts, schedule="static", num_threads=num_threads):
            attention_maxima(
                level, a[0], u[0], first + k * ATTENTION_HUB, min(first + (k + 1) * ATTENTION_HUB, end), maxima[k]
            )
        for k in range(1, n_parts):
            merge_maxima(maxima[0], maxima[k])
    while group < n_parts:
        group_end = min(group + GROUP, n_parts)
        for k in prange(group, group_end, schedule="dynamic", num_threads=num_threads):
            attention_piece(
                level, a[0], u[0], row, first + k * ATTENTION_HUB, min(first + (k + 1) * ATTENTION_HUB, end),
                maxima[0], sums[0 if k == 0 else 1 + k - group],
            )
        for k in range(max(group, 1), group_end):
            add_sums(u[0], sums[0], sums[1 + k - group])
        group = group_end
    attention_finish(level, a[0], u[0], row, maxima[0], sums[0])
    free(sums)
    free(maxima)
    return 0


def targets(
    const real_t[:, ::1] out,
    const real_t[:, :] d_out,
    const real_t[:, ::1] score_target,
    const real_t[:, ::1] row_max,
    const real_t[:, ::1] row_sum,
    const real_t[:, ::1] negative,
    const real_t[:, ::1] negative_weight,
    real_t[:, ::1] d_score_target,
    real_t[:, :, :] record,
    double slope,
    Py_ssize_t start,
    Py_ssize_t stop,
    int level,
    int num_threads,
):
    """Threads take equal pieces of the rows; no entry is read, and only the last two arrays are written."""
    cdef Attention[real_t] a
    cdef Py_ssize_t k
    cdef Py_ssize_t n = stop - start
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if n == 0:
        return
    a.heads = score_target.shape[1]
    a.width = out.shape[1] // score_target.shape[1]
    a.slope = <real_t>slope
    a.row_score = &score_target[0, 0]
    a.weighed = &d_out[0, 0]
    a.weighed_stride = stride(d_out.strides[0], sizeof(real_t))
    a.part_stride = stride(record.strides[0], sizeof(real_t))
    # What forward writes is only read here.
    a.out = <real_t*>&out[0, 0]
    a.row_max = <real_t*>&row_max[0, 0]
    a.row_sum = <real_t*>&row_sum[0, 0]
    a.negative = <real_t*>&negative[0, 0]
    a.negative_weight = <real_t*>&negative_weight[0, 0]
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        attention_targets(
            level, a, &d_score_target[0, 0], &record[0, 0, 0], start + cut(n, parts, k),
            start + cut(n, parts, k + 1),
        )


def weights(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[:, :] score_source,
    const real_t[:, :] score_target,
    real_t[:, ::1] out,
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
    """A row is one thread's, however long."""
    cdef Attention[real_t] a
    cdef Py_ssize_t k, first, all_work, n_pieces
    if start == stop or indices.shape[0] == 0:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, score_source.shape[0], start, stop)
    describe(
        &a, indptr, indices, score_target, 1, slope, target_gids, source_gids, key, threshold, scale, False
    )
    a.column_part = &score_source[0, 0]
    a.part_stride = stride(score_source.strides[0], sizeof(real_t))
    first = work(a.indptr, start)
    all_work = work(a.indptr, stop) - first
    n_pieces = min(<Py_ssize_t>num_threads * PIECES, all_work // LEAST_WORK + 1)
    for k in prange(n_pieces, nogil=True, schedule="dynamic", num_threads=num_threads):
        attention_weights(
            level, a, &out[0, 0], row_of_work(a.indptr, start, stop, first + cut(all_work, n_pieces, k)),
            row_of_work(a.indptr, start, stop, first + cut(all_work, n_pieces, k + 1)),
        )
