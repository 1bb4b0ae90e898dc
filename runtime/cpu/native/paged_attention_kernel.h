/* The attention arithmetic, included once per instruction set (see paged_attention.c).
 *
 * The includer defines
 *     NAME(x)                    the instruction set's own name for x
 *     TARGET                     function attribute that selects it
 *     VW                         floats in a vector; divides 16
 *     ROWS                       query rows held in registers: 4 or 8
 *     vset1 vfma vmax vhmax      broadcast, a * b + c rounded once, maximum, maximum over lanes
 *     vhalf(p) vint8(x) vfp8(p)  VW float16, int8 or e4m3fn as floats, the last ones times FP8_FACTOR, an exact power of 2
 *
 * Keys and values of a tile are first decoded to floats, exactly; kv_precision.h describes the types.
 *
 * For one query row, whatever its neighbours in registers, the operations and their order are these:
 *     score[t]   fma over dim 0, 1, 2, ... of (query * scale) and key
 *     per tile of TILE tokens at absolute positions: running maximum, 16 partial sums (lane t % 16), and
 *     output[d]  output * alpha, then fma over tokens in order of probability and value
 * Masked tokens add an exact zero, and tiles without an unmasked token multiply by an exact one, so that a tile's
 * bounds, the chunking and the grouping of rows never reach the result. No path may change this order, not even for speed.
 */

typedef float NAME(vec) __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef int32_t NAME(ivec) __attribute__((vector_size(VW * 4), aligned(4), may_alias));

typedef uint16_t NAME(halves) __attribute__((vector_size(VW * 2), aligned(1), may_alias));
typedef int8_t NAME(bytes) __attribute__((vector_size(VW), aligned(1), may_alias));
typedef uint8_t NAME(pairs) __attribute__((vector_size(VW / 2), aligned(1), may_alias));
typedef uint16_t NAME(pair_halves) __attribute__((vector_size(VW), aligned(1), may_alias));

#define vec NAME(vec)
#define ivec NAME(ivec)
#define halves NAME(halves)
#define bytes NAME(bytes)
#define pairs NAME(pairs)
#define pair_halves NAME(pair_halves)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LOAD(p) (*(const vec *)(p))
#define STORE(p, x) (*(vec *)(p) = (x))
#define PICK(mask, yes, no) ((vec)(((mask) & (ivec)(yes)) | (~(mask) & (ivec)(no))))
#define UNROLL _Pragma("GCC unroll 16")

/* e^x for x <= 0, within 1.5 ulp; exactly 1 at 0 and exactly 0 below -87. Cody-Waite reduction, Cephes' polynomial. */
INLINE vec NAME(exp_negative)(vec x)
{
    const vec shift = vset1(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    ivec alive = x > vset1(-87.0f);
    vec clamped = vmax(x, vset1(-87.0f));
    vec shifted = vfma(clamped, vset1(1.44269504088896341f), shift);
    vec whole = shifted - shift;
    vec r = vfma(whole, vset1(-0.693359375f), clamped);
    r = vfma(whole, vset1(2.12194440e-4f), r);
    vec y = vset1(1.9875691500e-4f);
    y = vfma(y, r, vset1(1.3981999507e-3f));
    y = vfma(y, r, vset1(8.3334519073e-3f));
    y = vfma(y, r, vset1(4.1665795894e-2f));
    y = vfma(y, r, vset1(1.6666665459e-1f));
    y = vfma(y, r, vset1(5.0000001201e-1f));
    y = vfma(y, r * r, r) + vset1(1.0f);
    ivec power = ((ivec)shifted - (ivec)shift) << 23;
    return PICK(alive, (vec)((ivec)y + power), vset1(0.0f));
}

/* tanh within 2 ulp: Cephes' polynomial below 0.625, else 1 - 2 e / (1 + e) with e = exp(-2 |x|). */
INLINE vec NAME(tanh)(vec x)
{
    ivec sign = (ivec)x & (ivec)vset1(-0.0f);
    vec magnitude = (vec)((ivec)x ^ sign);
    vec e = NAME(exp_negative)(magnitude * vset1(-2.0f));
    vec large = vset1(1.0f) - (e + e) / (vset1(1.0f) + e);
    vec z = x * x;
    vec y = vset1(-5.70498872745e-3f);
    y = vfma(y, z, vset1(2.06390887954e-2f));
    y = vfma(y, z, vset1(-5.37397155531e-2f));
    y = vfma(y, z, vset1(1.33314422036e-1f));
    y = vfma(y, z, vset1(-3.33332819422e-1f));
    vec small = vfma(y * z, magnitude, magnitude);
    ivec is_small = magnitude < vset1(0.625f);
    return (vec)((ivec)PICK(is_small, small, large) | sign);
}

/* VW codes from p on times their scale; not for int4. */
INLINE vec NAME(decode)(enum kind kind, const uint8_t *p, vec scale)
{
    if (kind == FLOAT16)
        return vhalf(p);
    if (kind == BFLOAT16)
        return (vec)(__builtin_convertvector(*(const halves *)p, ivec) << 16);
    if (kind == FP8)
        return vfp8(p) * scale;
    return vint8(*(const bytes *)p) * scale;
}

/* VW codes of int4, each in the low half of a byte, times their scale. */
INLINE vec NAME(decode_nibbles)(bytes x, vec scale) { return vint8(((x & 15) ^ 8) - 8) * scale; }

INLINE float NAME(factor)(enum kind kind) { return kind == FP8 ? FP8_FACTOR : 1.0f; }

/* Keys of 16 tokens: target[d * TILE + t] = dim d of token t. */
INLINE void NAME(decode_keys)(enum kind kind, const struct stored *from, int dim, int group, float *target)
{
    const int code_bytes = kind < FP8 ? 2 : 1;
    for (int first = 0; first < dim; first += group)
        for (int t = 0; t < 16; t += VW) {
            const uint8_t *p = from->codes + (kind == INT4 ? first / 2 : first) * from->stride + t * code_bytes;
            float *to = target + first * TILE + t;
            vec scale = vset1(1.0f);
            if (kind >= FP8)
                scale = vhalf((const uint8_t *)(from->scales + first / group * from->scale_stride + t)) *
                        vset1(NAME(factor)(kind));
            for (int d = 0; d < group; d += kind == INT4 ? 2 : 1, p += from->stride) {
                if (kind == INT4) {
                    const bytes both = *(const bytes *)p;
                    STORE(to + d * TILE, NAME(decode_nibbles)(both, scale));
                    STORE(to + (d + 1) * TILE, NAME(decode_nibbles)(both >> 4, scale));
                } else {
                    STORE(to + d * TILE, NAME(decode)(kind, p, scale));
                }
            }
        }
}

/* Dims of a value that share a scale, rounded up to VW of them. Reads no byte beyond them. */
INLINE void NAME(decode_dims)(enum kind kind, const uint8_t *codes, int dims, float factor, float *target)
{
    const int twice_bytes = kind < FP8 ? 4 : kind == INT4 ? 1 : 2; /* bytes of two codes */
    const vec scale = vset1(factor);
    for (int d = 0; d < dims; d += VW) {
        const uint8_t *p = codes + d * twice_bytes / 2;
        uint8_t padded[2 * VW];
        if (d + VW > dims) {
            memset(padded, 0, sizeof padded);
            memcpy(padded, p, (dims - d) * twice_bytes / 2);
            p = padded;
        }
        if (kind == INT4) {
            pair_halves spread = __builtin_convertvector(*(const pairs *)p, pair_halves);
            STORE(target + d, NAME(decode_nibbles)((bytes)(spread | spread << 4), scale));
        } else {
            STORE(target + d, NAME(decode)(kind, p, scale));
        }
    }
}

/* One value: target[d], whose padding is written too. */
INLINE void NAME(decode_value)(enum kind kind, const uint8_t *codes, const uint16_t *scales, int dim, int group,
                               float *target)
{
    for (int first = 0; first < dim; first += group) {
        const float factor = kind < FP8 ? 1.0f : float_of_half(scales[first / group]) * NAME(factor)(kind);
        const uint8_t *p = codes + (kind < FP8 ? 2 * first : kind == INT4 ? first / 2 : first);
        NAME(decode_dims)(kind, p, group, factor, target + first);
    }
}

#define DECODERS(name, KIND)                                                                                           \
    static TARGET void NAME(name##_keys)(const struct stored *from, int dim, int group, float *target)                 \
    {                                                                                                                  \
        NAME(decode_keys)(KIND, from, dim, group, target);                                                             \
    }                                                                                                                  \
    static TARGET void NAME(name##_value)(const uint8_t *codes, const uint16_t *scales, int dim, int group,            \
                                          float *target)                                                               \
    {                                                                                                                  \
        NAME(decode_value)(KIND, codes, scales, dim, group, target);                                                   \
    }
DECODERS(float16, FLOAT16)
DECODERS(bfloat16, BFLOAT16)
DECODERS(fp8, FP8)
DECODERS(int8, INT8)
DECODERS(int4, INT4)

/* Scores of `rows` query rows against tokens begin .. end of the tile. */
INLINE void NAME(score)(const struct rows *g, const struct tile *tile, int rows, int vectors, int begin, int end,
                        float *scores)
{
    for (int t = begin; t < end; t += vectors * VW) {
        vec sum[ROWS][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++)
                sum[r][j] = vset1(0.0f);
        const float *keys[4]; /* of VW tokens each */
        UNROLL for (int j = 0; j < vectors; j++)
            keys[j] = tile->keys[(t + j * VW) / 16] + (t + j * VW) % 16;
        for (int d = 0; d < tile->dim; d++) {
            vec key[4];
            UNROLL for (int j = 0; j < vectors; j++)
                key[j] = LOAD(keys[j] + d * tile->key_stride);
            UNROLL for (int r = 0; r < rows; r++) {
                vec query = vset1(g->query[d * rows + r]);
                UNROLL for (int j = 0; j < vectors; j++)
                    sum[r][j] = vfma(query, key[j], sum[r][j]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++)
                STORE(scores + r * TILE + t + j * VW, sum[r][j]);
    }
}

/* All ones where the row at `position` attends to the token: causal, and inside the window if there is one. */
INLINE ivec NAME(visible)(const struct tile *tile, int position, int token)
{
    ivec lanes;
    UNROLL for (int i = 0; i < VW; i++)
        lanes[i] = i;
    ivec t = lanes + token;
    int last = position - tile->start;
    int first = tile->window ? last - tile->window : -1; /* the last token that is not visible */
    return (t <= last) & (t > first);
}

INLINE int NAME(any)(ivec lanes)
{
    int32_t all = 0;
    UNROLL for (int i = 0; i < VW; i++)
        all |= lanes[i];
    return all;
}

/* Scores become probabilities against the running maximum; alpha[r] is what earlier sums are multiplied by. */
INLINE void NAME(soften)(struct rows *g, const struct tile *tile, int rows, int begin, int end, float *scores,
                         float *alpha)
{
    float maxima[16];
    for (int r = 0; r < rows; r++) {
        vec top = vset1(g->maximum[r]);
        ivec bad = top != top;
        for (int t = begin; t < end; t += VW) {
            vec s = LOAD(scores + r * TILE + t);
            if (tile->softcap != 0.0f)
                s = NAME(tanh)(s * vset1(tile->inverse_softcap)) * vset1(tile->softcap);
            s = PICK(NAME(visible)(tile, g->position[r], t), s, vset1(MASKED));
            STORE(scores + r * TILE + t, s);
            bad |= s != s;
            top = vmax(top, s);
        }
        maxima[r] = vhmax(top);
        if (NAME(any)(bad)) /* comparisons drop a NaN, the sum keeps it */
            g->sums[r * 16] = NAN;
    }
    for (int r = 0; r < rows; r += VW) {
        float change[VW];
        for (int i = 0; i < VW; i++)
            change[i] = r + i < rows ? g->maximum[r + i] - maxima[r + i] : 0.0f;
        STORE(alpha + r, NAME(exp_negative)(LOAD(change)));
    }
    for (int r = 0; r < rows; r++) {
        vec sums[16 / VW], top = vset1(maxima[r]);
        UNROLL for (int j = 0; j < 16 / VW; j++)
            sums[j] = LOAD(g->sums + r * 16 + j * VW) * vset1(alpha[r]);
        for (int t = begin; t < end; t += 16) {
            UNROLL for (int j = 0; j < 16 / VW; j++) {
                vec s = LOAD(scores + r * TILE + t + j * VW);
                ivec seen = s > vset1(MASKED);
                vec p = PICK(seen, NAME(exp_negative)(s - top), vset1(0.0f));
                STORE(scores + r * TILE + t + j * VW, p);
                sums[j] += p;
            }
        }
        UNROLL for (int j = 0; j < 16 / VW; j++)
            STORE(g->sums + r * 16 + j * VW, sums[j]);
        g->maximum[r] = maxima[r];
    }
}

/* Columns column .. of the output: output * alpha + probabilities @ values. */
INLINE void NAME(weigh)(struct rows *g, const struct tile *tile, int rows, int vectors, int column,
                        const float *probabilities, const float *alpha)
{
    vec sum[ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++)
            sum[r][j] = LOAD(g->output + r * tile->columns + column + j * VW) * vset1(alpha[r]);
    for (int t = g->first; t < g->last; t++) {
        const float *value_row = tile->values[t] + column;
        if (tile->next != NULL && column == 0) {
            for (int at = 0; at < tile->key_bytes; at += 64)
                __builtin_prefetch(tile->next->keys[t] + at, 0, 2);
            for (int at = 0; at < tile->value_bytes; at += 64)
                __builtin_prefetch(tile->next->values[t] + at, 0, 2);
        }
        vec value[4];
        UNROLL for (int j = 0; j < vectors; j++)
            value[j] = LOAD(value_row + j * VW);
        UNROLL for (int r = 0; r < rows; r++) {
            vec p = vset1(probabilities[r * TILE + t]);
            UNROLL for (int j = 0; j < vectors; j++)
                sum[r][j] = vfma(p, value[j], sum[r][j]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++)
            STORE(g->output + r * tile->columns + column + j * VW, sum[r][j]);
}

INLINE void NAME(attend_tile)(struct rows *g, const struct tile *tile, int rows, int vectors)
{
    float scores[ROWS * TILE] __attribute__((aligned(64))), alpha[16];
    const int step = vectors * VW > 16 ? vectors * VW : 16;
    const int begin = g->first / step * step, end = (g->last + step - 1) / step * step;
    NAME(score)(g, tile, rows, vectors, begin, end, scores);
    NAME(soften)(g, tile, rows, begin, end, scores, alpha);
    int column = 0;
    for (; column + vectors * VW <= tile->columns; column += vectors * VW)
        NAME(weigh)(g, tile, rows, vectors, column, scores, alpha);
    for (; column < tile->columns; column += VW)
        NAME(weigh)(g, tile, rows, 1, column, scores, alpha);
}

static TARGET void NAME(attend_1)(struct rows *g, const struct tile *t) { NAME(attend_tile)(g, t, 1, 4); }
static TARGET void NAME(attend_2)(struct rows *g, const struct tile *t) { NAME(attend_tile)(g, t, 2, 4); }
#if ROWS == 8
static TARGET void NAME(attend_4)(struct rows *g, const struct tile *t) { NAME(attend_tile)(g, t, 4, 4); }
static TARGET void NAME(attend_8)(struct rows *g, const struct tile *t) { NAME(attend_tile)(g, t, 8, 2); }
#else
static TARGET void NAME(attend_4)(struct rows *g, const struct tile *t) { NAME(attend_tile)(g, t, 4, 2); }
#endif

static const struct isa NAME(isa) = {
    .vector_floats = VW,
    .rows = ROWS,
    .keys = {NULL, NAME(float16_keys), NAME(bfloat16_keys), NAME(fp8_keys), NAME(int8_keys), NAME(int4_keys)},
    .value = {NULL, NAME(float16_value), NAME(bfloat16_value), NAME(fp8_value), NAME(int8_value), NAME(int4_value)},
#if ROWS == 8
    .attend = {NAME(attend_1), NAME(attend_2), NAME(attend_4), NAME(attend_8)},
#else
    .attend = {NAME(attend_1), NAME(attend_2), NAME(attend_4), NULL},
#endif
};

#undef vec
#undef ivec
#undef halves
#undef bytes
#undef pairs
#undef pair_halves
#undef DECODERS
#undef vhalf
#undef vint8
#undef vfp8
#undef FP8_FACTOR
#undef INLINE
#undef LOAD
#undef STORE
#undef PICK
#undef UNROLL
#undef NAME
#undef TARGET
#undef VW
#undef ROWS
#undef vset1
#undef vfma
#undef vmax
#undef vhmax
