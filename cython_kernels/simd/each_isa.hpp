// Includes DORYLUS_BODY once per instruction set (see isa.hpp). No include guard: used once a body.
#if DORYLUS_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,prefer-vector-width=512")
#endif
#define DORYLUS_LEVEL 2
namespace dorylus { namespace avx512 {
#include "vec.hpp"
#include DORYLUS_BODY
}}
#undef DORYLUS_LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define DORYLUS_LEVEL 1
namespace dorylus { namespace avx2 {
#include "vec.hpp"
#include DORYLUS_BODY
}}
#undef DORYLUS_LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

#define DORYLUS_LEVEL 0
namespace dorylus { namespace baseline {
#include "vec.hpp"
#include DORYLUS_BODY
}}
#undef DORYLUS_LEVEL
#undef DORYLUS_BODY
