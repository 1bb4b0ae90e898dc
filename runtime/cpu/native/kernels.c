/* The tables of kernels, one for each instruction set that the compiler has, and the choice among them. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kernels.h"
#include "kv_precision.h"

#define CONCATENATE(a, b) a##_##b

enum { CACHED_BYTES = 1 << 20 }; /* of activations that are reused from cache, while the tiles of a matrix go by */

#include "embed_row.h"
#include "kernels_portable.h"
#if defined(__x86_64__)
#include "kernels_x86.h"
#elif defined(__aarch64__)
#include "kernels_neon.h"
#endif

#if defined(__x86_64__)
#include <cpuid.h>

/* Whether the system saves these registers: bits of XCR0. */
static int saves(unsigned state)
{
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & state) == state;
}

/* Reads cpuid itself: __builtin_cpu_supports reads a table of the compiler's runtime library, which zig's never fills. */
static int has_avx2(void)
{
    unsigned a, b, c, d, features;
    return saves(0x06) && __get_cpuid(1, &a, &b, &features, &d) && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (features & bit_FMA) && (features & bit_F16C) && (b & bit_AVX2);
}

static int has_avx_vnni(void)
{
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 4);
}

static int has_avx512_vnni(void)
{
    const unsigned sets = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    unsigned a, b, c, d;
    return has_avx2() && saves(0xe6) && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & sets) == sets && (c & 1 << 11);
}
#endif

static int always(void) { return 1; }

/* Best first. */
static const struct {
    const struct kernels *kernels;
    int (*runs_here)(void);
} SETS[] = {
#if defined(__x86_64__)
    {&kernels_avx512, has_avx512_vnni},
#if HAS_AVX_VNNI
    {&kernels_avx_vnni, has_avx_vnni},
#endif
    {&kernels_avx2, has_avx2},
#elif defined(__aarch64__)
    {&kernels_neon_i8mm, has_i8mm},
    {&kernels_neon_dotprod, has_dotprod},
    {&kernels_neon, always},
#endif
    {&kernels_portable, always},
};
enum { NUM_SETS = sizeof SETS / sizeof *SETS };

const struct kernels *find_kernels(const char *name)
{
    for (int i = 0; i < NUM_SETS; i++)
        if ((name == NULL || strcmp(SETS[i].kernels->name, name) == 0) && SETS[i].runs_here())
            return SETS[i].kernels;
    return NULL;
}

const char *kernels_name(int index)
{
    for (int i = 0; i < NUM_SETS; i++)
        if (SETS[i].runs_here() && index-- == 0)
            return SETS[i].kernels->name;
    return NULL;
}
