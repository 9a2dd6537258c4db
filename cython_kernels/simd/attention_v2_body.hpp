// The loops of attention_v2.hpp, once per instruction set; no guard.
#include "attention_common_body.hpp"

enum {
    BLOCK_V2 = 32,  // entries whose weights are made at a time: their rows stay in the first-level cache
    GROUP = 16,     // of these whose products are added at a time
    // Vectors of a chunk of columns: two sums and a row's own values must fit in the registers.
    CHUNK = MAX_VECTORS == 8 ? 4 : 3
};

#if DORYLUS_LEVEL == 2
enum { REGISTER = 64 };  // bytes
#elif DORYLUS_LEVEL == 1
enum { REGISTER = 32 };
#else
enum { REGISTER = 16 };
#endif

// Numbers of a block of entries by entry and head. One vector more than its entries have is read and written.
template <class A>
struct BlockV2 {
    enum { LANES = Lanes<A>::value, SIZE = (BLOCK_V2 + 1) * LANES };
    alignas(64) A part[RECORD_V2][SIZE];  // ADJOINT: the records of the columns
    alignas(64) A score[SIZE];
    alignas(64) A product[SIZE];  // d_out.left
    alignas(64) A weight[SIZE];
    alignas(64) A change[SIZE];  // ds
    alignas(64) uint32_t word[SIZE];
    alignas(64) A terms[(GROUP * LANES + 2) * LANES];  // what is to be added, by entry, head and lane
};

// Sums of neighbouring pairs of p, then those of q.
DORYLUS_INLINE Vec<float, REGISTER / 4> add_pairs(Vec<float, REGISTER / 4> p, Vec<float, REGISTER / 4> q) {
    typedef Vec<float, REGISTER / 4> V;
#if DORYLUS_LEVEL == 2
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return (V)_mm512_permutex2var_ps((__m512)p, even, (__m512)q) + (V)_mm512_permutex2var_ps((__m512)p, odd, (__m512)q);
#elif DORYLUS_LEVEL == 1
    const V sum = (V)_mm256_shuffle_ps((__m256)p, (__m256)q, 0x88) + (V)_mm256_shuffle_ps((__m256)p, (__m256)q, 0xDD);
    return (V)_mm256_permute4x64_pd((__m256d)sum, 0xD8);
#elif DORYLUS_X86
    return (V)_mm_shuffle_ps((__m128)p, (__m128)q, 0x88) + (V)_mm_shuffle_ps((__m128)p, (__m128)q, 0xDD);
#else
    return V{p[0], p[2], q[0], q[2]} + V{p[1], p[3], q[1], q[3]};
#endif
}
DORYLUS_INLINE Vec<double, REGISTER / 8> add_pairs(Vec<double, REGISTER / 8> p, Vec<double, REGISTER / 8> q) {
    typedef Vec<double, REGISTER / 8> V;
#if DORYLUS_LEVEL == 2
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    return (V)_mm512_permutex2var_pd((__m512d)p, even, (__m512d)q) + (V)_mm512_permutex2var_pd((__m512d)p, odd, (__m512d)q);
#elif DORYLUS_LEVEL == 1
    const V sum = (V)_mm256_unpacklo_pd((__m256d)p, (__m256d)q) + (V)_mm256_unpackhi_pd((__m256d)p, (__m256d)q);
    return (V)_mm256_permute4x64_pd((__m256d)sum, 0xD8);
#else
    return V{p[0], q[0]} + V{p[1], q[1]};
#endif
}

// Sums of `lanes` neighbours, a power of two, of which `sums` are wanted; `terms` is used up. Whole registers are
// read and written.
template <class A>
inline void add_neighbours(A* terms, int64_t lanes, int64_t sums, A* result) {
    enum { R = REGISTER / sizeof(A) };
    for (; lanes > 2; lanes /= 2)
        for (int64_t k = 0; k < sums * lanes / 2; k += R)
            store<R>(terms + k, add_pairs(load<R>(terms + 2 * k), load<R>(terms + 2 * k + R)));
    if (lanes == 2)
        for (int64_t k = 0; k < sums; k += R)
            store<R>(result + k, add_pairs(load<R>(terms + 2 * k), load<R>(terms + 2 * k + R)));
    else
        std::memcpy(result, terms, sums * sizeof(A));
}

// The lanes that the products of a head come in: all columns of one or, of a wider head, sums of several.
template <class A>
inline int64_t lanes_of(int64_t width) {
    int64_t lanes = Lanes<A>::value;
    while (lanes > width) lanes /= 2;
    return lanes;
}

// The terms of a score, a * leaky(other + own), and of a product of two rows.
template <class A>
struct ScoreTerm {
    const A* own;
    const A* factor;
    A slope;

    template <int N>
    struct Kept {
        Vec<A, N> own, factor;
    };
    template <int N>
    DORYLUS_INLINE Kept<N> keep(int64_t column) const {
        return {load<N>(own + column), load<N>(factor + column)};
    }
    template <int N>
    DORYLUS_INLINE Vec<A, N> value(const Kept<N>& kept, Vec<A, N> other) const {
        const Vec<A, N> raw = other + kept.own;
        return choose(raw > 0, raw, slope * raw) * kept.factor;
    }
};
template <class A>
struct ProductTerm {
    const A* own;

    template <int N>
    struct Kept {
        Vec<A, N> own;
    };
    template <int N>
    DORYLUS_INLINE Kept<N> keep(int64_t column) const {
        return {load<N>(own + column)};
    }
    template <int N>
    DORYLUS_INLINE Vec<A, N> value(const Kept<N>& kept, Vec<A, N> other) const {
        return other * kept.own;
    }
};

// The rows of a group of entries, and where their terms go.
template <class A>
struct Rows {
    const int32_t* entries;  // the first of the group
    int64_t left;            // entries from there to the last of the matrix
    int count;
    const A* rows;
    int64_t stride;
    A* terms;
    int64_t pitch;  // terms of an entry

    DORYLUS_INLINE const A* row(int k) const { return rows + (int64_t)entries[k] * stride; }
    DORYLUS_INLINE const A* later(int k) const { return row(k + AHEAD < left ? k + AHEAD : k); }
};

// Terms of heads that fill vectors, in chunks of columns.
template <class A, class Term>
struct TermVisit {
    const Rows<A>& r;
    const Term& term;

    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        typename Term::template Kept<N> kept[NV];
        for (int v = 0; v < NV; v++) kept[v] = term.template keep<N>(column + at<N, NV>(v, last));
        for (int k = 0; k < r.count; k++) {
            const A* const later = r.later(k) + column;
            for (int v = 0; v < NV; v++)
                if ((v * N * (int)sizeof(A)) % 64 == 0) __builtin_prefetch(later + at<N, NV>(v, last));
            const A* const row = r.row(k) + column;
            A* const to = r.terms + k * r.pitch + column;
            for (int v = 0; v < NV; v++)
                store<N>(to + at<N, NV>(v, last), term.template value<N>(kept[v], load<N>(row + at<N, NV>(v, last))));
        }
    }
};

// Terms of a head of any width, added up to a vector. The last columns are read once more, without being added.
template <int N, class A, class Term>
DORYLUS_INLINE void terms_of_head(const Rows<A>& r, const Term& term, int64_t head, int64_t width) {
    typedef typename IntOf<A>::type I;
    const int64_t start = head * width, whole = width / N * N;
    Vec<I, N> fresh;
    for (int l = 0; l < N; l++) fresh[l] = width - N + l >= whole ? -1 : 0;
    for (int k = 0; k < r.count; k++) {
        const A* const later = r.later(k) + start;
        for (int64_t c = 0; c < width; c += 64 / sizeof(A)) __builtin_prefetch(later + c);
        const A* const row = r.row(k) + start;
        Vec<A, N> sum = {};
        for (int64_t c = 0; c < whole; c += N)
            sum += term.template value<N>(term.template keep<N>(start + c), load<N>(row + c));
        if (whole < width) {
            const int64_t c = width - N;
            sum += choose(fresh, term.template value<N>(term.template keep<N>(start + c), load<N>(row + c)), Vec<A, N>{});
        }
        store<N>(r.terms + k * r.pitch + head * N, sum);
    }
}

template <class A, class Term>
inline void add_terms(const Rows<A>& r, const Term& term, const Unit& u, int64_t width, int64_t lanes, int heads, A* result) {
    if (lanes == width) {
        visit_row<A, CHUNK>(TermVisit<A, Term>{r, term}, u.heads * width);
    } else {
        for (int64_t h = 0; h < u.heads; h++) switch (lanes) {
                case 2: terms_of_head<2>(r, term, h, width); break;
                case 4: terms_of_head<4>(r, term, h, width); break;
                case 8: terms_of_head<8>(r, term, h, width); break;
                default: terms_of_head<Lanes<A>::value>(r, term, h, width);
            }
    }
    add_neighbours(r.terms, lanes, (int64_t)r.count * heads, result);
}

// The scores of a block and, backward, the products d_out.left.
template <int WALK, class A>
inline void make_sums(const AttentionV2<A>& a, const Unit& u, int heads, int64_t row, int64_t first, int count, BlockV2<A>& b) {
    const int64_t lanes = lanes_of<A>(a.width), column = u.head * a.width;
    const ScoreTerm<A> score{a.own + row * a.own_stride + column, a.factor + column, a.slope};
    const ProductTerm<A> product{WALK == FORWARD ? nullptr : a.paired + row * a.paired_stride + column};
    for (int k = 0; k < count; k += GROUP) {
        const int some = count - k < GROUP ? count - k : (int)GROUP;
        const int32_t* const entries = a.indices + first + k;
        const int64_t left = a.nnz - first - k;
        const Rows<A> others{entries, left, some, a.other + column, a.other_stride, b.terms, heads * lanes};
        add_terms(others, score, u, a.width, lanes, heads, b.score + k * heads);
        if (WALK == FORWARD) continue;
        const Rows<A> weighed{entries, left, some, a.weighed + column, a.weighed_stride, b.terms, heads * lanes};
        add_terms(weighed, product, u, a.width, lanes, heads, b.product + k * heads);
    }
}

// What is the same for all entries of a row, for every entry that a vector holds.
template <class A>
struct RowNumbersV2 {
    typedef Vec<A, Lanes<A>::value> V;
    V best, inverse, t;  // FORWARD: best is the maximum so far
    V weight;            // FORWARD: the sum so far
};

template <int HEADS, int WALK, class A>
DORYLUS_INLINE RowNumbersV2<A> start_row_v2(const AttentionV2<A>& a, const Unit& u, int64_t row) {
    typedef Vec<A, Lanes<A>::value> V;
    RowNumbersV2<A> r;
    r.weight = r.inverse = r.t = V{};
    r.best = splat<Lanes<A>::value>(-(A)INFINITY);
    if (WALK == TARGETS) {
        const A* const record = a.record + row * a.record_stride + u.head;
        r.best = repeat_heads<HEADS>(record, u.heads);
        r.inverse = repeat_heads<HEADS>(record + a.heads, u.heads);
        r.t = repeat_heads<HEADS>(record + 2 * a.heads, u.heads);
    }
    return r;
}

// What is subtracted from scores whose maximum this is: 0 if all are -inf, whose weights then are 0.
template <int N, class A>
DORYLUS_INLINE Vec<A, N> subtracted(Vec<A, N> best) {
    return choose(best == splat<N>(-(A)INFINITY), Vec<A, N>{}, best);
}

// Takes the scores of a block into the maximum.
template <int HEADS, class A>
DORYLUS_INLINE void raise_maximum(const Unit& u, int64_t width, int size, bool begun, RowNumbersV2<A>& r, const BlockV2<A>& b,
                                  SumsV2<A>& sums) {
    enum { N = Lanes<A>::value };
    typedef Vec<A, N> V;
    alignas(64) A old[N], best[N], factor[N];
    store<N>(old, r.best);
    V most = r.best;  // of a NaN nothing is seen; it makes the weights NaN
    for (int k = 0; k + N <= size; k += N) {
        const V s = load<N>(b.score + k);
        most = choose(s > most, s, most);
    }
    store<N>(best, most);
    for (int k = size / N * N; k < size; k++)
        if (b.score[k] > best[k % N]) best[k % N] = b.score[k];
    for (int l = HEADS; l < N; l++)
        if (best[l] > best[l % HEADS]) best[l % HEADS] = best[l];
    for (int l = HEADS; l < N; l++) best[l] = best[l % HEADS];
    r.best = load<N>(best);
    bool grows = false;
    for (int h = 0; h < HEADS; h++) grows |= best[h] != old[h];
    if (!begun || !grows) return;
    const V shrink = exponential<N>(load<N>(old) - subtracted<N, A>(r.best));
    r.weight *= shrink;
    store<N>(factor, shrink);
    for (int64_t h = 0; h < u.heads; h++)
        for (int64_t c = h * width; c < (h + 1) * width; c++) sums.first[c] *= factor[h];
}

// The weights of `count` entries, and in FORWARD their sums.
template <int HEADS, int WALK, class A>
DORYLUS_INLINE void make_weights_v2(const AttentionV2<A>& a, const Unit& u, int64_t row, int64_t first, int count, bool begun,
                                    RowNumbersV2<A>& r, Occurrences* occurrences, BlockV2<A>& b, SumsV2<A>& sums) {
    enum { N = Lanes<A>::value };
    typedef Vec<A, N> V;
    typedef typename IntOf<A>::type I;
    typedef Vec<I, N> M;
    typedef Vec<int32_t, N> W;
    if (WALK == ADJOINT)
        for (int k = 0; k < count; k++) {
            const int64_t e = first + k;
            const A* const record = a.record + (int64_t)a.indices[e] * a.record_stride + u.head;
            __builtin_prefetch(a.record + (int64_t)a.indices[e + AHEAD < a.nnz ? e + AHEAD : e] * a.record_stride + u.head);
            for (int q = 0; q < RECORD_V2; q++)
                store<HEADS>(b.part[q] + k * HEADS, load_heads<HEADS>(record + q * a.heads, u.heads));
        }
    make_sums<WALK>(a, u, HEADS, row, first, count, b);
    const bool drop = occurrences != nullptr;
    if (drop) make_words(a, u, HEADS, row, first, count, *occurrences, b.word);
    const int size = count * HEADS;
    if (WALK == FORWARD) raise_maximum<HEADS>(u, u.heads == 1 ? u.columns : a.width, size, begun, r, b, sums);
    const V best = WALK == FORWARD ? subtracted<N, A>(r.best) : r.best;
    V weight = {};
    for (int k = 0; k < size; k += N) {
        V e, t;
        if (WALK == FORWARD) {
            e = exponential<N>(load<N>(b.score + k) - best);
            M inside = splat<N>((I)-1);
            if (k + N > size)  // beyond the last entry the buffer holds anything
                for (int l = 0; l < N; l++) inside[l] = k + l < size ? -1 : 0;
            weight += choose(inside, e, V{});
        } else {
            // Not above 0 unless a row has changed since the forward pass.
            const V below = load<N>(b.score + k) - (WALK == TARGETS ? best : load<N>(b.part[0] + k));
            e = exponential<N>(choose(below > 0, V{}, below)) * (WALK == TARGETS ? r.inverse : load<N>(b.part[1] + k));
            t = WALK == TARGETS ? r.t : load<N>(b.part[2] + k);
        }
        V kept = e, d_alpha = WALK == FORWARD ? V{} : load<N>(b.product + k);
        if (drop) {
            const Vec<uint32_t, N> word = load<N>(b.word + k);
            const W some = a.threshold == 0 ? splat<N>((int32_t)-1) : (W)(word > (uint32_t)(a.threshold - 1));
            const M mask = __builtin_convertvector(some, M);
            kept = choose(mask, e * a.kept_scale, V{});
            d_alpha = choose(mask, d_alpha * a.kept_scale, V{});
        }
        if (WALK != TARGETS) store<N>(b.weight + k, kept);
        if (WALK != FORWARD) store<N>(b.change + k, e * (d_alpha - t));
    }
    r.weight += weight;
}

// Goes over the rows of a block once more and adds what is said above, a chunk of columns at a time.
template <int WALK, bool SPREAD, class A>
struct AddVisitV2 {
    const AttentionV2<A>& a;
    const Unit& u;
    const BlockV2<A>& b;
    int heads;
    int64_t row, first;
    int count;
    SumsV2<A>& sums;
    int64_t offset;

    template <int N, class M>
    DORYLUS_INLINE Vec<A, N> number(const A* of_entry, int64_t head, M lane) const {
#if DORYLUS_LEVEL == 2
        if constexpr (SPREAD && N == Lanes<A>::value) return permute(load<N>(of_entry), lane);
#endif
        return splat<N>(of_entry[head]);
    }

    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        typedef Vec<A, N> V;
        typedef Vec<typename IntOf<A>::type, N> M;
        const int64_t start = u.column + offset + column;
        A* const firsts = sums.first + offset + column;
        A* const seconds = sums.second + offset + column;
        V first_sum[NV], second_sum[NV];
        [[maybe_unused]] V own[NV];
        M lane[NV];
        int64_t head[NV];
        for (int v = 0; v < NV; v++) {
            first_sum[v] = second_sum[v] = V{};
            const int64_t c = offset + column + at<N, NV>(v, last);
            head[v] = u.head_of[c];
            lane[v] = SPREAD ? __builtin_convertvector(load<N>(u.head_of + c), M) : M{};
            if (WALK != FORWARD) own[v] = load<N>(a.own + row * a.own_stride + start + at<N, NV>(v, last));
        }
        for (int k = 0; k < count; k++) {
            const int64_t j = a.indices[first + k];
            const A* const weighed = a.weighed + j * a.weighed_stride + start;
            const A* const other = a.other + j * a.other_stride + start;
            const A* const weight = b.weight + k * heads;
            const A* const change = b.change + k * heads;
            for (int v = 0; v < NV; v++) {
                const int64_t c = at<N, NV>(v, last);
                if (WALK == FORWARD) {
                    first_sum[v] += number<N>(weight, head[v], lane[v]) * load<N>(weighed + c);
                    continue;
                }
                const V raw = load<N>(other + c) + own[v];
                const V d = number<N>(change, head[v], lane[v]);
                const V d_raw = choose(raw > 0, d, a.slope * d);
                first_sum[v] += d_raw;
                if (WALK == TARGETS)
                    second_sum[v] += d_raw * raw;
                else
                    second_sum[v] += number<N>(weight, head[v], lane[v]) * load<N>(weighed + c);
            }
        }
        for (int v = 0; v < NV; v++) {  // all loads before the first store: the last vector may overlap
            first_sum[v] += load<N>(firsts + at<N, NV>(v, last));
            if (WALK != FORWARD) second_sum[v] += load<N>(seconds + at<N, NV>(v, last));
        }
        for (int v = 0; v < NV; v++) {
            store<N>(firsts + at<N, NV>(v, last), first_sum[v]);
            if (WALK != FORWARD) store<N>(seconds + at<N, NV>(v, last), second_sum[v]);
        }
    }
};

template <int WALK, class A>
inline void add_block_v2(const AttentionV2<A>& a, const Unit& u, const BlockV2<A>& b, int heads, int64_t row, int64_t first,
                         int count, SumsV2<A>& sums) {
    visit_unit<CHUNK>(a, u, AddVisitV2<WALK, false, A>{a, u, b, heads, row, first, count, sums, 0},
                      AddVisitV2<WALK, true, A>{a, u, b, heads, row, first, count, sums, 0});
}

template <int HEADS, int WALK, class A>
inline void sum_piece_v2_as(const AttentionV2<A>& a, const Unit& u, int64_t row, int64_t first, int64_t end,
                            Occurrences* occurrences, BlockV2<A>& block, SumsV2<A>& sums) {
    RowNumbersV2<A> r = start_row_v2<HEADS, WALK>(a, u, row);
    std::memset(sums.first, 0, u.columns * sizeof(A));
    if (WALK != FORWARD) std::memset(sums.second, 0, u.columns * sizeof(A));
    for (int64_t e = first; e < end; e += BLOCK_V2) {
        const int count = (int)(end - e < BLOCK_V2 ? end - e : (int64_t)BLOCK_V2);
        make_weights_v2<HEADS, WALK>(a, u, row, e, count, e > first, r, occurrences, block, sums);
        add_block_v2<WALK>(a, u, block, HEADS, row, e, count, sums);
    }
    if (WALK != FORWARD) return;
    add_lanes<A, Lanes<A>::value>(HEADS, r.weight, sums.weight);
    store<Lanes<A>::value>(sums.best, r.best);
}

template <int HEADS, int WALK, class A>
DORYLUS_INLINE void sum_piece_v2(const AttentionV2<A>& a, const Unit& u, int64_t row, int64_t first, int64_t end,
                                 BlockV2<A>& block, SumsV2<A>& sums) {
    if (a.row_gids) {
        Occurrences occurrences(a.indices, a.indptr[row], first, end);
        sum_piece_v2_as<HEADS, WALK>(a, u, row, first, end, &occurrences, block, sums);
    } else {
        sum_piece_v2_as<HEADS, WALK>(a, u, row, first, end, nullptr, block, sums);
    }
}

template <class A>
inline void attention_v2_finish(const AttentionV2<A>& a, const Unit& u, int64_t row, const SumsV2<A>& sums, double* d_factor) {
    A* const out = a.out + row * a.out_stride + u.column;
    if (a.walk == FORWARD) {
        const int64_t width = u.heads == 1 ? u.columns : a.width;
        const bool empty = a.indptr[row] == a.indptr[row + 1];
        for (int64_t h = 0; h < u.heads; h++) {
            divide(sums.first + h * width, empty ? (A)1 : sums.weight[h], out + h * width, width);
            if (!a.row_max) continue;
            a.row_max[row * a.heads + u.head + h] = empty ? (A)0 : sums.best[h];
            a.row_sum[row * a.heads + u.head + h] = empty ? (A)0 : sums.weight[h];
        }
        return;
    }
    const A* const factor = a.factor + u.column;
    if (a.walk == TARGETS) {
        for (int64_t c = 0; c < u.columns; c++) out[c] = factor[c] * sums.first[c];
        for (int64_t c = 0; c < u.columns; c++) d_factor[u.column + c] += (double)sums.second[c];
    } else {
        for (int64_t c = 0; c < u.columns; c++) out[c] = sums.second[c] + factor[c] * sums.first[c];
    }
}

template <class A>
inline void attention_v2_merge(const AttentionV2<A>& a, const Unit& u, SumsV2<A>& sums, const SumsV2<A>& part) {
    enum { N = Lanes<A>::value };
    typedef Vec<A, N> V;
    if (a.walk != FORWARD) {
        for (int64_t c = 0; c < u.columns; c++) sums.first[c] += part.first[c];
        for (int64_t c = 0; c < u.columns; c++) sums.second[c] += part.second[c];
        return;
    }
    const int64_t width = u.heads == 1 ? u.columns : a.width;
    const V mine = load<N>(sums.best), theirs = load<N>(part.best);
    const V best = choose(theirs > mine, theirs, mine);
    A keep[N], take[N];
    store<N>(keep, exponential<N>(mine - subtracted<N, A>(best)));
    store<N>(take, exponential<N>(theirs - subtracted<N, A>(best)));
    store<N>(sums.best, best);
    for (int64_t h = 0; h < u.heads; h++) {
        sums.weight[h] = keep[h] * sums.weight[h] + take[h] * part.weight[h];
        for (int64_t c = h * width; c < (h + 1) * width; c++)
            sums.first[c] = keep[h] * sums.first[c] + take[h] * part.first[c];
    }
}

template <int HEADS, int WALK, class A>
inline void rows_v2_as(const AttentionV2<A>& a, const Unit& u, int64_t start, int64_t stop, double* d_factor) {
    BlockV2<A> block = {};  // what lies behind the last entry is computed with, never used
    SumsV2<A> sums;
    for (int64_t i = start; i < stop; i++) {
        const int64_t first = a.indptr[i], end = a.indptr[i + 1];
        if (end - first > ATTENTION_HUB) continue;
        sum_piece_v2<HEADS, WALK>(a, u, i, first, end, block, sums);
        attention_v2_finish(a, u, i, sums, d_factor);
    }
}

template <int HEADS, int WALK, class A>
inline void piece_v2_as(const AttentionV2<A>& a, const Unit& u, int64_t row, int64_t first, int64_t end, SumsV2<A>& sums) {
    BlockV2<A> block = {};
    sum_piece_v2<HEADS, WALK>(a, u, row, first, end, block, sums);
}

template <class A>
inline void attention_v2_rows(const AttentionV2<A>& a, const Unit& u, int64_t start, int64_t stop, double* d_factor) {
#define DORYLUS_CALL(HEADS)                                                                 \
    {                                                                                       \
        if (a.walk == FORWARD) rows_v2_as<HEADS, FORWARD>(a, u, start, stop, d_factor);     \
        else if (a.walk == TARGETS) rows_v2_as<HEADS, TARGETS>(a, u, start, stop, d_factor); \
        else rows_v2_as<HEADS, ADJOINT>(a, u, start, stop, d_factor);                       \
    }
    DORYLUS_HEADS(u.heads, DORYLUS_CALL)
#undef DORYLUS_CALL
}

template <class A>
inline void attention_v2_piece(const AttentionV2<A>& a, const Unit& u, int64_t row, int64_t first, int64_t end,
                               SumsV2<A>& sums) {
#define DORYLUS_CALL(HEADS)                                                                \
    {                                                                                      \
        if (a.walk == FORWARD) piece_v2_as<HEADS, FORWARD>(a, u, row, first, end, sums);   \
        else if (a.walk == TARGETS) piece_v2_as<HEADS, TARGETS>(a, u, row, first, end, sums); \
        else piece_v2_as<HEADS, ADJOINT>(a, u, row, first, end, sums);                     \
    }
    DORYLUS_HEADS(u.heads, DORYLUS_CALL)
#undef DORYLUS_CALL
}

template <class A>
inline void attention_v2_records(const AttentionV2<A>& a, const A* out, const A* row_max, const A* row_sum, A* record,
                                 int64_t start, int64_t stop) {
    for (int64_t i = start; i < stop; i++) {
        A* const parts = record + i * a.record_stride;
        const A* const d_out = a.paired + i * a.paired_stride;
        for (int64_t h = 0; h < a.heads; h++) {
            const int64_t at = i * a.heads + h;
            parts[h] = row_max[at];
            parts[a.heads + h] = row_sum[at] == 0 ? (A)0 : (A)1 / row_sum[at];
            parts[2 * a.heads + h] = dot(d_out + h * a.width, out + at * a.width, a.width);
        }
    }
}
