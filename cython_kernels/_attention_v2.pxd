# What the C++ loops of attention_v2 look like from Cython; simd/attention_v2.hpp says what each field means.

from libc.stdint cimport int32_t, int64_t, uint64_t


cdef extern from "simd/attention_v2.hpp" namespace "dorylus" nogil:
    const int64_t ATTENTION_HUB
    const int FORWARD
    const int TARGETS
    const int ADJOINT

    cdef cppclass AttentionV2[A]:
        const int64_t* indptr
        const int32_t* indices
        int64_t nnz
        int64_t heads
        int64_t width
        A slope
        const int64_t* row_gids
        const int64_t* column_gids
        uint64_t key
        uint64_t threshold
        A kept_scale
        bint rows_are_sources
        int walk
        const A* factor
        const A* own
        int64_t own_stride
        const A* other
        int64_t other_stride
        const A* weighed
        int64_t weighed_stride
        const A* paired
        int64_t paired_stride
        const A* record
        int64_t record_stride
        A* out
        int64_t out_stride
        A* row_max
        A* row_sum

    cdef cppclass Unit:
        int64_t head
        int64_t heads
        int64_t column
        int64_t columns

    cdef cppclass SumsV2[A]:
        pass

    int64_t count_units[A](const AttentionV2[A]& a)
    Unit make_unit[A](const AttentionV2[A]& a, int64_t k)
    void attention_v2_rows[A](
        int level, const AttentionV2[A]& a, const Unit& u, int64_t start, int64_t stop, double* d_factor
    )
    void attention_v2_piece[A](
        int level, const AttentionV2[A]& a, const Unit& u, int64_t row, int64_t first, int64_t end, SumsV2[A]& sums
    )
    void attention_v2_merge[A](
        int level, const AttentionV2[A]& a, const Unit& u, SumsV2[A]& sums, const SumsV2[A]& part
    )
    void attention_v2_finish[A](
        int level, const AttentionV2[A]& a, const Unit& u, int64_t row, const SumsV2[A]& sums, double* d_factor
    )
    void attention_v2_records[A](
        int level, const AttentionV2[A]& a, const A* out, const A* row_max, const A* row_sum, A* record,
        int64_t start, int64_t stop,
    )
