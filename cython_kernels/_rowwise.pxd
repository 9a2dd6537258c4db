# What the C++ passes over rows look like from Cython; simd/rowwise.hpp says what each field means.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t


cdef extern from "simd/rowwise.hpp" namespace "dorylus" nogil:
    cdef cppclass Mask:
        uint32_t key0
        uint32_t key1
        uint32_t epoch
        uint64_t threshold

    cdef cppclass RowPass[S, A]:
        const A* x
        int64_t columns
        const A* bias
        const int64_t* gids
        const A* row_scale
        bint relu
        A scale
        Mask mask
        S* out
        int64_t out_width
        int64_t out_tile
        bint stream

    cdef cppclass RowPassBack[P, S, A]:
        const A* d_out
        int64_t columns
        const P* activated
        int64_t activated_width
        int64_t activated_tile
        const A* row_scale
        A scale
        S* out
        int64_t out_width
        int64_t out_tile
        bint stream

    cdef cppclass EluBack[A]:
        const A* d_out
        const A* activated
        int64_t columns
        const int64_t* gids
        A scale
        A keep
        Mask mask
        A* out

    cdef cppclass EntryDropout[A]:
        const int64_t* indptr
        const int32_t* indices
        const A* data
        const int64_t* gids
        A* out
        A scale
        Mask mask

    cdef cppclass Move[P, S]:
        const P* x
        int64_t x_width
        int64_t x_tile
        const int32_t* x_index
        S* out
        int64_t out_width
        int64_t out_tile
        const int32_t* out_index
        int64_t columns

    void activate_rows[S, A](int level, const RowPass[S, A]& work, int64_t start, int64_t stop)
    void activate_rows_back[P, S, A](int level, const RowPassBack[P, S, A]& work, int64_t start, int64_t stop)
    void elu_rows[A](int level, const RowPass[A, A]& work, int64_t start, int64_t stop)
    void elu_rows_back[A](int level, const EluBack[A]& work, int64_t start, int64_t stop)
    void drop_entries[A](int level, const EntryDropout[A]& work, int64_t start, int64_t stop)
    void move_rows[P, S](int level, const Move[P, S]& move, int64_t start, int64_t stop)
    void add_rows[A](
        int level, const A* rows, const int32_t* index, A* out, int64_t stride, int64_t start, int64_t stop,
        int64_t left, int64_t right,
    )
    void philox_block(int level, uint32_t* words, uint32_t key0, uint32_t key1)


cdef inline Mask make_mask(uint64_t key, uint32_t epoch, uint64_t threshold) noexcept nogil:
    cdef Mask mask
    mask.key0 = <uint32_t>key
    mask.key1 = <uint32_t>(key >> 32)
    mask.epoch = epoch
    mask.threshold = threshold
    return mask
