/* The KV pool's element types: how a vector of floats is stored. kv_precision.py writes the same bytes in numpy.
 *
 *     float32
 *     float16, bfloat16   rounded to nearest, ties to even; float16 makes numbers beyond 65504 infinite
 *     fp8                 e4m3fn codes of x / scale, |x / scale| at most 448
 *     int8                -127 .. 127: x / scale rounded to nearest, ties to even
 *     int4                -7 .. 7 likewise, dims 2 j and 2 j + 1 in the low and high half of byte j
 *
 * A scale is a float16, largest |x| / 448, 127 or 7 of the dims that share it; codes are made with the rounded scale, and
 * zeros have scale 1. Where a dim is NaN or infinite, or the scale is beyond float16, the scale is NaN and all codes are 0:
 * what is not finite decodes to NaN, never to a number. Code times scale is exact in float32, so that every
 * instruction set reads equal numbers.
 *
 * Within a block, a head's keys are stored by dim, [width, token], so that a kernel that multiplies many tokens by one
 * dim of the query reads vectors; its values are stored by token, [token, width]. Scales: [group, token] and [token, group].
 */

enum kind { FLOAT32, FLOAT16, BFLOAT16, FP8, INT8, INT4, NUM_KINDS };

/* Bytes of a code; for int4, of the two that share a byte. */
static inline int64_t unit_bytes(enum kind kind) { return kind == FLOAT32 ? 4 : kind < FP8 ? 2 : 1; }

/* Codes of a vector, where those that share a byte count once. */
static inline int64_t units_of(enum kind kind, int dim) { return kind == INT4 ? dim / 2 : dim; }

static inline int64_t vector_bytes(enum kind kind, int dim) { return units_of(kind, dim) * unit_bytes(kind); }

static inline int is_scaled(enum kind kind) { return kind >= FP8; }

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

static inline float float_of_half(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00)
        return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
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

/* The scale of `dims` floats as float16, NaN if one of them is not finite. */
static inline uint16_t scale_of(const float *x, int dims, float limit)
{
    uint32_t largest = 0;
    for (int d = 0; d < dims; d++) {
        uint32_t magnitude = bits_of(x[d]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const uint16_t scale = half_of(float_of(largest) / limit);
    if (largest >= 0x7f800000 || scale >= 0x7c00)
        return 0x7e00;
    return scale == 0 ? 0x3c00 : scale;
}

/* Where a vector is stored: code j at codes + j * stride bytes, scale g at scales[g * scale_stride]. */
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

/* The dims from `first` on that share a scale. */
static void store_group(enum kind kind, const float *x, int first, int dims, uint16_t scale, const struct stored *to)
{
    const float step = float_of_half(scale), limit = kind == FP8 ? 448.0f : kind == INT8 ? 127.0f : 7.0f;
    const int is_number = scale != 0x7e00;
    for (int d = first; d < first + dims; d++) {
        const float y = is_number ? limited(x[d] / step, limit) : 0.0f;
        uint8_t *code = to->codes + (kind == INT4 ? d / 2 : d) * to->stride;
        const uint8_t whole = kind == FP8 ? e4m3_of(y) : (uint8_t)(int)rounded(y);
        *code = kind != INT4 ? whole : d % 2 ? (uint8_t)((*code & 15) | whole << 4) : (uint8_t)(whole & 15);
    }
}

/* Store a vector of `dim` floats, each `group` of them with a scale. */
static void store_vector(enum kind kind, const float *x, int dim, int group, const struct stored *to)
{
    if (kind == FLOAT32) {
        for (int d = 0; d < dim; d++)
            memcpy(to->codes + d * to->stride, x + d, sizeof *x);
    } else if (kind < FP8) {
        store_halves(kind, x, dim, to);
    } else {
        for (int first = 0; first < dim; first += group) {
            uint16_t scale = scale_of(x + first, group, kind == FP8 ? 448.0f : kind == INT8 ? 127.0f : 7.0f);
            to->scales[first / group * to->scale_stride] = scale;
            store_group(kind, x, first, group, scale, to);
        }
    }
}
