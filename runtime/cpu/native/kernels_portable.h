/* The kernels in plain C, for CPUs without an instruction set of their own here. fmaf rounds once on all of them. */

typedef float portable_floats __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t portable_ints __attribute__((vector_size(16), aligned(4), may_alias));

static inline portable_floats portable_fma(portable_floats a, portable_floats b, portable_floats c)
{
    for (int i = 0; i < 4; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}

static inline portable_ints portable_maximum(portable_ints a, portable_ints b)
{
    const portable_ints mask = a > b;
    return (mask & a) | (~mask & b);
}

static inline portable_ints portable_widen16(const uint8_t *p)
{
    uint16_t x[4];
    memcpy(x, p, sizeof x);
    return (portable_ints){x[0], x[1], x[2], x[3]};
}

static inline portable_floats portable_halves(const uint8_t *p)
{
    portable_floats x;
    for (int i = 0; i < 4; i++) {
        uint16_t half;
        memcpy(&half, p + 2 * i, sizeof half);
        x[i] = float_of_half(half);
    }
    return x;
}

static inline portable_floats portable_float8(const uint8_t *p)
{
    const portable_ints code = {p[0], p[1], p[2], p[3]};
    return (portable_floats)((code & 0x7f) << 20 | (code & 0x80) << 24) * 0x1p112f;
}

static inline portable_ints portable_dot(portable_ints sum, portable_ints c, int32_t q)
{
    for (int j = 0; j < 32; j += 8)
        sum += ((c >> j) & 255) * (int8_t)(q >> j);
    return sum;
}

#define NAME(x) CONCATENATE(x, portable)
#define SET "portable"
#define TARGET
#define VW 4
#define HEIGHT 4
#define FLOAT_TILES 1
#define CHAINS 1
#define AHEAD 1024
#define UNROLL /* too few registers to gain from it */
#define vset(x) ((vf){(x), (x), (x), (x)})
#define vseti(x) ((vi){(x), (x), (x), (x)})
#define vfma(a, b, c) ((vf)portable_fma((portable_floats)(a), (portable_floats)(b), (portable_floats)(c)))
#define vmaxi(a, b) ((vi)portable_maximum((portable_ints)(a), (portable_ints)(b)))
#define vwiden8(p) ((vi){(p)[0], (p)[1], (p)[2], (p)[3]})
#define vwiden16(p) ((vi)portable_widen16(p))
#define vhalf(p) ((vf)portable_halves(p))
#define vfloat8(p, v) ((vf)portable_float8((p) + 4 * (v)))
#define multiply16(a, b) ((a) * (((b) << 16) >> 16))
#define vdot(sum, c, at) ((vi)portable_dot((portable_ints)(sum), (portable_ints)(c), *(at)))
#include "kernel_set.h"
