// Sums over the entries of a CSR matrix: arguments and dispatch. The loops are in gather_body.hpp.
#pragma once
#include "isa.hpp"

namespace dorylus {

// A row with more entries is summed in pieces of this many, whose sums are added in order: the same
// result whether one thread has the row or all threads share it.
enum { HUB = 8192 };

// A null pointer stands for an absent array. Strides are in elements. The columns are those of one
// contiguous piece of a row: all of a row-major matrix, or one tile.
// S is what features are stored in, A what they are summed in (float for bf16, else the same).
template <class S, class A>
struct Gather {
    const int64_t* indptr;
    const int32_t* indices;
    int64_t nnz;
    const A* data;
    const S* x;
    int64_t x_stride;
    const S* self;  // the rows of the self term
    int64_t self_stride;
    A* out;
    int64_t out_stride;
    int64_t columns;
    const A* row_scale;
    const A* source_scale;  // scales of the entries' sources
    const A* self_scale;    // scales of the self term's rows
    A self_weight;
    bool mean;
    bool accumulate;
    bool stream;  // write past the caches; rows of `out` are aligned and whole vectors
};

template <class S, class A>
struct GatherMax {
    const int64_t* indptr;
    const int32_t* indices;
    int64_t nnz;
    const S* x;
    int64_t x_stride;
    A* out;
    int64_t out_stride;
    int32_t* source;  // may be null
    int64_t source_stride;
    int64_t columns;
};

template <class A>
struct Adjoint {
    const int64_t* indptr;
    const int32_t* indices;
    const A* data;
    const A* d_out;
    A* d_x;
    int64_t stride;  // of both
    const A* row_scale;
    const A* source_scale;
    A self_weight;
    bool mean;
};

// The adjoint over the transposed matrix, whose rows are in the order of the rows they come from.
template <class A>
struct Turned {
    const int64_t* indptr;
    const int32_t* indices;
    int64_t nnz;
    const A* values;  // of the transpose's entries, times `scale`; may be null
    const A* x;       // the rows that entries name: those of d_out, with their factors where they have any
    int64_t x_stride;
    const A* d_out;  // for the self term: without factors
    A* d_x;
    int64_t stride;  // of both
    int64_t columns;
    const A* row_scale;
    const A* scale;  // of the result's rows
    A self_weight;
    int64_t low, high;  // only these rows of d_out contribute
    bool cut;           // whether entries name others
    bool accumulate;
    bool stream;  // as in Gather
};

}  // namespace dorylus

#define DORYLUS_BODY "gather_body.hpp"
#include "each_isa.hpp"

namespace dorylus {

// Whether rows stored as S are summed in A; a caller that is generic in both compiles to nothing else.
template <class S, class A>
constexpr bool SUMS_IN = std::is_same<S, A>::value || (std::is_same<S, bf16>::value && std::is_same<A, float>::value);

// Rows start .. stop - 1, except those with more than `longest` entries.
template <class S, class A>
inline void gather_rows(int level, const Gather<S, A>& g, int64_t start, int64_t stop, int64_t longest) {
    if constexpr (SUMS_IN<S, A>) DORYLUS_DISPATCH(level, gather_rows(g, start, stop, longest))
}

// The sum over entries first .. last - 1 of one row, at most HUB of them, into part[columns].
template <class S, class A>
inline void gather_piece(int level, const Gather<S, A>& g, int64_t first, int64_t last, A* part) {
    if constexpr (SUMS_IN<S, A>) DORYLUS_DISPATCH(level, gather_piece(g, first, last, part))
}

// What comes after the sum: `total` [columns] is the sum over all entries of the row.
template <class S, class A>
inline void gather_finish(int level, const Gather<S, A>& g, int64_t row, const A* total) {
    if constexpr (SUMS_IN<S, A>) DORYLUS_DISPATCH(level, gather_finish(g, row, total))
}

template <class S, class A>
inline void gather_max_rows(int level, const GatherMax<S, A>& g, int64_t start, int64_t stop) {
    if constexpr (SUMS_IN<S, A>) DORYLUS_DISPATCH(level, gather_max_rows(g, start, stop))
}

// What rows start .. stop - 1 add to columns left .. right - 1 of the adjoint. With `sift`, only to its rows
// low .. high - 1; without, entries name no others.
template <class A>
inline void adjoint_scatter(int level, const Adjoint<A>& g, int64_t start, int64_t stop, int64_t left, int64_t right,
                            int64_t low, int64_t high, bool sift) {
    DORYLUS_DISPATCH(level, adjoint_scatter(g, start, stop, left, right, low, high, sift))
}

// Rows start .. stop - 1 of the adjoint.
template <class A>
inline void turned_rows(int level, const Turned<A>& g, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, turned_rows(g, start, stop))
}

// Copy columns of rows start .. stop - 1 of d_out into a tile, times a scale per row (null: 1) and divided by
// the rows' degrees (null: not); the tile's columns beyond `columns` become 0.
template <class A>
inline void gradient_tile(int level, const A* x, int64_t x_stride, int64_t columns, const A* scale,
                          const int64_t* indptr, A* tile, int64_t tile_columns, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, gradient_tile(x, x_stride, columns, scale, indptr, tile, tile_columns, start, stop))
}

// Copy columns of rows start .. stop - 1 into a tile, times a scale per row (null: 1); the tile's
// columns beyond `columns` become 0.
template <class S, class A>
inline void fill_tile(int level, const S* x, int64_t x_stride, int64_t columns, const A* scale, S* tile, int64_t tile_columns,
                      int64_t start, int64_t stop) {
    if constexpr (SUMS_IN<S, A>) DORYLUS_DISPATCH(level, fill_tile(x, x_stride, columns, scale, tile, tile_columns, start, stop))
}

// float32 to bfloat16 and back.
template <class S, class T>
inline void convert(int level, const S* x, T* out, int64_t n) {
    DORYLUS_DISPATCH(level, convert(x, out, n))
}

}  // namespace dorylus
