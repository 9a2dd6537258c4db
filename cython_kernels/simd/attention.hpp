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
//
// A unit of work is some heads, at most a vector of them, or some columns of one wide head: sums of a
// unit stay in a buffer on the stack. Its bounds depend on the shapes alone, so no result depends on the
// instructions. A row of more than HUB entries is left to the caller, who sums its pieces.
#pragma once
#include "isa.hpp"

namespace dorylus {

enum {
    ATTENTION_HUB = 8192,  // entries of a piece of a row: the same result however pieces are shared
    UNIT_COLUMNS = 1024,   // at most so many columns are summed at a time
    RECORD = 4             // parts of a target's record: score, maximum, 1 / sum of weights, t
};

// A null pointer stands for an absent array. All matrices are row-major; H = heads, D = width. Those with a
// stride beside them may be columns of a wider matrix: their rows begin so many elements apart.
template <class A>
struct Attention {
    const int64_t* indptr;
    const int32_t* indices;
    int64_t nnz;
    int64_t heads;
    int64_t width;
    A slope;
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
    // Dropout of weights, unless row_gids is null.
    const int64_t* row_gids;
    const int64_t* column_gids;
    uint64_t key;
    uint64_t threshold;
    A kept_scale;
    bool rows_are_sources;
};

struct Unit {
    int64_t head, heads;      // heads first .. first + heads - 1
    int64_t column, columns;  // of a row of all heads
    int32_t head_of[UNIT_COLUMNS];  // which of its heads a column of the unit is of
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
inline int64_t heads_of_unit(const Attention<A>& a) {
    const int64_t lanes = 64 / sizeof(A), fit = UNIT_COLUMNS / a.width;
    const int64_t most = fit < lanes ? fit : lanes;
    return most < 1 ? 1 : most;
}

template <class A>
inline int64_t units_of_head(const Attention<A>& a) {  // more than one only if a unit is one head
    return (a.width + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
}

template <class A>
inline int64_t count_units(const Attention<A>& a) {
    const int64_t heads = heads_of_unit(a);
    return (a.heads + heads - 1) / heads * units_of_head(a);
}

template <class A>
inline Unit make_unit(const Attention<A>& a, int64_t k) {
    const int64_t parts = units_of_head(a), most = heads_of_unit(a);
    Unit u;
    u.head = k / parts * most;
    u.heads = a.heads - u.head < most ? a.heads - u.head : most;
    u.column = u.head * a.width + k % parts * UNIT_COLUMNS;
    const int64_t left = (u.head + u.heads) * a.width - u.column;
    u.columns = left < UNIT_COLUMNS ? left : (int64_t)UNIT_COLUMNS;
    for (int64_t c = 0; c < u.columns; c++) u.head_of[c] = u.heads == 1 ? 0 : (int32_t)(c / a.width);
    return u;
}

// Splitmix64's finaliser; a bijection.
inline uint64_t mix64(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

// The generator's key for a block of four heads of the entry that is number `occurrence` among its equals.
inline uint64_t block_key(uint64_t key, uint64_t occurrence, uint64_t quad) {
    return mix64(key + 0x9E3779B97F4A7C15u * ((occurrence << 32) + quad + 1));
}

// Which of its equals in the row, entries of the same column, an entry is. Sorted rows count as they go;
// in others a filter of bits tells most entries that they are the first, and the rest look back.
struct Occurrences {
    enum { BITS = 1 << 16 };
    const int32_t* entries;
    int64_t next_entry, run;
    bool sorted;
    uint64_t seen[BITS / 64];

    // Entries `first` .. of the row that begins at `start`, up to `end`.
    Occurrences(const int32_t* indices, int64_t start, int64_t first, int64_t end)
        : entries(indices + start), next_entry(first - start), run(0), sorted(true) {
        for (int64_t e = start + 1; e < end && sorted; e++) sorted = indices[e - 1] <= indices[e];
        if (sorted) {
            for (int64_t e = first - 1; e >= start && first < end && indices[e] == indices[first]; e--) run++;
        } else {
            std::memset(seen, 0, sizeof seen);
            for (int64_t e = start; e < first; e++) see(indices[e]);
        }
    }
    // Whether the column may have been seen before, and from now on it has.
    bool see(int32_t column) {
        const uint32_t bit = ((uint32_t)column * 0x9E3779B9u) >> 16;
        const bool before = seen[bit / 64] >> (bit % 64) & 1;
        seen[bit / 64] |= (uint64_t)1 << (bit % 64);
        return before;
    }
    uint64_t next() {
        const int64_t e = next_entry++;
        int64_t count = 0;
        if (sorted) {
            const bool same = e > 0 && entries[e] == entries[e - 1];
            count = run;
            if (!same) count = run = 0;
            run++;
            return (uint64_t)count;
        }
        if (see(entries[e]))
            for (int64_t k = 0; k < e; k++) count += entries[k] == entries[e];
        return (uint64_t)count;
    }
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
