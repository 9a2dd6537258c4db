// Passes over the rows of a matrix: arguments and dispatch. The loops are in rowwise_body.hpp.
//
// A pass reads every value once and writes it once, and does between the two what would otherwise be
// passes of their own: bias, activation, dropout, the scale that the next gather wants, and the
// conversion to its layout (isa.hpp) or to bfloat16.
#pragma once
#include "isa.hpp"

namespace dorylus {

// The dropout masks of one (seed, layer, epoch); dropout_masks.py says what a word is made of.
struct Mask {
    uint32_t key0, key1, epoch;
    uint64_t threshold;  // a value is kept iff its word is at least this; up to 2**32; 0 keeps all
};

// A null pointer stands for an absent array. Strides are in elements. A matrix [n][columns] lies in
// tiles of `width` columns, each tile `tile` elements after the one before it; a row-major matrix is
// a single tile of all its columns.
// S is what the result is stored in, A what is computed in (float for bf16, else the same).
template <class S, class A>
struct RowPass {
    const A* x;  // row-major
    int64_t columns;
    const A* bias;
    const int64_t* gids;  // not read if the mask keeps all
    const A* row_scale;
    bool relu;
    A scale;  // of kept values
    Mask mask;
    S* out;  // may be x
    int64_t out_width, out_tile;
    bool stream;  // write past the caches; `out` begins at a cache line and a tile's rows are whole lines
};

// P is what the activated values are stored in.
template <class P, class S, class A>
struct RowPassBack {
    const A* d_out;  // row-major
    int64_t columns;
    const P* activated;
    int64_t activated_width, activated_tile;
    const A* row_scale;
    A scale;
    S* out;  // may be d_out or activated
    int64_t out_width, out_tile;
    bool stream;
};

// The way back through dropout and ELU (of RowPass), row-major; the masks are made again.
template <class A>
struct EluBack {
    const A* d_out;
    const A* activated;  // the result of the way there
    int64_t columns;
    const int64_t* gids;  // not read if the mask keeps all
    A scale, keep;        // of kept values, and its inverse
    Mask mask;
    A* out;  // may be d_out or activated
};

template <class A>
struct EntryDropout {
    const int64_t* indptr;
    const int32_t* indices;
    const A* data;
    const int64_t* gids;
    A* out;  // may be data
    A scale;
    Mask mask;
};

// out[out_index[k]] = x[x_index[k]]; a null index stands for k itself.
template <class P, class S>
struct Move {
    const P* x;
    int64_t x_width, x_tile;
    const int32_t* x_index;
    S* out;
    int64_t out_width, out_tile;
    const int32_t* out_index;
    int64_t columns;
};

}  // namespace dorylus

#define DORYLUS_BODY "rowwise_body.hpp"
#include "each_isa.hpp"

namespace dorylus {

// Whether a value computed in A may be stored as S; a caller that is generic in both compiles to
// nothing else.
template <class S, class A>
constexpr bool STORES = std::is_same<S, A>::value || (std::is_same<S, bf16>::value && std::is_same<A, float>::value);

// Each of these does rows start .. stop - 1.
template <class S, class A>
inline void activate_rows(int level, const RowPass<S, A>& pass, int64_t start, int64_t stop) {
    if constexpr (STORES<S, A>) DORYLUS_DISPATCH(level, activate_rows(pass, start, stop))
}

template <class P, class S, class A>
inline void activate_rows_back(int level, const RowPassBack<P, S, A>& pass, int64_t start, int64_t stop) {
    if constexpr (STORES<S, A> && STORES<P, A>) DORYLUS_DISPATCH(level, activate_rows_back(pass, start, stop))
}

// ELU in place of relu, row-major: the result has no tiles and no scale of rows.
template <class A>
inline void elu_rows(int level, const RowPass<A, A>& pass, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, elu_rows(pass, start, stop))
}

template <class A>
inline void elu_rows_back(int level, const EluBack<A>& pass, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, elu_rows_back(pass, start, stop))
}

template <class A>
inline void drop_entries(int level, const EntryDropout<A>& pass, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, drop_entries(pass, start, stop))
}

// Numbers start .. stop - 1 of the index.
template <class P, class S>
inline void move_rows(int level, const Move<P, S>& move, int64_t start, int64_t stop) {
    if constexpr (STORES<P, S> || STORES<S, P>) DORYLUS_DISPATCH(level, move_rows(move, start, stop))
}

// Add columns left .. right - 1 of rows start .. stop - 1 to the rows of `out` that `index` names.
template <class A>
inline void add_rows(int level, const A* rows, const int32_t* index, A* out, int64_t stride, int64_t start, int64_t stop,
                     int64_t left, int64_t right) {
    DORYLUS_DISPATCH(level, add_rows(rows, index, out, stride, start, stop, left, right))
}

// `words` holds a counter on entry and its four random words on return.
inline void philox_block(int level, uint32_t* words, uint32_t key0, uint32_t key1) {
    DORYLUS_DISPATCH(level, philox_block(words, key0, key1))
}

}  // namespace dorylus
