// Graph attention: weights of entries that are softmaxes over a row, and what they weigh.
//
// Nothing is stored per entry. Forward and backward are the same walk: a row of a CSR matrix takes a
// block of entries at a time, makes their weights for up to a vector of heads in a small buffer, and
// adds the rows that they weigh; only the weights' formula differs.
//
//     forward    row i, sources j    weight = mask * exp(s - max_i)             adds rows of x
//     backward   row j, targets i    weight = mask * exp(s - max_i) / sum_i     adds rows of d_out
//
//     raw = score_source[j] + score_target[i];  s = raw > 0 ? raw : slope * raw
//
// The gradients of the scores need ds = alpha * (mask * d_out[i].x[j] - t_i) * (raw > 0 ? 1 : slope) with
// t_i = d_out[i].out[i], a product of two rows for every entry and head. Both sums of it are made without:
// what is weighed is summed twice, over all entries and over those with raw <= 0 ("negative"), and the
// products are of these sums, one a row:
//
//     over targets i (backward, row j):  (all - (1 - slope) * negative).x[j] - sum alpha * leaky' * t_i
//     over sources j (from forward):     (slope - 1) * (d_out[i].negative_i - t_i * negative_weight_i)
//
// the second because sum_j alpha * (mask * d_out[i].x[j] - t_i) is 0.
#pragma once
#include "attention_common.hpp"

namespace dorylus {

enum { RECORD = 4 };  // parts of a target's record: score, maximum, 1 / sum of weights, t

// A null pointer stands for an absent array. All matrices are row-major; H = heads, D = width. Those with a
// stride beside them may be columns of a wider matrix: their rows begin so many elements apart.
template <class A>
struct Attention : AttentionCommon<A> {
    const A* weighed;      // the rows that are added, [columns of the matrix, H D]: x, or d_out
    int64_t weighed_stride;
    const A* column_part;  // scores of sources [columns, H]; backward: records of targets [columns, RECORD, H]
    int64_t part_stride;
    const A* row_score;    // [rows, H]: of the targets; backward: of the sources
    int64_t score_stride;
    // The results; forward may do without the last four.
    A* out;              // [rows, H D]; backward: d_x
    int64_t out_stride;
    A* row_max;          // [rows, H]
    A* row_sum;          // [rows, H]
    A* negative;         // [rows, H D]
    A* negative_weight;  // [rows, H]
    const A* x;          // backward: [rows, H D]
    int64_t x_stride;
    A* d_row_score;      // backward: [rows, H]
    int64_t d_score_stride;
};

// What a piece of a row adds up to. Forward: `weight`, `negative_weight` are sums of weights before
// dropout; backward: `weight` is the sum of alpha * leaky' * t.
template <class A>
struct Sums {
    A total[UNIT_COLUMNS], negative[UNIT_COLUMNS];
    A weight[64 / sizeof(A)], negative_weight[64 / sizeof(A)];
};

// The maximum of the sources' scores in a piece of a row, by head of a unit.
template <class A>
struct Maxima {
    A value[64 / sizeof(A)];
};

template <class A>
inline void clear_sums(const Unit& u, Sums<A>& s) {
    std::memset(s.total, 0, u.columns * sizeof(A));
    std::memset(s.negative, 0, u.columns * sizeof(A));
    std::memset(s.weight, 0, sizeof s.weight);
    std::memset(s.negative_weight, 0, sizeof s.negative_weight);
}

template <class A>
inline void add_sums(const Unit& u, Sums<A>& s, const Sums<A>& part) {
    for (int64_t c = 0; c < u.columns; c++) s.total[c] += part.total[c];
    for (int64_t c = 0; c < u.columns; c++) s.negative[c] += part.negative[c];
    for (int64_t h = 0; h < u.heads; h++) s.weight[h] += part.weight[h];
    for (int64_t h = 0; h < u.heads; h++) s.negative_weight[h] += part.negative_weight[h];
}

template <class A>
inline void merge_maxima(Maxima<A>& best, const Maxima<A>& part) {
    for (int h = 0; h < (int)(64 / sizeof(A)); h++)
        if (part.value[h] > best.value[h]) best.value[h] = part.value[h];
}

}  // namespace dorylus

#define DORYLUS_BODY "attention_body.hpp"
#include "each_isa.hpp"

namespace dorylus {

// Rows start .. stop - 1 that have at most ATTENTION_HUB entries.
template <class A>
inline void attention_rows(int level, const Attention<A>& a, const Unit& u, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, attention_rows(a, u, start, stop))
}

// Forward: the largest scores of the sources of entries first .. end - 1.
template <class A>
inline void attention_maxima(int level, const Attention<A>& a, const Unit& u, int64_t first, int64_t end, Maxima<A>& best) {
    DORYLUS_DISPATCH(level, attention_maxima(a, u, first, end, best))
}

// The sums over entries first .. end - 1 of a row; `best` is not read backward.
template <class A>
inline void attention_piece(int level, const Attention<A>& a, const Unit& u, int64_t row, int64_t first, int64_t end,
                            const Maxima<A>& best, Sums<A>& sums) {
    DORYLUS_DISPATCH(level, attention_piece(a, u, row, first, end, best, sums))
}

// Writes the results of a row.
template <class A>
inline void attention_finish(int level, const Attention<A>& a, const Unit& u, int64_t row, const Maxima<A>& best,
                             const Sums<A>& sums) {
    DORYLUS_DISPATCH(level, attention_finish(a, u, row, best, sums))
}

// The weights themselves, [nnz, H], of rows of any length.
template <class A>
inline void attention_weights(int level, const Attention<A>& a, A* weights, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, attention_weights(a, weights, start, stop))
}

// Gradients of the targets' scores, and the records of the targets for the backward pull, whose rows are
// `part_stride` apart. `weighed` is d_out.
template <class A>
inline void attention_targets(int level, const Attention<A>& a, A* d_score, A* record, int64_t start, int64_t stop) {
    DORYLUS_DISPATCH(level, attention_targets(a, d_score, record, start, stop))
}

}  // namespace dorylus
