/* The arithmetic of attention compiled once per instruction set, and the choice among them at run time. */
#include "paged_attention_isa.h"
#include "vector_parts.h"

#if defined(__x86_64__) && !defined(PORTABLE_ONLY)
#include "cpu_features.h"


/* Values of 4 bits of two's complement. */
static const float NIBBLES[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
static const float UNSIGNED_NIBBLES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#define NAME(x) CONCATENATE(x, avx512)
#define TARGET __attribute__((target("avx512f," TARGET_AVX2)))
#define VECTORS AVX512
#define ROWS 8
#define vwiden(x) ((vi)_mm512_cvtepi8_epi32((__m128i)(x)))
#define vnibble(i) ((vf)_mm512_permutexvar_ps((__m512i)(i), _mm512_loadu_ps(NIBBLES)))
#define vunsigned_nibble(i) ((vf)_mm512_permutexvar_ps((__m512i)(i), _mm512_loadu_ps(UNSIGNED_NIBBLES)))
#define one_half(p) _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(*(p))))
#include "paged_attention_kernel.h"
#include "paged_attention_bfloat16.h"
#include "paged_attention_amx.h"
#include "paged_attention_undef.h"

/* Element i of the first and second half of 32. */
static const uint16_t INTERLEAVED[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

/* vdpbf16ps: bfloat16 only, the rest is that of avx512. */
#define NAME(x) CONCATENATE(x, avx512_bf16)
#define TARGET __attribute__((target("avx512f,avx512bf16,avx512bw,avx512vl," TARGET_AVX2)))
#define VECTORS AVX512
#define ROWS 8
#define vdot(sum, a, b) ((vf)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b)))
#define vround_pair(lower, upper)                                                                                      \
    ((vi)_mm512_permutexvar_epi16(_mm512_loadu_si512(INTERLEAVED),                                                     \
                                  (__m512i)_mm512_cvtne2ps_pbh((__m512)(upper), (__m512)(lower))))
#define vstore_bfloats(p, x) _mm256_storeu_si256((__m256i *)(p), (__m256i)_mm512_cvtneps_pbh((__m512)(x)))
#include "paged_attention_vectors.h"
#include "paged_attention_bfloat16.h"
#define HAS_AMX
#include "paged_attention_amx.h"
#undef HAS_AMX
#include "paged_attention_undef.h"

#define NAME(x) CONCATENATE(x, avx2)
#define TARGET __attribute__((target(TARGET_AVX2)))
#define VECTORS AVX2
#define ROWS 4
#define vwiden(x) ((vi)_mm256_cvtepi8_epi32((__m128i){(int64_t)(x), 0}))
#define one_half(p) _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(*(p))))
#include "paged_attention_kernel.h"
#include "paged_attention_bfloat16.h"
#include "paged_attention_amx.h"
#include "paged_attention_undef.h"
#endif

#define NAME(x) CONCATENATE(x, baseline)
#define TARGET
#if defined(__aarch64__)
#define VECTORS NEON
#define ROWS 8
#else /* no fused multiply-add: two roundings, and so other last bits than the sets above */
#define VECTORS UNFUSED
#define ROWS 4
#endif
#include "paged_attention_kernel.h"
#include "paged_attention_bfloat16.h"
#include "paged_attention_amx.h"
#include "paged_attention_undef.h"

static int always(void) { return 1; }

/* Best first. */
static const struct instruction_set SETS[] = {
#if defined(__x86_64__) && !defined(PORTABLE_ONLY)
#if defined(__linux__)
    {"amx-bf16", has_amx_bf16, &isa_avx512, &pairs_isa_avx512_bf16, attend_by_amx_avx512_bf16},
#endif
    {"avx512-bf16", has_avx512_bf16, &isa_avx512, &pairs_isa_avx512_bf16, attend_in_tiles_avx512_bf16},
    {"avx512", has_avx512, &isa_avx512, &pairs_isa_avx512, attend_in_tiles_avx512},
    {"avx2", has_avx2, &isa_avx2, &pairs_isa_avx2, attend_in_tiles_avx2},
#endif
    {"baseline", always, &isa_baseline, &pairs_isa_baseline, attend_in_tiles_baseline},
};
enum { NUM_SETS = sizeof SETS / sizeof *SETS };

static _Atomic int chosen = -1;

const struct instruction_set *attention_instruction_set(void)
{
    if (chosen < 0) {
        int index = 0;
        while (!SETS[index].runs_here())
            index++;
        chosen = index;
    }
    return &SETS[chosen];
}

/* Name of the instruction set in use. */
const char *paged_attention_isa(void)
{
    return attention_instruction_set()->name;
}

/* Use the named instruction set from now on. Returns 0, or -1 when this CPU or build has no such set. */
int paged_attention_use_isa(const char *name)
{
    for (int i = 0; i < NUM_SETS; i++)
        if (strcmp(SETS[i].name, name) == 0 && SETS[i].runs_here()) {
            chosen = i;
            return 0;
        }
    return -1;
}
