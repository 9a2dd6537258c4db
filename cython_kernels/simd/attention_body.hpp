// The loops of attention.hpp, once per instruction set; no guard.
#include "attention_common_body.hpp"

enum { BLOCK = 64 };  // entries whose weights are made at a time

// Numbers of a block of entries by entry and head. One vector more than its entries have is read.
template <class A>
struct Block {
    enum { SIZE = (BLOCK + 1) * Lanes<A>::value };
    alignas(64) A part[RECORD][SIZE];  // what a column gives: its score; backward: its record
    alignas(64) A weight[SIZE];
    alignas(64) A negative[SIZE];
    alignas(64) uint32_t word[SIZE];
};

// What is the same for all entries of a row.
template <class A>
struct RowNumbers {
    typedef Vec<A, Lanes<A>::value> V;
    V score, best;  // best: forward only
    V weight, negative_weight;
};

template <int HEADS, bool BACK, class A>
DORYLUS_INLINE RowNumbers<A> start_row(const Attention<A>& a, const Unit& u, int64_t row, const Maxima<A>& best) {
    typedef Vec<A, Lanes<A>::value> V;
    RowNumbers<A> r;
    r.score = repeat_heads<HEADS>(a.row_score + row * a.score_stride + u.head, u.heads);
    r.weight = r.negative_weight = r.best = V{};
    if (!BACK) {
        const V raw = repeat_heads<HEADS>(best.value, u.heads) + r.score;
        r.best = choose(raw > 0, raw, a.slope * raw);
    }
    return r;
}

// The weights of `count` entries, and their sums.
template <int HEADS, bool BACK, class A>
DORYLUS_INLINE void make_weights(const Attention<A>& a, const Unit& u, int64_t row, int64_t first, int count,
                                 RowNumbers<A>& r, Occurrences* occurrences, Block<A>& b) {
    enum { N = Lanes<A>::value };
    typedef Vec<A, N> V;
    typedef typename IntOf<A>::type I;
    typedef Vec<I, N> M;
    typedef Vec<int32_t, N> W;
    for (int k = 0; k < count; k++) {
        const int64_t j = a.indices[first + k];
        if (BACK) {
            const A* const record = a.column_part + j * a.part_stride + u.head;
            for (int q = 0; q < RECORD; q++)
                store<HEADS>(b.part[q] + k * HEADS, load_heads<HEADS>(record + q * a.heads, u.heads));
        } else {
            store<HEADS>(b.part[0] + k * HEADS, load_heads<HEADS>(a.column_part + j * a.part_stride + u.head, u.heads));
        }
    }
    const bool drop = occurrences != nullptr;
    if (drop) make_words(a, u, HEADS, row, first, count, *occurrences, b.word);
    const int size = count * HEADS;
    V weight = {}, negative_weight = {};
    for (int k = 0; k < size; k += N) {
        const V raw = load<N>(b.part[0] + k) + r.score;
        const M positive = raw > 0;
        const V s = choose(positive, raw, a.slope * raw);
        V below = s - (BACK ? load<N>(b.part[1] + k) : r.best);
        if (BACK) below = choose(below > 0, V{}, below);  // a maximum that is older than the score
        V e = exponential<N>(below);
        if (BACK) e *= load<N>(b.part[2] + k);
        M inside = splat<N>((I)-1);
        if (k + N > size)  // beyond the last entry the buffer holds anything
            for (int l = 0; l < N; l++) inside[l] = k + l < size ? -1 : 0;
        e = choose(inside, e, V{});
        if (BACK) {
            const V change = e * load<N>(b.part[3] + k);
            weight += choose(inside, choose(positive, change, a.slope * change), V{});
        } else {
            weight += e;
            negative_weight += choose(positive, V{}, e);
        }
        if (drop) {
            const Vec<uint32_t, N> word = load<N>(b.word + k);
            const W kept = a.threshold == 0 ? splat<N>((int32_t)-1) : (W)(word > (uint32_t)(a.threshold - 1));
            e = choose(__builtin_convertvector(kept, M), e * a.kept_scale, V{});
        }
        store<N>(b.weight + k, e);
        store<N>(b.negative + k, choose(positive, V{}, e));
    }
    r.weight += weight;
    r.negative_weight += negative_weight;
}

// Sums the weighed rows of a block, a chunk of columns at a time, and adds that to the sums of the row:
// the rounding errors of a long row grow with its blocks, not its entries. The chunks begin at column
// `offset` of the unit. SPREAD: columns of several heads in a vector, to which the weights of an
// entry are permuted; else all columns of a vector are of one head.
template <bool PAIR, bool SPREAD, class A>
struct AddVisit {
    const Attention<A>& a;
    const Unit& u;
    const Block<A>& b;
    int heads;  // of an entry in the block
    int64_t first;
    int count;
    Sums<A>& sums;
    int64_t offset;

    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        typedef Vec<A, N> V;
        typedef Vec<typename IntOf<A>::type, N> M;
        const int64_t stride = a.weighed_stride;
        const A* const x = a.weighed + u.column + offset + column;
        A* const totals = sums.total + offset + column;
        A* const negatives = sums.negative + offset + column;
        V total[NV], negative[NV];
        [[maybe_unused]] M lane[NV];
        int64_t head[NV];
        for (int v = 0; v < NV; v++) {
            total[v] = negative[v] = V{};
            const int64_t c = offset + column + at<N, NV>(v, last);
            head[v] = u.head_of[c];
            lane[v] = SPREAD ? __builtin_convertvector(load<N>(u.head_of + c), M) : M{};
        }
        for (int k = 0; k < count; k++) {
            const int64_t e = first + k;
            if (NV * N * sizeof(A) > 64) {
                const A* const later = x + (int64_t)a.indices[e + AHEAD < a.nnz ? e + AHEAD : e] * stride;
                for (int v = 0; v < NV; v++)
                    if ((v * N * (int)sizeof(A)) % 64 == 0) __builtin_prefetch(later + at<N, NV>(v, last));
            }
            const A* const row = x + (int64_t)a.indices[e] * stride;
            const A* const weight = b.weight + k * heads;
            const A* const below = b.negative + k * heads;
            for (int v = 0; v < NV; v++) {
                const V value = load<N>(row + at<N, NV>(v, last));
#if DORYLUS_LEVEL == 2
                if constexpr (SPREAD && N == Lanes<A>::value) {  // never of narrow ones
                    total[v] += permute(load<N>(weight), lane[v]) * value;
                    if (PAIR) negative[v] += permute(load<N>(below), lane[v]) * value;
                    continue;
                }
#endif
                total[v] += weight[head[v]] * value;
                if (PAIR) negative[v] += below[head[v]] * value;
            }
        }
        for (int v = 0; v < NV; v++) {  // all loads before the first store: the last vector may overlap
            total[v] += load<N>(totals + at<N, NV>(v, last));
            if (PAIR) negative[v] += load<N>(negatives + at<N, NV>(v, last));
        }
        for (int v = 0; v < NV; v++) {
            store<N>(totals + at<N, NV>(v, last), total[v]);
            if (PAIR) store<N>(negatives + at<N, NV>(v, last), negative[v]);
        }
    }
};

template <bool PAIR, class A>
inline void add_block(const Attention<A>& a, const Unit& u, const Block<A>& b, int heads, int64_t first, int count,
                      Sums<A>& sums) {
    enum { LIMIT = PAIR ? (int)PAIRS : (int)MAX_VECTORS };
    visit_unit<LIMIT>(a, u, AddVisit<PAIR, false, A>{a, u, b, heads, first, count, sums, 0},
                      AddVisit<PAIR, true, A>{a, u, b, heads, first, count, sums, 0});
}

template <int HEADS, class A>
DORYLUS_INLINE void find_maxima(const Attention<A>& a, const Unit& u, int64_t first, int64_t end, Maxima<A>& best) {
    // Of a NaN nothing is seen here; it makes the weights NaN.
    Vec<A, HEADS> most = splat<HEADS>(-(A)INFINITY);
    const A* const score = a.column_part + u.head;
    for (int64_t e = first; e < end; e++) {
        const Vec<A, HEADS> value = load_heads<HEADS>(score + (int64_t)a.indices[e] * a.part_stride, u.heads);
        most = choose(value > most, value, most);
    }
    for (int h = 0; h < (int)Lanes<A>::value; h++) best.value[h] = -(A)INFINITY;
    store<HEADS>(best.value, most);
}

template <int HEADS, bool BACK, bool PAIR, class A>
inline void sum_piece_as(const Attention<A>& a, const Unit& u, int64_t row, int64_t first, int64_t end, const Maxima<A>& best,
                         Occurrences* occurrences, Block<A>& block, Sums<A>& sums) {
    RowNumbers<A> r = start_row<HEADS, BACK>(a, u, row, best);
    clear_sums(u, sums);
    for (int64_t e = first; e < end; e += BLOCK) {
        const int count = (int)(end - e < BLOCK ? end - e : (int64_t)BLOCK);
        make_weights<HEADS, BACK>(a, u, row, e, count, r, occurrences, block);
        add_block<PAIR>(a, u, block, HEADS, e, count, sums);
    }
    add_lanes<A, Lanes<A>::value>(HEADS, r.weight, sums.weight);
    add_lanes<A, Lanes<A>::value>(HEADS, r.negative_weight, sums.negative_weight);
}

template <int HEADS, bool BACK, bool PAIR, class A>
DORYLUS_INLINE void sum_piece(const Attention<A>& a, const Unit& u, int64_t row, int64_t first, int64_t end,
                              const Maxima<A>& best, Block<A>& block, Sums<A>& sums) {
    if (a.row_gids) {
        Occurrences occurrences(a.indices, a.indptr[row], first, end);
        sum_piece_as<HEADS, BACK, PAIR>(a, u, row, first, end, best, &occurrences, block, sums);
    } else {
        sum_piece_as<HEADS, BACK, PAIR>(a, u, row, first, end, best, nullptr, block, sums);
    }
}

template <class A>
inline void finish_forward(const Attention<A>& a, const Unit& u, int64_t row, const Maxima<A>& best, const Sums<A>& sums) {
    const int64_t width = u.heads == 1 ? u.columns : a.width;
    const bool empty = a.indptr[row] == a.indptr[row + 1];
    for (int64_t h = 0; h < u.heads; h++) {
        const int64_t at = row * a.heads + u.head + h, c = u.column + h * width;
        const A weight = empty ? (A)1 : sums.weight[h];  // the sums of an empty row are 0
        divide(sums.total + h * width, weight, a.out + row * a.out_stride + c, width);
        if (!a.negative) continue;
        divide(sums.negative + h * width, weight, a.negative + row * a.heads * a.width + c, width);
        const A raw = best.value[h] + a.row_score[row * a.score_stride + u.head + h];
        a.row_max[at] = empty ? (A)0 : raw > 0 ? raw : a.slope * raw;
        a.row_sum[at] = sums.weight[h];
        a.negative_weight[at] = sums.negative_weight[h] / weight;
    }
}

template <class A>
inline void finish_backward(const Attention<A>& a, const Unit& u, int64_t row, const Sums<A>& sums) {
    const int64_t width = u.heads == 1 ? u.columns : a.width;
    const A rest = (A)1 - a.slope;
    std::memcpy(a.out + row * a.out_stride + u.column, sums.total, u.columns * sizeof(A));
    for (int64_t h = 0; h < u.heads; h++) {
        A* const target = a.d_row_score + row * a.d_score_stride + u.head + h;
        const A* const x = a.x + row * a.x_stride + u.column + h * width;
        const A change = dot(sums.total + h * width, x, width) - rest * dot(sums.negative + h * width, x, width);
        // A wide head comes in several units, the first of which has the rest of the sum.
        *target = u.column == u.head * a.width ? change - sums.weight[h] : *target + change;
    }
}

template <int HEADS, class A>
inline void attention_rows_as(const Attention<A>& a, const Unit& u, int64_t start, int64_t stop) {
    Block<A> block = {};  // lanes behind the last entry are computed, never used
    Sums<A> sums;
    Maxima<A> best;
    const bool back = a.d_row_score != nullptr;
    for (int64_t i = start; i < stop; i++) {
        const int64_t first = a.indptr[i], end = a.indptr[i + 1];
        if (end - first > ATTENTION_HUB) continue;
        if (back) {
            sum_piece<HEADS, true, true>(a, u, i, first, end, best, block, sums);
            finish_backward(a, u, i, sums);
            continue;
        }
        find_maxima<HEADS>(a, u, first, end, best);
        if (a.negative)
            sum_piece<HEADS, false, true>(a, u, i, first, end, best, block, sums);
        else
            sum_piece<HEADS, false, false>(a, u, i, first, end, best, block, sums);
        finish_forward(a, u, i, best, sums);
    }
}

template <class A>
inline void attention_rows(const Attention<A>& a, const Unit& u, int64_t start, int64_t stop) {
#define DORYLUS_CALL(HEADS) { attention_rows_as<HEADS>(a, u, start, stop); }
    DORYLUS_HEADS(u.heads, DORYLUS_CALL)
#undef DORYLUS_CALL
}

template <class A>
inline void attention_maxima(const Attention<A>& a, const Unit& u, int64_t first, int64_t end, Maxima<A>& best) {
#define DORYLUS_CALL(HEADS) { find_maxima<HEADS>(a, u, first, end, best); }
    DORYLUS_HEADS(u.heads, DORYLUS_CALL)
#undef DORYLUS_CALL
}

template <int HEADS, class A>
inline void attention_piece_as(const Attention<A>& a, const Unit& u, int64_t row, int64_t first, int64_t end,
                               const Maxima<A>& best, Sums<A>& sums) {
    Block<A> block = {};
    if (a.d_row_score)
        sum_piece<HEADS, true, true>(a, u, row, first, end, best, block, sums);
    else if (a.negative)
        sum_piece<HEADS, false, true>(a, u, row, first, end, best, block, sums);
    else
        sum_piece<HEADS, false, false>(a, u, row, first, end, best, block, sums);
}

template <class A>
inline void attention_piece(const Attention<A>& a, const Unit& u, int64_t row, int64_t first, int64_t end,
                            const Maxima<A>& best, Sums<A>& sums) {
#define DORYLUS_CALL(HEADS) { attention_piece_as<HEADS>(a, u, row, first, end, best, sums); }
    DORYLUS_HEADS(u.heads, DORYLUS_CALL)
#undef DORYLUS_CALL
}

template <class A>
inline void attention_finish(const Attention<A>& a, const Unit& u, int64_t row, const Maxima<A>& best, const Sums<A>& sums) {
    if (a.d_row_score)
        finish_backward(a, u, row, sums);
    else
        finish_forward(a, u, row, best, sums);
}

template <int HEADS, class A>
inline void weights_as(const Attention<A>& a, const Unit& u, A* weights, int64_t start, int64_t stop) {
    enum { N = Lanes<A>::value };
    Block<A> block = {};
    Maxima<A> best;
    for (int64_t i = start; i < stop; i++) {
        const int64_t first = a.indptr[i], end = a.indptr[i + 1];
        find_maxima<HEADS>(a, u, first, end, best);
        A sum[N] = {};
        Occurrences occurrences(a.indices, first, first, a.row_gids ? end : first);
        for (int64_t piece = first; piece < end; piece += ATTENTION_HUB) {
            const int64_t piece_end = end - piece < ATTENTION_HUB ? end : piece + ATTENTION_HUB;
            RowNumbers<A> r = start_row<HEADS, false>(a, u, i, best);
            for (int64_t e = piece; e < piece_end; e += BLOCK) {
                const int count = (int)(piece_end - e < BLOCK ? piece_end - e : (int64_t)BLOCK);
                make_weights<HEADS, false>(a, u, i, e, count, r, a.row_gids ? &occurrences : nullptr, block);
                for (int k = 0; k < count; k++)
                    for (int64_t h = 0; h < u.heads; h++)
                        weights[(e + k) * a.heads + u.head + h] = block.weight[k * HEADS + h];
            }
            A part[N];
            add_lanes<A, N>(HEADS, r.weight, part);
            for (int h = 0; h < HEADS; h++) sum[h] = piece == first ? part[h] : sum[h] + part[h];
        }
        for (int64_t e = first; e < end; e++)
            for (int64_t h = 0; h < u.heads; h++) weights[e * a.heads + u.head + h] /= sum[h];
    }
}

template <class A>
inline void attention_weights(const Attention<A>& a, A* weights, int64_t start, int64_t stop) {
    for (int64_t k = 0; k < count_units(a); k++) {
        const Unit u = make_unit(a, k);
#define DORYLUS_CALL(HEADS) { weights_as<HEADS>(a, u, weights, start, stop); }
        DORYLUS_HEADS(u.heads, DORYLUS_CALL)
#undef DORYLUS_CALL
    }
}

template <class A>
inline void attention_targets(const Attention<A>& a, A* d_score, A* record, int64_t start, int64_t stop) {
    for (int64_t i = start; i < stop; i++) {
        const A* const d_out = a.weighed + i * a.weighed_stride;
        A* const parts = record + i * a.part_stride;
        for (int64_t h = 0; h < a.heads; h++) {
            const int64_t at = i * a.heads + h, c = at * a.width;
            const A t = dot(d_out + h * a.width, a.out + c, a.width);
            const A below = dot(d_out + h * a.width, a.negative + c, a.width);
            d_score[at] = (a.slope - (A)1) * (below - t * a.negative_weight[at]);
            parts[h] = a.row_score[at];
            parts[a.heads + h] = a.row_max[at];
            parts[2 * a.heads + h] = a.row_sum[at] == 0 ? (A)0 : (A)1 / a.row_sum[at];
            parts[3 * a.heads + h] = t;
        }
    }
}
