/* The attention arithmetic in float32, included once per instruction set (see paged_attention.c).
 *
 * The includer defines
 *     NAME(x)                    the instruction set's own name for x
 *     TARGET                     function attribute that selects it
 *     VECTORS                    the vectors of vectors.h
 *     ROWS                       query rows held in registers: 4 or 8
 *     vwiden(x)                  VW int8 as int32
 *     vnibble(i) vunsigned_nibble(i)   the lowest 4 bits of int32 as floats: -8 .. 7 and 0 .. 15
 *     one_half(p)                one float16 as a float; may be left out, as may the three before
 *     vdot vround_pair vstore_bfloats   for bfloat16, where the CPU has them: see paged_attention_bfloat16.h
 *
 * Keys and values of a tile are first decoded to floats, which rounds once at most; kv_precision.h describes the types.
 *
 * For one query row, whatever its neighbours in registers, the operations and their order are these:
 *     score[t]   fma over dim 0, 1, 2, ... of (query * scale) and key
 *     per tile of TILE tokens at absolute positions: running maximum, 16 partial sums (lane t % 16), and
 *     output[d]  output * alpha, then fma over tokens in order of probability and value
 *     per split of SPLIT tokens: all of that from the start, then merged with the earlier splits
 * Masked tokens add an exact zero, and tiles without an unmasked token multiply by an exact one, so that a tile's
 * bounds, the chunking and the grouping of rows never reach the result. No path may change this order, not even for speed.
 */

#include "paged_attention_vectors.h"

#ifndef vwiden
#define vwiden(x) __builtin_convertvector((x), vi)
#endif
#ifndef vnibble
#define vnibble(i) __builtin_convertvector(VSHIFT(i, 28) >> 28, vf)
#define vunsigned_nibble(i) __builtin_convertvector((i) & 15, vf)
#endif
#ifndef one_half
#define one_half(p) float_of_half(*(p))
#endif

/* What VW codes are multiplied by, and what is added to grouped int4 then. */
struct NAME(factors) {
    vf scale, minimum;
};

/* float8 is read as 1/256 of its value. */
INLINE float NAME(factor)(enum kind kind) { return kind == FP8 ? 256.0f : 1.0f; }

/* Factors of VW tokens' keys: `scales` has those of dim `first` and of the first token. */
INLINE struct NAME(factors) NAME(key_factors)(enum kind kind, const uint16_t *scales, int64_t stride)
{
    struct NAME(factors) f = {vset(1.0f), vset(0.0f)};
    if (kind >= FP8)
        f.scale = vhalf((const uint8_t *)scales) * vset(NAME(factor)(kind));
    if (kind == GROUPED_INT4)
        f.minimum = vhalf((const uint8_t *)(scales + stride));
    return f;
}

/* Factors of some dims of one value; for grouped int4 those of one group. */
INLINE struct NAME(factors) NAME(value_factors)(enum kind kind, const uint16_t *scales)
{
    struct NAME(factors) f = {vset(1.0f), vset(0.0f)};
    if (kind >= FP8)
        f.scale = vset(one_half(scales) * NAME(factor)(kind));
    if (kind == GROUPED_INT4)
        f.minimum = vset(one_half(scales + 1));
    return f;
}

/* VW codes from p on times their scale; int4 has functions of its own. */
INLINE vf NAME(decode)(enum kind kind, const uint8_t *p, vf scale)
{
    if (kind == FLOAT16)
        return vhalf(p);
    if (kind == BFLOAT16)
        return (vf)VSHIFT(__builtin_convertvector(*(const halves *)p, vi), 16);
    if (kind == FP8)
        return vfloat8(p) * scale;
    return __builtin_convertvector(vwiden(*(const bytes *)p), vf) * scale;
}

/* The lowest 4 bits of each number as a number of int4. */
INLINE vf NAME(decode_nibbles)(enum kind kind, vi codes, struct NAME(factors) f)
{
    if (kind == INT4)
        return vnibble(codes) * f.scale;
    return vfma(vunsigned_nibble(codes), f.scale, f.minimum);
}

/* Dim 2 j (i = 0) or 2 j + 1 (i = 1) of VW keys of int4. */
INLINE vf NAME(decode_half)(enum kind kind, const uint8_t *p, int i, struct NAME(factors) f)
{
    const vi both = vwiden(*(const bytes *)p);
    return NAME(decode_nibbles)(kind, i == 0 ? both : both >> 4, f);
}

/* VW dims of a value of int4. */
INLINE vf NAME(decode_pairs)(enum kind kind, const uint8_t *p, struct NAME(factors) f)
{
    const pair_halves spread = __builtin_convertvector(*(const pairs *)p, pair_halves);
    return NAME(decode_nibbles)(kind, vwiden((bytes)(spread | spread << 4)), f);
}

/* Dims that share a scale; the last group of grouped int4 may have fewer. */
INLINE int NAME(group_dims)(enum kind kind, int dim, int group, int first)
{
    return kind != GROUPED_INT4 ? dim : first + group < dim ? group : dim - first;
}

/* Keys of 16 tokens: target[d * TILE + t] = dim d of token t. */
INLINE void NAME(decode_keys)(enum kind kind, const struct stored *from, int dim, int group, float *target)
{
    const int code_bytes = kind < FP8 ? 2 : 1;
    for (int first = 0, g = 0; first < dim; first += NAME(group_dims)(kind, dim, group, first), g++)
        for (int t = 0; t < 16; t += VW) {
            const uint8_t *p = from->codes + (kind >= INT4 ? first / 2 : first) * from->stride + t * code_bytes;
            const uint16_t *scales = from->scales + 2 * g * from->scale_stride + t;
            const struct NAME(factors) f = NAME(key_factors)(kind, scales, from->scale_stride);
            float *to = target + first * TILE + t;
            const int dims = NAME(group_dims)(kind, dim, group, first);
            for (int d = 0; d < dims; d += kind >= INT4 ? 2 : 1, p += from->stride) {
                if (kind >= INT4) {
                    STOREF(to + d * TILE, NAME(decode_half)(kind, p, 0, f));
                    STOREF(to + (d + 1) * TILE, NAME(decode_half)(kind, p, 1, f));
                } else {
                    STOREF(to + d * TILE, NAME(decode)(kind, p, f.scale));
                }
            }
        }
}

/* VW dims of a value from column on. */
INLINE vf NAME(value_dims)(enum kind kind, const uint8_t *codes, int column, struct NAME(factors) f)
{
    if (kind >= INT4)
        return NAME(decode_pairs)(kind, codes + column / 2, f);
    return NAME(decode)(kind, codes + column * (kind < FP8 ? 2 : 1), f.scale);
}

/* Dims of a value that share a scale, rounded up to VW of them. Reads no byte beyond them. */
INLINE void NAME(decode_dims)(enum kind kind, const uint8_t *codes, int dims, struct NAME(factors) f, float *target)
{
    const int twice_bytes = kind < FP8 ? 4 : kind >= INT4 ? 1 : 2; /* bytes of two codes */
    for (int d = 0; d < dims; d += VW) {
        const uint8_t *p = codes + d * twice_bytes / 2;
        uint8_t padded[2 * VW];
        if (d + VW > dims) {
            memset(padded, 0, sizeof padded);
            memcpy(padded, p, (dims - d) * twice_bytes / 2);
            p = padded;
        }
        STOREF(target + d, NAME(value_dims)(kind, p, 0, f));
    }
}

/* One value: target[d], whose padding is written too. */
INLINE void NAME(decode_value)(enum kind kind, const uint8_t *codes, const uint16_t *scales, int dim, int group,
                               float *target)
{
    for (int first = 0, dims; first < dim; first += dims, scales += 2) {
        dims = NAME(group_dims)(kind, dim, group, first);
        const uint8_t *p = codes + (kind < FP8 ? 2 * first : kind >= INT4 ? first / 2 : first);
        NAME(decode_dims)(kind, p, dims, NAME(value_factors)(kind, scales), target + first);
    }
}

/* target[d] = scale * the head's element d, rotated: elements d and d + half are a pair (RoFormer, Su et al. 2021, with halves as
 * pairs). Every multiplication and addition is rounded, so the bits are the same on all CPUs. */
static TARGET void NAME(turn)(const float *restrict head, const float *restrict cos, const float *restrict sin, int half, int dim,
                              float scale, float *restrict target)
{
    for (int d = 0; d < half; d++) {
        const float first = head[d], second = head[d + half];
        target[d] = (first * cos[d] - second * sin[d]) * scale;
        target[d + half] = (second * cos[d] + first * sin[d]) * scale;
    }
    for (int d = 2 * half; d < dim; d++)
        target[d] = head[d] * scale;
}

#ifdef vstore_halves
/* half_of of each number; `dim` is a multiple of VW. */
static TARGET void NAME(to_float16)(const float *x, int dim, uint16_t *codes)
{
    for (int d = 0; d < dim; d += VW) {
        const vf numbers = LOADF(x + d);
        vstore_halves(codes + d, numbers);
        for (int i = 0; i < VW && vany(numbers != numbers); i++)
            codes[d + i] = half_of(x[d + i]); /* for its NaN */
    }
}
#define TO_FLOAT16 NAME(to_float16)
#else
#define TO_FLOAT16 NULL
#endif

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
DECODERS(grouped_int4, GROUPED_INT4)

/* Add a group's dims, from `first` on, of query times key to the sums; the keys are stored codes. */
INLINE void NAME(score_codes)(enum kind kind, const struct rows *g, const struct tile *tile, int rows, int vectors,
                              int t, int first, vf (*sum)[4])
{
    const uint8_t *codes[4];
    struct NAME(factors) f[4];
    const int step = kind >= INT4 ? 2 : 1, code_bytes = kind < FP8 ? 2 : 1;
    const int64_t stride = tile->codes->of_16[0].stride;
    UNROLL for (int j = 0; j < vectors; j++) {
        const struct stored *of_16 = &tile->codes->of_16[(t + j * VW) / 16];
        const int in_16 = (t + j * VW) % 16;
        const uint16_t *scales = of_16->scales + in_16;
        if (kind == GROUPED_INT4)
            scales += 2 * (first / tile->group) * of_16->scale_stride;
        codes[j] = of_16->codes + in_16 * code_bytes + first / step * stride;
        f[j] = NAME(key_factors)(kind, scales, of_16->scale_stride);
    }
    const int last = first + NAME(group_dims)(kind, tile->dim, tile->group, first);
    for (int d = first; d < last; d += step) {
        NAME(prefetch_keys)(tile, t, d);
        vf key[2][4];
        UNROLL for (int j = 0; j < vectors; j++) {
            if (kind >= INT4) {
                key[0][j] = NAME(decode_half)(kind, codes[j], 0, f[j]);
                key[1][j] = NAME(decode_half)(kind, codes[j], 1, f[j]);
            } else {
                key[0][j] = NAME(decode)(kind, codes[j], f[j].scale);
            }
            codes[j] += stride;
        }
        UNROLL for (int i = 0; i < step; i++)
            UNROLL for (int r = 0; r < rows; r++) {
                vf query = vset(g->query[(d + i) * rows + r]);
                UNROLL for (int j = 0; j < vectors; j++)
                    sum[r][j] = vfma(query, key[i][j], sum[r][j]);
            }
    }
}

/* The next row's scores become probabilities. */
INLINE void NAME(soften)(struct softening *s)
{
    const int r = s->row++;
    const vf top = vset(s->maxima[r]), alpha = vset(s->alpha[r]);
    float *scores = s->scores + r * TILE, *sums = s->rows->sums + r * 16;
    vf total[16 / VW];
    UNROLL for (int j = 0; j < 16 / VW; j++)
        total[j] = LOADF(sums + j * VW) * alpha;
    for (int t = s->begin; t < s->end; t += 16)
        UNROLL for (int j = 0; j < 16 / VW; j++) {
            const vf p = NAME(exp_negative)(LOADF(scores + t + j * VW) - top);
            STOREF(scores + t + j * VW, p);
            total[j] += p;
        }
    UNROLL for (int j = 0; j < 16 / VW; j++)
        STOREF(sums + j * VW, total[j]);
}

/* The same for keys that are floats. */
INLINE void NAME(score_floats)(const struct rows *g, const struct tile *tile, int rows, int vectors, int t,
                               vf (*sum)[4], int prefetches, struct softening *before)
{
    const float *keys[4]; /* of VW tokens each */
    UNROLL for (int j = 0; j < vectors; j++)
        keys[j] = tile->keys[(t + j * VW) / 16] + (t + j * VW) % 16;
    const int piece = (tile->dim + 3) / 4;
    for (int d = 0; d < tile->dim;) {
        const int stop = d + piece < tile->dim ? d + piece : tile->dim;
        for (int i = d; prefetches && i < stop; i++)
            NAME(prefetch_keys)(tile, t, i);
        for (; d < stop; d++) {
            vf key[4];
            UNROLL for (int j = 0; j < vectors; j++)
                key[j] = LOADF(keys[j] + d * tile->key_stride);
            UNROLL for (int r = 0; r < rows; r++) {
                vf query = vset(g->query[d * rows + r]);
                UNROLL for (int j = 0; j < vectors; j++)
                    sum[r][j] = vfma(query, key[j], sum[r][j]);
            }
        }
        if (before->row < rows)
            NAME(soften)(before);
    }
}

/* Scores of `rows` query rows; meanwhile those of the rows before become probabilities. */
INLINE void NAME(score)(enum kind kind, struct softening *s, const struct tile *tile, int prefetches, int rows, int vectors,
                        struct softening *before)
{
    for (int t = s->begin; t < s->end; t += vectors * VW) {
        vf sum[ROWS][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++)
                sum[r][j] = vset(0.0f);
        if (kind == FLOAT32)
            NAME(score_floats)(s->rows, tile, rows, vectors, t, sum, prefetches, before);
        else
            for (int first = 0; first < tile->dim; first += NAME(group_dims)(kind, tile->dim, tile->group, first))
                NAME(score_codes)(kind, s->rows, tile, rows, vectors, t, first, sum);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++)
                STOREF(s->scores + r * TILE + t + j * VW, sum[r][j]);
    }
}

/* Scales and minima of the values of tokens first .. last as floats: tile->factors[t][group]. */
INLINE void NAME(decode_value_factors)(const struct tile *tile, int first, int last)
{
    const int numbers = 2 * ((tile->value_dim + tile->group - 1) / tile->group); /* of a token */
    for (int t = first / 16 * 16; t < last; t += 16) {
        const int near = t < first ? first : t; /* 16 tokens follow each other in a block */
        const uint16_t *scales = tile->codes->scales[near] - (near - t) * numbers;
        for (int i = 0; i < 16 * numbers; i += VW)
            STOREF(tile->factors + t * numbers + i, vhalf((const uint8_t *)(scales + i)));
    }
}

/* Columns column .. of the output: output * alpha + probabilities @ values. */
INLINE void NAME(weigh)(enum kind kind, struct rows *g, const struct tile *tile, int prefetches, int rows, int vectors, int column,
                        const float *probabilities, const float *alpha)
{
    const int columns = tile->columns;
    float *output = g->output + column;
    vf sum[ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++)
            sum[r][j] = LOADF(output + r * columns + j * VW) * vset(alpha[r]);
    int group[4] = {0}, groups = 0; /* of each vector */
    if (kind == GROUPED_INT4) {
        groups = (tile->value_dim + tile->group - 1) / tile->group;
        UNROLL for (int j = 0; j < vectors; j++)
            group[j] = (column + j * VW) / tile->group;
    }
    for (int t = g->first; t < g->last; t++) {
        if (column == 0 && prefetches)
            NAME(prefetch_value)(tile, t);
        vf value[4];
        UNROLL for (int j = 0; j < vectors; j++) {
            const int d = column + j * VW;
            if (kind == FLOAT32) {
                value[j] = LOADF(tile->values[t] + d);
            } else {
                struct NAME(factors) f;
                if (kind == GROUPED_INT4) {
                    const float *factors = tile->factors + 2 * (t * groups + group[j]);
                    f = (struct NAME(factors)){vset(factors[0]), vset(factors[1])};
                } else {
                    f = NAME(value_factors)(kind, tile->codes->scales[t]);
                }
                value[j] = NAME(value_dims)(kind, tile->codes->values[t], d, f);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vf p = vset(probabilities[r * TILE + t]);
            UNROLL for (int j = 0; j < vectors; j++)
                sum[r][j] = vfma(p, value[j], sum[r][j]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++)
            STOREF(output + r * columns + j * VW, sum[r][j]);
}

INLINE void NAME(attend_tile)(int mix, struct rows *groups, int count, const struct tile *tile, int rows, int vectors)
{
    const enum kind key_kind = mix >= K8V4 ? INT8 : (enum kind)mix;
    const enum kind value_kind = mix == K8V4 ? INT4 : mix == GROUPED_K8V4 ? GROUPED_INT4 : (enum kind)mix;
    const int step = vectors * VW > 16 ? vectors * VW : 16;
    struct softening two[2];
    two[1].row = rows;
    for (int n = 0; n <= count; n++) {
        struct softening *s = &two[n % 2], *before = &two[1 - n % 2];
        if (n < count) {
            s->rows = &groups[n], s->row = 0;
            s->begin = groups[n].first / step * step, s->end = (groups[n].last + step - 1) / step * step;
            NAME(score)(key_kind, s, tile, n == 0, rows, vectors, before);
        }
        while (before->row < rows)
            NAME(soften)(before);
        if (n < count) {
            NAME(find_maxima)(s, tile, 0, rows);
            for (int r = 0; r < rows; r += VW)
                STOREF(s->alpha + r, NAME(exp_negative)(LOADF(s->rows->maximum + r) - LOADF(s->maxima + r)));
            memcpy(s->rows->maximum, s->maxima, rows * sizeof(float));
        }
        if (n == 0)
            continue;
        struct rows *g = before->rows;
        if (value_kind == GROUPED_INT4)
            NAME(decode_value_factors)(tile, g->first, g->last);
        int column = 0;
        for (; column + vectors * VW <= tile->columns; column += vectors * VW)
            NAME(weigh)(value_kind, g, tile, n == 1, rows, vectors, column, before->scores, before->alpha);
        for (; column < tile->columns; column += VW)
            NAME(weigh)(value_kind, g, tile, n == 1, rows, 1, column, before->scores, before->alpha);
    }
}

/* Merge a row's result into the total of the splits before it, [columns] and 16 sums and the maximum. */
static TARGET void NAME(merge)(float *total, const float *output, const float *sums, float maximum, int columns)
{
    float *const before = total + columns + 16;
    const vf top = vmax(vset(*before), vset(maximum));
    const vf keep = NAME(exp_negative)(vset(*before) - top), add = NAME(exp_negative)(vset(maximum) - top);
    for (int i = 0; i < columns; i += VW)
        STOREF(total + i, LOADF(total + i) * keep + LOADF(output + i) * add);
    for (int i = 0; i < 16; i += VW)
        STOREF(total + columns + i, LOADF(total + columns + i) * keep + LOADF(sums + i) * add);
    *before = top[0];
}

#define ATTEND(name, KIND, COUNT, VECTORS)                                                                             \
    static TARGET void NAME(name##_##COUNT)(struct rows *g, int count, const struct tile *t)                                      \
    {                                                                                                                  \
        NAME(attend_tile)(KIND, g, count, t, COUNT, VECTORS);                                                                 \
    }
#if ROWS == 8
#define ATTENDS(name, KIND) ATTEND(name, KIND, 1, 4) ATTEND(name, KIND, 2, 4) ATTEND(name, KIND, 4, 4) ATTEND(name, KIND, 8, 2)
#define ROW_OF(name) {NAME(name##_1), NAME(name##_2), NAME(name##_4), NAME(name##_8)}
#else
#define ATTENDS(name, KIND) ATTEND(name, KIND, 1, 4) ATTEND(name, KIND, 2, 4) ATTEND(name, KIND, 4, 2)
#define ROW_OF(name) {NAME(name##_1), NAME(name##_2), NAME(name##_4), NULL}
#endif
ATTENDS(attend_float32, FLOAT32)
ATTENDS(attend_float16, FLOAT16)
ATTENDS(attend_bfloat16, BFLOAT16)
ATTENDS(attend_fp8, FP8)
ATTENDS(attend_int8, INT8)
ATTENDS(attend_int4, INT4)
ATTENDS(attend_grouped_int4, GROUPED_INT4)
ATTENDS(attend_k8v4, K8V4)
ATTENDS(attend_grouped_k8v4, GROUPED_K8V4)

static const struct isa NAME(isa) = {
    .vector_floats = VW,
    .rows = ROWS,
    .turn = NAME(turn),
    .to_float16 = TO_FLOAT16,
    .keys = {NULL, NAME(float16_keys), NAME(bfloat16_keys), NAME(fp8_keys), NAME(int8_keys), NAME(int4_keys),
             NAME(grouped_int4_keys)},
    .value = {NULL, NAME(float16_value), NAME(bfloat16_value), NAME(fp8_value), NAME(int8_value), NAME(int4_value),
              NAME(grouped_int4_value)},
    .attend = {ROW_OF(attend_float32), ROW_OF(attend_float16), ROW_OF(attend_bfloat16), ROW_OF(attend_fp8),
               ROW_OF(attend_int8), ROW_OF(attend_int4), ROW_OF(attend_grouped_int4), ROW_OF(attend_k8v4),
               ROW_OF(attend_grouped_k8v4)},
    .merge = NAME(merge),
};

#undef DECODERS
#undef TO_FLOAT16
#undef ATTEND
#undef ATTENDS
#undef ROW_OF
