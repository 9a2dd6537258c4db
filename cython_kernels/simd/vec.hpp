// Vectors of N elements, in the namespace of one instruction set. Included by each_isa.hpp; no guard.

// Registers for sums: a chunk of columns is at most this many 64-byte vectors. At least 3, so that a
// row cut into balanced chunks never has a last chunk of one vector (see chunks.hpp).
#if DORYLUS_LEVEL == 2
enum { MAX_VECTORS = 8 };
#elif DORYLUS_LEVEL == 1 || !DORYLUS_X86
enum { MAX_VECTORS = 4 };
#else
enum { MAX_VECTORS = 3 };
#endif

template <class T>
struct Lanes {
    enum { value = 64 / sizeof(T) };
};

template <class T, int N>
struct VecOf {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
    typedef T loose __attribute__((vector_size(N * sizeof(T)), aligned(alignof(T)), may_alias));
};
template <class T, int N>
using Vec = typename VecOf<T, N>::type;

// The integer of the same size: lanes of comparisons, and of indices beside values.
template <class T>
struct IntOf;
template <>
struct IntOf<float> {
    typedef int32_t type;
};
template <>
struct IntOf<double> {
    typedef int64_t type;
};

template <int N>
DORYLUS_INLINE Vec<float, N> load(const float* p) {
    return *reinterpret_cast<const typename VecOf<float, N>::loose*>(p);
}
template <int N>
DORYLUS_INLINE Vec<double, N> load(const double* p) {
    return *reinterpret_cast<const typename VecOf<double, N>::loose*>(p);
}
template <int N>
DORYLUS_INLINE Vec<int32_t, N> load(const int32_t* p) {
    return *reinterpret_cast<const typename VecOf<int32_t, N>::loose*>(p);
}
template <int N>
DORYLUS_INLINE Vec<uint32_t, N> load(const uint32_t* p) {
    return *reinterpret_cast<const typename VecOf<uint32_t, N>::loose*>(p);
}
template <int N>
DORYLUS_INLINE Vec<float, N> load(const bf16* p) {
#if DORYLUS_LEVEL == 2
    if constexpr (N == 16)  // gcc makes five instructions of what is one
        return (Vec<float, N>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#endif
    typedef Vec<uint32_t, N> U;
    const auto half = *reinterpret_cast<const typename VecOf<uint16_t, N>::loose*>(p);
    return (Vec<float, N>)(__builtin_convertvector(half, U) << 16);
}

template <int N>
DORYLUS_INLINE void store(float* p, Vec<float, N> v) {
    *reinterpret_cast<typename VecOf<float, N>::loose*>(p) = v;
}
template <int N>
DORYLUS_INLINE void store(double* p, Vec<double, N> v) {
    *reinterpret_cast<typename VecOf<double, N>::loose*>(p) = v;
}
template <int N>
DORYLUS_INLINE void store(int32_t* p, Vec<int32_t, N> v) {
    *reinterpret_cast<typename VecOf<int32_t, N>::loose*>(p) = v;
}

// Round to nearest even; a NaN keeps its sign and becomes quiet, so that it can't round to infinity.
template <int N>
DORYLUS_INLINE void store(bf16* p, Vec<float, N> v) {
    typedef Vec<uint32_t, N> U;
    typedef Vec<uint16_t, N> H;
    const U bits = (U)v;
    const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const U quiet = (bits >> 16) | 0x40u;
    const U nan = (U)(v != v);
    *reinterpret_cast<typename VecOf<uint16_t, N>::loose*>(p) =
        __builtin_convertvector((nan & quiet) | (~nan & rounded), H);
}

template <int N, class T>
DORYLUS_INLINE Vec<T, N> splat(T value) {
    return value - Vec<T, N>{};
}

// mask ? a : b; lanes of the mask are all ones or all zeros.
template <class M, class V>
DORYLUS_INLINE V choose(M mask, V a, V b) {
    return (V)((mask & (M)a) | (~mask & (M)b));
}
