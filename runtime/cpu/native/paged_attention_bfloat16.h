/* Attention in bfloat16, included once per instruction set after the vectors of paged_attention_kernel.h.
 *
 * Queries (times their scale), keys, probabilities and values are rounded to bfloat16, nearest with ties to even; what is
 * below 2^-56 becomes 0. Multiplications are exact in float32, additions are in float32, one at a time, in the order of
 * x86's vdpbf16ps. For one query row, whatever its neighbours in registers:
 *     score[t]   sum over dims 1, 0, 3, 2, 5, 4, ... of query and key, log2(e) being a part of the query's scale
 *     per tile of TILE tokens: running maximum, 16 partial sums (lane t % 16) of 2^(score - maximum), and
 *     output[d]  output * alpha + sum over tokens 1, 0, 3, 2, ... of the tile of probability and value
 *     per split of SPLIT tokens: all of that from the start, then merged with the earlier splits
 *
 * The bits are the same on every CPU, with or without vdpbf16ps or fused multiply-adds: what is added is 0 or a multiple
 * of 2^-126, so no sum is subnormal, which vdpbf16ps would flush, and every other operation is rounded by itself.
 */

/* sum + upper halves of a times those of b, then + lower halves: two pairs of bfloat16 in each lane. */
#ifndef vdot
INLINE vf NAME(add_pairs)(vf sum, vi a, vi b)
{
    const vi upper = (vi)vset(-0.0f) >> 15; /* 0xffff0000 */
    sum = vfma((vf)(a & upper), (vf)(b & upper), sum);
    return vfma((vf)VSHIFT(a, 16), (vf)VSHIFT(b, 16), sum);
}
#define vdot(sum, a, b) NAME(add_pairs)(sum, a, b)
#endif

/* Both numbers rounded to bfloat16 in a lane. NaN stays NaN. */
#ifndef vround_pair
INLINE vi NAME(upper_of)(vf x)
{
    const vi bits = (vi)x;
    return (vi)PICK(x == x, VADD(bits, vseti(0x7fff) + (bits >> 16 & 1)), bits | 0x400000);
}

INLINE vi NAME(round_pair)(vf lower, vf upper)
{
    return (NAME(upper_of)(lower) >> 16 & 0xffff) | (NAME(upper_of)(upper) & (vi)vset(-0.0f) >> 15);
}
#define vround_pair(lower, upper) NAME(round_pair)(lower, upper)
#endif

/* 0 for what is below 2^-56. */
INLINE vf NAME(without_small)(vf x)
{
    const vi magnitude = (vi)x & ~(vi)vset(-0.0f);
    return (vf)((vi)x & (magnitude >= (vi)vset(0x1p-56f)));
}

/* Store VW numbers, which are 0 or at least 2^-56, as bfloat16. */
#ifndef vstore_bfloats
INLINE void NAME(store_bfloats)(uint16_t *p, vf x)
{
    *(halves *)p = __builtin_convertvector(NAME(upper_of)(x) >> 16, halves);
}
#define vstore_bfloats(p, x) NAME(store_bfloats)(p, x)
#endif

/* Rows 2 j and 2 j + 1 of `width` floats become row j of pairs, first .. last, in place; rows are `stride` apart before and after. */
static TARGET void NAME(pair_rows)(float *rows, int first, int last, int width, int stride)
{
    for (int j = first; j < last; j++)
        for (int i = 0; i < width; i += VW) {
            const vf lower = NAME(without_small)(LOADF(rows + 2 * j * stride + i));
            const vf upper = NAME(without_small)(LOADF(rows + (2 * j + 1) * stride + i));
            STOREF(rows + j * stride + i, (vf)vround_pair(lower, upper));
        }
}

/* The same of two rows of float16, which has no number below 2^-56; the second may be missing: then its numbers are 0. */
static TARGET void NAME(pair_float16)(const uint8_t *lower, const uint8_t *upper, int width, float *target)
{
    for (int i = 0; i < width; i += VW) {
        const vf second = upper != NULL ? vhalf(upper + 2 * i) : vset(0.0f);
        STOREF(target + i, (vf)vround_pair(vhalf(lower + 2 * i), second));
    }
}

/* Keys of 16 tokens in float16: target[j * TILE + t] = dims 2 j and 2 j + 1 of token t. */
static TARGET void NAME(pair_keys)(const struct stored *from, int dim, float *target)
{
    const uint8_t *p = from->codes;
    for (int d = 0; d < dim; d += 2, p += 2 * from->stride, target += TILE)
        for (int t = 0; t < 16; t += VW)
            STOREF(target + t, (vf)vround_pair(vhalf(p + 2 * t), vhalf(p + from->stride + 2 * t)));
}

/* Round `count` floats, a multiple of VW, in place: the codes follow each other. */
static TARGET void NAME(round_row)(float *row, int count)
{
    for (int i = 0; i < count; i += VW)
        vstore_bfloats((uint16_t *)row + i, NAME(without_small)(LOADF(row + i)));
}

/* 2^x for x <= 0 within 3 parts in a million; exactly 1 at 0 and exactly 0 from -54 on. */
INLINE vf NAME(exp2_negative)(vf x)
{
    const vf shift = vset(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    const vf shifted = x + shift, r = x - (shifted - shift);
    vf y = vset(0.009582852944731712f);
    y = y * r + vset(0.055906426161527634f);
    y = y * r + vset(0.24024099111557007f);
    y = y * r + vset(0.6931241750717163f);
    y = y * r + vset(1.0f);
    const vi power = VSHIFT(shifted, 23); /* the low bits of `shifted` are the number */
    return PICK(x <= vset(-54.0f), vset(0.0f), (vf)VADD(y, power));
}

/* The next row's scores become probabilities, rounded. */
INLINE void NAME(soften_pairs)(struct softening *s)
{
    const int r = s->row++;
    const vf top = vset(s->maxima[r]), alpha = vset(s->alpha[r]);
    const float *scores = s->scores + r * TILE;
    float *sums = s->rows->sums + r * 16;
    vf total[16 / VW];
    UNROLL for (int j = 0; j < 16 / VW; j++)
        total[j] = LOADF(sums + j * VW) * alpha;
    for (int t = s->begin; t < s->end; t += 16)
        UNROLL for (int j = 0; j < 16 / VW; j++) {
            const vf p = NAME(exp2_negative)(LOADF(scores + t + j * VW) - top);
            total[j] += p;
            vstore_bfloats(s->weights + r * TILE + t + j * VW, p);
        }
    UNROLL for (int j = 0; j < 16 / VW; j++)
        STOREF(sums + j * VW, total[j]);
}

/* Dims 2 i and 2 i + 1 of VW keys from token t on. `from_codes`: of float16, else of pairs. */
INLINE vi NAME(key_pair)(int from_codes, const struct tile *tile, int i, int t)
{
    if (!from_codes)
        return (vi)LOADF(tile->key_pairs + i * TILE + t);
    const struct stored *of_16 = &tile->codes->of_16[t / 16];
    const uint8_t *p = of_16->codes + 2 * i * of_16->stride + 2 * (t % 16);
    return vround_pair(vhalf(p), vhalf(p + of_16->stride));
}

/* Scores of `rows` query rows; meanwhile those of the rows before become probabilities. */
INLINE void NAME(score_pairs)(int from_codes, struct softening *s, const struct tile *tile, int prefetches, int rows, int vectors,
                              struct softening *before)
{
    const struct rows *g = s->rows;
    const int depth = (tile->dim + 1) / 2, piece = prefetches ? 1 : (depth + 3) / 4;
    for (int t = s->begin; t < s->end; t += vectors * VW) {
        vf sum[ROWS][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++)
                sum[r][j] = vset(0.0f);
        for (int i = 0; i < depth;) {
            if (prefetches) {
                NAME(prefetch_keys)(tile, t, 2 * i);
                if (2 * i + 1 < tile->dim)
                    NAME(prefetch_keys)(tile, t, 2 * i + 1);
            }
            for (const int stop = i + piece < depth ? i + piece : depth; i < stop; i++) {
                vi key[4];
                UNROLL for (int j = 0; j < vectors; j++)
                    key[j] = NAME(key_pair)(from_codes, tile, i, t + j * VW);
                UNROLL for (int r = 0; r < rows; r++) {
                    const vi query = (vi)vset(g->query[i * rows + r]);
                    UNROLL for (int j = 0; j < vectors; j++)
                        sum[r][j] = vdot(sum[r][j], query, key[j]);
                }
            }
            if (before->row < rows)
                NAME(soften_pairs)(before);
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++)
                STOREF(s->scores + r * TILE + t + j * VW, sum[r][j]);
    }
}

/* VW columns of tokens 2 t and 2 t + 1. Codes of a token outside of the tile are those of another: its probability is 0. */
INLINE vi NAME(value_pair)(int from_codes, const struct tile *tile, int t, int column)
{
    if (!from_codes)
        return (vi)LOADF(tile->value_pairs + t * tile->columns + column);
    return vround_pair(vhalf(tile->codes->values[2 * t] + 2 * column), vhalf(tile->codes->values[2 * t + 1] + 2 * column));
}

/* Columns column .. of the output: output * alpha + probabilities @ values. */
INLINE void NAME(weigh_pairs)(int from_codes, const struct softening *s, const struct tile *tile, int prefetches, int rows,
                              int vectors, int column)
{
    const float *two = (const float *)s->weights; /* tokens */
    const int columns = tile->columns, first = s->rows->first / 2, last = (s->rows->last + 1) / 2;
    float *output = s->rows->output + column;
    vf sum[ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++)
            sum[r][j] = vset(0.0f);
    for (int t = first; t < last; t++) {
        if (column == 0 && prefetches) {
            NAME(prefetch_value)(tile, 2 * t);
            NAME(prefetch_value)(tile, 2 * t + 1);
        }
        vi value[4];
        UNROLL for (int j = 0; j < vectors; j++)
            value[j] = NAME(value_pair)(from_codes, tile, t, column + j * VW);
        UNROLL for (int r = 0; r < rows; r++) {
            const vi p = (vi)vset(two[r * (TILE / 2) + t]);
            UNROLL for (int j = 0; j < vectors; j++)
                sum[r][j] = vdot(sum[r][j], p, value[j]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++, output += columns)
        UNROLL for (int j = 0; j < vectors; j++)
            STOREF(output + j * VW, LOADF(output + j * VW) * vset(s->alpha[r]) + sum[r][j]);
}

INLINE void NAME(attend_pairs)(int from_codes, struct rows *groups, int count, const struct tile *tile, int rows, int vectors)
{
    const int step = vectors * VW > 16 ? vectors * VW : 16;
    struct softening two[2];
    two[1].row = rows;
    for (int n = 0; n <= count; n++) {
        struct softening *s = &two[n % 2], *before = &two[1 - n % 2];
        if (n < count) {
            s->rows = &groups[n], s->row = 0;
            s->begin = groups[n].first / step * step, s->end = (groups[n].last + step - 1) / step * step;
            NAME(score_pairs)(from_codes, s, tile, n == 0, rows, vectors, before);
        }
        while (before->row < rows)
            NAME(soften_pairs)(before);
        if (n < count) {
            NAME(find_maxima)(s, tile, 0, rows);
            for (int r = 0; r < rows; r += VW)
                STOREF(s->alpha + r, NAME(exp2_negative)(LOADF(s->rows->maximum + r) - LOADF(s->maxima + r)));
            memcpy(s->rows->maximum, s->maxima, rows * sizeof(float));
        }
        if (n == 0)
            continue;
        int column = 0;
        for (; column + vectors * VW <= tile->columns; column += vectors * VW)
            NAME(weigh_pairs)(from_codes, before, tile, n == 1, rows, vectors, column);
        for (; column < tile->columns; column += VW)
            NAME(weigh_pairs)(from_codes, before, tile, n == 1, rows, 1, column);
    }
}

/* Merge a row's result into the total of the splits before it, [columns] and 16 sums and the maximum. */
static TARGET void NAME(merge_pairs)(float *total, const float *output, const float *sums, float maximum, int columns)
{
    float *const before = total + columns + 16;
    const vf top = vmax(vset(*before), vset(maximum));
    const vf keep = NAME(exp2_negative)(vset(*before) - top), add = NAME(exp2_negative)(vset(maximum) - top);
    for (int i = 0; i < columns; i += VW)
        STOREF(total + i, LOADF(total + i) * keep + LOADF(output + i) * add);
    for (int i = 0; i < 16; i += VW)
        STOREF(total + columns + i, LOADF(total + columns + i) * keep + LOADF(sums + i) * add);
    *before = top[0];
}

#define ATTEND(name, FROM_CODES, COUNT, VECTORS)                                                                       \
    static TARGET void NAME(name##_##COUNT)(struct rows *groups, int count, const struct tile *tile)                   \
    {                                                                                                                  \
        NAME(attend_pairs)(FROM_CODES, groups, count, tile, COUNT, VECTORS);                                           \
    }
#if ROWS == 8
#define ATTENDS(name, FROM_CODES)                                                                                      \
    ATTEND(name, FROM_CODES, 1, 4) ATTEND(name, FROM_CODES, 2, 4) ATTEND(name, FROM_CODES, 4, 4) ATTEND(name, FROM_CODES, 8, 2)
#define ROW_OF(name) {NAME(name##_1), NAME(name##_2), NAME(name##_4), NAME(name##_8)}
#else
#define ATTENDS(name, FROM_CODES) ATTEND(name, FROM_CODES, 1, 4) ATTEND(name, FROM_CODES, 2, 4) ATTEND(name, FROM_CODES, 4, 2)
#define ROW_OF(name) {NAME(name##_1), NAME(name##_2), NAME(name##_4), NULL}
#endif
ATTENDS(attend_pairs, 0)
ATTENDS(attend_pairs_of_codes, 1)

static const struct pairs_isa NAME(pairs_isa) = {
    .round_row = NAME(round_row),
    .pair_rows = NAME(pair_rows),
    .pair_keys = NAME(pair_keys),
    .pair_float16 = NAME(pair_float16),
    .attend = {ROW_OF(attend_pairs), ROW_OF(attend_pairs_of_codes)},
    .merge = NAME(merge_pairs),
};

#undef ATTEND
#undef ATTENDS
#undef ROW_OF
