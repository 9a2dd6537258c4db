// The loops of narrow.hpp, once per instruction set; no guard.
//
// Sums stay in registers: of some rows of the result (a @ b), or of some of its rows over a block of rows of A
// (a^T @ b). A is read once, as fast as memory gives it if asked ahead; B, or the block of A, comes from a cache.

// Registers of 64 bytes for sums.
#if DORYLUS_LEVEL == 2
enum { SUMS = 24, MOST_AT_ONCE = 12 };
#elif DORYLUS_LEVEL == 1 || !DORYLUS_X86
enum { SUMS = 6, MOST_AT_ONCE = 6 };
#else
enum { SUMS = 3, MOST_AT_ONCE = 3 };
#endif

template <int NV>
struct AtOnce {
    enum { value = SUMS / NV < MOST_AT_ONCE ? SUMS / NV : MOST_AT_ONCE };
};

// R rows of a @ b.
template <int R, int NV, class A>
DORYLUS_INLINE void narrow_block(const NarrowProduct<A>& g, int64_t i) {
    enum { N = Lanes<A>::value };
    Vec<A, N> total[R][NV] = {};
    const int64_t depth = g.depth;
    const A* const row = g.a + i * depth;
    for (int64_t first = 0; first < depth; first += N) {
        const int64_t end = first + N < depth ? first + N : depth;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) __builtin_prefetch(row + (R + r) * depth + first);
        for (int64_t k = first; k < end; k++) {
            const A* const b = g.b + k * (NV * N);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) total[r][v] += row[r * depth + k] * load<N>(b + v * N);
        }
    }
    A* out = g.out + i * g.columns;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++, out += g.columns) {
        if (g.columns == NV * N)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) store<N>(out + v * N, total[r][v]);
        else
            memcpy(out, total[r], g.columns * sizeof(A));
    }
}

template <int NV, class A>
inline void narrow_rows_as(const NarrowProduct<A>& g, int64_t start, int64_t stop) {
    enum { R = AtOnce<NV>::value };
    int64_t i = start;
    for (; i + R <= stop; i += R) narrow_block<R, NV>(g, i);
    for (; i < stop; i++) narrow_block<1, NV>(g, i);
}

template <class A>
inline void narrow_rows(const NarrowProduct<A>& g, int64_t start, int64_t stop) {
    switch ((g.columns + Lanes<A>::value - 1) / Lanes<A>::value) {
        case 1: narrow_rows_as<1>(g, start, stop); break;
        case 2: narrow_rows_as<2>(g, start, stop); break;
        default: narrow_rows_as<3>(g, start, stop);
    }
}

// What a block adds to G rows of a^T @ b. `b` has rows of whole vectors. A line of the next block is asked for
// with every row.
template <int G, int NV, class A>
DORYLUS_INLINE const A* narrow_group(
    const A* a, int64_t depth, const A* b, int64_t rows, const A* ahead, A* out, int64_t columns
) {
    enum { N = Lanes<A>::value };
    Vec<A, N> total[G][NV] = {};
    for (int64_t i = 0; i < rows; i++, a += depth, b += NV * N) {
#pragma GCC unroll 4
        for (int one = 0; one < G; one += N) __builtin_prefetch(ahead + one, 0, 2);
        ahead += G;
#pragma GCC unroll 16
        for (int k = 0; k < G; k++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) total[k][v] += a[k] * load<N>(b + v * N);
    }
#pragma GCC unroll 16
    for (int k = 0; k < G; k++, out += columns) {
        if (columns == NV * N) {
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) store<N>(out + v * N, load<N>(out + v * N) + total[k][v]);
        } else {
            A part[NV * N];
            memcpy(part, total[k], sizeof part);
            for (int64_t j = 0; j < columns; j++) out[j] += part[j];
        }
    }
    return ahead;
}

template <int NV, class A>
inline void narrow_adjoint_as(const NarrowProduct<A>& g, int64_t n, int64_t left, int64_t right) {
    enum { N = Lanes<A>::value, G = AtOnce<NV>::value };
    alignas(64) A padded[NARROW_BLOCK * NV * N] = {};
    const bool pads = g.columns != NV * N;
    for (int64_t k = left * g.columns; k < right * g.columns; k++) g.out[k] = 0;
    for (int64_t first = 0; first < n; first += NARROW_BLOCK) {
        const int64_t rows = n - first < NARROW_BLOCK ? n - first : (int64_t)NARROW_BLOCK;
        const A* b = g.b + first * g.columns;
        if (pads) {
            for (int64_t i = 0; i < rows; i++) memcpy(padded + i * NV * N, b + i * g.columns, g.columns * sizeof(A));
            b = padded;
        }
        const A* const a = g.a + first * g.depth;
        const A* ahead = a + rows * g.depth;
        int64_t k = left;
        for (; k + G <= right; k += G)
            ahead = narrow_group<G, NV>(a + k, g.depth, b, rows, ahead, g.out + k * g.columns, g.columns);
        for (; k < right; k++)
            ahead = narrow_group<1, NV>(a + k, g.depth, b, rows, ahead, g.out + k * g.columns, g.columns);
    }
}

template <class A>
inline void narrow_adjoint(const NarrowProduct<A>& g, int64_t n, int64_t left, int64_t right) {
    switch ((g.columns + Lanes<A>::value - 1) / Lanes<A>::value) {
        case 1: narrow_adjoint_as<1>(g, n, left, right); break;
        case 2: narrow_adjoint_as<2>(g, n, left, right); break;
        default: narrow_adjoint_as<3>(g, n, left, right);
    }
}
