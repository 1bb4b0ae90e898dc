/* The KV pool's element types: how a vector of floats is stored. kv_precision.py writes the same bytes in numpy.
 *
 *     float32
 *     float16, bfloat16   rounded to nearest, ties to even; float16 makes numbers beyond 65504 infinite
 *     fp8                 e4m3fn codes of x / scale, |x / scale| at most 448
 *     int8                -127 .. 127: x / scale rounded to nearest, ties to even
 *     int4                -7 .. 7 likewise, dims 2 j and 2 j + 1 in the low and high half of byte j
 *     grouped int4        0 .. 15 for each group of dims: (x - minimum) / scale rounded to nearest, ties to even
 *
 * A vector's scale is a float16, largest |x| / 448, 127 or 7; a group's is (largest x - minimum) / 15, next to its minimum
 * as a float16. Codes are made with the rounded numbers, and scale 0 becomes 1. Where a dim is NaN or infinite, or the scale or
 * the minimum is beyond float16, the scale is NaN and all codes are 0: what is not finite decodes to NaN, never to a
 * number. Code times scale is exact in float32, so that every instruction set reads equal numbers, whether it fuses the
 * multiplication with the addition of the minimum or not.
 *
 * Within a block, a head's keys are stored by dim, [width, token], so that a kernel that multiplies many tokens by one
 * dim of the query reads vectors; its values are stored by token, [token, width]. Scales are [scales, token] and
 * [token, scales]; those of grouped int4 are scale and minimum of the first group, of the second, and so on.
 */

#pragma once
#include <stdint.h>
#include <string.h>

#include "abi_enums.h"

/* Bytes of a code; for int4, of the two that share a byte. */
static inline int64_t unit_bytes(enum kind kind) { return kind == FLOAT32 ? 4 : kind < FP8 ? 2 : 1; }

/* Codes of a vector, where those that share a byte count once. */
static inline int64_t units_of(enum kind kind, int dim) { return kind >= INT4 ? dim / 2 : dim; }

static inline int64_t vector_bytes(enum kind kind, int dim) { return units_of(kind, dim) * unit_bytes(kind); }

/* Numbers in float16 next to a vector's codes; `group` is that of grouped int4, whose last group may be smaller. */
static inline int64_t scales_of(enum kind kind, int dim, int group)
{
    return kind < FP8 ? 0 : kind == GROUPED_INT4 ? 2 * ((dim + group - 1) / group) : 1;
}

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint16_t half_of(float x)
{
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return 0x7e00;
    if (magnitude >= 0x477ff000) /* from 65520 on */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) /* a multiple of 2^-24: the sum with 0.5 is rounded to one */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0x0fff + (magnitude >> 13 & 1)) >> 13));
}

/* NaN becomes quiet, as instructions make it. */
static inline float float_of_half(uint16_t half)
{
#if defined(__aarch64__)
    __fp16 x; /* converted by one instruction */
    memcpy(&x, &half, sizeof x);
    return x;
#else
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00)
        return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13 | (magnitude > 0x7c00 ? 0x400000 : 0));
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
#endif
}

static inline uint16_t bfloat_of(float x)
{
    const uint32_t bits = bits_of(x);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; } /* for |x| < 2^22 */

static inline float limited(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

static inline uint8_t e4m3_of(float x) /* |x| at most 448 */
{
    const uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude < 0x3c800000) /* below 2^-6: a multiple of 2^-9 */
        return (uint8_t)(sign | (uint32_t)rounded(float_of(magnitude) * 512.0f));
    return (uint8_t)(sign | (((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - 0x3c0));
}

#define NAN_SCALE 0x7e00

/* Bits of the largest magnitude; from 0x7f800000 on one of them is not finite. */
static inline uint32_t largest_of(const float *x, int dims)
{
    uint32_t largest = 0;
    for (int d = 0; d < dims; d++) {
        uint32_t magnitude = bits_of(x[d]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* `step` as float16: NaN if it is not finite there, 1 if it is 0. */
static inline uint16_t scale_of(float step)
{
    const uint16_t scale = half_of(step);
    return scale >= 0x7c00 ? NAN_SCALE : scale == 0 ? 0x3c00 : scale;
}

/* Where a vector is stored: code j at codes + j * stride bytes, scale i at scales[i * scale_stride]. */
struct stored {
    uint8_t *codes;
    uint16_t *scales;
    int64_t stride, scale_stride;
};

static void store_halves(enum kind kind, const float *x, int dim, const struct stored *to)
{
    for (int d = 0; d < dim; d++) {
        uint16_t code = kind == FLOAT16 ? half_of(x[d]) : bfloat_of(x[d]);
        memcpy(to->codes + d * to->stride, &code, sizeof code);
    }
}

static inline void store_nibble(uint8_t code, int d, const struct stored *to)
{
    uint8_t *both = to->codes + d / 2 * to->stride;
    *both = d % 2 ? (uint8_t)((*both & 15) | code << 4) : code & 15;
}

/* One scale for the vector. */
static void store_scaled(enum kind kind, const float *x, int dim, const struct stored *to)
{
    const float limit = kind == FP8 ? 448.0f : kind == INT8 ? 127.0f : 7.0f;
    const uint32_t largest = largest_of(x, dim);
    const uint16_t scale = largest >= 0x7f800000 ? NAN_SCALE : scale_of(float_of(largest) / limit);
    const float step = float_of_half(scale);
    *to->scales = scale;
    for (int d = 0; d < dim; d++) {
        const float y = scale == NAN_SCALE ? 0.0f : limited(x[d] / step, limit);
        const uint8_t code = kind == FP8 ? e4m3_of(y) : (uint8_t)(int)rounded(y);
        if (kind == INT4)
            store_nibble(code, d, to);
        else
            to->codes[d * to->stride] = code;
    }
}

/* Dims first .. last, which share a scale and a minimum. */
static void store_group(const float *x, int first, int last, uint16_t *scale, uint16_t *minimum, const struct stored *to)
{
    float low = x[first], high = x[first];
    for (int d = first + 1; d < last; d++) {
        low = x[d] < low ? x[d] : low;
        high = x[d] > high ? x[d] : high;
    }
    *minimum = half_of(low + 0.0f); /* -0 becomes +0 */
    const float base = float_of_half(*minimum), range = high > base ? high - base : 0.0f;
    *scale = largest_of(x + first, last - first) >= 0x7f800000 ? NAN_SCALE : scale_of(range / 15.0f);
    if ((*minimum & 0x7fff) >= 0x7c00)
        *scale = NAN_SCALE;
    if (*scale == NAN_SCALE)
        *minimum = 0;
    const float step = float_of_half(*scale);
    for (int d = first; d < last; d++) {
        const float y = *scale == NAN_SCALE ? 0.0f : (x[d] - base) / step;
        store_nibble((uint8_t)(int)rounded(y > 15.0f ? 15.0f : y < 0.0f ? 0.0f : y), d, to);
    }
}

/* Store a vector of `dim` floats; `group` is that of grouped int4. */
static inline void store_vector(enum kind kind, const float *x, int dim, int group, const struct stored *to)
{
    if (kind == FLOAT32) {
        for (int d = 0; d < dim; d++)
            memcpy(to->codes + d * to->stride, x + d, sizeof *x);
    } else if (kind < FP8) {
        store_halves(kind, x, dim, to);
    } else if (kind < GROUPED_INT4) {
        store_scaled(kind, x, dim, to);
    } else {
        uint16_t *scale = to->scales;
        for (int first = 0; first < dim; first += group, scale += 2 * to->scale_stride) {
            const int last = first + group < dim ? first + group : dim;
            store_group(x, first, last, scale, scale + to->scale_stride, to);
        }
    }
}
