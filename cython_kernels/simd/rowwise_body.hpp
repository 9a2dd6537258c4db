// The loops of rowwise.hpp, once per instruction set; no guard.
#include "exp.hpp"

// PHILOX. Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011) multiplies 32-bit words to 64 bits. A word is kept in the low half of a 64-bit lane, and
// the high half is whatever the round before left there: the multiplication (vpmuludq) reads low
// halves only, so nothing has to be cleared or shuffled in the rounds.
#if DORYLUS_LEVEL == 2
enum { REGISTER = 64 };  // bytes. A longer vector's comparisons are lowered to single elements
#elif DORYLUS_LEVEL == 1
enum { REGISTER = 32 };
#else
enum { REGISTER = 16 };
#endif
enum { QUADS = REGISTER / 8 };  // counters in one register
enum { RUN = 64 };  // columns whose words are made at a time, 4 a counter

typedef Vec<uint64_t, QUADS> Words;

template <class A>
struct Register {
    enum { lanes = REGISTER / sizeof(A) };
};

// Low halves times a factor. (With a mask of ones, which costs nothing: gcc 12 warns of the form without.)
DORYLUS_INLINE Words times(Words a, uint32_t factor) {
#if DORYLUS_LEVEL == 2
    return (Words)_mm512_maskz_mul_epu32((__mmask8)-1, (__m512i)a, _mm512_set1_epi64(factor));
#elif DORYLUS_LEVEL == 1
    return (Words)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(factor));
#elif DORYLUS_X86
    return (Words)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(factor));
#else
    return (a & 0xffffffffu) * (uint64_t)factor;
#endif
}

// Lanes 0 of a and b, then lanes 2 of a and b, ...; with `odd` lanes 1, 3, ...
template <bool odd>
DORYLUS_INLINE Words interleave(Words a, Words b) {
#if DORYLUS_LEVEL == 2
    return (Words)(odd ? _mm512_maskz_unpackhi_epi64((__mmask8)-1, (__m512i)a, (__m512i)b) : _mm512_maskz_unpacklo_epi64((__mmask8)-1, (__m512i)a, (__m512i)b));
#elif DORYLUS_LEVEL == 1
    return (Words)(odd ? _mm256_unpackhi_epi64((__m256i)a, (__m256i)b) : _mm256_unpacklo_epi64((__m256i)a, (__m256i)b));
#else
    return odd ? Words{a[1], b[1]} : Words{a[0], b[0]};
#endif
}

struct Counters {
    Words word[4];
};

DORYLUS_INLINE Counters philox(Counters c, uint32_t key0, uint32_t key1) {
#pragma GCC unroll 10
    for (uint32_t step = 0; step < 10; step++) {
        const uint64_t round0 = key0 + step * 0x9E3779B9u, round1 = key1 + step * 0xBB67AE85u;
        const Words product0 = times(c.word[0], 0xD2511F53u);
        const Words product1 = times(c.word[2], 0xCD9E8D57u);
        c.word[0] = (product1 >> 32) ^ c.word[1] ^ splat<QUADS>((uint64_t)(uint32_t)round0);
        c.word[1] = product1;
        c.word[2] = (product0 >> 32) ^ c.word[3] ^ splat<QUADS>((uint64_t)(uint32_t)round1);
        c.word[3] = product0;
    }
    return c;
}

DORYLUS_INLINE Counters counters(Words quad, const Mask& mask, int64_t gid) {
    return {{quad, splat<QUADS>((uint64_t)mask.epoch), splat<QUADS>((uint64_t)gid & 0xffffffffu),
             splat<QUADS>((uint64_t)gid >> 32)}};
}

inline void philox_block(uint32_t* words, uint32_t key0, uint32_t key1) {
    Counters c;
    for (int k = 0; k < 4; k++) c.word[k] = splat<QUADS>((uint64_t)words[k]);
    c = philox(c, key0, key1);
    for (int k = 0; k < 4; k++) words[k] = (uint32_t)c.word[k][0];
}

// The quads of a register: those of the first columns in the even lanes, so that interleaving words
// 0, 1 with words 2, 3 of a quad gives columns in their order, within 16 bytes.
DORYLUS_INLINE Words quads_from(uint64_t first) {
    Words quad;
    for (int k = 0; k < QUADS; k++) quad[k] = k / 2 + k % 2 * (QUADS / 2);
    return quad + first;
}

// The words of columns first .. first + columns - 1, of at most RUN; `first` is a multiple of 4.
DORYLUS_INLINE void column_words(uint32_t* words, const Mask& mask, int64_t gid, int64_t first, int64_t columns) {
    for (int64_t column = 0; column < columns; column += 4 * QUADS) {
        const Counters c = philox(counters(quads_from((first + column) / 4), mask, gid), mask.key0, mask.key1);
        const Words left = (c.word[0] & 0xffffffffu) | (c.word[1] << 32);
        const Words right = (c.word[2] & 0xffffffffu) | (c.word[3] << 32);
        const Words even = interleave<false>(left, right), odd = interleave<true>(left, right);
        memcpy(words + column, &even, sizeof even);
        memcpy(words + column + 2 * QUADS, &odd, sizeof odd);
    }
}

// The first `count` of N elements; the others are 0, and their memory is not touched.
template <int N, class A, class S>
DORYLUS_INLINE Vec<A, N> load_some(const S* p, int64_t count) {
#if DORYLUS_LEVEL == 2
    if constexpr (sizeof(S) == 4 && N == 16)
        return (Vec<A, N>)_mm512_maskz_loadu_epi32((__mmask16)((1u << count) - 1), p);
    if constexpr (sizeof(S) == 8 && N == 8)
        return (Vec<A, N>)_mm512_maskz_loadu_epi64((__mmask8)((1u << count) - 1), p);
#endif
    A whole[N] = {};
    for (int64_t k = 0; k < count; k++) whole[k] = load<1>(p + k)[0];
    return load<N>(whole);
}

template <int N, class A, class S>
DORYLUS_INLINE void store_some(S* p, Vec<A, N> v, int64_t count) {
#if DORYLUS_LEVEL == 2
    if constexpr (sizeof(S) == 4 && N == 16) {
        _mm512_mask_storeu_epi32(p, (__mmask16)((1u << count) - 1), (__m512i)v);
        return;
    }
    if constexpr (sizeof(S) == 8 && N == 8) {
        _mm512_mask_storeu_epi64(p, (__mmask8)((1u << count) - 1), (__m512i)v);
        return;
    }
#endif
    S whole[N];
    store<N>(whole, v);
    for (int64_t k = 0; k < count; k++) p[k] = whole[k];
}

// A whole register past the caches: the line is not read from memory before it is written. Only at
// the level whose registers are lines; half a line at a time is slower.
template <int N, class A, class S>
DORYLUS_INLINE void stream_register(S* p, Vec<A, N> v) {
#if DORYLUS_LEVEL == 2
    alignas(64) S whole[N];
    store<N>(whole, v);
    if constexpr (sizeof whole == 64)
        _mm512_stream_si512((__m512i*)p, *(const __m512i*)whole);
    else
        _mm256_stream_si256((__m256i*)p, *(const __m256i*)whole);
#else
    store<N>(p, v);
#endif
}

DORYLUS_INLINE void after_streams(bool stream) {
#if DORYLUS_LEVEL == 2
    if (stream) _mm_sfence();
#endif
}

// Walks over the columns of one row of a matrix in tiles.
template <class S>
struct Place {
    S* p;
    int64_t column;  // in its tile
    int64_t width, jump;

    DORYLUS_INLINE Place(S* matrix, int64_t row, int64_t width, int64_t tile)
        : p(matrix + row * width), column(0), width(width), jump(tile - width) {}

    DORYLUS_INLINE void step(int64_t count) {
        p += count;
        column += count;
        if (column == width) {
            p += jump;
            column = 0;
        }
    }
    template <int N, class A>
    DORYLUS_INLINE Vec<A, N> take(int64_t count) {
        if (column + count <= width) {
            const Vec<A, N> v = count == N ? load<N>(p) : load_some<N, A>(p, count);
            step(count);
            return v;
        }
        A whole[N] = {};
        for (int64_t k = 0; k < count; k++) {
            whole[k] = load<1>(p)[0];
            step(1);
        }
        return load<N>(whole);
    }
    template <int N, class A>
    DORYLUS_INLINE void put(Vec<A, N> v, int64_t count, bool stream) {
        if (column + count <= width) {
            if (count < N)
                store_some<N, A>(p, v, count);
            else if (stream)
                stream_register<N, A>(p, v);
            else
                store<N>(p, v);
            step(count);
        } else {
            S whole[N];
            store<N>(whole, v);
            for (int64_t k = 0; k < count; k++) {
                *p = whole[k];
                step(1);
            }
        }
    }
    // What is left of the last tile becomes 0.
    DORYLUS_INLINE void pad() {
        if (column > 0)
            for (; column < width; column++) *p++ = S{};
    }
};

template <int N, class S, class A>
DORYLUS_INLINE void activate_vector(const RowPass<S, A>& pass, const A* x, const A* bias, const uint32_t* words,
                                    uint32_t last_dropped, bool drops, A floor, A scale, A row_scale, int64_t count,
                                    Place<S>& out) {
    typedef typename IntOf<A>::type I;
    Vec<A, N> v = count == N ? load<N>(x) : load_some<N, A>(x, count);
    if (bias) v += count == N ? load<N>(bias) : load_some<N, A>(bias, count);
    v = v <= floor ? Vec<A, N>{} : v;  // this way round a NaN stays visible
    v *= scale;
    if (drops) {
        Vec<uint32_t, N> word;
        memcpy(&word, words, sizeof word);
        // Chosen, not multiplied by 0, so that no dropped NaN gets through.
        v = __builtin_convertvector(word > last_dropped, Vec<I, N>) ? v : Vec<A, N>{};
    }
    v *= row_scale;
    out.template put<N, A>(v, count, pass.stream);
}

template <bool drops, class S, class A>
inline void activate_rows_as(const RowPass<S, A>& pass, int64_t start, int64_t stop) {
    enum { N = Register<A>::lanes };
    alignas(64) uint32_t words[RUN];
    const uint32_t last_dropped = (uint32_t)(pass.mask.threshold - 1);
    const A floor = pass.relu ? (A)0 : (A)NAN;  // nothing is at most NaN
    const A scale = pass.scale;
    const Mask mask = pass.mask;
    for (int64_t i = start; i < stop; i++) {
        const A* const x = pass.x + i * pass.columns;
        const A row_scale = pass.row_scale ? pass.row_scale[i] : (A)1;
        Place<S> out(pass.out, i, pass.out_width, pass.out_tile);
        for (int64_t first = 0; first < pass.columns; first += RUN) {
            const int64_t run = pass.columns - first < RUN ? pass.columns - first : (int64_t)RUN;
            if (drops) column_words(words, mask, pass.gids[i], first, run);
            int64_t k = 0;
            for (; k + N <= run; k += N)
                activate_vector<N>(pass, x + first + k, pass.bias ? pass.bias + first + k : nullptr, words + k,
                                   last_dropped, drops, floor, scale, row_scale, N, out);
            if (k < run)
                activate_vector<N>(pass, x + first + k, pass.bias ? pass.bias + first + k : nullptr, words + k,
                                   last_dropped, drops, floor, scale, row_scale, run - k, out);
        }
        out.pad();
    }
    after_streams(pass.stream);
}

template <class S, class A>
inline void activate_rows(const RowPass<S, A>& pass, int64_t start, int64_t stop) {
    if (pass.mask.threshold > 0)
        activate_rows_as<true>(pass, start, stop);
    else
        activate_rows_as<false>(pass, start, stop);
}

enum { BACK_AHEAD = 512 };  // elements that the way back asks for before it reads them

template <class P, class S, class A>
inline void activate_rows_back(const RowPassBack<P, S, A>& pass, int64_t start, int64_t stop) {
    enum { N = Register<A>::lanes };
    const A scale = pass.scale;
    for (int64_t i = start; i < stop; i++) {
        const A* const d_out = pass.d_out + i * pass.columns;
        const A row_scale = pass.row_scale ? pass.row_scale[i] : (A)1;
        Place<const P> activated(pass.activated, i, pass.activated_width, pass.activated_tile);
        Place<S> out(pass.out, i, pass.out_width, pass.out_tile);
        int64_t k = 0;
        for (; k + N <= pass.columns; k += N) {
            __builtin_prefetch(d_out + k + BACK_AHEAD);  // two matrices to read and one to write
            __builtin_prefetch(activated.p + BACK_AHEAD);
            const Vec<A, N> passed = activated.template take<N, A>(N);
            const Vec<A, N> d = load<N>(d_out + k) * scale;
            out.template put<N, A>((passed > 0 ? d : Vec<A, N>{}) * row_scale, N, pass.stream);
        }
        if (k < pass.columns) {
            const int64_t count = pass.columns - k;
            const Vec<A, N> passed = activated.template take<N, A>(count);
            const Vec<A, N> d = load_some<N, A>(d_out + k, count) * scale;
            out.template put<N, A>((passed > 0 ? d : Vec<A, N>{}) * row_scale, count, pass.stream);
        }
        out.pad();
    }
    after_streams(pass.stream);
}

template <int N, class A>
DORYLUS_INLINE Vec<A, N> load_part(const A* p, int64_t count) {
    return count == N ? load<N>(p) : load_some<N, A>(p, count);
}

template <int N, class A>
DORYLUS_INLINE void store_part(A* p, Vec<A, N> v, int64_t count) {
    if (count == N)
        store<N>(p, v);
    else
        store_some<N, A>(p, v, count);
}

// Chosen, not multiplied by 0, so that no dropped NaN gets through.
template <int N, class A>
DORYLUS_INLINE Vec<A, N> drop(Vec<A, N> v, const uint32_t* words, uint32_t last_dropped) {
    typedef typename IntOf<A>::type I;
    Vec<uint32_t, N> word;
    memcpy(&word, words, sizeof word);
    return __builtin_convertvector(word > last_dropped, Vec<I, N>) ? v : Vec<A, N>{};
}

// Calls visit(i, column, count, words) for every register of every row, with the words of its masks.
template <bool drops, int N, class Visit>
DORYLUS_INLINE void visit_registers(const Visit& visit, const Mask& mask, const int64_t* gids, int64_t columns, int64_t start,
                                    int64_t stop) {
    alignas(64) uint32_t words[RUN];
    for (int64_t i = start; i < stop; i++) {
        for (int64_t first = 0; first < columns; first += RUN) {
            const int64_t run = columns - first < RUN ? columns - first : (int64_t)RUN;
            if (drops) column_words(words, mask, gids[i], first, run);
            int64_t k = 0;
            for (; k + N <= run; k += N) visit(i, first + k, (int64_t)N, words + k);
            if (k < run) visit(i, first + k, run - k, words + k);
        }
    }
}

template <bool drops, class A>
struct EluVisit {
    const RowPass<A, A>& pass;
    uint32_t last_dropped;

    DORYLUS_INLINE void operator()(int64_t i, int64_t column, int64_t count, const uint32_t* words) const {
        enum { N = Register<A>::lanes };
        typedef Vec<A, N> V;
        const int64_t place = i * pass.columns + column;
        V z = load_part<N>(pass.x + place, count);
        if (pass.bias) z += load_part<N>(pass.bias + column, count);
        const auto positive = z > (A)0;  // not of a NaN, which goes through the exponential
        V y = positive ? z : exponential_minus_one<N>(positive ? V{} : z);
        y *= pass.scale;
        if (drops) y = drop<N, A>(y, words, last_dropped);
        store_part<N>(pass.out + place, y, count);
    }
};

template <class A>
inline void elu_rows(const RowPass<A, A>& pass, int64_t start, int64_t stop) {
    enum { N = Register<A>::lanes };
    const uint32_t last_dropped = (uint32_t)(pass.mask.threshold - 1);
    if (pass.mask.threshold > 0)
        visit_registers<true, N>(EluVisit<true, A>{pass, last_dropped}, pass.mask, pass.gids, pass.columns, start, stop);
    else
        visit_registers<false, N>(EluVisit<false, A>{pass, 0}, pass.mask, pass.gids, pass.columns, start, stop);
}

template <bool drops, class A>
struct EluBackVisit {
    const EluBack<A>& pass;
    uint32_t last_dropped;

    DORYLUS_INLINE void operator()(int64_t i, int64_t column, int64_t count, const uint32_t* words) const {
        enum { N = Register<A>::lanes };
        typedef Vec<A, N> V;
        const int64_t place = i * pass.columns + column;
        const V before = load_part<N>(pass.activated + place, count) * pass.keep;  // what dropout was given
        const V slope = before > (A)0 ? splat<N>((A)1) : before + (A)1;
        V d = load_part<N>(pass.d_out + place, count) * pass.scale * slope;
        if (drops) d = drop<N, A>(d, words, last_dropped);
        store_part<N>(pass.out + place, d, count);
    }
};

template <class A>
inline void elu_rows_back(const EluBack<A>& pass, int64_t start, int64_t stop) {
    enum { N = Register<A>::lanes };
    const uint32_t last_dropped = (uint32_t)(pass.mask.threshold - 1);
    if (pass.mask.threshold > 0)
        visit_registers<true, N>(EluBackVisit<true, A>{pass, last_dropped}, pass.mask, pass.gids, pass.columns, start, stop);
    else
        visit_registers<false, N>(EluBackVisit<false, A>{pass, 0}, pass.mask, pass.gids, pass.columns, start, stop);
}

// A register of entries at a time, each with a counter of its own: entries of a sparse row seldom
// share one.
template <class A>
inline void drop_entries(const EntryDropout<A>& pass, int64_t start, int64_t stop) {
    typedef typename IntOf<A>::type I;
    enum { N = QUADS };
    typedef Vec<int64_t, N> Wide;
    const Mask mask = pass.mask;
    for (int64_t i = start; i < stop; i++) {
        const int64_t end = pass.indptr[i + 1];
        for (int64_t e = pass.indptr[i]; e < end; e += N) {
            const int64_t count = end - e < N ? end - e : (int64_t)N;
            int32_t last[N] = {};
            for (int64_t k = 0; count < N && k < count; k++) last[k] = pass.indices[e + k];
            Vec<int32_t, N> column;
            memcpy(&column, count < N ? last : pass.indices + e, sizeof column);
            const Wide wide = __builtin_convertvector(column, Wide);
            const Counters c = philox(counters((Words)(wide >> 2), mask, pass.gids[i]), mask.key0, mask.key1);
            const Wide number = wide & 3;
            Words word = number == 0 ? c.word[0] : c.word[1];
            word = number == 2 ? c.word[2] : word;
            word = number == 3 ? c.word[3] : word;
            const Wide kept = (Wide)(word & 0xffffffffu) >= (int64_t)mask.threshold;
            const Vec<A, N> v = count == N ? load<N>(pass.data + e) : load_some<N, A>(pass.data + e, count);
            const Vec<A, N> result = __builtin_convertvector(kept, Vec<I, N>) ? v * pass.scale : Vec<A, N>{};
            if (count == N)
                store<N>(pass.out + e, result);
            else
                store_some<N, A>(pass.out + e, result, count);
        }
    }
}

// Rows that are asked for before they are moved or added to.
enum { ROWS_AHEAD = 8 };

template <int N, class P, class S>
DORYLUS_INLINE void move_vector(const P* x, S* out) {
    if constexpr (std::is_same<P, S>::value)
        memcpy(out, x, N * sizeof(S));  // bits, also those of bfloat16
    else
        store<N>(out, load<N>(x));
}

// Copy or convert; the two are apart, so the last vector may overlap the one before it.
template <class P, class S>
DORYLUS_INLINE void move_piece(const P* x, S* out, int64_t columns) {
    enum { N = 64 / (sizeof(P) > sizeof(S) ? sizeof(P) : sizeof(S)) };
    int64_t k = 0;
    if (columns >= N) {
        for (; k + N <= columns; k += N) move_vector<N>(x + k, out + k);
        if (k < columns) move_vector<N>(x + columns - N, out + columns - N);
    } else {
        for (; k < columns; k++) move_vector<1>(x + k, out + k);
    }
}

template <class P, class S>
inline void move_rows(const Move<P, S>& move, int64_t start, int64_t stop) {
    for (int64_t k = start; k < stop; k++) {
        const int64_t from = move.x_index ? move.x_index[k] : k, to = move.out_index ? move.out_index[k] : k;
        const int64_t later = k + ROWS_AHEAD < stop ? k + ROWS_AHEAD : k;
        const P* const later_from = move.x + (move.x_index ? move.x_index[later] : later) * move.x_width;
        S* const later_to = move.out + (move.out_index ? move.out_index[later] : later) * move.out_width;
        int64_t column = 0;
        while (column < move.columns) {
            const int64_t x_tile = column / move.x_width, x_place = column % move.x_width;
            const int64_t out_tile = column / move.out_width, out_place = column % move.out_width;
            int64_t width = move.columns - column;
            if (move.x_width - x_place < width) width = move.x_width - x_place;
            if (move.out_width - out_place < width) width = move.out_width - out_place;
            const int64_t x_start = x_tile * move.x_tile + x_place, out_start = out_tile * move.out_tile + out_place;
            if (move.x_index)
                for (int64_t j = 0; j < width; j += 64 / sizeof(P)) __builtin_prefetch(later_from + x_start + j);
            if (move.out_index)
                for (int64_t j = 0; j < width; j += 64 / sizeof(S)) __builtin_prefetch(later_to + out_start + j, 1);
            move_piece(move.x + from * move.x_width + x_start, move.out + to * move.out_width + out_start, width);
            column += width;
        }
    }
}

template <class A>
inline void add_rows(const A* rows, const int32_t* index, A* out, int64_t stride, int64_t start, int64_t stop,
                     int64_t left, int64_t right) {
    enum { N = Register<A>::lanes };
    for (int64_t k = start; k < stop; k++) {
        const A* const row = rows + k * stride;
        A* const target = out + index[k] * stride;
        const A* const later = out + index[k + ROWS_AHEAD < stop ? k + ROWS_AHEAD : k] * stride;
        int64_t j = left;
        for (; j + N <= right; j += N) {
            __builtin_prefetch(later + j, 1);
            store<N>(target + j, load<N>(target + j) + load<N>(row + j));
        }
        if (j < right)
            store_some<N, A>(
                target + j, load_some<N, A>(target + j, right - j) + load_some<N, A>(row + j, right - j), right - j);
    }
}
