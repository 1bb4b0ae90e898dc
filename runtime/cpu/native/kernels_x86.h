/* The kernels of x86-64: primitives of AVX-512 VNNI, AVX-VNNI and AVX2. */
#include <immintrin.h>

#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define HAS_AVX_VNNI 1
#else
#define HAS_AVX_VNNI 0
#endif

#define INLINE_FOR(set) static inline __attribute__((always_inline, target(set)))
#define AVX2 "avx2,fma,f16c"
#define AVX_VNNI "avx2,fma,f16c,avxvnni"
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"

/* e4m3fn codes, sign-extended, as float16: the value over 256, as the exponents' biases are 7 and 15. */
INLINE_FOR(AVX2) __m256i halves_of_16_float8(const uint8_t *p)
{
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    return _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16((short)0xbf80));
}

/* Assembly in place of the intrinsic: gcc 12 copies every sum twice around that, and does not fold the broadcast. */
INLINE_FOR(AVX512) __m512i avx512_dot(__m512i sum, __m512i c, const int32_t *q)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(c), "m"(*q));
    return sum;
}

INLINE_FOR(AVX512) __m512i avx512_dot_wide(__m512i sum, __m512i c, __m512i x)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(c), "v"(x));
    return sum;
}

#define NAME(x) CONCATENATE(x, avx512)
#define SET "avx512-vnni"
#define TARGET __attribute__((target(AVX512)))
#define VW 16
#define HEIGHT 12
#define FLOAT_TILES 2
#define CHAINS 4
#define AHEAD 8192
#define vset(x) ((vf)_mm512_set1_ps(x))
#define vseti(x) ((vi)_mm512_set1_epi32(x))
#define vfma(a, b, c) ((vf)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define vmaxi(a, b) ((vi)_mm512_max_epi32((__m512i)(a), (__m512i)(b)))
#define vwiden8(p) ((vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define vwiden16(p) ((vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))))
#define vhalf(p) ((vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))))
#define vfloat8(p, v) ((vf)_mm512_cvtph_ps(halves_of_16_float8(p)))
#define multiply16(a, b) ((vi)_mm512_madd_epi16((__m512i)(a), (__m512i)(b)))
#define vdot(sum, c, at) ((vi)avx512_dot((__m512i)(sum), (__m512i)(c), at))
#define vdot_wide(sum, c, x) ((vi)avx512_dot_wide((__m512i)(sum), (__m512i)(c), (__m512i)(x)))
#include "kernel_set.h"

/* Behind a barrier: the compiler would add in another order, which needs more registers than there are. */
INLINE_FOR(AVX2) __m256i avx2_short_add(__m256i a, __m256i b)
{
    a = _mm256_add_epi16(a, b);
    __asm__("" : "+x"(a));
    return a;
}

#define NAME(x) CONCATENATE(x, avx2)
#define SET "avx2"
#define TARGET __attribute__((target(AVX2)))
#define VW 8
#define HEIGHT 4
#define FLOAT_TILES 1
#define CHAINS 1
#define AHEAD 4096
#define vset(x) ((vf)_mm256_set1_ps(x))
#define vseti(x) ((vi)_mm256_set1_epi32(x))
#define vfma(a, b, c) ((vf)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define vmaxi(a, b) ((vi)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
#define vwiden8(p) ((vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define vwiden16(p) ((vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define vhalf(p) ((vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define vfloat8(p, v)                                                                                                  \
    ((vf)_mm256_cvtph_ps((v) == 0 ? _mm256_castsi256_si128(halves_of_16_float8(p))                                     \
                                  : _mm256_extracti128_si256(halves_of_16_float8(p), 1)))
#define multiply16(a, b) ((vi)_mm256_madd_epi16((__m256i)(a), (__m256i)(b)))
#define SHORT_SUMS
#define short_dot(c, at) ((vi)_mm256_maddubs_epi16((__m256i)(c), _mm256_set1_epi32(*(at))))
#define short_add(a, b) ((vi)avx2_short_add((__m256i)(a), (__m256i)(b)))
#define short_fold(s, factor) ((vi)_mm256_madd_epi16((__m256i)(s), _mm256_set1_epi16(factor)))
#include "kernel_set.h"

#if HAS_AVX_VNNI
INLINE_FOR(AVX_VNNI) __m256i avx_vnni_dot(__m256i sum, __m256i c, const int32_t *q)
{
    const __m256i all = _mm256_set1_epi32(*q);
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(c), "x"(all));
    return sum;
}

#define NAME(x) CONCATENATE(x, avx_vnni)
#define SET "avx-vnni"
#define TARGET __attribute__((target(AVX_VNNI)))
#define VW 8
#define HEIGHT 6
#define FLOAT_TILES 1
#define CHAINS 2
#define AHEAD 4096
#define vset(x) ((vf)_mm256_set1_ps(x))
#define vseti(x) ((vi)_mm256_set1_epi32(x))
#define vfma(a, b, c) ((vf)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define vmaxi(a, b) ((vi)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
#define vwiden8(p) ((vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define vwiden16(p) ((vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define vhalf(p) ((vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define vfloat8(p, v)                                                                                                  \
    ((vf)_mm256_cvtph_ps((v) == 0 ? _mm256_castsi256_si128(halves_of_16_float8(p))                                     \
                                  : _mm256_extracti128_si256(halves_of_16_float8(p), 1)))
#define multiply16(a, b) ((vi)_mm256_madd_epi16((__m256i)(a), (__m256i)(b)))
#define vdot(sum, c, at) ((vi)avx_vnni_dot((__m256i)(sum), (__m256i)(c), at))
#include "kernel_set.h"
#endif
