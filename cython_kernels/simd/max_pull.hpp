// The gradient of the maximum as a gather: arguments and dispatch. The loops are in max_pull_body.hpp.
#pragma once
#include "isa.hpp"

namespace dorylus {

// A packed row is `columns` gradients and then as many ids, the bits of integers of their size.
template <class A>
struct MaxPull {
    const int64_t* indptr;
    const int32_t* indices;
    int64_t nnz;
    const A* packed;
    const int64_t* ids;  // of the rows
    A* d_x;
    int64_t columns;  // of d_x: half of a packed row
};

}  // namespace dorylus

#define DORYLUS_BODY "max_pull_body.hpp"
#include "each_isa.hpp"

namespace dorylus {

template <class A>
inline void max_pull_rows(int level, const MaxPull<A>& g, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, max_pull_rows(g, start, stop))
}

}  // namespace dorylus
