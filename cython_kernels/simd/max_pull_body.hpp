// Loops of max_pull.hpp, in the namespace of one instruction set; no guard.
#include "chunks.hpp"

enum { PULL_AHEAD = 32 };  // entries between a prefetch and its use

template <class A>
struct PullVisit {
    const MaxPull<A>& g;
    int64_t start, stop;
    template <int N, int NV>
    DORYLUS_INLINE void run(int64_t column, int64_t last) const {
        for (int64_t row = start; row < stop; row++) pull_row<N, NV>(row, column, last);
    }
    template <int N, int NV>
    DORYLUS_INLINE void pull_row(int64_t row, int64_t column, int64_t last) const {
        typedef typename IntOf<A>::type I;
        typedef Vec<A, N> V;
        typedef Vec<I, N> M;
        const A* const values = g.packed + column;
        const A* const keys = values + g.columns;
        const int64_t first = g.indptr[row], end = g.indptr[row + 1];
        const M own = splat<N>((I)g.ids[row]);
        V total[NV];
        for (int k = 0; k < NV; k++) total[k] = V{};
        for (int64_t e = first; e < end; e++) {
            if (e + PULL_AHEAD < g.nnz) {
                const int64_t later = (int64_t)g.indices[e + PULL_AHEAD] * 2 * g.columns;
                for (int k = 0; k < NV; k++) {
                    __builtin_prefetch(values + later + at<N, NV>(k, last));
                    __builtin_prefetch(keys + later + at<N, NV>(k, last));
                }
            }
            if (e > first && g.indices[e] == g.indices[e - 1]) continue;  // the value came over one of them
            const int64_t from = (int64_t)g.indices[e] * 2 * g.columns;
            for (int k = 0; k < NV; k++) {
                const M mine = (M)((M)load<N>(keys + from + at<N, NV>(k, last)) == own);
                total[k] += (V)(mine & (M)load<N>(values + from + at<N, NV>(k, last)));
            }
        }
        for (int k = 0; k < NV; k++) store<N>(g.d_x + row * g.columns + column + at<N, NV>(k, last), total[k]);
    }
};

template <class A>
inline void max_pull_rows(const MaxPull<A>& g, int64_t start, int64_t stop) {
    if (g.columns <= (int64_t)MAX_VECTORS * Lanes<A>::value) {
        visit_row<A>(PullVisit<A>{g, start, stop}, g.columns);
    } else {
        for (int64_t i = start; i < stop; i++) visit_row<A>(PullVisit<A>{g, i, i + 1}, g.columns);
    }
}
