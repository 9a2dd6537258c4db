// Products with a matrix of few columns: arguments and dispatch. The loops are in narrow_body.hpp.
#pragma once
#include "isa.hpp"

namespace dorylus {

// Rows whose share of an adjoint is summed by itself. The sums are added in order: rounding grows with the
// length of a block and the number of blocks, not with the number of rows. A block of A stays in the L2 cache.
enum { NARROW_BLOCK = 64 };

// Columns are at most three cache lines. Matrices are row-major; `padded` is the columns of `b` in whole lines.
template <class A>
struct NarrowProduct {
    const A* a;  // [n][depth]
    int64_t depth;
    const A* b;  // [depth][padded], or of an adjoint [n][columns]
    A* out;      // [n][columns], or of an adjoint [depth][columns]
    int64_t columns;
};

}  // namespace dorylus

#define DORYLUS_BODY "narrow_body.hpp"
#include "each_isa.hpp"

namespace dorylus {

// Rows start .. stop - 1 of a @ b.
template <class A>
inline void narrow_rows(int level, const NarrowProduct<A>& g, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, narrow_rows(g, start, stop))
}

// Rows left .. right - 1 of a^T @ b, over n rows of both.
template <class A>
inline void narrow_adjoint(int level, const NarrowProduct<A>& g, int64_t n, int64_t left, int64_t right) {
    DORYLUS_DISPATCH(level, narrow_adjoint(g, n, left, right))
}

}  // namespace dorylus
