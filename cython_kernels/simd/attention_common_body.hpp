// The loops that both kinds of attention share, once per instruction set; no guard.
#include "chunks.hpp"
#include "exp.hpp"

// Twice the sums of a gather must fit in the registers.
enum { PAIRS = MAX_VECTORS == 4 ? 3 : MAX_VECTORS };

enum { AHEAD = 24 };  // entries that a row is asked for before it is added

// HEADS is the number of heads of a unit, rounded up to a power of two; numbers of an entry follow those
// of the entry before it, so that a vector holds some heads of one entry, or all of several.
template <int HEADS, class A>
DORYLUS_INLINE Vec<A, HEADS> load_heads(const A* p, int64_t heads) {
    if (heads == HEADS) return load<HEADS>(p);
    A lane[HEADS] = {};
    for (int64_t h = 0; h < heads; h++) lane[h] = p[h];
    return load<HEADS>(lane);
}

// The numbers of a row, for every entry that a vector holds.
template <int HEADS, class A>
DORYLUS_INLINE Vec<A, Lanes<A>::value> repeat_heads(const A* p, int64_t heads) {
    enum { N = Lanes<A>::value };
    A lane[N];
    const Vec<A, HEADS> value = load_heads<HEADS>(p, heads);
    for (int l = 0; l < N; l += HEADS) store<HEADS>(lane + l, value);
    return load<N>(lane);
}

template <class A, int N>
DORYLUS_INLINE void add_lanes(int heads, Vec<A, N> v, A* sum) {
    A lane[N];
    store<N>(lane, v);
    for (int h = 0; h < heads; h++) sum[h] = lane[h];
    for (int l = heads; l < N; l++) sum[l % heads] += lane[l];
}

// The product of 32-bit numbers in 64-bit lanes.
DORYLUS_INLINE Vec<uint64_t, 8> multiply_words(Vec<uint64_t, 8> a, uint64_t factor) {
#if DORYLUS_LEVEL == 2
    return (Vec<uint64_t, 8>)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, _mm512_set1_epi64((long long)factor));
#else
    return a * factor;
#endif
}

// Philox4x32-10 (as in rowwise_body.hpp, where all counters have one key) of eight counters and keys, a word a lane.
DORYLUS_INLINE void philox8(Vec<uint64_t, 8>* word, Vec<uint64_t, 8> key) {
    typedef Vec<uint64_t, 8> U;
    const uint64_t low = 0xFFFFFFFFu;
    U c0 = word[0], c1 = word[1], c2 = word[2], c3 = word[3], key0 = key & low, key1 = key >> 32;
    for (int step = 0; step < 10; step++) {
        const U product0 = multiply_words(c0, 0xD2511F53u), product1 = multiply_words(c2, 0xCD9E8D57u);
        c0 = (product1 >> 32) ^ c1 ^ key0;
        c1 = product1 & low;
        c2 = (product0 >> 32) ^ c3 ^ key1;
        c3 = product0 & low;
        key0 = (key0 + 0x9E3779B9u) & low;
        key1 = (key1 + 0xBB67AE85u) & low;
    }
    word[0] = c0;
    word[1] = c1;
    word[2] = c2;
    word[3] = c3;
}

// The random words of a block: a counter is (source gid, target gid), both of 64 bits.
template <class A>
inline void make_words(const AttentionCommon<A>& a, const Unit& u, int heads, int64_t row, int64_t first, int count,
                       Occurrences& occurrences, uint32_t* word) {
    typedef Vec<uint64_t, 8> U;
    const U fixed = splat<8>((uint64_t)a.row_gids[row]);
    const uint64_t low = 0xFFFFFFFFu;
    const int64_t first_quad = u.head / 4, last_quad = (u.head + u.heads - 1) / 4;
    for (int k = 0; k < count; k += 8) {
        alignas(64) uint64_t gid[8] = {}, occurrence[8] = {};
        const int lanes = count - k < 8 ? count - k : 8;
        uint64_t repeated = 0;
        for (int l = 0; l < lanes; l++) {
            gid[l] = (uint64_t)a.column_gids[a.indices[first + k + l]];
            occurrence[l] = occurrences.next();
            repeated |= occurrence[l];
        }
        const U other = *(const U*)gid;
        const U source = a.rows_are_sources ? fixed : other, target = a.rows_are_sources ? other : fixed;
        for (int64_t quad = first_quad; quad <= last_quad; quad++) {
            alignas(64) uint64_t key[8], made[4][8];
            if (repeated)
                for (int l = 0; l < 8; l++) key[l] = block_key(a.key, occurrence[l], (uint64_t)quad);
            else
                *(U*)key = splat<8>(block_key(a.key, 0, (uint64_t)quad));
            U words[4] = {source & low, source >> 32, target & low, target >> 32};
            philox8(words, *(const U*)key);
            for (int w = 0; w < 4; w++) *(U*)made[w] = words[w];
            for (int w = 0; w < 4; w++) {
                const int64_t h = quad * 4 + w - u.head;
                if (h < 0 || h >= u.heads) continue;
                for (int l = 0; l < lanes; l++) word[(k + l) * heads + h] = (uint32_t)made[w][l];
            }
        }
    }
}

#if DORYLUS_LEVEL == 2
template <class V, class M>
DORYLUS_INLINE V permute(V v, M lane) {
#if !defined(__clang__)
    return __builtin_shuffle(v, lane);
#else
    if constexpr (sizeof(v[0]) == 4) return (V)_mm512_permutexvar_ps((__m512i)lane, (__m512)v);
    else return (V)_mm512_permutexvar_pd((__m512i)lane, (__m512d)v);
#endif
}
#endif

// Narrow heads, of a power of two of columns: a vector each.
template <int N, class Visit>
DORYLUS_INLINE void visit_heads(Visit visit, int64_t heads) {
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) {
        visit.offset = h * N;
        visit.template run<N, 4>(0, 3 * N);
    }
    for (; h < heads; h++) {
        visit.offset = h * N;
        visit.template run<N, 1>(0, 0);
    }
}

// Visits the columns of a unit so that a visitor knows the head of each vector: all its columns are of one head,
// or they are of several, which only `spread` is given, and only where numbers of heads can be permuted.
template <int LIMIT, class A, class Visit, class Spread>
DORYLUS_INLINE void visit_unit(const AttentionCommon<A>& a, const Unit& u, Visit visit, [[maybe_unused]] Spread spread) {
    enum { N = Lanes<A>::value };
    if (u.heads == 1 || a.width % N == 0) {
        visit_row<A, LIMIT>(visit, u.columns);
        return;
    }
#if DORYLUS_LEVEL == 2
    if (u.columns >= N) {
        visit_row<A, LIMIT>(spread, u.columns);
        return;
    }
#endif
    if (a.width == 8 && N > 8) {
        visit_heads<8>(visit, u.heads);
    } else if (a.width == 4) {
        visit_heads<4>(visit, u.heads);
    } else {
        for (int64_t h = 0; h < u.heads; h++) {
            visit.offset = h * a.width;
            visit_row<A, LIMIT>(visit, a.width);
        }
    }
}

// The scalar product of two rows of n, in an order that does not depend on the instructions.
template <class A>
DORYLUS_INLINE A dot(const A* p, const A* q, int64_t n) {
    enum { N = Lanes<A>::value };
    int64_t k = 0;
    A sum = 0;
    if (n >= N) {
        Vec<A, N> total = load<N>(p) * load<N>(q);
        for (k = N; k + N <= n; k += N) total += load<N>(p + k) * load<N>(q + k);
        for (int l = 0; l < N; l++) sum += total[l];
    }
    for (; k < n; k++) sum += p[k] * q[k];
    return sum;
}

template <class A>
DORYLUS_INLINE void divide(const A* total, A weight, A* target, int64_t n) {
    for (int64_t c = 0; c < n; c++) target[c] = total[c] / weight;
}
