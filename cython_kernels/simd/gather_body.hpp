// The loops of gather.hpp, once per instruction set; no guard.
#include "chunks.hpp"

// Entries that a row is asked for before it is added: enough for a row to come from memory.
enum { AHEAD = 32 };

// Ask for the row of a later entry. A row of one line needs none: the CPU runs far enough ahead by itself.
template <int N, int NV, class G, class S>
DORYLUS_INLINE void fetch_ahead(const G& g, const S* x, int64_t last, int64_t e) {
    if (NV * N * sizeof(S) <= 64) return;
    const S* const later = x + (int64_t)g.indices[e + AHEAD < g.nnz ? e + AHEAD : e] * g.x_stride;
    for (int k = 0; k < NV; k++)
        if ((k * N * (int)sizeof(S)) % 64 == 0) __builtin_prefetch(later + at<N, NV>(k, last));
    if ((uintptr_t)later % 64) __builtin_prefetch(later + last + (N - 1));  // it ends in a line more
}

template <int N, int NV, bool WEIGHTS, class S, class A>
DORYLUS_INLINE void sum_entries(
    const Gather<S, A>& g, int64_t column, int64_t last, int64_t first, int64_t end, Vec<A, N>* total
) {
    const S* const x = g.x + column;
    for (int k = 0; k < NV; k++) total[k] = Vec<A, N>{};
    for (int64_t e = first; e < end; e++) {
        fetch_ahead<N, NV>(g, x, last, e);
        const int64_t j = g.indices[e];
        const S* const row = x + j * g.x_stride;
        if (WEIGHTS) {
            A weight = g.data ? g.data[e] : (A)1;
            if (g.source_scale) weight = weight * g.source_scale[j];
            for (int k = 0; k < NV; k++) total[k] += weight * load<N>(row + at<N, NV>(k, last));
        } else {
            for (int k = 0; k < NV; k++) total[k] += load<N>(row + at<N, NV>(k, last));
        }
    }
}

template <int N, class A>
DORYLUS_INLINE void stream_store(A* p, Vec<A, N> v) {
#if DORYLUS_LEVEL == 2
    if constexpr (N * sizeof(A) == 64) {
        _mm512_stream_si512((__m512i*)p, (__m512i)v);
        return;
    }
#endif
    store<N>(p, v);
}

template <int N, int NV, class S, class A>
DORYLUS_INLINE void finish_chunk(
    const Gather<S, A>& g, int64_t i, int64_t column, int64_t last, Vec<A, N>* total
) {
    const int64_t degree = g.indptr[i + 1] - g.indptr[i];
    if (g.mean && degree > 0)
        for (int k = 0; k < NV; k++) total[k] /= (A)degree;
    if (g.self_weight != 0) {
        const S* const row = g.self + i * g.self_stride + column;
        const A weight = g.self_scale ? g.self_weight * g.self_scale[i] : g.self_weight;
        for (int k = 0; k < NV; k++) total[k] += weight * load<N>(row + at<N, NV>(k, last));
    }
    if (g.row_scale)
        for (int k = 0; k < NV; k++) total[k] *= g.row_scale[i];
    A* const target = g.out + i * g.out_stride + column;
    if (g.accumulate)  // all loads before the first store: the last vector may overlap
        for (int k = 0; k < NV; k++) total[k] = load<N>(target + at<N, NV>(k, last)) + total[k];
    if (g.stream)
        for (int k = 0; k < NV; k++) stream_store<N>(target + at<N, NV>(k, last), total[k]);
    else
        for (int k = 0; k < NV; k++) store<N>(target + at<N, NV>(k, last), total[k]);
}

template <int N, int NV, bool WEIGHTS, class S, class A>
DORYLUS_INLINE void row_chunk(const Gather<S, A>& g, int64_t i, int64_t column, int64_t last) {
    typedef Vec<A, N> V;
    const int64_t end = g.indptr[i + 1];
    int64_t first = g.indptr[i];
    V total[NV];
    sum_entries<N, NV, WEIGHTS>(g, column, last, first, first + HUB < end ? first + HUB : end, total);
    for (first += HUB; first < end; first += HUB) {
        V part[NV];
        sum_entries<N, NV, WEIGHTS>(g, column, last, first, first + HUB < end ? first + HUB : end, part);
        for (int k = 0; k < NV; k++) total[k] += part[k];
    }
    finish_chunk<N, NV>(g, i, column, last, total);
}

// Most calls are of one chunk: then the rows' loop is inside it, and the choice of N, NV outside.
template <bool WEIGHTS, class S, class A>
struct RowsVisit {
    const Gather<S, A>& g;
    int64_t start, stop;
    int64_t longest;
    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        for (int64_t i = start; i < stop; i++) {
            if (g.indptr[i + 1] - g.indptr[i] > longest) continue;
            row_chunk<N, NV, WEIGHTS>(g, i, column, last);
        }
    }
};

template <bool WEIGHTS, class S, class A>
inline void gather_rows_as(const Gather<S, A>& g, int64_t start, int64_t stop, int64_t longest) {
    if (g.columns <= (int64_t)MAX_VECTORS * Lanes<A>::value) {
        visit_row<A>(RowsVisit<WEIGHTS, S, A>{g, start, stop, longest}, g.columns);
    } else {
        for (int64_t i = start; i < stop; i++)
            visit_row<A>(RowsVisit<WEIGHTS, S, A>{g, i, i + 1, longest}, g.columns);
    }
}

template <class S, class A>
inline void gather_rows(const Gather<S, A>& g, int64_t start, int64_t stop, int64_t longest) {
    if (g.data || g.source_scale)
        gather_rows_as<true>(g, start, stop, longest);
    else
        gather_rows_as<false>(g, start, stop, longest);
#if DORYLUS_LEVEL == 2
    if (g.stream) _mm_sfence();
#endif
}

template <bool WEIGHTS, class S, class A>
struct PieceVisit {
    const Gather<S, A>& g;
    int64_t first, end;
    A* part;
    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        Vec<A, N> total[NV];
        sum_entries<N, NV, WEIGHTS>(g, column, last, first, end, total);
        for (int k = 0; k < NV; k++) store<N>(part + column + at<N, NV>(k, last), total[k]);
    }
};

template <class S, class A>
inline void gather_piece(const Gather<S, A>& g, int64_t first, int64_t end, A* part) {
    if (g.data || g.source_scale)
        visit_row<A>(PieceVisit<true, S, A>{g, first, end, part}, g.columns);
    else
        visit_row<A>(PieceVisit<false, S, A>{g, first, end, part}, g.columns);
}

template <class S, class A>
struct FinishVisit {
    const Gather<S, A>& g;
    int64_t row;
    const A* sum;
    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        Vec<A, N> total[NV];
        for (int k = 0; k < NV; k++) total[k] = load<N>(sum + column + at<N, NV>(k, last));
        finish_chunk<N, NV>(g, row, column, last, total);
    }
};

template <class S, class A>
inline void gather_finish(const Gather<S, A>& g, int64_t row, const A* total) {
    visit_row<A>(FinishVisit<S, A>{g, row, total}, g.columns);
}

template <bool SOURCES, class S, class A>
struct MaxVisit {
    const GatherMax<S, A>& g;
    int64_t start, stop;
    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        for (int64_t row = start; row < stop; row++) max_row<N, NV>(row, column, last);
    }
    template <int N, int NV>
    DORYLUS_INLINE void max_row(int64_t row, int64_t column, int64_t last) const {
        typedef typename IntOf<A>::type I;
        typedef Vec<A, N> V;
        typedef Vec<I, N> M;
        typedef Vec<int32_t, N> Narrowed;
        const S* const x = g.x + column;
        const int64_t first = g.indptr[row], end = g.indptr[row + 1];
        const int64_t j = first < end ? g.indices[first] : -1;
        V best[NV];
        M source[NV];
        for (int k = 0; k < NV; k++) {
            best[k] = first < end ? load<N>(x + j * g.x_stride + at<N, NV>(k, last)) : V{};
            if (SOURCES) source[k] = splat<N>((I)j);
        }
        for (int64_t e = first + 1; e < end; e++) {
            fetch_ahead<N, NV>(g, x, last, e);
            const M here = splat<N>((I)g.indices[e]);
            const S* const from = x + (int64_t)g.indices[e] * g.x_stride;
            for (int k = 0; k < NV; k++) {
                const V value = load<N>(from + at<N, NV>(k, last));
                // "Not at most" holds for a NaN too. Once one is met it stays: the first is kept.
                const M larger = (M)(best[k] == best[k]) & ~(M)(value <= best[k]);
                best[k] = choose(larger, value, best[k]);
                if (SOURCES) source[k] = choose(larger, here, source[k]);
            }
        }
        for (int k = 0; k < NV; k++) store<N>(g.out + row * g.out_stride + column + at<N, NV>(k, last), best[k]);
        if (SOURCES)
            for (int k = 0; k < NV; k++)
                store<N>(g.source + row * g.source_stride + column + at<N, NV>(k, last),
                         __builtin_convertvector(source[k], Narrowed));
    }
};

template <bool SOURCES, class S, class A>
inline void gather_max_as(const GatherMax<S, A>& g, int64_t start, int64_t stop) {
    if (g.columns <= (int64_t)MAX_VECTORS * Lanes<A>::value) {
        visit_row<A>(MaxVisit<SOURCES, S, A>{g, start, stop}, g.columns);
    } else {
        for (int64_t i = start; i < stop; i++) visit_row<A>(MaxVisit<SOURCES, S, A>{g, i, i + 1}, g.columns);
    }
}

template <class S, class A>
inline void gather_max_rows(const GatherMax<S, A>& g, int64_t start, int64_t stop) {
    if (g.source)
        gather_max_as<true>(g, start, stop);
    else
        gather_max_as<false>(g, start, stop);
}

// Adds to rows low .. high - 1 of the result. SIFT: entries of other rows are there, and are left out.
template <bool SIFT, class A>
struct ScatterVisit {
    enum { BLOCK = 2048 };  // entries that are sifted at a time, without a branch that can't be foretold
    const Adjoint<A>& g;
    int64_t start, stop, left, low, high;

    template <int N, int NV>
    DORYLUS_INLINE void enter(int64_t i, int64_t column, int64_t last, Vec<A, N>* gradient) const {
        const A* const row = g.d_out + i * g.stride + left + column;
        for (int k = 0; k < NV; k++) gradient[k] = load<N>(row + at<N, NV>(k, last));
        if (g.row_scale)
            for (int k = 0; k < NV; k++) gradient[k] = g.row_scale[i] * gradient[k];
        if (g.self_weight != 0 && i >= low && i < high) {
            const A weight = g.source_scale ? g.self_weight * g.source_scale[i] : g.self_weight;
            add<N, NV>(i, column, last, weight, gradient);
        }
        const int64_t degree = g.indptr[i + 1] - g.indptr[i];
        if (g.mean && degree > 0)
            for (int k = 0; k < NV; k++) gradient[k] /= (A)degree;
    }

    template <int N, int NV>
    DORYLUS_INLINE void add(int64_t j, int64_t column, int64_t last, A weight, const Vec<A, N>* gradient) const {
        A* const target = g.d_x + j * g.stride + left + column;
        Vec<A, N> total[NV];  // all loads before the first store: the last vector may overlap
        for (int k = 0; k < NV; k++) total[k] = load<N>(target + at<N, NV>(k, last)) + weight * gradient[k];
        for (int k = 0; k < NV; k++) store<N>(target + at<N, NV>(k, last), total[k]);
    }

    // Which of the entries from `first` on are of these rows.
    DORYLUS_INLINE int64_t sift(int64_t first, int64_t size, int32_t* kept) const {
        const int32_t* const indices = g.indices + first;
        const uint32_t least = (uint32_t)low, length = (uint32_t)(high - low);
        int64_t count = 0, n = 0;
#if DORYLUS_LEVEL == 2
        const __m512i sixteen = _mm512_set1_epi32(16), from = _mm512_set1_epi32((int)least);
        const __m512i lengths = _mm512_set1_epi32((int)length);
        __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (; n + 16 <= size; n += 16) {
            const __m512i index = _mm512_sub_epi32(_mm512_loadu_si512(indices + n), from);
            const __mmask16 inside = _mm512_cmplt_epu32_mask(index, lengths);
            _mm512_storeu_si512(kept + count, _mm512_maskz_compress_epi32(inside, place));  // count <= n
            count += __builtin_popcount(inside);
            place = _mm512_add_epi32(place, sixteen);
        }
#endif
        for (; n < size; n++) {
            kept[count] = (int32_t)n;
            count += (uint32_t)indices[n] - least < length;
        }
        return count;
    }

    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        int32_t kept[SIFT ? BLOCK : 1];
        Vec<A, N> gradient[NV];
        const int64_t end = g.indptr[stop];
        int64_t i = start;
        enter<N, NV>(i, column, last, gradient);
        for (int64_t first = g.indptr[start]; first < end; first += BLOCK) {
            const int64_t size = end - first < BLOCK ? end - first : (int64_t)BLOCK;
            int64_t count = size;
            if (SIFT) count = sift(first, size, kept);
            for (int64_t n = 0; n < count; n++) {
                const int64_t e = first + (SIFT ? kept[n] : n);
                if (SIFT ? n + AHEAD < count : e + AHEAD < end) {
                    const int64_t after = SIFT ? first + kept[n + AHEAD] : e + AHEAD;
                    const A* const later = g.d_x + (int64_t)g.indices[after] * g.stride + left + column;
                    for (int k = 0; k < NV; k++)
                        if ((k * N * (int)sizeof(A)) % 64 == 0) __builtin_prefetch(later + at<N, NV>(k, last), 1);
                    if ((uintptr_t)later % 64) __builtin_prefetch(later + last + (N - 1), 1);
                }
                while (e >= g.indptr[i + 1]) enter<N, NV>(++i, column, last, gradient);
                const int64_t j = g.indices[e];
                A weight = g.data ? g.data[e] : (A)1;
                if (g.source_scale) weight = weight * g.source_scale[j];
                add<N, NV>(j, column, last, weight, gradient);
            }
        }
        while (++i < stop) enter<N, NV>(i, column, last, gradient);  // they may have self terms
    }
};

template <class A>
inline void adjoint_scatter(const Adjoint<A>& g, int64_t start, int64_t stop, int64_t left, int64_t right,
                            int64_t low, int64_t high, bool sift) {
    if (start == stop) return;
    if (sift)
        visit_row<A>(ScatterVisit<true, A>{g, start, stop, left, low, high}, right - left);
    else
        visit_row<A>(ScatterVisit<false, A>{g, start, stop, left, low, high}, right - left);
}

// The same sums in the same order, so the same bits, over the transpose: every row of the result is one's.
template <bool WEIGHTS, class A>
struct TurnedVisit {
    const Turned<A>& g;
    int64_t start, stop;

    // The first entry, of those from `first` on, that comes from row `row` of the matrix or a later one.
    int64_t find(int64_t first, int64_t end, int64_t row) const {
        while (first < end) {
            const int64_t middle = first + (end - first) / 2;
            if (g.indices[middle] < row)
                first = middle + 1;
            else
                end = middle;
        }
        return first;
    }

    template <int N, int NV>
    DORYLUS_INLINE void add(
        int64_t j, int64_t column, int64_t last, int64_t first, int64_t end, Vec<A, N>* total
    ) const {
        const A* const x = g.x + column;
        const A scale = WEIGHTS && g.scale ? g.scale[j] : (A)1;
        for (int64_t e = first; e < end; e++) {
            fetch_ahead<N, NV>(g, x, last, e);
            const A* const row = x + (int64_t)g.indices[e] * g.x_stride;
            if (WEIGHTS) {
                const A weight = g.values ? g.values[e] : scale;
                for (int k = 0; k < NV; k++) total[k] += weight * load<N>(row + at<N, NV>(k, last));
            } else {
                for (int k = 0; k < NV; k++) total[k] += load<N>(row + at<N, NV>(k, last));
            }
        }
    }

    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        for (int64_t j = start; j < stop; j++) {
            Vec<A, N> total[NV];
            A* const target = g.d_x + j * g.stride + column;
            for (int k = 0; k < NV; k++)
                total[k] = g.accumulate ? load<N>(target + at<N, NV>(k, last)) : Vec<A, N>{};
            int64_t first = g.indptr[j], end = g.indptr[j + 1];
            if (g.cut) {
                first = find(first, end, g.low);
                end = find(first, end, g.high);
            }
            if (g.self_weight != 0 && j >= g.low && j < g.high) {
                const int64_t middle = find(first, end, j);
                add<N, NV>(j, column, last, first, middle, total);
                first = middle;
                const A* const row = g.d_out + j * g.stride + column;
                const A weight = g.scale ? g.self_weight * g.scale[j] : g.self_weight;
                for (int k = 0; k < NV; k++) {
                    Vec<A, N> gradient = load<N>(row + at<N, NV>(k, last));
                    if (g.row_scale) gradient = g.row_scale[j] * gradient;
                    total[k] += weight * gradient;
                }
            }
            add<N, NV>(j, column, last, first, end, total);
            if (g.stream)
                for (int k = 0; k < NV; k++) stream_store<N>(target + at<N, NV>(k, last), total[k]);
            else
                for (int k = 0; k < NV; k++) store<N>(target + at<N, NV>(k, last), total[k]);
        }
    }
};

template <bool WEIGHTS, class A>
inline void turned_rows_as(const Turned<A>& g, int64_t start, int64_t stop) {
    if (g.columns <= (int64_t)MAX_VECTORS * Lanes<A>::value) {
        visit_row<A>(TurnedVisit<WEIGHTS, A>{g, start, stop}, g.columns);
    } else {
        for (int64_t j = start; j < stop; j++) visit_row<A>(TurnedVisit<WEIGHTS, A>{g, j, j + 1}, g.columns);
    }
}

template <class A>
inline void turned_rows(const Turned<A>& g, int64_t start, int64_t stop) {
    if (g.values || g.scale)
        turned_rows_as<true>(g, start, stop);
    else
        turned_rows_as<false>(g, start, stop);
#if DORYLUS_LEVEL == 2
    if (g.stream) _mm_sfence();
#endif
}

template <class A>
struct GradientVisit {
    const A* row;
    const A* scale;  // null: 1
    int64_t degree;  // 0: not divided
    A* tile;
    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        Vec<A, N> value[NV];
        for (int k = 0; k < NV; k++) {
            value[k] = load<N>(row + column + at<N, NV>(k, last));
            if (scale) value[k] = *scale * value[k];
            if (degree) value[k] /= (A)degree;
        }
        for (int k = 0; k < NV; k++) store<N>(tile + column + at<N, NV>(k, last), value[k]);
    }
};

template <class A>
inline void gradient_tile(const A* x, int64_t x_stride, int64_t columns, const A* scale, const int64_t* indptr,
                          A* tile, int64_t tile_columns, int64_t start, int64_t stop) {
    for (int64_t i = start; i < stop; i++) {
        A* const row = tile + i * tile_columns;
        visit_row<A>(
            GradientVisit<A>{
                x + i * x_stride, scale ? scale + i : nullptr, indptr ? indptr[i + 1] - indptr[i] : 0, row},
            columns);
        for (int64_t j = columns; j < tile_columns; j++) row[j] = A{};
    }
}

template <class S, class A>
struct FillVisit {
    const S* row;
    A scale;
    bool scaled;
    S* tile;
    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        Vec<A, N> value[NV];
        for (int k = 0; k < NV; k++) {
            value[k] = load<N>(row + column + at<N, NV>(k, last));
            if (scaled) value[k] = scale * value[k];
        }
        for (int k = 0; k < NV; k++) store<N>(tile + column + at<N, NV>(k, last), value[k]);
    }
};

template <class S, class A>
inline void fill_tile(const S* x, int64_t x_stride, int64_t columns, const A* scale, S* tile, int64_t tile_columns,
                      int64_t start, int64_t stop) {
    for (int64_t i = start; i < stop; i++) {
        S* const row = tile + i * tile_columns;
        visit_row<A>(
            FillVisit<S, A>{x + i * x_stride, scale ? scale[i] : (A)1, scale != nullptr, row}, columns);
        for (int64_t j = columns; j < tile_columns; j++) row[j] = S{};
    }
}

template <class S, class T>
inline void convert(const S* x, T* out, int64_t n) {
    enum { N = 16 };
    int64_t i = 0;
    for (; i + N <= n; i += N) store<N>(out + i, load<N>(x + i));
    for (; i < n; i++) store<1>(out + i, load<1>(x + i));
}
