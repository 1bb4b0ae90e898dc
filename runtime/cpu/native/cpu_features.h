/* What an x86-64 CPU and its system support. Reads cpuid itself: __builtin_cpu_supports reads a table of the compiler's runtime
 * library, which zig's never fills. */
#pragma once
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Whether the system saves these registers: bits of XCR0. */
static inline int saves(unsigned state)
{
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & state) == state;
}

/* With FMA and conversions of float16. */
static inline int has_avx2(void)
{
    unsigned a, b, c, d, features;
    return saves(0x06) && __get_cpuid(1, &a, &b, &features, &d) && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (features & bit_FMA) && (features & bit_F16C) && (b & bit_AVX2);
}

static inline int has_avx_vnni(void)
{
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 4);
}

static inline int has_avx512(void)
{
    unsigned a, b, c, d;
    return has_avx2() && saves(0xe6) && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX512F);
}

static inline int has_avx512_vnni(void)
{
    const unsigned sets = bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    unsigned a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & sets) == sets && (c & 1 << 11);
}

static inline int has_avx512_bf16(void)
{
    const unsigned sets = bit_AVX512BW | bit_AVX512VL;
    unsigned a, b, c, d, more;
    return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & sets) == sets &&
           __get_cpuid_count(7, 1, &more, &b, &c, &d) && (more & 1 << 5);
}

#if defined(__linux__)
#ifdef EMULATED_AMX /* tests run the instructions by a handler of the signal for illegal ones */
static inline int has_amx(unsigned feature)
{
    (void)feature;
    return 1;
}
#else
/* Whether there are tiles and the multiplication with this bit of cpuid. Linux saves the tiles of a process that asked for
 * them: 8 KiB a thread. */
static inline int has_amx(unsigned feature)
{
    enum { ASK = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    unsigned a, b, c, d;
    return saves(0x600e6) && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & 1 << 24) && (d & feature) &&
           syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
}
#endif

static inline int has_amx_int8(void) { return has_avx512_vnni() && has_amx(1 << 25); }

static inline int has_amx_bf16(void) { return has_avx512_bf16() && has_amx(1 << 22); }
#endif
