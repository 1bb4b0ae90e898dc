/* The kernels of aarch64: NEON, which every such CPU has, with sdot, and with smmla. */

#if defined(__linux__)
#include <sys/auxv.h>
enum { HWCAP_OF_DOTPROD = 1 << 20, HWCAP2_OF_I8MM = 1 << 13 }; /* older headers lack the names */

static int has_dotprod(void) { return (getauxval(AT_HWCAP) & HWCAP_OF_DOTPROD) != 0; }
static int has_i8mm(void) { return has_dotprod() && (getauxval(AT_HWCAP2) & HWCAP2_OF_I8MM) != 0; }
#elif defined(__APPLE__)
#include <sys/sysctl.h>

static int has_feature(const char *name)
{
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value != 0;
}

static int has_dotprod(void) { return has_feature("hw.optional.arm.FEAT_DotProd"); }
static int has_i8mm(void) { return has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
static int has_dotprod(void) { return 0; }
static int has_i8mm(void) { return 0; }
#endif

#define DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#define I8MM __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))

/* The lane of an intrinsic must be a literal. */
NEON_INLINE float32x4_t neon_fma_lane(float32x4_t sum, float32x4_t w, float32x4_t q, int lane)
{
    switch (lane) {
    case 0: return vfmaq_laneq_f32(sum, w, q, 0);
    case 1: return vfmaq_laneq_f32(sum, w, q, 1);
    case 2: return vfmaq_laneq_f32(sum, w, q, 2);
    default: return vfmaq_laneq_f32(sum, w, q, 3);
    }
}

NEON_INLINE DOTPROD int32x4_t neon_dot_lane(int32x4_t sum, int8x16_t c, int8x16_t q, int lane)
{
    switch (lane) {
    case 0: return vdotq_laneq_s32(sum, c, q, 0);
    case 1: return vdotq_laneq_s32(sum, c, q, 1);
    case 2: return vdotq_laneq_s32(sum, c, q, 2);
    default: return vdotq_laneq_s32(sum, c, q, 3);
    }
}

/* How codes are multiplied: widened to 16 bits; four by four; eight of two columns by eight of two rows. */
#define WIDENING 1
#define BY_LANE 2
#define OF_PAIRS 3

#define NAME(x) CONCATENATE(x, neon)
#define SET "neon"
#define TARGET
#define HEIGHT 6
#define VECTORS NEON
#define FLOAT_TILES 1
#define OWN_DOTS "neon_dots.h"
#define DOTS WIDENING
#include "kernel_set.h"

#define NAME(x) CONCATENATE(x, neon_dotprod)
#define SET "neon-dotprod"
#define TARGET DOTPROD
#define HEIGHT 12
#define VECTORS NEON
#define FLOAT_TILES 1
#define OWN_DOTS "neon_dots.h"
#define DOTS BY_LANE
#include "kernel_set.h"

/* Rows are rounded to pairs: codes k .. k + 7 of a row, then of the next. A last row of an odd number is alone. */
#define NAME(x) CONCATENATE(x, neon_i8mm)
#define SET "neon-i8mm"
#define TARGET I8MM
#define HEIGHT 12
#define VECTORS NEON
#define FLOAT_TILES 1
#define OWN_DOTS "neon_dots.h"
#define DOTS OF_PAIRS
#define FIRST_WORD(m) ((m) / 2 * 4 + (m) % 2 * 2)
#define WORD(group, height) ((int64_t)((group) / 2) * 2 * (height) + (group) % 2)
#include "kernel_set.h"
