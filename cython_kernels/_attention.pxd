# What the C++ loops of attention look like from Cython; simd/attention.hpp says what each field means.

from libc.stdint cimport int32_t, int64_t, uint64_t


cdef extern from "simd/attention.hpp" namespace "dorylus" nogil:
    const int64_t ATTENTION_HUB

    cdef cppclass Attention[A]:
        const int64_t* indptr
        const int32_t* indices
        int64_t nnz
        int64_t heads
        int64_t width
        A slope
        const A* weighed
        int64_t weighed_stride
        const A* column_part
        int64_t part_stride
        const A* row_score
        int64_t score_stride
        A* out
        int64_t out_stride
        A* row_max
        A* row_sum
        A* negative
        A* negative_weight
        const A* x
        int64_t x_stride
        A* d_row_score
        int64_t d_score_stride
        const int64_t* row_gids
        const int64_t* column_gids
        uint64_t key
        uint64_t threshold
        A kept_scale
        bint rows_are_sources

    cdef cppclass Unit:
        int64_t head
        int64_t heads
        int64_t column
        int64_t columns

    cdef cppclass Sums[A]:
        pass

    cdef cppclass Maxima[A]:
        pass

    int64_t count_units[A](const Attention[A]& a)
    Unit make_unit[A](const Attention[A]& a, int64_t k)
    void add_sums[A](const Unit& u, Sums[A]& s, const Sums[A]& part)
    void merge_maxima[A](Maxima[A]& best, const Maxima[A]& part)
    void attention_rows[A](int level, const Attention[A]& a, const Unit& u, int64_t start, int64_t stop)
    void attention_maxima[A](
        int level, const Attention[A]& a, const Unit& u, int64_t first, int64_t end, Maxima[A]& best
    )
    void attention_piece[A](
        int level, const Attention[A]& a, const Unit& u, int64_t row, int64_t first, int64_t end,
        const Maxima[A]& best, Sums[A]& sums,
    )
    void attention_finish[A](
        int level, const Attention[A]& a, const Unit& u, int64_t row, const Maxima[A]& best, const Sums[A]& sums
    )
    void attention_weights[A](int level, const Attention[A]& a, A* weights, int64_t start, int64_t stop)
    void attention_targets[A](
        int level, const Attention[A]& a, A* d_score, A* record, int64_t start, int64_t stop
    )
