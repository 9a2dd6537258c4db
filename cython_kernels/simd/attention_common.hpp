// What the loops of attention share, with scores that are sums (attention.hpp) and with scores that a vector makes
// of a sum (attention_v2.hpp): the matrix, units of work, masks. The loops are in attention_common_body.hpp.
//
// A unit of work is some heads, at most a vector of them, or some columns of one wide head: sums of a
// unit stay in a buffer on the stack. Its bounds depend on the shapes alone, so no result depends on the
// instructions. A row of more than HUB entries is left to the caller, who sums its pieces.
#pragma once
#include "isa.hpp"

namespace dorylus {

enum {
    ATTENTION_HUB = 8192,  // entries of a piece of a row: the same result however pieces are shared
    UNIT_COLUMNS = 1024    // at most so many columns are summed at a time
};

// The matrix, the heads (H of D columns), and dropout of weights, unless row_gids is null.
template <class A>
struct AttentionCommon {
    const int64_t* indptr;
    const int32_t* indices;
    int64_t nnz;
    int64_t heads;
    int64_t width;
    A slope;
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

template <class A>
inline int64_t heads_of_unit(const AttentionCommon<A>& a) {
    const int64_t lanes = 64 / sizeof(A), fit = UNIT_COLUMNS / a.width;
    const int64_t most = fit < lanes ? fit : lanes;
    return most < 1 ? 1 : most;
}

template <class A>
inline int64_t units_of_head(const AttentionCommon<A>& a) {  // more than one only if a unit is one head
    return (a.width + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
}

template <class A>
inline int64_t count_units(const AttentionCommon<A>& a) {
    const int64_t heads = heads_of_unit(a);
    return (a.heads + heads - 1) / heads * units_of_head(a);
}

template <class A>
inline Unit make_unit(const AttentionCommon<A>& a, int64_t k) {
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

// Calls the instance for the number of heads of a unit, rounded up to a power of two.
#define DORYLUS_HEADS(heads, call)                                \
    {                                                             \
        if (heads == 1) call(1)                                   \
        else if (heads == 2) call(2)                              \
        else if (heads <= 4) call(4)                              \
        else if (heads <= 8) call(8)                              \
        else if constexpr (Lanes<A>::value == 16) call(16)        \
    }

}  // namespace dorylus
