# What the C++ loops of a gather look like from Cython; simd/gather.hpp says what each field means.

from libc.stdint cimport int32_t, int64_t, uint16_t


cdef extern from "simd/gather.hpp" namespace "dorylus" nogil:
    const int64_t HUB

    cdef cppclass Gather[S, A]:
        const int64_t* indptr
        const int32_t* indices
        int64_t nnz
        const A* data
        const S* x
        int64_t x_stride
        const S* self
        int64_t self_stride
        A* out
        int64_t out_stride
        int64_t columns
        const A* row_scale
        const A* source_scale
        const A* self_scale
        A self_weight
        bint mean
        bint accumulate
        bint stream

    cdef cppclass GatherMax[S, A]:
        const int64_t* indptr
        const int32_t* indices
        int64_t nnz
        const S* x
        int64_t x_stride
        A* out
        int64_t out_stride
        int32_t* source
        int64_t source_stride
        int64_t columns

    cdef cppclass Adjoint[A]:
        const int64_t* indptr
        const int32_t* indices
        const A* data
        const A* d_out
        A* d_x
        int64_t stride
        const A* row_scale
        const A* source_scale
        A self_weight
        bint mean

    cdef cppclass Turned[A]:
        const int64_t* indptr
        const int32_t* indices
        int64_t nnz
        const A* values
        const A* x
        int64_t x_stride
        const A* d_out
        A* d_x
        int64_t stride
        int64_t columns
        const A* row_scale
        const A* scale
        A self_weight
        int64_t low
        int64_t high
        bint cut
        bint accumulate
        bint stream

    void gather_rows[S, A](int level, const Gather[S, A]& g, int64_t start, int64_t stop, int64_t longest)
    void gather_piece[S, A](int level, const Gather[S, A]& g, int64_t first, int64_t last, A* part)
    void gather_finish[S, A](int level, const Gather[S, A]& g, int64_t row, const A* total)
    void gather_max_rows[S, A](int level, const GatherMax[S, A]& g, int64_t start, int64_t stop)
    void adjoint_scatter[A](
        int level, const Adjoint[A]& g, int64_t start, int64_t stop, int64_t left, int64_t right,
        int64_t low, int64_t high, bint sift,
    )
    void turned_rows[A](int level, const Turned[A]& g, int64_t start, int64_t stop)
    void gradient_tile[A](
        int level, const A* x, int64_t x_stride, int64_t columns, const A* scale, const int64_t* indptr,
        A* tile, int64_t tile_columns, int64_t start, int64_t stop,
    )
    void fill_tile[S, A](
        int level, const S* x, int64_t x_stride, int64_t columns, const A* scale, S* tile, int64_t tile_columns,
        int64_t start, int64_t stop,
    )
    void convert[S, T](int level, const S* x, T* out, int64_t n)
