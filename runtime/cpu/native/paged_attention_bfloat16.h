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
INLINE vec NAME(add_pairs)(vec sum, ivec a, ivec b)
{
    const ivec upper = (ivec)vset1(-0.0f) >> 15; /* 0xffff0000 */
    sum = vfma((vec)(a & upper), (vec)(b & upper), sum);
    return vfma((vec)(a << 16), (vec)(b << 16), sum);
}
#define vdot(sum, a, b) NAME(add_pairs)(sum, a, b)
#endif

/* Both numbers rounded to bfloat16 in a lane. NaN stays NaN. */
#ifndef vround_pair
INLINE ivec NAME(upper_of)(vec x)
{
    const ivec bits = (ivec)x;
    return (ivec)PICK(x == x, bits + 0x7fff + (bits >> 16 & 1), bits | 0x400000);
}

INLINE ivec NAME(round_pair)(vec lower, vec upper)
{
    return (NAME(upper_of)(lower) >> 16 & 0xffff) | (NAME(upper_of)(upper) & (ivec)vset1(-0.0f) >> 15);
}
#define vround_pair(lower, upper) NAME(round_pair)(lower, upper)
#endif

/* 0 for what is below 2^-56. */
INLINE vec NAME(without_small)(vec x)
{
    const ivec magnitude = (ivec)x & ~(ivec)vset1(-0.0f);
    return (vec)((ivec)x & (magnitude >= (ivec)vset1(0x1p-56f)));
}

/* Store VW numbers, which are 0 or at least 2^-56, as bfloat16. */
#ifndef vstore_bfloats
INLINE void NAME(store_bfloats)(uint16_t *p, vec x)
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
            const vec lower = NAME(without_small)(LOAD(rows + 2 * j * stride + i));
            const vec upper = NAME(without_small)(LOAD(rows + (2 * j + 1) * stride + i));
            STORE(rows + j * stride + i, (vec)vround_pair(lower, upper));
        }
}

/* The same of two rows of float16, which has no number below 2^-56; the second may be missing: then its numbers are 0. */
static TARGET void NAME(pair_float16)(const uint8_t *lower, const uint8_t *upper, int width, float *target)
{
    for (int i = 0; i < width; i += VW) {
        const vec second = upper != NULL ? vhalf(upper + 2 * i) : vset1(0.0f);
        STORE(target + i, (vec)vround_pair(vhalf(lower + 2 * i), second));
    }
}

/* Round `count` floats, a multiple of VW, in place: the codes follow each other. */
static TARGET void NAME(round_row)(float *row, int count)
{
    for (int i = 0; i < count; i += VW)
        vstore_bfloats((uint16_t *)row + i, NAME(without_small)(LOAD(row + i)));
}

/* 2^x for x <= 0 within 3 parts in a million; exactly 1 at 0 and exactly 0 from -54 on. */
INLINE vec NAME(exp2_negative)(vec x)
{
    const vec shift = vset1(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    const vec shifted = x + shift, r = x - (shifted - shift);
    vec y = vset1(0.009582852944731712f);
    y = y * r + vset1(0.055906426161527634f);
    y = y * r + vset1(0.24024099111557007f);
    y = y * r + vset1(0.6931241750717163f);
    y = y * r + vset1(1.0f);
    const ivec alive = x > vset1(-54.0f), power = (ivec)shifted << 23; /* the low bits of `shifted` are the number */
    return (vec)(((ivec)y + power) & alive);
}

INLINE void NAME(score_pairs)(const struct rows *g, const struct tile *tile, int rows, int vectors, int begin, int end,
                              float *scores)
{
    for (int t = begin; t < end; t += vectors * VW) {
        const float *keys = tile->key_pairs + t;
        vec sum[ROWS][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++)
                sum[r][j] = vset1(0.0f);
        for (int i = 0; i < (tile->dim + 1) / 2; i++, keys += TILE) {
            NAME(prefetch_keys)(tile, t, 2 * i);
            if (2 * i + 1 < tile->dim)
                NAME(prefetch_keys)(tile, t, 2 * i + 1);
            ivec key[4];
            UNROLL for (int j = 0; j < vectors; j++)
                key[j] = (ivec)LOAD(keys + j * VW);
            UNROLL for (int r = 0; r < rows; r++) {
                const ivec query = (ivec)vset1(g->query[i * rows + r]);
                UNROLL for (int j = 0; j < vectors; j++)
                    sum[r][j] = vdot(sum[r][j], query, key[j]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++)
                STORE(scores + r * TILE + t + j * VW, sum[r][j]);
    }
}

/* Scores become probabilities against the running maximum, rounded; alpha[r] is what earlier sums are multiplied by. */
INLINE void NAME(soften_pairs)(struct rows *g, const struct tile *tile, int rows, int begin, int end, float *scores,
                               uint16_t *weights, float *alpha)
{
    float maxima[16];
    NAME(find_maxima)(g, tile, rows, begin, end, scores, maxima, alpha);
    for (int r = 0; r < rows; r += VW)
        STORE(alpha + r, NAME(exp2_negative)(LOAD(alpha + r)));
    for (int r = 0; r < rows; r++) {
        const vec top = vset1(maxima[r]);
        vec sums[16 / VW];
        UNROLL for (int j = 0; j < 16 / VW; j++)
            sums[j] = LOAD(g->sums + r * 16 + j * VW) * vset1(alpha[r]);
        for (int t = begin; t < end; t += 16)
            UNROLL for (int j = 0; j < 16 / VW; j++) {
                const vec s = LOAD(scores + r * TILE + t + j * VW);
                const vec p = (vec)((ivec)NAME(exp2_negative)(s - top) & (s > vset1(MASKED)));
                sums[j] += p;
                vstore_bfloats(weights + r * TILE + t + j * VW, p);
            }
        UNROLL for (int j = 0; j < 16 / VW; j++)
            STORE(g->sums + r * 16 + j * VW, sums[j]);
        g->maximum[r] = maxima[r];
    }
}

/* Columns column .. of the output: output * alpha + probabilities @ values. */
INLINE void NAME(weigh_pairs)(struct rows *g, const struct tile *tile, int rows, int vectors, int column,
                              const uint16_t *weights, const float *alpha)
{
    const float *two = (const float *)weights; /* tokens */
    vec sum[ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++)
            sum[r][j] = vset1(0.0f);
    for (int t = g->first / 2; t < (g->last + 1) / 2; t++) {
        if (column == 0) {
            NAME(prefetch_value)(tile, 2 * t);
            NAME(prefetch_value)(tile, 2 * t + 1);
        }
        ivec value[4];
        UNROLL for (int j = 0; j < vectors; j++)
            value[j] = (ivec)LOAD(tile->value_pairs + t * tile->columns + column + j * VW);
        UNROLL for (int r = 0; r < rows; r++) {
            const ivec p = (ivec)vset1(two[r * (TILE / 2) + t]);
            UNROLL for (int j = 0; j < vectors; j++)
                sum[r][j] = vdot(sum[r][j], p, value[j]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) {
            float *output = g->output + r * tile->columns + column + j * VW;
            STORE(output, LOAD(output) * vset1(alpha[r]) + sum[r][j]);
        }
}

INLINE void NAME(attend_pairs)(struct rows *g, const struct tile *tile, int rows, int vectors)
{
    float scores[ROWS * TILE] __attribute__((aligned(64))), alpha[16];
    uint16_t weights[ROWS * TILE] __attribute__((aligned(64), may_alias));
    const int step = vectors * VW > 16 ? vectors * VW : 16;
    const int begin = g->first / step * step, end = (g->last + step - 1) / step * step;
    NAME(score_pairs)(g, tile, rows, vectors, begin, end, scores);
    NAME(soften_pairs)(g, tile, rows, begin, end, scores, weights, alpha);
    int column = 0;
    for (; column + vectors * VW <= tile->columns; column += vectors * VW)
        NAME(weigh_pairs)(g, tile, rows, vectors, column, weights, alpha);
    for (; column < tile->columns; column += VW)
        NAME(weigh_pairs)(g, tile, rows, 1, column, weights, alpha);
}

/* Merge a row's result into the total of the splits before it: output and sums, then the maximum. */
static TARGET void NAME(merge_pairs)(float *total, const float *added, int floats)
{
    float *const maximum = total + floats - 16;
    const vec before = vset1(*maximum), own = vset1(added[floats - 16]), top = vmax(before, own);
    const vec keep = NAME(exp2_negative)(before - top), add = NAME(exp2_negative)(own - top);
    for (int i = 0; i < floats - 16; i += VW)
        STORE(total + i, LOAD(total + i) * keep + LOAD(added + i) * add);
    *maximum = top[0];
}

#define ATTEND(COUNT, VECTORS)                                                                                         \
    static TARGET void NAME(attend_pairs_##COUNT)(struct rows *g, const struct tile *t)                                \
    {                                                                                                                  \
        NAME(attend_pairs)(g, t, COUNT, VECTORS);                                                                      \
    }
ATTEND(1, 4)
ATTEND(2, 4)
#if ROWS == 8
ATTEND(4, 4)
ATTEND(8, 2)
#define ATTEND_8 NAME(attend_pairs_8)
#else
ATTEND(4, 2)
#define ATTEND_8 NULL
#endif

static const struct pairs_isa NAME(pairs_isa) = {
    .round_row = NAME(round_row),
    .pair_rows = NAME(pair_rows),
    .pair_float16 = NAME(pair_float16),
    .attend = {NAME(attend_pairs_1), NAME(attend_pairs_2), NAME(attend_pairs_4), ATTEND_8},
    .merge = NAME(merge_pairs),
};

#undef ATTEND
#undef ATTEND_8
#undef vdot
#undef vstore_bfloats
#undef vround_pair
