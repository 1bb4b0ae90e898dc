/* The kernels of x86-64: primitives of AMX, AVX-512 VNNI, AVX-VNNI and AVX2. */

#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define HAS_AVX_VNNI 1
#else
#define HAS_AVX_VNNI 0
#endif
#if HAS_AVX_VNNI && defined(__linux__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

#define TARGET_AVX_VNNI "avx2,fma,f16c,avxvnni"
#define TARGET_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"

/* Assembly in place of the intrinsic: gcc 12 copies every sum twice around that, and does not fold the broadcast. */
INLINE_FOR(TARGET_AVX512) __m512i avx512_dot(__m512i sum, __m512i c, const int32_t *q)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(c), "m"(*q));
    return sum;
}

INLINE_FOR(TARGET_AVX512) __m512i avx512_dot_wide(__m512i sum, __m512i c, __m512i x)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(c), "v"(x));
    return sum;
}

#define NAME(x) CONCATENATE(x, avx512)
#define SET "avx512-vnni"
#define TARGET __attribute__((target(TARGET_AVX512)))
#define VECTORS AVX512
#define HEIGHT 12
#define FLOAT_TILES 2
#define CHAINS 4
#define AHEAD 8192
#define multiply16(a, b) ((vi)_mm512_madd_epi16((__m512i)(a), (__m512i)(b)))
#define vdot(sum, c, at) ((vi)avx512_dot((__m512i)(sum), (__m512i)(c), at))
#define vdot_wide(sum, c, x) ((vi)avx512_dot_wide((__m512i)(sum), (__m512i)(c), (__m512i)(x)))
#include "kernel_set.h"

#if HAS_AMX
enum { TILE_BLOCK = 512 }; /* columns of a block, at most, where there are several: a longer one is summed in the memory of the totals */

/* Columns of a row that are in one piece, in a tile of rows that AMX multiplies; 0 where it does not. Codes are unpacked for all rows of
 * a step, so a few rows are faster without it, and so are blocks of 32, as most of the time goes into their sums. */
static inline int columns_in_one_piece(const struct linear *op, const struct activations *rows, int height)
{
    enum { LEAST_ROWS = 36, COLUMNS = 64 };
    if (op->rounding == ROUND_NONE || height < 12 || rows->count < LEAST_ROWS)
        return 0;
    const int blocks = activation_blocks(op), block = op->matrix->padded_k / blocks;
    return block % COLUMNS == 0 && (block <= TILE_BLOCK || blocks == 1) ? COLUMNS : 0;
}

#define NAME(x) CONCATENATE(x, amx)
#define SET "amx-int8"
#define TARGET __attribute__((target("amx-tile,amx-int8," TARGET_AVX512)))
#define VECTORS AVX512
#define HEIGHT 12
#define FLOAT_TILES 2
#define CHAINS 4
#define AHEAD 8192
#define TILES "matmul_tiles.h"
#define PIECE columns_in_one_piece
#define multiply16(a, b) ((vi)_mm512_madd_epi16((__m512i)(a), (__m512i)(b)))
#define add_multiply16(sum, a, b) ((vi)_mm512_dpwssd_epi32((__m512i)(sum), (__m512i)(a), (__m512i)(b)))
#define vdot(sum, c, at) ((vi)avx512_dot((__m512i)(sum), (__m512i)(c), at))
#define vdot_wide(sum, c, x) ((vi)avx512_dot_wide((__m512i)(sum), (__m512i)(c), (__m512i)(x)))
#include "kernel_set.h"
#endif

/* Behind a barrier: the compiler would add in another order, which needs more registers than there are. */
INLINE_FOR(TARGET_AVX2) __m256i avx2_short_add(__m256i a, __m256i b)
{
    a = _mm256_add_epi16(a, b);
    __asm__("" : "+x"(a));
    return a;
}

#define NAME(x) CONCATENATE(x, avx2)
#define SET "avx2"
#define TARGET __attribute__((target(TARGET_AVX2)))
#define VECTORS AVX2
#define HEIGHT 4
#define FLOAT_TILES 1
#define CHAINS 1
#define AHEAD 4096
#define multiply16(a, b) ((vi)_mm256_madd_epi16((__m256i)(a), (__m256i)(b)))
#define SHORT_SUMS
#define short_dot(c, at) ((vi)_mm256_maddubs_epi16((__m256i)(c), _mm256_set1_epi32(*(at))))
#define short_add(a, b) ((vi)avx2_short_add((__m256i)(a), (__m256i)(b)))
#define short_fold(s, factor) ((vi)_mm256_madd_epi16((__m256i)(s), _mm256_set1_epi16(factor)))
#include "kernel_set.h"

#if HAS_AVX_VNNI
INLINE_FOR(TARGET_AVX_VNNI) __m256i avx_vnni_dot(__m256i sum, __m256i c, const int32_t *q)
{
    const __m256i all = _mm256_set1_epi32(*q);
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(c), "x"(all));
    return sum;
}

#define NAME(x) CONCATENATE(x, avx_vnni)
#define SET "avx-vnni"
#define TARGET __attribute__((target(TARGET_AVX_VNNI)))
#define VECTORS AVX2
#define HEIGHT 6
#define FLOAT_TILES 1
#define CHAINS 2
#define AHEAD 4096
#define multiply16(a, b) ((vi)_mm256_madd_epi16((__m256i)(a), (__m256i)(b)))
#define vdot(sum, c, at) ((vi)avx_vnni_dot((__m256i)(sum), (__m256i)(c), at))
#include "kernel_set.h"
#endif
