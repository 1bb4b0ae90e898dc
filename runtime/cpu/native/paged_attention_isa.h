/* The kernel compiled once per instruction set, and the choice among them at run time. */

#define CONCATENATE(a, b) a##_##b

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static inline __attribute__((always_inline, target("avx2,fma"))) float maximum_of_8(__m256 x)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

/* e4m3fn, sign-extended to 16 bits, to float16: the value over 256, as the exponents' biases are 7 and 15. */
#define HALF_OF_FP8 ((short)0xbf80)

/* Values of 4 bits of two's complement. */
static const float NIBBLES[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
static const float UNSIGNED_NIBBLES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static inline __attribute__((always_inline, target("avx2,fma,f16c"))) __m256i halves_of_fp8(const uint8_t *p)
{
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    return _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(HALF_OF_FP8));
}

static inline __attribute__((always_inline, target("avx2,fma,f16c"))) __m128i halves_of_8_fp8(const uint8_t *p)
{
    const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
    return _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(HALF_OF_FP8));
}

/* The largest number of each of 8 vectors. */
static inline __attribute__((always_inline, target("avx512f,avx2,fma,f16c"))) __m512 maxima_of_8(const __m512 *tops)
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

#define NAME(x) CONCATENATE(x, avx512)
#define TARGET __attribute__((target("avx512f,avx2,fma,f16c")))
#define VW 16
#define ROWS 8
#define vset1(x) ((vec)_mm512_set1_ps(x))
#define vfma(a, b, c) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define vmax(a, b) ((vec)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define vhmax(a) _mm512_reduce_max_ps((__m512)(a))
#define vhmax_of_8(tops) ((vec)maxima_of_8((const __m512 *)(tops)))
#define vany(a) (_mm512_test_epi32_mask((__m512i)(a), (__m512i)(a)) != 0)
#define vhalf(p) ((vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))))
#define vwiden(x) ((ivec)_mm512_cvtepi8_epi32((__m128i)(x)))
#define vnibble(i) ((vec)_mm512_permutexvar_ps((__m512i)(i), _mm512_loadu_ps(NIBBLES)))
#define vunsigned_nibble(i) ((vec)_mm512_permutexvar_ps((__m512i)(i), _mm512_loadu_ps(UNSIGNED_NIBBLES)))
#define vfp8(p) ((vec)_mm512_cvtph_ps(halves_of_fp8(p)))
#define vstore_halves(p, x) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT))
#define one_half(p) _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(*(p))))
#define FP8_FACTOR 256.0f
#include "paged_attention_kernel.h"

/* Element i of the first and second half of 32. */
static const uint16_t INTERLEAVED[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

/* vdpbf16ps: bfloat16 only, the rest is that of avx512. */
#define NAME(x) CONCATENATE(x, avx512_bf16)
#define TARGET __attribute__((target("avx512f,avx512bf16,avx512bw,avx512vl,avx2,fma,f16c")))
#define VW 16
#define ROWS 8
#define vset1(x) ((vec)_mm512_set1_ps(x))
#define vfma(a, b, c) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define vmax(a, b) ((vec)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define vhmax(a) _mm512_reduce_max_ps((__m512)(a))
#define vhmax_of_8(tops) ((vec)maxima_of_8((const __m512 *)(tops)))
#define vany(a) (_mm512_test_epi32_mask((__m512i)(a), (__m512i)(a)) != 0)
#define vhalf(p) ((vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))))
#define vdot(sum, a, b) ((vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b)))
#define vround_pair(lower, upper)                                                                                      \
    ((ivec)_mm512_permutexvar_epi16(_mm512_loadu_si512(INTERLEAVED),                                                   \
                                    (__m512i)_mm512_cvtne2ps_pbh((__m512)(upper), (__m512)(lower))))
#define vstore_bfloats(p, x) _mm256_storeu_si256((__m256i *)(p), (__m256i)_mm512_cvtneps_pbh((__m512)(x)))
#include "paged_attention_vectors.h"
#include "paged_attention_bfloat16.h"
#include "paged_attention_undef.h"

#define NAME(x) CONCATENATE(x, avx2)
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VW 8
#define ROWS 4
#define vset1(x) ((vec)_mm256_set1_ps(x))
#define vfma(a, b, c) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define vmax(a, b) ((vec)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define vhmax(a) maximum_of_8((__m256)(a))
#define vany(a) (_mm256_movemask_epi8((__m256i)(a)) != 0)
#define vhalf(p) ((vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define vwiden(x) ((ivec)_mm256_cvtepi8_epi32((__m128i){(int64_t)(x), 0}))
#define vnibble(i) __builtin_convertvector((i) << 28 >> 28, vec)
#define vunsigned_nibble(i) __builtin_convertvector((i) & 15, vec)
#define vfp8(p) ((vec)_mm256_cvtph_ps(halves_of_8_fp8(p)))
#define vstore_halves(p, x) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT))
#define one_half(p) _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(*(p))))
#define FP8_FACTOR 256.0f
#include "paged_attention_kernel.h"
#endif

typedef float four_floats __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t four_ints __attribute__((vector_size(16), aligned(4), may_alias));

static inline four_floats floats_of_halves(const uint8_t *p)
{
    four_floats x;
    for (int i = 0; i < 4; i++) {
        uint16_t half;
        memcpy(&half, p + 2 * i, sizeof half);
        x[i] = float_of_half(half);
    }
    return x;
}

static inline four_floats floats_of_fp8(const uint8_t *p)
{
    four_ints code = {p[0], p[1], p[2], p[3]};
    return (four_floats)((code & 0x7f) << 20 | (code & 0x80) << 24);
}

#define NAME(x) CONCATENATE(x, baseline)
#define TARGET
#define VW 4
#define vhalf(p) ((vec)floats_of_halves(p))
#define vwiden(x) __builtin_convertvector((x), ivec)
#define vnibble(i) __builtin_convertvector((i) << 28 >> 28, vec)
#define vunsigned_nibble(i) __builtin_convertvector((i) & 15, vec)
#define vfp8(p) ((vec)floats_of_fp8(p))
#define one_half(p) float_of_half(*(p))
#define FP8_FACTOR 0x1p120f
#if defined(__aarch64__)
#include <arm_neon.h>
#define ROWS 8
#define vset1(x) ((vec)vdupq_n_f32(x))
#define vfma(a, b, c) ((vec)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define vmax(a, b) ((vec)vmaxq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define vhmax(a) vmaxvq_f32((float32x4_t)(a))
#define vany(a) (vmaxvq_u32((uint32x4_t)(a)) != 0)
#else /* no fused multiply-add: two roundings, and so other last bits than the sets above */
#define ROWS 4
static inline four_floats maximum_of_each(four_floats a, four_floats b)
{
    four_ints mask = a > b;
    return (four_floats)((mask & (four_ints)a) | (~mask & (four_ints)b));
}
static inline float maximum_of_4(four_floats x)
{
    float low = x[0] > x[1] ? x[0] : x[1], high = x[2] > x[3] ? x[2] : x[3];
    return low > high ? low : high;
}
#define vset1(x) ((vec){(x), (x), (x), (x)})
#define vfma(a, b, c) ((a) * (b) + (c))
#define vmax(a, b) ((vec)maximum_of_each((four_floats)(a), (four_floats)(b)))
#define vhmax(a) maximum_of_4((four_floats)(a))
#define vany(a) (((a)[0] | (a)[1] | (a)[2] | (a)[3]) != 0)
#endif
#include "paged_attention_kernel.h"

/* Instruction sets, best first. */
static const struct {
    const char *name;
    const struct isa *isa;
    const struct pairs_isa *pairs;
} ISAS[] = {
#if defined(__x86_64__)
    {"avx512-bf16", &isa_avx512, &pairs_isa_avx512_bf16},
    {"avx512", &isa_avx512, &pairs_isa_avx512},
    {"avx2", &isa_avx2, &pairs_isa_avx2},
#endif
    {"baseline", &isa_baseline, &pairs_isa_baseline},
};
enum { NUM_ISAS = sizeof(ISAS) / sizeof(ISAS[0]) };

#if defined(__x86_64__)
/* Register state that the system saves: bits of XCR0, 0 when it saves none. */
static unsigned saved_state(void)
{
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* Reads cpuid itself: __builtin_cpu_supports reads a table of the compiler's runtime library, which zig's never fills. */
static int cpu_has(int avx512, int bf16)
{
    const unsigned state = avx512 ? 0xe6 : 0x06; /* SSE and AVX registers; for AVX-512 its masks and both halves too */
    unsigned a, b, c, d, fma, more = 0;
    if ((saved_state() & state) != state || !__get_cpuid(1, &a, &b, &fma, &d) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    const unsigned set = b;
    if (bf16 && (!(set & bit_AVX512BW) || !(set & bit_AVX512VL) || !__get_cpuid_count(7, 1, &more, &b, &c, &d)))
        return 0;
    return (fma & bit_FMA) && (fma & bit_F16C) && (set & bit_AVX2) && (!avx512 || (set & bit_AVX512F)) &&
           (!bf16 || (more & 1 << 5)); /* AVX512_BF16 */
}
#endif

static int runs_here(int index)
{
#if defined(__x86_64__)
    if (index < 3)
        return cpu_has(index < 2, index == 0);
#endif
    return index < NUM_ISAS;
}

static _Atomic int chosen_isa = -1;

static int selected_isa(void)
{
    if (chosen_isa < 0) {
        int index = 0;
        while (!runs_here(index))
            index++;
        chosen_isa = index;
    }
    return chosen_isa;
}

/* Name of the instruction set in use. */
const char *paged_attention_isa(void)
{
    return ISAS[selected_isa()].name;
}

/* Use the named instruction set from now on. Returns 0, or -1 when this CPU or build has no such set. */
int paged_attention_use_isa(const char *name)
{
    for (int i = 0; i < NUM_ISAS; i++)
        if (strcmp(ISAS[i].name, name) == 0 && runs_here(i)) {
            chosen_isa = i;
            return 0;
        }
    return -1;
}
