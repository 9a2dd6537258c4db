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

template <class A>
inline void adjoint_strip(const Adjoint<A>& g, int64_t start, int64_t stop, int64_t left, int64_t right) {
    enum { TILE = 128 };
    A gradient[TILE];
    for (int64_t column = left; column < right; column += TILE) {
        const int64_t width = right - column < TILE ? right - column : (int64_t)TILE;
        for (int64_t i = start; i < stop; i++) {
            const A* __restrict const row = g.d_out + i * g.stride + column;
            const A scale = g.row_scale ? g.row_scale[i] : (A)1;
            for (int64_t j = 0; j < width; j++) gradient[j] = scale * row[j];
            if (g.self_weight != 0) {
                A* __restrict const target = g.d_x + i * g.stride + column;
                const A weight = g.source_scale ? g.self_weight * g.source_scale[i] : g.self_weight;
                for (int64_t j = 0; j < width; j++) target[j] += weight * gradient[j];
            }
            const int64_t degree = g.indptr[i + 1] - g.indptr[i];
            if (g.mean && degree > 0)
                for (int64_t j = 0; j < width; j++) gradient[j] /= (A)degree;
            for (int64_t e = g.indptr[i]; e < g.indptr[i + 1]; e++) {
                if (e + AHEAD < g.indptr[stop]) {
                    const A* const later = g.d_x + (int64_t)g.indices[e + AHEAD] * g.stride + column;
                    for (int64_t j = 0; j < width; j += 64 / (int64_t)sizeof(A)) __builtin_prefetch(later + j, 1);
                }
                A* __restrict const target = g.d_x + (int64_t)g.indices[e] * g.stride + column;
                A weight = g.data ? g.data[e] : (A)1;
                if (g.source_scale) weight = weight * g.source_scale[g.indices[e]];
                for (int64_t j = 0; j < width; j++) target[j] += weight * gradient[j];
            }
        }
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
