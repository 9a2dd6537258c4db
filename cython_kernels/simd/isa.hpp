// One binary for every CPU, and why the features are tiled.
//
// DISPATCH. The loops of a family live in one body header, written once with vectors of 64 bytes (a
// cache line: 16 floats, 8 doubles). `each_isa.hpp` includes a body once per instruction set, inside
// a namespace and a target pragma of its own; the compiler lowers a 64-byte vector to one AVX-512
// register, two of AVX2 or four of SSE/NEON. Every entry point takes the level as an argument and
// picks a namespace (DORYLUS_DISPATCH); `cython_kernels.dispatch` finds the level of the CPU once, and
// ``with cython_kernels.dispatch.using("avx2"):`` forces another that the CPU has (`available` lists them).
// Products and sums are kept apart (-ffp-contract=off) and a column is always summed in the order
// of its entries, so results are the same bits on every level and for any cut into columns.
//
// LAYOUT. A gather reads a row per edge. On a graph without locality each row of a row-major matrix
// comes from main memory, all of it:
//
//     row-major [n][f]              tiles [ceil(f/16)][n][16]
//     v0: ################          tile 0   v0: ####  v1: ####  v2: ####  ...   64 B a vertex
//     v1: ################          tile 1   v0: ####  v1: ####  v2: ####  ...
//     v2: ################          ...
//
// One tile is one cache line a vertex (16 columns of float32, 8 of float64, 32 of bfloat16; the last tile
// is padded to a whole one): 200,000 vertices take 12.8 MB, which stays in the last-level cache while all
// edges are gathered from it; then the next tile's turn comes. Every feature leaves main memory once
// instead of once an edge, for the price of reading the indices once a tile. `Tiles` holds all tiles, made
// once for many gathers; ``layout="tiles"`` copies one tile at a time into scratch memory, in every call.
// Where the order of the vertices has locality, or hubs take most reads, rows are cached as they are, and
// row-major with prefetching is faster: `layout.choose_layout` estimates which.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__)
#define DORYLUS_X86 1
#include <immintrin.h>
#else
#define DORYLUS_X86 0
#endif

#define DORYLUS_INLINE inline __attribute__((always_inline))

namespace dorylus {

enum Level { BASELINE = 0, AVX2 = 1, AVX512 = 2 };

// The best level that this CPU and its operating system support.
inline int detect_level() {
#if DORYLUS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2")) return AVX2;
#endif
    return BASELINE;
}

// The upper half of a float32, rounded to nearest even: 8 bits of exponent, 7 of fraction.
typedef uint16_t bf16;

}  // namespace dorylus

#if DORYLUS_X86
#define DORYLUS_DISPATCH(level, call)                  \
    {                                                  \
        switch (level) {                               \
            case AVX512: avx512::call; break;          \
            case AVX2: avx2::call; break;              \
            default: baseline::call; break;            \
        }                                              \
    }
#else
#define DORYLUS_DISPATCH(level, call) { baseline::call; }
#endif
