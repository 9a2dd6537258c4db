// How the columns of a row are cut into vectors, in the namespace of one instruction set; no guard.

// A chunk is NV vectors of N columns. Its last vector may overlap the one before it: a row of any
// length is covered by whole vectors without reading beyond it, and columns that are summed twice
// come out the same twice. `last` is where the last vector begins.
template <int N, int NV>
DORYLUS_INLINE int64_t at(int k, int64_t last) {
    return k < NV - 1 ? (int64_t)k * N : last;
}

// Calls visit.run<N, NV>(column, last) for every chunk that a row of `columns` is cut into.
template <int N, class Visit>
DORYLUS_INLINE void visit_chunk(const Visit& visit, int vectors, int64_t column, int64_t last) {
    switch (vectors) {
        case 1: visit.template run<N, 1>(column, last); break;
        case 2: visit.template run<N, 2>(column, last); break;
        case 3: visit.template run<N, 3>(column, last); break;
#if DORYLUS_LEVEL == 2 || DORYLUS_LEVEL == 1 || !DORYLUS_X86
        case 4: visit.template run<N, 4>(column, last); break;
#endif
#if DORYLUS_LEVEL == 2
        case 5: visit.template run<N, 5>(column, last); break;
        case 6: visit.template run<N, 6>(column, last); break;
        case 7: visit.template run<N, 7>(column, last); break;
        case 8: visit.template run<N, 8>(column, last); break;
#endif
    }
}

// Fewer columns than a whole vector: one or two vectors of half, a quarter, ... of its length.
template <int N, class Visit>
struct Narrow {
    static DORYLUS_INLINE void run(const Visit& visit, int64_t columns) {
        if (columns > N)
            visit.template run<N, 2>(0, columns - N);
        else if (columns == N)
            visit.template run<N, 1>(0, 0);
        else
            Narrow<N / 2, Visit>::run(visit, columns);
    }
};
template <class Visit>
struct Narrow<0, Visit> {
    static DORYLUS_INLINE void run(const Visit&, int64_t) {}
};

// LIMIT: the most vectors of a chunk, at least 3 as MAX_VECTORS is.
template <class A, int LIMIT = MAX_VECTORS, class Visit>
DORYLUS_INLINE void visit_row(const Visit& visit, int64_t columns) {
    enum { N = Lanes<A>::value };
    if (columns < N) {
        Narrow<N / 2, Visit>::run(visit, columns);
        return;
    }
    const int64_t vectors = (columns + N - 1) / N;
    const int64_t chunks = (vectors + LIMIT - 1) / LIMIT;
    int64_t column = 0;
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t count = vectors / chunks + (c < vectors % chunks);
        const int64_t last = c == chunks - 1 ? columns - N - column : (count - 1) * N;
        visit_chunk<N>(visit, (int)count, column, last);
        column += count * N;
    }
}
