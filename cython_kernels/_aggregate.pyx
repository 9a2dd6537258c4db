"""Loops over threads, columns and hubs of `aggregate`; the door has checked everything.

Features come as [tiles, rows, columns of a tile]: a row-major matrix is one tile. An empty array
stands for an absent one. The innermost loops are C++ (simd/gather.hpp), where their design is told.
"""

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t, uint16_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from ._gather cimport (
    HUB, Adjoint, Gather, GatherMax, Turned, adjoint_scatter, convert, fill_tile, gather_finish,
    gather_max_rows, gather_piece, gather_rows, gradient_tile, turned_rows,
)
from ._types cimport cut, pieces, real_t, stored_t
from ._work cimport DORYLUS_BOUNDS_CHECK, LEAST_WORK, PIECES, check_reads, row_of_work, work

cdef extern from *:
    const Py_ssize_t PY_SSIZE_T_MAX

cdef enum:
    STRIP = 16  # columns below which the adjoint is not cut further
    RANGE = 64  # rows below which a range of the adjoint is not cut further
    SHARES = 8  # a thread shares rows of more than this part of its work
    GROUP = 64  # pieces of a hub that are summed at a time


def hub_degree():
    """Entries above which a row is summed in pieces."""
    return HUB


def gather(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[::1] data,
    const stored_t[:, :, ::1] x,
    real_t[:, :, ::1] out,
    Py_ssize_t columns,
    const real_t[::1] row_scale,
    const real_t[::1] source_scale,
    double self_weight,
    bint mean,
    bint accumulate,
    bint stream,
    Py_ssize_t start,
    Py_ssize_t stop,
    stored_t[:, ::1] scratch,
    int level,
    int num_threads,
):
    """With a scratch tile `x` is copied into it, some columns at a time, and gathered from there."""
    cdef Gather[stored_t, real_t] g
    cdef stored_t* tile
    if start == stop or columns == 0:
        return
    g.indptr = &indptr[0]
    g.indices = &indices[0] if indices.shape[0] > 0 else NULL
    g.nnz = indices.shape[0]
    g.data = &data[0] if data.shape[0] > 0 else NULL
    g.row_scale = &row_scale[0] if row_scale.shape[0] > 0 else NULL
    g.source_scale = &source_scale[0] if source_scale.shape[0] > 0 else NULL
    g.self_scale = g.source_scale
    g.self_weight = <real_t>self_weight
    g.mean = mean
    g.accumulate = accumulate
    g.stream = stream and not accumulate
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, x.shape[1], start, stop)
    tile = &scratch[0, 0] if scratch.shape[0] > 0 else NULL
    with nogil:
        gather_columns(&g, x, out, columns, start, stop, tile, scratch.shape[1], level, num_threads)


cdef int gather_columns(
    Gather[stored_t, real_t]* g,
    const stored_t[:, :, ::1] x,
    real_t[:, :, ::1] out,
    Py_ssize_t columns,
    Py_ssize_t start,
    Py_ssize_t stop,
    stored_t* scratch,
    Py_ssize_t scratch_columns,
    int level,
    int num_threads,
) except -1 nogil:
    """Walk over the pieces of a row that are contiguous in the input, the scratch and the output."""
    cdef Py_ssize_t column = 0
    cdef Py_ssize_t width
    cdef Py_ssize_t x_width = x.shape[2]
    cdef Py_ssize_t out_width = out.shape[2]
    cdef bint stream = g.stream
    cdef const real_t* scale = g.source_scale
    while column < columns:
        width = min(columns - column, x_width - column % x_width, out_width - column % out_width)
        g.x = &x[column // x_width, 0, column % x_width]
        g.x_stride = x_width
        g.self = g.x
        g.self_stride = x_width
        if scratch != NULL:
            width = min(width, scratch_columns)
            # The scale is applied as a row is copied, not once an edge, where that is the same bits.
            if stored_t is not uint16_t and g.data == NULL:
                fill(g.x, x_width, width, scale, scratch, scratch_columns, x.shape[1], level, num_threads)
                g.source_scale = NULL
            else:
                fill(g.x, x_width, width, <const real_t*>NULL, scratch, scratch_columns, x.shape[1], level, num_threads)
            g.x = scratch
            g.x_stride = scratch_columns
        g.out = &out[column // out_width, 0, column % out_width]
        g.out_stride = out_width
        g.columns = width
        g.stream = stream and is_whole_lines(<uintptr_t>g.out, out_width * sizeof(real_t), width * sizeof(real_t))
        gather_all_rows(g, start, stop, level, num_threads)
        g.source_scale = scale
        column += width
    return 0


cdef inline bint is_whole_lines(uintptr_t address, size_t stride, size_t width) noexcept nogil:
    """Whether every row of the output is a number of whole cache lines."""
    return address % 64 == 0 and stride % 64 == 0 and width % 64 == 0


cdef int fill(
    const stored_t* x,
    Py_ssize_t x_width,
    Py_ssize_t width,
    const real_t* scale,
    stored_t* scratch,
    Py_ssize_t scratch_columns,
    Py_ssize_t rows,
    int level,
    int num_threads,
) except -1 nogil:
    """Copy `width` columns of all rows into the scratch tile."""
    cdef Py_ssize_t k
    cdef Py_ssize_t parts = pieces(rows, num_threads)
    for k in prange(parts, schedule="static", num_threads=num_threads):
        fill_tile(
            level, x, x_width, width, scale, scratch, scratch_columns, cut(rows, parts, k), cut(rows, parts, k + 1)
        )
    return 0


cdef int gather_all_rows(
    Gather[stored_t, real_t]* g, Py_ssize_t start, Py_ssize_t stop, int level, int num_threads
) except -1 nogil:
    """Cut the rows into pieces of equal work; with more threads, share each hub among them afterwards."""
    cdef Py_ssize_t k, i, n_pieces
    cdef Py_ssize_t first = work(g.indptr, start)
    cdef Py_ssize_t all_work = work(g.indptr, stop) - first
    cdef int threads = <int>min(<Py_ssize_t>num_threads, all_work // LEAST_WORK + 1)
    # All threads share a row that would be much of one's work; its sum is the same either way.
    cdef Py_ssize_t longest = max(<Py_ssize_t>HUB, all_work // (SHARES * threads)) if threads > 1 else PY_SSIZE_T_MAX
    n_pieces = min(threads * PIECES, all_work // LEAST_WORK + 1) if threads > 1 else 1
    for k in prange(n_pieces, schedule="dynamic", num_threads=threads):
        gather_rows(
            level, g[0], row_of_work(g.indptr, start, stop, first + cut(all_work, n_pieces, k)),
            row_of_work(g.indptr, start, stop, first + cut(all_work, n_pieces, k + 1)), longest,
        )
    if threads > 1:
        for i in range(start, stop):
            if g.indptr[i + 1] - g.indptr[i] > longest:
                gather_hub(g, i, level, threads)
    return 0


cdef int gather_hub(Gather[stored_t, real_t]* g, Py_ssize_t row, int level, int num_threads) except -1 nogil:
    """Sum the pieces of one row by all threads and add them in order."""
    cdef Py_ssize_t first = g.indptr[row]
    cdef Py_ssize_t end = g.indptr[row + 1]
    cdef Py_ssize_t n_parts = (end - first + HUB - 1) // HUB
    cdef Py_ssize_t width = g.columns
    cdef Py_ssize_t group, group_end, k, j
    cdef real_t* total = <real_t*>malloc((GROUP + 1) * width * sizeof(real_t))
    cdef real_t* parts = total + width
    if total == NULL:
        with gil:
            raise MemoryError("no memory for the sums of a hub")
    group = 0
    while group < n_parts:
        group_end = min(group + GROUP, n_parts)
        for k in prange(group, group_end, schedule="dynamic", num_threads=num_threads):
            gather_piece(
                level, g[0], first + k * HUB, min(first + (k + 1) * HUB, end), parts + (k - group) * width
            )
        for k in range(group, group_end):
            for j in range(width):
                total[j] = parts[(k - group) * width + j] if k == 0 else total[j] + parts[(k - group) * width + j]
        group = group_end
    gather_finish(level, g[0], row, total)
    free(total)
    return 0


def gather_max(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const stored_t[:, :, ::1] x,
    real_t[:, ::1] out,
    int32_t[:, ::1] source,
    Py_ssize_t start,
    Py_ssize_t stop,
    stored_t[:, ::1] scratch,
    int level,
    int num_threads,
):
    """An empty `source` is not written. With a scratch tile `x` is copied into it as in `gather`."""
    cdef GatherMax[stored_t, real_t] g
    cdef Py_ssize_t column = 0
    cdef Py_ssize_t x_width = x.shape[2]
    cdef stored_t* tile = &scratch[0, 0] if scratch.shape[0] > 0 else NULL
    if start == stop:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, x.shape[1], start, stop)
    g.indptr = &indptr[0]
    g.indices = &indices[0] if indices.shape[0] > 0 else NULL
    g.nnz = indices.shape[0]
    g.out_stride = out.shape[1]
    g.source_stride = source.shape[1]
    while column < out.shape[1]:
        g.x = &x[column // x_width, 0, column % x_width]
        g.x_stride = x_width
        g.columns = min(x_width - column % x_width, out.shape[1] - column)
        g.out = &out[0, column]
        g.source = &source[0, column] if source.shape[0] > 0 else NULL
        with nogil:
            if tile != NULL:
                g.columns = min(<Py_ssize_t>g.columns, scratch.shape[1])
                fill(
                    g.x, x_width, g.columns, <const real_t*>NULL, tile, scratch.shape[1], x.shape[1], level, num_threads
                )
                g.x = tile
                g.x_stride = scratch.shape[1]
            max_all_rows(&g, start, stop, level, num_threads)
        column += g.columns


cdef int max_all_rows(
    GatherMax[stored_t, real_t]* g, Py_ssize_t start, Py_ssize_t stop, int level, int num_threads
) except -1 nogil:
    """Cut the rows into pieces of equal work."""
    cdef Py_ssize_t k
    cdef Py_ssize_t first = work(g.indptr, start)
    cdef Py_ssize_t all_work = work(g.indptr, stop) - first
    cdef int threads = <int>min(<Py_ssize_t>num_threads, all_work // LEAST_WORK + 1)
    cdef Py_ssize_t n_pieces = min(threads * PIECES, all_work // LEAST_WORK + 1)
    for k in prange(n_pieces, schedule="dynamic", num_threads=threads):
        gather_max_rows(
            level, g[0], row_of_work(g.indptr, start, stop, first + cut(all_work, n_pieces, k)),
            row_of_work(g.indptr, start, stop, first + cut(all_work, n_pieces, k + 1)),
        )
    return 0


def gather_max_adjoint(
    const int32_t[:, ::1] source,
    const real_t[:, ::1] d_out,
    real_t[:, ::1] d_x,
    bint accumulate,
    Py_ssize_t start,
    Py_ssize_t stop,
    int num_threads,
):
    """Threads take strips of columns: a source may be named by many rows."""
    cdef Py_ssize_t k
    cdef Py_ssize_t f = d_x.shape[1]
    cdef Py_ssize_t strips = pieces((f + STRIP - 1) // STRIP, num_threads)
    for k in prange(strips, nogil=True, schedule="static", num_threads=num_threads):
        max_adjoint_strip(
            source, d_out, d_x, accumulate, start, stop, cut(f, strips, k), cut(f, strips, k + 1)
        )


cdef int max_adjoint_strip(
    const int32_t[:, ::1] source,
    const real_t[:, ::1] d_out,
    real_t[:, ::1] d_x,
    bint accumulate,
    Py_ssize_t start,
    Py_ssize_t stop,
    Py_ssize_t left,
    Py_ssize_t right,
) except -1 nogil:
    cdef Py_ssize_t i, j
    if not accumulate:
        for i in range(d_x.shape[0]):
            for j in range(left, right):
                d_x[i, j] = 0
    for i in range(start, stop):
        for j in range(left, right):
            if source[i, j] >= 0:
                d_x[source[i, j], j] += d_out[i, j]
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
    int level,
    int num_threads,
):
    """Threads take ranges of the rows of `d_x`, each reading all entries; or strips of columns, if it has few rows.

    So no two of them meet, and what is added to a row is added in the order of rows and entries.
    """
    cdef Adjoint[real_t] g
    cdef Py_ssize_t k, ranges, strips
    cdef Py_ssize_t f = d_x.shape[1]
    cdef Py_ssize_t n = d_x.shape[0]
    cdef int threads
    if f == 0 or n == 0:
        return
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr, indices, n, start, stop)
    g.indptr = &indptr[0]
    g.indices = &indices[0] if indices.shape[0] > 0 else NULL
    g.data = &data[0] if data.shape[0] > 0 else NULL
    g.d_out = &d_out[0, 0] if d_out.shape[0] > 0 else NULL
    g.d_x = &d_x[0, 0]
    g.stride = f
    g.row_scale = &row_scale[0] if row_scale.shape[0] > 0 else NULL
    g.source_scale = &source_scale[0] if source_scale.shape[0] > 0 else NULL
    g.self_weight = <real_t>self_weight
    g.mean = mean
    threads = <int>min(<Py_ssize_t>num_threads, (work(g.indptr, stop) - work(g.indptr, start)) // LEAST_WORK + 1)
    ranges = pieces(n // RANGE, threads)
    strips = pieces((f + STRIP - 1) // STRIP, threads)
    if ranges >= strips:
        strips = 1
    else:
        ranges = 1
    if not accumulate:
        for k in prange(n, nogil=True, schedule="static", num_threads=num_threads):
            memset(&d_x[k, 0], 0, f * sizeof(real_t))
    for k in prange(strips * ranges, nogil=True, schedule="static", num_threads=threads):
        adjoint_scatter(
            level, g, start, stop, cut(f, strips, k // ranges), cut(f, strips, k // ranges + 1),
            cut(n, ranges, k % ranges), cut(n, ranges, k % ranges + 1), ranges > 1,
        )


def gather_transposed(
    const int64_t[::1] indptr,
    const int64_t[::1] indptr_t,
    const int32_t[::1] indices_t,
    const real_t[::1] values_t,
    const real_t[:, ::1] d_out,
    real_t[:, ::1] d_x,
    const real_t[::1] row_scale,
    const real_t[::1] source_scale,
    double self_weight,
    bint mean,
    bint accumulate,
    bint stream,
    Py_ssize_t start,
    Py_ssize_t stop,
    real_t[:, ::1] scratch,
    int level,
    int num_threads,
):
    """The adjoint over the transpose, the same bits as `gather_adjoint`; `values_t` are times `source_scale`.

    A scratch tile is needed where rows of `d_out` have factors: they are multiplied as they are copied.
    """
    cdef Turned[real_t] g
    cdef Py_ssize_t column = 0
    cdef Py_ssize_t f = d_x.shape[1]
    cdef const int64_t* degrees = &indptr[0] if mean else NULL
    cdef real_t* tile
    if f == 0 or d_x.shape[0] == 0:
        return
    tile = &scratch[0, 0] if scratch.shape[0] > 0 else NULL
    if DORYLUS_BOUNDS_CHECK:
        check_reads(indptr_t, indices_t, d_out.shape[0], 0, d_x.shape[0])
    g.indptr = &indptr_t[0]
    g.indices = &indices_t[0] if indices_t.shape[0] > 0 else NULL
    g.nnz = indices_t.shape[0]
    g.values = &values_t[0] if values_t.shape[0] > 0 else NULL
    g.stride = f
    g.row_scale = &row_scale[0] if row_scale.shape[0] > 0 else NULL
    g.scale = &source_scale[0] if source_scale.shape[0] > 0 else NULL
    g.self_weight = <real_t>self_weight
    g.low = start
    g.high = stop
    g.cut = stop - start < d_out.shape[0]
    g.accumulate = accumulate
    while column < f:
        g.d_out = &d_out[0, column] if d_out.shape[0] > 0 else NULL
        g.d_x = &d_x[0, column]
        g.x = g.d_out
        g.x_stride = f
        g.columns = f - column
        with nogil:
            if tile != NULL:
                g.columns = min(<Py_ssize_t>g.columns, scratch.shape[1])
                fill_gradient(&g, degrees, tile, scratch.shape[1], start, stop, level, num_threads)
                g.x = tile
                g.x_stride = scratch.shape[1]
            g.stream = stream and not accumulate and is_whole_lines(
                <uintptr_t>g.d_x, f * sizeof(real_t), g.columns * sizeof(real_t)
            )
            turned_all_rows(&g, d_x.shape[0], level, num_threads)
        column += g.columns


cdef int fill_gradient(
    Turned[real_t]* g,
    const int64_t* degrees,
    real_t* tile,
    Py_ssize_t tile_columns,
    Py_ssize_t start,
    Py_ssize_t stop,
    int level,
    int num_threads,
) except -1 nogil:
    """Copy some columns of the rows that contribute into the scratch tile, with their factors."""
    cdef Py_ssize_t k
    cdef Py_ssize_t parts = pieces(stop - start, num_threads)
    for k in prange(parts, schedule="static", num_threads=num_threads):
        gradient_tile(
            level, g.x, g.x_stride, g.columns, g.row_scale, degrees, tile, tile_columns,
            start + cut(stop - start, parts, k), start + cut(stop - start, parts, k + 1),
        )
    return 0


cdef int turned_all_rows(Turned[real_t]* g, Py_ssize_t rows, int level, int num_threads) except -1 nogil:
    """Cut the rows into pieces of equal work."""
    cdef Py_ssize_t k
    cdef Py_ssize_t all_work = work(g.indptr, rows)
    cdef int threads = <int>min(<Py_ssize_t>num_threads, all_work // LEAST_WORK + 1)
    cdef Py_ssize_t n_pieces = min(threads * PIECES, all_work // LEAST_WORK + 1) if threads > 1 else 1
    for k in prange(n_pieces, schedule="dynamic", num_threads=threads):
        turned_rows(
            level, g[0], row_of_work(g.indptr, 0, rows, cut(all_work, n_pieces, k)),
            row_of_work(g.indptr, 0, rows, cut(all_work, n_pieces, k + 1)),
        )
    return 0


def to_bfloat16(const float[::1] x, uint16_t[::1] out, int level, int num_threads):
    """Threads take equal pieces."""
    cdef Py_ssize_t k
    cdef Py_ssize_t n = x.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if n > 0:
        for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
            convert(level, &x[cut(n, parts, k)], &out[cut(n, parts, k)], cut(n, parts, k + 1) - cut(n, parts, k))


def from_bfloat16(const uint16_t[::1] x, float[::1] out, int level, int num_threads):
    """Threads take equal pieces."""
    cdef Py_ssize_t k
    cdef Py_ssize_t n = x.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if n > 0:
        for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
            convert(level, &x[cut(n, parts, k)], &out[cut(n, parts, k)], cut(n, parts, k + 1) - cut(n, parts, k))
