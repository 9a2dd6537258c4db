// Graph attention whose scores see both ends through a rectifier (GATv2), forward and backward.
//
//     raw = left[j] + right[i];  s = sum over the columns of a head of a * (raw > 0 ? raw : slope * raw)
//
// for source j and target i. Nothing is stored per entry: the score of an entry costs a row of each end, so every
// walk makes it again from the rows that it has to read anyway. All three are the same walk over a row of a CSR
// matrix, which takes a block of entries at a time, makes numbers of each entry and head in a small buffer, and
// then goes over the same rows of the block again, which are in the cache by now:
//
//     FORWARD   row i, sources j   w = mask * exp(s - max_i)                 sums w * left[j]
//     TARGETS   row i, sources j   ds = alpha * (mask * d_out[i].left[j] - t_i)
//                                                                            sums ds * leaky', ds * leaky
//     ADJOINT   row j, targets i   ds, w = mask * alpha                      sums ds * leaky', w * d_out[i]
//
//     alpha = exp(s - max_i) / sum_i;  t_i = d_out[i].out[i];  leaky' = raw > 0 ? 1 : slope;  leaky = leaky' * raw
//
// The gradients: d_right[i] = a * (sum of ds * leaky'), d_a = sum over all i of (sum of ds * leaky), d_left[j] =
// (sum of w * d_out[i]) + a * (sum of ds * leaky').
//
// FORWARD knows no maximum before it has the scores: it takes that of what it has seen, block by block, and when
// it grows multiplies what is summed by exp(old - new). A hub's pieces are merged in the same way.
//
// Scores are sums of products over the columns of a head. A vector of products is made for as many columns as
// fit, and the vectors of a group of entries are then added in pairs of neighbours, a group at a time: the order
// depends on the width alone.
#pragma once
#include "attention_common.hpp"

namespace dorylus {

enum AttentionWalk { FORWARD = 0, TARGETS = 1, ADJOINT = 2 };
enum { RECORD_V2 = 3 };  // parts of a target's record: maximum, 1 / sum of weights, t

// All matrices are row-major, their rows begin as many elements apart as the stride tells; H = heads, D = width.
template <class A>
struct AttentionV2 : AttentionCommon<A> {
    int walk;
    const A* factor;  // a [H, D]
    const A* own;     // [rows, H D]: right; ADJOINT: left
    int64_t own_stride;
    const A* other;  // [columns, H D], what is added to it: left; ADJOINT: right
    int64_t other_stride;
    const A* weighed;  // [columns, H D]: left; ADJOINT: d_out
    int64_t weighed_stride;
    const A* paired;  // [rows, H D], whose products with rows of `weighed` are d_alpha: d_out; ADJOINT: left
    int64_t paired_stride;
    const A* record;  // [rows, RECORD_V2, H]; ADJOINT: [columns, RECORD_V2, H]; FORWARD: null
    int64_t record_stride;
    A* out;  // [rows, H D]: out; TARGETS: d_right; ADJOINT: d_left
    int64_t out_stride;
    A* row_max;  // [rows, H], FORWARD, or null
    A* row_sum;
};

// What a piece of a row adds up to; `weight` and `best` in FORWARD only.
template <class A>
struct SumsV2 {
    A first[UNIT_COLUMNS], second[UNIT_COLUMNS];
    A weight[64 / sizeof(A)], best[64 / sizeof(A)];
};

}  // namespace dorylus

#define DORYLUS_BODY "attention_v2_body.hpp"
#include "each_isa.hpp"

namespace dorylus {

// Rows start .. stop - 1 that have at most ATTENTION_HUB entries. TARGETS adds what they give to d_a to `d_factor`.
template <class A>
inline void attention_v2_rows(int level, const AttentionV2<A>& a, const Unit& u, int64_t start, int64_t stop,
                              double* d_factor) {
    DORYLUS_DISPATCH(level, attention_v2_rows(a, u, start, stop, d_factor))
}

// The sums over entries first .. end - 1 of a row.
template <class A>
inline void attention_v2_piece(int level, const AttentionV2<A>& a, const Unit& u, int64_t row, int64_t first, int64_t end,
                               SumsV2<A>& sums) {
    DORYLUS_DISPATCH(level, attention_v2_piece(a, u, row, first, end, sums))
}

// Adds the sums of the piece that follows.
template <class A>
inline void attention_v2_merge(int level, const AttentionV2<A>& a, const Unit& u, SumsV2<A>& sums, const SumsV2<A>& part) {
    DORYLUS_DISPATCH(level, attention_v2_merge(a, u, sums, part))
}

// Writes the results of a row.
template <class A>
inline void attention_v2_finish(int level, const AttentionV2<A>& a, const Unit& u, int64_t row, const SumsV2<A>& sums,
                                double* d_factor) {
    DORYLUS_DISPATCH(level, attention_v2_finish(a, u, row, sums, d_factor))
}

// The records of targets, from what the forward pass left.
template <class A>
inline void attention_v2_records(int level, const AttentionV2<A>& a, const A* out, const A* row_max, const A* row_sum,
                                 A* record, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, attention_v2_records(a, out, row_max, row_sum, record, start, stop))
}

}  // namespace dorylus
