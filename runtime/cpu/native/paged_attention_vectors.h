/* Vectors of one instruction set and what all arithmetic needs of them: see paged_attention_kernel.h for what the includer
 * defines.
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
    vec clamped = vmax(vset1(-87.0f), x); /* NaN if x is */
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
    return PICK(x <= vset1(-87.0f), vset1(0.0f), (vec)((ivec)y + power));
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

/* Whether all rows attend to all of tokens begin .. end of the tile: rows are in the order of their positions. */
INLINE int NAME(all_visible)(const struct rows *g, const struct tile *tile, int rows, int begin, int end)
{
    const int oldest = tile->window ? g->position[rows - 1] - tile->window : -1; /* the last token that is not visible */
    return g->position[0] - tile->start >= end - 1 && oldest < tile->start + begin;
}

/* Cap scores, and replace those of tokens that are not visible. */
INLINE void NAME(mask_scores)(const struct tile *tile, int position, int begin, int end, float *scores)
{
    for (int t = begin; t < end; t += VW) {
        vec s = LOAD(scores + t);
        if (tile->softcap != 0.0f)
            s = NAME(tanh)(s * vset1(tile->inverse_softcap)) * vset1(tile->softcap);
        STORE(scores + t, PICK(NAME(visible)(tile, position, t), s, vset1(HIDDEN)));
    }
}

/* Mask the scores of each row, and find its running maximum with them. Both kinds of softmax begin with it. */
INLINE void NAME(find_maxima)(struct softening *s, const struct tile *tile, int rows)
{
    const struct rows *g = s->rows;
    const int begin = s->begin, end = s->end;
    const int plain = tile->softcap == 0.0f && NAME(all_visible)(g, tile, rows, begin, end);
    vec tops[ROWS];
    UNROLL for (int r = 0; r < rows; r++) {
        float *scores = s->scores + r * TILE;
        if (!plain)
            NAME(mask_scores)(tile, g->position[r], begin, end, scores);
        tops[r] = LOAD(scores + begin);
        for (int t = begin + VW; t < end; t += VW)
            tops[r] = vmax(tops[r], LOAD(scores + t));
    }
#ifdef vhmax_of_8
    if (rows == 8) {
        STORE(s->maxima, vmax(LOAD(g->maximum), vhmax_of_8(tops))); /* the last 8 lanes are not used */
        return;
    }
#endif
    UNROLL for (int r = 0; r < rows; r++) {
        const float top = vhmax(tops[r]);
        s->maxima[r] = g->maximum[r] > top ? g->maximum[r] : top;
    }
}

/* Fetch the share of the next tile's keys that belongs to dim d, during the first score of this tile. */
INLINE void NAME(prefetch_keys)(const struct tile *tile, int t, int d)
{
    if (tile->next == NULL || t > 0)
        return;
    const int last = (d + 1) * TILE / tile->dim;
    for (int token = d * TILE / tile->dim; token < last; token++)
        for (int at = 0; at < tile->key_bytes; at += 64)
            __builtin_prefetch(tile->next->keys[token] + at, 0, 2);
}

/* Fetch token t of the next tile's values. */
INLINE void NAME(prefetch_value)(const struct tile *tile, int t)
{
    if (tile->next != NULL)
        for (int at = 0; at < tile->value_bytes; at += 64)
            __builtin_prefetch(tile->next->values[t] + at, 0, 2);
}
