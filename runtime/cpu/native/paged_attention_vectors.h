/* What both kinds of arithmetic of attention do with vectors: masks, maxima, prefetching. Included once per instruction set. */
#include "vectors.h"

typedef uint16_t NAME(halves) __attribute__((vector_size(VW * 2), aligned(1), may_alias));
typedef int8_t NAME(bytes) __attribute__((vector_size(VW), aligned(1), may_alias));
typedef uint8_t NAME(pairs) __attribute__((vector_size(VW / 2), aligned(1), may_alias));
typedef uint16_t NAME(pair_halves) __attribute__((vector_size(VW), aligned(1), may_alias));

#define halves NAME(halves)
#define bytes NAME(bytes)
#define pairs NAME(pairs)
#define pair_halves NAME(pair_halves)

/* All ones where the row at `position` attends to the token: causal, and inside the window if there is one. */
INLINE vi NAME(visible)(const struct tile *tile, int position, int token)
{
    vi lanes;
    UNROLL for (int i = 0; i < VW; i++)
        lanes[i] = i;
    vi t = lanes + token;
    int last = position - tile->start;
    int first = tile->window ? last - tile->window : -1; /* the last token that is not visible */
    return (t <= last) & (t > first);
}

/* Whether rows first .. first + rows attend to all of tokens begin .. end of the tile: they are in the order of positions. */
INLINE int NAME(all_visible)(const struct rows *g, const struct tile *tile, int first, int rows, int begin, int end)
{
    const int *position = g->position + first;
    const int oldest = tile->window ? position[rows - 1] - tile->window : -1; /* the last token that is not visible */
    return position[0] - tile->start >= end - 1 && oldest < tile->start + begin;
}

/* Cap scores, and replace those of tokens that are not visible. */
INLINE void NAME(mask_scores)(const struct tile *tile, int position, int begin, int end, float *scores)
{
    for (int t = begin; t < end; t += VW) {
        vf s = LOADF(scores + t);
        if (tile->softcap != 0.0f)
            s = NAME(tanh)(s * vset(tile->inverse_softcap)) * vset(tile->softcap);
        STOREF(scores + t, PICK(NAME(visible)(tile, position, t), s, vset(HIDDEN)));
    }
}

/* Mask the scores of rows first .. first + rows, and find their running maxima with them: how both kinds of softmax begin. */
INLINE void NAME(find_maxima)(struct softening *s, const struct tile *tile, int first, int rows)
{
    const struct rows *g = s->rows;
    const int begin = s->begin, end = s->end;
    const int plain = tile->softcap == 0.0f && NAME(all_visible)(g, tile, first, rows, begin, end);
    vf tops[ROWS];
    UNROLL for (int r = 0; r < rows; r++) {
        float *scores = s->scores + (first + r) * TILE;
        if (!plain)
            NAME(mask_scores)(tile, g->position[first + r], begin, end, scores);
        tops[r] = LOADF(scores + begin);
        for (int t = begin + VW; t < end; t += VW)
            tops[r] = vmax(tops[r], LOADF(scores + t));
    }
#ifdef vhmax_of_8
    if (rows == 8) {
        STOREF(s->maxima + first, vmax(LOADF(g->maximum + first), vhmax_of_8(tops))); /* the last 8 lanes are not used */
        return;
    }
#endif
    UNROLL for (int r = 0; r < rows; r++) {
        const float top = vhmax(tops[r]), before = g->maximum[first + r];
        s->maxima[first + r] = before > top ? before : top;
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
