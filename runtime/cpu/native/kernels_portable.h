/* The kernels in plain C, for CPUs without an instruction set of their own here. fmaf rounds once on all of them. */

static inline plain_ints plain_dot(plain_ints sum, plain_ints c, int32_t q)
{
    for (int j = 0; j < 32; j += 8)
        sum += ((c >> j) & 255) * (int8_t)(q >> j);
    return sum;
}

#define NAME(x) CONCATENATE(x, portable)
#define SET "portable"
#define TARGET
#define VECTORS PLAIN
#define HEIGHT 4
#define FLOAT_TILES 1
#define CHAINS 1
#define AHEAD 1024
#define multiply16(a, b) ((a) * (VSHIFT(b, 16) >> 16))
#define vdot(sum, c, at) ((vi)plain_dot((plain_ints)(sum), (plain_ints)(c), *(at)))
#include "kernel_set.h"
