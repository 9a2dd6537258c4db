// Exponentials of vectors, in the namespace of one instruction set; no guard.
//
// Cody and Waite's reduction ("Software manual for the elementary functions", 1980): x = n log(2) + r with a whole
// n and |r| <= log(2) / 2, and Taylor's polynomial for e^r - 1. Products and sums are kept apart, so all
// instruction sets give the same bits.

// e^r - 1. The bits of `shifted` end in those of n.
template <int N>
DORYLUS_INLINE Vec<float, N> reduced_exponential(Vec<float, N> x, Vec<float, N>& shifted) {
    typedef Vec<float, N> V;
    shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2**23: the integer is in the low bits
    const V n = shifted - 12582912.f;
    const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    V p = r * (1.f / 5040) + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    return p * (r * r) + r;
}
template <int N>
DORYLUS_INLINE Vec<double, N> reduced_exponential(Vec<double, N> x, Vec<double, N>& shifted) {
    typedef Vec<double, N> V;
    shifted = x * 1.4426950408889634074 + 6755399441055744.0;  // 1.5 * 2**52
    const V n = shifted - 6755399441055744.0;
    const V r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
    V p = r * (1. / 6227020800) + 1. / 479001600;
    p = p * r + 1. / 39916800;
    p = p * r + 1. / 3628800;
    p = p * r + 1. / 362880;
    p = p * r + 1. / 40320;
    p = p * r + 1. / 5040;
    p = p * r + 1. / 720;
    p = p * r + 1. / 120;
    p = p * r + 1. / 24;
    p = p * r + 1. / 6;
    p = p * r + 0.5;
    return p * (r * r) + r;
}

// e^x for x <= 0; less than the smallest normal number is 0, NaN stays. Within 1.5 units in the last place.
template <int N>
DORYLUS_INLINE Vec<float, N> exponential(Vec<float, N> x) {
    typedef Vec<float, N> V;
    typedef Vec<uint32_t, N> U;
    V shifted;
    const V p = reduced_exponential<N>(x, shifted) + 1.f;
    const V y = (V)((U)p + ((U)shifted << 23));
    return choose(x == x, choose(x < -86.5f, V{}, y), x);
}
template <int N>
DORYLUS_INLINE Vec<double, N> exponential(Vec<double, N> x) {
    typedef Vec<double, N> V;
    typedef Vec<uint64_t, N> U;
    V shifted;
    const V p = reduced_exponential<N>(x, shifted) + 1.;
    const V y = (V)((U)p + ((U)shifted << 52));
    return choose(x == x, choose(x < -707., V{}, y), x);
}

// e^x - 1 for x <= 0, also near 0 to a few units in the last place; NaN stays.
template <int N>
DORYLUS_INLINE Vec<float, N> exponential_minus_one(Vec<float, N> x) {
    typedef Vec<float, N> V;
    typedef Vec<uint32_t, N> U;
    V shifted;
    const V p = reduced_exponential<N>(choose(x < -40.f, splat<N>(-40.f), x), shifted);  // below it is -1
    const V power = (V)(((U)shifted << 23) + 0x3f800000u);
    return choose(x == x, p * power + (power - 1.f), x);
}
template <int N>
DORYLUS_INLINE Vec<double, N> exponential_minus_one(Vec<double, N> x) {
    typedef Vec<double, N> V;
    typedef Vec<uint64_t, N> U;
    V shifted;
    const V p = reduced_exponential<N>(choose(x < -40., splat<N>(-40.), x), shifted);
    const V power = (V)(((U)shifted << 52) + 0x3ff0000000000000u);
    return choose(x == x, p * power + (power - 1.), x);
}
