/* The tables of kernels, one for each instruction set that the compiler has, and the choice among them. PORTABLE_ONLY leaves
 * out those of x86, for sanitizers whose checks of wide vectors take a compiler many minutes. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kernels.h"
#include "kv_precision.h"
#include "vector_parts.h"

enum { CACHED_BYTES = 1 << 20 }; /* of activations that are reused from cache, while the tiles of a matrix go by */

#include "embed_row.h"
#include "kernels_portable.h"
#if defined(__x86_64__) && !defined(PORTABLE_ONLY)
#include "cpu_features.h"
#include "kernels_x86.h"
#elif defined(__aarch64__)
#include "kernels_neon.h"
#endif

static int always(void) { return 1; }

/* Best first. */
static const struct {
    const struct kernels *kernels;
    int (*runs_here)(void);
} SETS[] = {
#if defined(__x86_64__) && !defined(PORTABLE_ONLY)
#if HAS_AMX
    {&kernels_amx, has_amx_int8},
#endif
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
