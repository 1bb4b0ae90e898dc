/* The matmul of a few rows with tiles of a matrix, included once per instruction set by kernel_set.h. launch.h has the
 * layouts and the arithmetic. Functions here have their height, form and number of tiles as constants, so that sums stay in
 * registers.
 */

#ifdef OWN_DOTS
#include OWN_DOTS
#else
/* Codes 4 group .. of the 32 that begin at `codes`: VW lanes of four bytes from lane v * VW on. */
INLINE vi NAME(codes_of)(const uint8_t *codes, int v, int bits, int group)
{
    const int lines = bits == 8 ? group : bits == 4 ? group / 2 : group / 4;
    vi c = LOADI(codes + 64 * lines + 4 * VW * v);
    if (bits == 8)
        return c;
    if (bits == 4)
        return (c >> 4 * (group % 2)) & vseti(0x0f0f0f0f);
    c = (c >> 2 * (group % 4)) & vseti(0x03030303);
    if (bits == 2)
        return c;
    const vi high = LOADI(codes + 128 + 4 * VW * v);
    return c | ((group < 2 ? VSHIFT(high, 2 - group) : high >> (group - 2)) & vseti(0x04040404));
}

#ifdef SHORT_SUMS
/* Add groups begin .. end of 32 codes, times q, to the sums. Terms are summed in 16 bits first: pairs of eight fit, as codes
 * of 4 bits times 128 times 2 are 3840 at most. Codes of 8 bits are two of 4 bits. */
INLINE void NAME(add_groups)(const uint8_t *codes, const int32_t *q, vi *sum, int v, int mt, int chains, int bits, int begin, int end)
{
    vi low[MAX_HEIGHT], high[MAX_HEIGHT];
    UNROLL for (int g = begin; g < end; g++) {
        const vi c = NAME(codes_of)(codes, v, bits, g), four = c & vseti(0x0f0f0f0f), more = (c >> 4) & vseti(0x0f0f0f0f);
        UNROLL for (int m = 0; m < mt; m++) {
            const int32_t *at = q + (g - begin) * mt + m;
            low[m] = g == begin ? short_dot(four, at) : short_add(low[m], short_dot(four, at));
            if (bits == 8)
                high[m] = g == begin ? short_dot(more, at) : short_add(high[m], short_dot(more, at));
        }
    }
    UNROLL for (int m = 0; m < mt; m++) {
        sum[m] += short_fold(low[m], 1);
        if (bits == 8)
            sum[m] += short_fold(high[m], 16);
    }
    (void)chains;
}
#else
#ifdef vdot_wide
/* Add groups begin .. end of 32 codes of two tiles, `next` bytes apart, to the sums [tile][row]: q is read once for both. */
INLINE void NAME(add_to_both)(const uint8_t *codes, int64_t next, const int32_t *q, vi (*sum)[MAX_HEIGHT], int mt, int bits, int begin,
                              int end)
{
    UNROLL for (int g = begin; g < end; g++) {
        const vi c = NAME(codes_of)(codes, 0, bits, g), d = NAME(codes_of)(codes + next, 0, bits, g);
        UNROLL for (int m = 0; m < mt; m++) {
            const vi x = vseti(q[(g - begin) * mt + m]);
            sum[0][m] = vdot_wide(sum[0][m], c, x);
            sum[1][m] = vdot_wide(sum[1][m], d, x);
        }
    }
}
#endif

/* Add groups begin .. end of 32 codes, times q, to the sums: each row has `chains` of them in turns, for the latency. */
INLINE void NAME(add_groups)(const uint8_t *codes, const int32_t *q, vi *sum, int v, int mt, int chains, int bits, int begin, int end)
{
    UNROLL for (int g = begin; g < end; g++) {
        const vi c = NAME(codes_of)(codes, v, bits, g);
        UNROLL for (int m = 0; m < mt; m++)
            sum[m * chains + g % chains] = vdot(sum[m * chains + g % chains], c, q + (g - begin) * mt + m);
    }
}
#endif

/* Add columns at .. at + block of lanes v * VW .. to the sums; the 32 codes of column `at` begin at `codes`. */
INLINE void NAME(add_block)(const uint8_t *codes, int64_t ahead, const int32_t *q, vi *sum, int v, int mt, int chains, int bits, int at,
                            int block)
{
    const int end = at + block;
    if (at % 32 != 0) {
        NAME(add_groups)(codes, q, sum, v, mt, chains, bits, 4, 8);
        at += 16, codes += 64 * bits, q += 4 * mt;
    }
    for (; at + 32 <= end; at += 32, codes += 64 * bits, q += 8 * mt) {
        UNROLL for (int line = 0; v == 0 && line < bits; line++)
            __builtin_prefetch(codes + ahead + 64 * line, 0, 3);
        NAME(add_groups)(codes, q, sum, v, mt, chains, bits, 0, 8);
    }
    if (at < end)
        NAME(add_groups)(codes, q, sum, v, mt, chains, bits, 0, 4);
}

/* out[m][16] of `mt` rows and one tile of integer codes. */
INLINE void NAME(integers)(const struct linear *op, const uint8_t *tile, const struct activations *rows, int first, int mt,
                           int bits, float *out)
{
    const struct matrix *w = op->matrix;
    const int blocks = activation_blocks(op), block = w->padded_k / blocks, chains = mt < CHAINS ? CHAINS / mt : 1;
    /* Codes after the last column are padding, and add nothing. Less than a whole tile of rows reads them all the same: it waits
     * for memory, and is slower where gaps interrupt what is fetched ahead (45 % at one row of 576 columns). */
    const int end = mt < HEIGHT ? w->padded_k : (w->k + 31) / 32 * 32;
    const int scale_step = w->scale_blocks > 1 ? LANES : 0;
    const uint8_t *scales = tile, *zeros = tile + (int64_t)w->scale_blocks * LANES * w->scale_bytes;
    const int32_t *q = (const int32_t *)((const int8_t *)rows->values + (int64_t)first * w->padded_k);
    const int32_t *sums = rows->sums + (int64_t)first * blocks;
    const float *x_scales = rows->scales + (int64_t)first * blocks;
    const int64_t ahead = bytes_ahead(w, rows, AHEAD);
    vf total[MAX_HEIGHT][VECS];
    UNROLL for (int m = 0; m < mt; m++)
        EACH(v) total[m][v] = vset(0.0f);
    for (int b = 0, at = 0; b < blocks; b++, at += block, q += block / 4 * mt, sums += mt, x_scales += mt) {
        const uint8_t *codes = tile + w->codes_offset + (int64_t)(at / 32) * 64 * bits;
        EACH(v) {
            vi sum[MAX_HEIGHT], zero = vseti(1);
            UNROLL for (int m = 0; m < mt; m++) {
                sum[m * chains] = vseti(sums[m]);
                UNROLL for (int c = 1; c < chains; c++)
                    sum[m * chains + c] = vseti(0);
            }
            if (w->has_zeros) {
                zero = vwiden8(zeros + v * VW);
                UNROLL for (int m = 0; m < mt; m++)
                    if (has_wide_sums(w, blocks))
                        sum[m * chains] *= zero;
                    else
                        sum[m * chains] = multiply16(zero, sum[m * chains]);
            }
            if (at < end)
                NAME(add_block)(codes, ahead, q, sum, v, mt, chains, bits, at, block < end - at ? block : end - at);
            const vf scale = w->scale_bytes == 2 ? vhalf(scales + 2 * VW * v) : LOADF(scales + 4 * VW * v);
            UNROLL for (int m = 0; m < mt; m++) {
                UNROLL for (int c = 1; c < chains; c++)
                    sum[m * chains] += sum[m * chains + c];
                total[m][v] = vfma(__builtin_convertvector(sum[m * chains], vf), scale * vset(x_scales[m]), total[m][v]);
            }
        }
        scales += scale_step * w->scale_bytes, zeros += scale_step;
    }
    UNROLL for (int m = 0; m < mt; m++)
        EACH(v) STOREF(out + m * LANES + v * VW, total[m][v]);
}

#ifdef vdot_wide
/* Add columns at .. at + block of two tiles to the sums, as add_block does for one. */
INLINE void NAME(add_block_to_both)(const uint8_t *codes, int64_t next, const int32_t *q, vi (*sum)[MAX_HEIGHT], int mt, int bits, int at,
                                    int block)
{
    const int end = at + block;
    if (at % 32 != 0) {
        NAME(add_to_both)(codes, next, q, sum, mt, bits, 4, 8);
        at += 16, codes += 64 * bits, q += 4 * mt;
    }
    for (; at + 32 <= end; at += 32, codes += 64 * bits, q += 8 * mt) {
        UNROLL for (int line = 0; line < bits; line++) {
            __builtin_prefetch(codes + AHEAD + 64 * line, 0, 3);
            __builtin_prefetch(codes + next + AHEAD + 64 * line, 0, 3);
        }
        NAME(add_to_both)(codes, next, q, sum, mt, bits, 0, 8);
    }
    if (at < end)
        NAME(add_to_both)(codes, next, q, sum, mt, bits, 0, 4);
}

/* out[t][m][16] of `mt` rows and two tiles of integer codes. Sums of codes are in registers, those of blocks in `out`. */
INLINE void NAME(integers_of_two)(const struct linear *op, const uint8_t *tile, const struct activations *rows, int first, int mt,
                                  int bits, float *out)
{
    const struct matrix *w = op->matrix;
    const int blocks = activation_blocks(op), block = w->padded_k / blocks, end = (w->k + 31) / 32 * 32;
    const int scale_step = w->scale_blocks > 1 ? LANES : 0;
    const uint8_t *scales = tile, *zeros = tile + (int64_t)w->scale_blocks * LANES * w->scale_bytes;
    const int32_t *q = (const int32_t *)((const int8_t *)rows->values + (int64_t)first * w->padded_k);
    const int32_t *sums = rows->sums + (int64_t)first * blocks;
    const float *x_scales = rows->scales + (int64_t)first * blocks;
    for (int i = 0; i < 2 * MAX_HEIGHT; i++)
        STOREF(out + i * LANES, vset(0.0f));
    for (int b = 0, at = 0; b < blocks; b++, at += block, q += block / 4 * mt, sums += mt, x_scales += mt) {
        const uint8_t *codes = tile + w->codes_offset + (int64_t)(at / 32) * 64 * bits;
        vi sum[2][MAX_HEIGHT];
        UNROLL for (int t = 0; t < 2; t++) {
            const vi zero = w->has_zeros ? vwiden8(zeros + t * w->tile_bytes) : vseti(1);
            UNROLL for (int m = 0; m < mt; m++) {
                sum[t][m] = vseti(sums[m]);
                if (w->has_zeros && has_wide_sums(w, blocks))
                    sum[t][m] *= zero;
                else if (w->has_zeros)
                    sum[t][m] = multiply16(zero, sum[t][m]);
            }
        }
        if (at < end)
            NAME(add_block_to_both)(codes, w->tile_bytes, q, sum, mt, bits, at, block < end - at ? block : end - at);
        UNROLL for (int t = 0; t < 2; t++) {
            const uint8_t *from = scales + t * w->tile_bytes;
            const vf scale = w->scale_bytes == 2 ? vhalf(from) : LOADF(from);
            UNROLL for (int m = 0; m < mt; m++) {
                float *total = out + (t * MAX_HEIGHT + m) * LANES;
                STOREF(total, vfma(__builtin_convertvector(sum[t][m], vf), scale * vset(x_scales[m]), LOADF(total)));
            }
        }
        scales += scale_step * w->scale_bytes, zeros += scale_step;
    }
}
#endif

/* VW elements of a row of 16 at p, from lane v * VW on; float8 as 1/256 of its value. */
INLINE vf NAME(elements)(const uint8_t *p, int v, int form)
{
    switch (form) {
    case FORM_FLOAT32: return LOADF(p + 4 * VW * v);
    case FORM_FLOAT16: return vhalf(p + 2 * VW * v);
    case FORM_BFLOAT16: return (vf)VSHIFT(vwiden16(p + 2 * VW * v), 16);
    default: return vfloat8(p + VW * v);
    }
}

/* Add column k of `nt` tiles, whose elements are at `codes`, times q to the sums. */
INLINE void NAME(add_column)(const uint8_t *codes, int64_t tile_bytes, const float *q, vf (*sum)[VECS], int mt, int nt, int form)
{
    if (mt <= 2) {
        UNROLL for (int t = 0; t < nt; t++)
            EACH(v) {
                const vf w = NAME(elements)(codes + t * tile_bytes, v, form);
                UNROLL for (int m = 0; m < mt; m++)
                    sum[t * mt + m][v] = vfma(w, vset(q[m]), sum[t * mt + m][v]);
            }
        return;
    }
    vf w[2][VECS];
    UNROLL for (int t = 0; t < nt; t++)
        EACH(v) w[t][v] = NAME(elements)(codes + t * tile_bytes, v, form);
    UNROLL for (int m = 0; m < mt; m++)
        UNROLL for (int t = 0; t < nt; t++)
            EACH(v) sum[t * mt + m][v] = vfma(w[t][v], vset(q[m]), sum[t * mt + m][v]);
}

/* out[t][m][16] of `mt` rows and `nt` tiles of floats: several, because one tile's sums wait for each other. */
INLINE void NAME(floats)(const struct linear *op, const uint8_t *tile, const struct activations *rows, int first, int mt,
                         int nt, int form, float *out)
{
    const struct matrix *w = op->matrix;
    const int bytes = LANES * (form == FORM_FLOAT32 ? 4 : form == FORM_FLOAT8 ? 1 : 2); /* of a column */
    const float *q = (const float *)rows->values + (int64_t)first * w->padded_k;
    const uint8_t *codes = tile + w->codes_offset;
    const int64_t ahead = bytes_ahead(w, rows, AHEAD) / 4;
    vf sum[4 * MAX_HEIGHT][VECS];
    UNROLL for (int i = 0; i < nt * mt; i++)
        EACH(v) sum[i][v] = vset(0.0f);
    int k = 0;
    for (; k + 4 <= w->k; k += 4, codes += 4 * bytes, q += 4 * mt) {
        UNROLL for (int t = 0; t < nt; t++)
            UNROLL for (int at = 0; at < 4 * bytes; at += 64)
                __builtin_prefetch(codes + t * w->tile_bytes + at + ahead, 0, 2);
        UNROLL for (int i = 0; i < 4; i++)
            NAME(add_column)(codes + i * bytes, w->tile_bytes, q + i * mt, sum, mt, nt, form);
    }
    for (; k < w->k; k++, codes += bytes, q += mt)
        NAME(add_column)(codes, w->tile_bytes, q, sum, mt, nt, form);
    UNROLL for (int t = 0; t < nt; t++)
        EACH(v) {
            vf scale = vset(1.0f);
            if (form == FORM_FLOAT8)
                scale = LOADF(tile + t * w->tile_bytes + 4 * VW * v);
            UNROLL for (int m = 0; m < mt; m++)
                STOREF(out + (t * MAX_HEIGHT + m) * LANES + v * VW, sum[t * mt + m][v] * scale);
        }
}

#endif

/* A function for every form and height. */
#define DOT(name, FORM, MT, function, ...)                                                                             \
    static TARGET void NAME(name##_##MT)(const struct linear *op, const uint8_t *tile, const struct activations *rows, \
                                         int first, float *out)                                                        \
    {                                                                                                                  \
        NAME(function)(op, tile, rows, first, MT, __VA_ARGS__, out);                                                   \
    }
#define INTEGERS(name, BITS, MT) DOT(name, BITS, MT, integers, BITS)
#define FLOATS(name, TILES, FORM, MT) DOT(name, FORM, MT, floats, TILES ? TILES : AT_ONCE(MT), FORM)
#define FOR_HEIGHTS(macro, ...)                                                                                        \
    macro(__VA_ARGS__, 1) macro(__VA_ARGS__, 2) macro(__VA_ARGS__, 3) macro(__VA_ARGS__, 4) MORE_HEIGHTS(macro, __VA_ARGS__)
#if HEIGHT == 12
#define MORE_HEIGHTS(macro, ...)                                                                                       \
    macro(__VA_ARGS__, 5) macro(__VA_ARGS__, 6) macro(__VA_ARGS__, 7) macro(__VA_ARGS__, 8) macro(__VA_ARGS__, 9)      \
        macro(__VA_ARGS__, 10) macro(__VA_ARGS__, 11) macro(__VA_ARGS__, 12)
#elif HEIGHT == 6
#define MORE_HEIGHTS(macro, ...) macro(__VA_ARGS__, 5) macro(__VA_ARGS__, 6)
#else
#define MORE_HEIGHTS(macro, ...)
#endif
#if HEIGHT == 12
#define EVERY(name)                                                                                                    \
    {NAME(name##_1), NAME(name##_2), NAME(name##_3), NAME(name##_4),  NAME(name##_5),  NAME(name##_6),                 \
     NAME(name##_7), NAME(name##_8), NAME(name##_9), NAME(name##_10), NAME(name##_11), NAME(name##_12)}
#elif HEIGHT == 6
#define EVERY(name) {NAME(name##_1), NAME(name##_2), NAME(name##_3), NAME(name##_4), NAME(name##_5), NAME(name##_6)}
#else
#define EVERY(name) {NAME(name##_1), NAME(name##_2), NAME(name##_3), NAME(name##_4)}
#endif
#define AT_ONCE(mt) ((mt) == 1 ? 4 : (mt) == 2 ? 2 * FLOAT_TILES : FLOAT_TILES) /* tiles of floats */

FOR_HEIGHTS(INTEGERS, int2, 2)
FOR_HEIGHTS(INTEGERS, int3, 3)
FOR_HEIGHTS(INTEGERS, int4, 4)
FOR_HEIGHTS(INTEGERS, int8, 8)
FOR_HEIGHTS(FLOATS, float32_one, 1, FORM_FLOAT32)
FOR_HEIGHTS(FLOATS, float16_one, 1, FORM_FLOAT16)
FOR_HEIGHTS(FLOATS, bfloat16_one, 1, FORM_BFLOAT16)
FOR_HEIGHTS(FLOATS, float8_one, 1, FORM_FLOAT8)
FOR_HEIGHTS(FLOATS, float32_some, 0, FORM_FLOAT32)
FOR_HEIGHTS(FLOATS, float16_some, 0, FORM_FLOAT16)
FOR_HEIGHTS(FLOATS, bfloat16_some, 0, FORM_BFLOAT16)
FOR_HEIGHTS(FLOATS, float8_some, 0, FORM_FLOAT8)

#ifdef vdot_wide
DOT(int2_two, 2, 12, integers_of_two, 2)
DOT(int3_two, 3, 12, integers_of_two, 3)
DOT(int4_two, 4, 12, integers_of_two, 4)
DOT(int8_two, 8, 12, integers_of_two, 8)
#endif

typedef void (*NAME(dot))(const struct linear *op, const uint8_t *tile, const struct activations *rows, int first, float *out);

/* One tile, and AT_ONCE(height) of floats, two of integers where the tile of rows is the tallest. */
static const NAME(dot) NAME(one_tile)[NUM_FORMS][HEIGHT] = {
    [FORM_FLOAT32] = EVERY(float32_one), [FORM_FLOAT16] = EVERY(float16_one), [FORM_BFLOAT16] = EVERY(bfloat16_one),
    [FORM_FLOAT8] = EVERY(float8_one),   [FORM_INT2] = EVERY(int2),           [FORM_INT3] = EVERY(int3),
    [FORM_INT4] = EVERY(int4),           [FORM_INT8] = EVERY(int8),
};
static const NAME(dot) NAME(some_tiles)[][HEIGHT] = {
    [FORM_FLOAT32] = EVERY(float32_some), [FORM_FLOAT16] = EVERY(float16_some), [FORM_BFLOAT16] = EVERY(bfloat16_some),
    [FORM_FLOAT8] = EVERY(float8_some),
#ifdef vdot_wide
    [FORM_INT2] = {[HEIGHT - 1] = NAME(int2_two_12)}, [FORM_INT3] = {[HEIGHT - 1] = NAME(int3_two_12)},
    [FORM_INT4] = {[HEIGHT - 1] = NAME(int4_two_12)}, [FORM_INT8] = {[HEIGHT - 1] = NAME(int8_two_12)},
#endif
};

/* Tiles that are multiplied at once by `mt` rows. */
static int NAME(tiles_at_once)(const struct matrix *w, int mt)
{
#ifdef vdot_wide
    const int of_integers = mt == HEIGHT ? 2 : 1;
#else
    const int of_integers = 1;
#endif
    return w->form <= FORM_FLOAT8 ? AT_ONCE(mt) : of_integers;
}

#include "low_rank_kernels.h"

/* alpha * y + bias, capped. */
INLINE vf NAME(linear_lanes)(const struct linear *op, const float *y, const float *bias)
{
    return NAME(capped)(op->cap, vfma(vset(op->alpha), LOADF(y), LOADF(bias)));
}

/* Store `mt` rows of one tile of output columns: y, and `up` with STORE_GATE. */
static TARGET void NAME(finish)(const struct linear *op, int unit, int first, int mt, const float *y, const float *up)
{
    const int gates = op->store == STORE_GATE, n = gates ? op->matrix->n / 2 : op->matrix->n, column = unit * LANES;
    const int count = n - column < LANES ? n - column : LANES;
    float biases[2][LANES] = {{0}}, space[LANES];
    for (int i = 0; op->bias && i < count; i++) {
        biases[0][i] = op->bias[column + i];
        biases[1][i] = gates ? op->bias[n + column + i] : 0;
    }
    for (int m = 0; m < mt; m++, y += LANES, up += LANES) {
        float *output = op->output.at + (first + m) * op->output.stride + column;
        const float *before = op->store == STORE_ADD ? NAME(lanes_at)(output, count, 0, space) : NULL;
        vf result[VECS];
        EACH(v) {
            const vf lanes = NAME(linear_lanes)(op, y + v * VW, biases[0] + v * VW);
            if (gates)
                result[v] = NAME(gated)(op->activation, op->numbers, lanes, NAME(linear_lanes)(op, up + v * VW, biases[1] + v * VW));
            else
                result[v] = NAME(activate)(op->activation, op->numbers, lanes);
            if (before)
                result[v] += LOADF(before + v * VW);
        }
        NAME(store_lanes)(output, count, result);
    }
}

/* What follows the matmul of rows first .. first + mt and of `tiles` tiles: their sums are `stride` floats apart. */
static TARGET void NAME(finish_tiles)(const struct linear *op, int unit, int tiles, const struct activations *rows, int first, int mt,
                                      float *sums, int stride)
{
    const int pair = op->store == STORE_GATE ? 2 : 1;
    for (int t = 0; rows->low_rank != NULL && t < tiles; t++)
        NAME(add_low_rank)(rows->low_rank, unit * pair + t, first, mt, sums + t * stride);
    for (int u = 0; u < tiles / pair; u++, sums += pair * stride)
        NAME(finish)(op, unit + u, first, mt, sums, sums + (pair - 1) * stride);
}

/* out[t][m][16] of `tiles` tiles from `tile` on. */
static TARGET void NAME(dot_tiles)(const struct linear *op, const uint8_t *tile, int tiles, const struct activations *rows,
                                   int first, int mt, float *out)
{
    const int is_float = op->matrix->form <= FORM_FLOAT8, some = NAME(tiles_at_once)(op->matrix, mt);
    for (int t = 0; t < tiles;) {
        const int together = (is_float || some > 1) && tiles - t >= some;
        const NAME(dot) dot = together ? NAME(some_tiles)[op->matrix->form][mt - 1] : NAME(one_tile)[op->matrix->form][mt - 1];
        dot(op, tile + t * op->matrix->tile_bytes, rows, first, out + t * MAX_HEIGHT * LANES);
        t += together ? some : 1;
    }
}

#ifdef TILES
#include TILES
#endif

static TARGET void NAME(multiply)(const struct linear *op, const struct activations *rows, int count, int begin, int end)
{
    const struct matrix *w = op->matrix;
    const int is_float = w->form <= FORM_FLOAT8, pair = op->store == STORE_GATE ? 2 : 1;
    const int together = NAME(tiles_at_once)(w, count < HEIGHT ? count : HEIGHT);
    const int units = together / pair > 1 ? together / pair : 1; /* at once */
    const int in_cache = CACHED_BYTES / ((is_float ? 4 : 1) * w->padded_k) / HEIGHT * HEIGHT;
    const int pass = in_cache > HEIGHT ? in_cache : HEIGHT; /* rows that stay in cache while tiles go by */
    float out[4 * MAX_HEIGHT * LANES] __attribute__((aligned(64)));
#ifdef TILES
    struct tile_sums sums;
    const int has_pieces = PIECE(op, rows, HEIGHT) != 0;
    if (has_pieces)
        NAME(begin_tiles)();
#endif
    for (int top = 0; top < count; top += pass)
        for (int unit = begin; unit < end; unit += units) {
            const int some = end - unit < units ? end - unit : units, bottom = count - top < pass ? count : top + pass;
            const uint8_t *tile = w->tiles + (int64_t)unit * pair * w->tile_bytes;
            int first = top;
#ifdef TILES
            while (has_pieces && bottom - first >= HEIGHT)
                first += NAME(multiply_tiles)(op, unit, some * pair, rows, first, bottom, &sums);
#endif
            for (; first < bottom; first += HEIGHT) {
                const int mt = bottom - first < HEIGHT ? bottom - first : HEIGHT;
                NAME(dot_tiles)(op, tile, some * pair, rows, first, mt, out);
                NAME(finish_tiles)(op, unit, some * pair, rows, first, mt, out, MAX_HEIGHT * LANES);
            }
        }
#ifdef TILES
    if (has_pieces)
        NAME(end_tiles)();
#endif
}

#undef DOT
#undef INTEGERS
#undef FLOATS
#undef FOR_HEIGHTS
#undef MORE_HEIGHTS
#undef EVERY
#undef AT_ONCE
