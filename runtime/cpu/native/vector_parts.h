/* What vectors.h builds the vectors of an instruction set from: the numbers of the sets, and functions of single vectors. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kv_precision.h"

#define CONCATENATE(a, b) a##_##b

#define PLAIN 0   /* four lanes of plain C; fmaf, which is slow and rounds once on all CPUs */
#define UNFUSED 1 /* the same with two roundings */
#define NEON 2
#define AVX2 3
#define AVX512 4

typedef float plain_floats __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t plain_ints __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t plain_words __attribute__((vector_size(16), aligned(4), may_alias));

#if defined(__x86_64__)
#include <immintrin.h>
#define INLINE_FOR(set) static inline __attribute__((always_inline, target(set)))
#define TARGET_AVX2 "avx2,fma,f16c"

/* e4m3fn codes, sign-extended, as float16: the value over 256, as the exponents' biases are 7 and 15. */
INLINE_FOR(TARGET_AVX2) __m256i halves_of_16_float8(const uint8_t *p)
{
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    return _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16((short)0xbf80));
}

INLINE_FOR(TARGET_AVX2) __m128i halves_of_8_float8(const uint8_t *p)
{
    const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
    return _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16((short)0xbf80));
}

INLINE_FOR(TARGET_AVX2) float maximum_of_8(__m256 x)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

INLINE_FOR(TARGET_AVX2) int32_t largest_of_8(__m256i x)
{
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

INLINE_FOR(TARGET_AVX2) int32_t sum_of_8(__m256i x)
{
    __m128i m = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

/* The largest number of each of 8 vectors. */
INLINE_FOR("avx512f," TARGET_AVX2) __m512 maxima_of_8(const __m512 *tops)
{
    __m512 two[4], four[2]; /* lanes of two rows, of four */
    for (int i = 0; i < 4; i++)
        two[i] = _mm512_max_ps(_mm512_shuffle_f32x4(tops[2 * i], tops[2 * i + 1], 0x44),
                               _mm512_shuffle_f32x4(tops[2 * i], tops[2 * i + 1], 0xee));
    for (int i = 0; i < 2; i++)
        four[i] = _mm512_max_ps(_mm512_shuffle_f32x4(two[2 * i], two[2 * i + 1], 0x88),
                                _mm512_shuffle_f32x4(two[2 * i], two[2 * i + 1], 0xdd));
    const __m512 eight = _mm512_max_ps(_mm512_shuffle_ps(four[0], four[1], 0x44), _mm512_shuffle_ps(four[0], four[1], 0xee));
    const __m512 all = _mm512_max_ps(eight, _mm512_permute_ps(eight, 0xb1));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(order, all);
}
#elif defined(__aarch64__)
#include <arm_neon.h>
#define NEON_INLINE static inline __attribute__((always_inline))

NEON_INLINE float32x4_t neon_half(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }

/* Four e4m3fn codes, sign-extended, as float16: the value over 256, as the exponents' biases are 7 and 15. */
NEON_INLINE float32x4_t neon_float8(const uint8_t *p)
{
    uint32_t codes;
    memcpy(&codes, p, sizeof codes);
    const int16x4_t halves = vget_low_s16(vshll_n_s8(vcreate_s8(codes), 7));
    return vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(halves, vdup_n_s16((short)0xbf80))));
}
#endif

static inline plain_floats plain_fma(plain_floats a, plain_floats b, plain_floats c)
{
    for (int i = 0; i < 4; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}

static inline plain_ints plain_pick(plain_ints mask, plain_ints yes, plain_ints no) { return (mask & yes) | (~mask & no); }

static inline int32_t plain_sum(plain_ints x) { return x[0] + x[1] + x[2] + x[3]; }

static inline int32_t plain_largest_int(plain_ints x)
{
    const int32_t low = x[0] > x[1] ? x[0] : x[1], high = x[2] > x[3] ? x[2] : x[3];
    return low > high ? low : high;
}

static inline float plain_largest(plain_floats x)
{
    const float low = x[0] > x[1] ? x[0] : x[1], high = x[2] > x[3] ? x[2] : x[3];
    return low > high ? low : high;
}

static inline plain_ints plain_widen16(const uint8_t *p)
{
    uint16_t x[4];
    memcpy(x, p, sizeof x);
    return (plain_ints){x[0], x[1], x[2], x[3]};
}

static inline plain_floats plain_halves(const uint8_t *p)
{
    plain_floats x;
    for (int i = 0; i < 4; i++) {
        uint16_t half;
        memcpy(&half, p + 2 * i, sizeof half);
        x[i] = float_of_half(half);
    }
    return x;
}

static inline plain_floats plain_float8(const uint8_t *p)
{
    const plain_words code = {p[0], p[1], p[2], p[3]};
    return (plain_floats)((code & 0x7f) << 20 | (code & 0x80) << 24) * 0x1p112f;
}
