/* The matmul of NEON, in place of that of matmul_kernels.h, which includes this once for each set of kernels_neon.h.
 *
 * 32 registers of 4 lanes hold the sums of 12 rows and 4 columns, or of 6 and 16; one load has 4 words of activations, each
 * a lane of dot or fma. Codes of 8 bits are less by 128 here, so that all codes are signed. DOTS says how they are multiplied:
 *
 *     WIDENING   smull: terms of 16 bits, added to sums of 32. With codes of 4 bits they are added in 16 bits first: eight of
 *                at most 15 * 128, in pairs
 *     BY_LANE    sdot: a lane of sums is a column, of one row
 *     OF_PAIRS   smmla, from two rows on: a register of sums has two columns of two rows. sum[2 p] and sum[2 p + 1] are of
 *                rows 2 p and 2 p + 1; a last row that is alone is taken twice
 */

/* Codes 4 group .. of the 32 that begin at `codes`: four lanes of four bytes from lane 4 v on. */
INLINE int8x16_t NAME(codes_of)(const uint8_t *codes, int v, int bits, int group)
{
    const int lines = bits == 8 ? group : bits == 4 ? group / 2 : group / 4;
    uint8x16_t c = vld1q_u8(codes + 64 * lines + 16 * v);
    if (bits == 8)
        return vreinterpretq_s8_u8(veorq_u8(c, vdupq_n_u8(128)));
    if (bits == 4)
        return vreinterpretq_s8_u8(group % 2 ? c >> 4 : c & vdupq_n_u8(15));
    c = group % 4 == 3 ? c >> 6 : c >> 2 * (group % 4) & vdupq_n_u8(3);
    if (bits == 2)
        return vreinterpretq_s8_u8(c);
    const uint8x16_t high = vld1q_u8(codes + 128 + 16 * v), moved = group < 2 ? high << (2 - group) : high >> (group - 2);
    return vreinterpretq_s8_u8(c | (moved & vdupq_n_u8(4)));
}

#if DOTS == WIDENING
/* Add groups begin .. end of 32 codes, times q, to the sums of columns 4 v .. of `mt` rows. */
INLINE void NAME(add_groups)(const uint8_t *codes, const int32_t *q, int32x4_t *sum, int v, int mt, int bits, int begin, int end)
{
    int16x8_t low[MAX_HEIGHT], high[MAX_HEIGHT]; /* of two columns each: four terms of either */
    int32x4_t pairs[MAX_HEIGHT][2];
    UNROLL for (int m = 0; m < mt; m++) {
        low[m] = high[m] = vdupq_n_s16(0);
        pairs[m][0] = pairs[m][1] = vdupq_n_s32(0);
    }
    UNROLL for (int g = begin; g < end; g++) {
        const int8x16_t c = NAME(codes_of)(codes, v, bits, g);
        UNROLL for (int m = 0; m < mt; m++) {
            const int8x16_t x = vreinterpretq_s8_s32(vld1q_dup_s32(q + (g - begin) * mt + m));
            if (bits == 8) {
                pairs[m][0] = vpadalq_s16(pairs[m][0], vmull_s8(vget_low_s8(c), vget_low_s8(x)));
                pairs[m][1] = vpadalq_s16(pairs[m][1], vmull_high_s8(c, x));
            } else {
                low[m] = vmlal_s8(low[m], vget_low_s8(c), vget_low_s8(x));
                high[m] = vmlal_high_s8(high[m], c, x);
            }
        }
    }
    UNROLL for (int m = 0; m < mt; m++)
        sum[m] = bits == 8 ? vaddq_s32(sum[m], vpaddq_s32(pairs[m][0], pairs[m][1]))
                           : vpadalq_s16(sum[m], vpaddq_s16(low[m], high[m]));
}
#else
INLINE void NAME(add_groups)(const uint8_t *codes, const int32_t *q, int32x4_t *sum, int v, int mt, int bits, int begin, int end)
{
#if DOTS == OF_PAIRS
    UNROLL for (int g = begin; mt > 1 && g < end; g += 2) {
        const int8x16_t a = NAME(codes_of)(codes, v, bits, g), b = NAME(codes_of)(codes, v, bits, g + 1);
        const int32x4_t words[2] = {vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)};
        const int8x16_t columns[2] = {vreinterpretq_s8_s32(vzip1q_s32(words[0], words[1])),
                                      vreinterpretq_s8_s32(vzip2q_s32(words[0], words[1]))};
        UNROLL for (int m = 0; m < mt; m += 2) {
            const int32_t *at = q + (g - begin) * mt + 2 * m;
            const int32x4_t pair = m + 1 < mt ? vld1q_s32(at) : vcombine_s32(vld1_s32(at), vld1_s32(at));
            sum[m] = vmmlaq_s32(sum[m], columns[0], vreinterpretq_s8_s32(pair));
            sum[m + 1] = vmmlaq_s32(sum[m + 1], columns[1], vreinterpretq_s8_s32(pair));
        }
    }
    if (mt > 1)
        return;
#endif
    UNROLL for (int g = begin; g < end; g++) {
        const int8x16_t c = NAME(codes_of)(codes, v, bits, g);
        UNROLL for (int m = 0; m < mt; m++) {
            const int word = (g - begin) * mt + m;
            const int8x16_t four = vreinterpretq_s8_s32(vld1q_s32(q + word / 4 * 4));
            sum[m] = neon_dot_lane(sum[m], c, four, word % 4);
        }
    }
}
#endif

/* Sums by rows to sums of pairs of rows, and back. */
INLINE void NAME(pair_up)(int32x4_t *sum, int mt)
{
    UNROLL for (int m = 0; DOTS == OF_PAIRS && mt > 1 && m < mt; m += 2) {
        const int32x4_t a = sum[m], b = m + 1 < mt ? sum[m + 1] : a;
        sum[m] = vzip1q_s32(a, b);
        sum[m + 1] = vzip2q_s32(a, b);
    }
}

INLINE void NAME(part_again)(int32x4_t *sum, int mt)
{
    UNROLL for (int m = 0; DOTS == OF_PAIRS && mt > 1 && m < mt; m += 2) {
        const int32x4_t a = sum[m], b = sum[m + 1];
        sum[m] = vuzp1q_s32(a, b);
        sum[m + 1] = vuzp2q_s32(a, b);
    }
}

/* What the sums of a block begin with, for the zero points; `sums` as round_row left them. */
INLINE void NAME(begin_sums)(const struct matrix *w, int blocks, const int32_t *sums, const uint8_t *zeros, int mt, int bits, int32x4_t *sum)
{
    if (!w->has_zeros) {
        UNROLL for (int m = 0; m < mt; m++)
            sum[m] = vdupq_n_s32(bits == 8 ? 0 : sums[m]);
        return;
    }
    uint32_t four;
    memcpy(&four, zeros, sizeof four);
    const int16x4_t wide = vreinterpret_s16_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
    const int32x4_t zero = vmovl_s16(bits == 8 ? vsub_s16(wide, vdup_n_s16(128)) : wide);
    UNROLL for (int m = 0; m < mt; m++)
        sum[m] = vmulq_n_s32(zero, has_wide_sums(w, blocks) ? sums[m] : (int16_t)sums[m]);
}

/* Add a block, whose columns begin at `at`, to the sums of columns 4 v .. 4 (v + vectors). q: of column `at`. */
INLINE void NAME(add_block)(const uint8_t *codes, const int32_t *q, int32x4_t (*sum)[MAX_HEIGHT], int v, int vectors, int mt,
                            int bits, int at, int block)
{
    const int end = at + block;
    codes += (int64_t)(at / 32) * 64 * bits;
    if (at % 32 != 0) {
        UNROLL for (int i = 0; i < vectors; i++)
            NAME(add_groups)(codes, q, sum[i], v + i, mt, bits, 4, 8);
        at += 16, codes += 64 * bits, q += 4 * mt;
    }
    for (; at + 32 <= end; at += 32, codes += 64 * bits, q += 8 * mt)
        UNROLL for (int i = 0; i < vectors; i++)
            NAME(add_groups)(codes, q, sum[i], v + i, mt, bits, 0, 8);
    if (at < end)
        UNROLL for (int i = 0; i < vectors; i++)
            NAME(add_groups)(codes, q, sum[i], v + i, mt, bits, 0, 4);
}

/* out[m][16] of `mt` rows and one tile of integer codes. */
INLINE void NAME(integers)(const struct linear *op, const uint8_t *tile, const struct activations *rows, int first, int mt,
                           int bits, float *out)
{
    const struct matrix *w = op->matrix;
    const int blocks = activation_blocks(op), block = w->padded_k / blocks;
    const int columns = mt < HEIGHT ? w->padded_k : (w->k + 31) / 32 * 32; /* as in matmul_kernels.h */
    const int vectors = mt <= 2 ? 4 : mt <= 4 ? 2 : 1; /* of columns at once: few rows leave room for more sums */
    const int scale_step = w->scale_blocks > 1 ? LANES : 0;
    const uint8_t *scales = tile, *zeros = tile + (int64_t)w->scale_blocks * LANES * w->scale_bytes;
    const int32_t *q = (const int32_t *)((const int8_t *)rows->values + (int64_t)first * w->padded_k);
    const int32_t *sums = rows->sums + (int64_t)first * blocks;
    const float *x_scales = rows->scales + (int64_t)first * blocks;
    float32x4_t total[VECS][MAX_HEIGHT];
    UNROLL for (int m = 0; m < mt; m++)
        EACH(v) total[v][m] = vdupq_n_f32(0.0f);
    for (int b = 0; b < blocks; b++, q += block / 4 * mt, sums += mt, x_scales += mt) {
        for (int v = 0; v < VECS; v += vectors) {
            int32x4_t sum[VECS][MAX_HEIGHT];
            UNROLL for (int i = 0; i < vectors; i++) {
                NAME(begin_sums)(w, blocks, sums, zeros + 4 * (v + i), mt, bits, sum[i]);
                NAME(pair_up)(sum[i], mt);
            }
            const int at = b * block, size = block < columns - at ? block : columns - at;
            if (size > 0)
                NAME(add_block)(tile + w->codes_offset, q, sum, v, vectors, mt, bits, at, size);
            UNROLL for (int i = 0; i < vectors; i++) {
                const int four = 4 * (v + i);
                const float32x4_t scale =
                    w->scale_bytes == 2 ? neon_half(scales + 2 * four) : (float32x4_t)LOADF(scales + 4 * four);
                NAME(part_again)(sum[i], mt);
                UNROLL for (int m = 0; m < mt; m++)
                    total[v + i][m] =
                        vfmaq_f32(total[v + i][m], vcvtq_f32_s32(sum[i][m]), vmulq_n_f32(scale, x_scales[m]));
            }
        }
        scales += scale_step * w->scale_bytes, zeros += scale_step;
    }
    UNROLL for (int m = 0; m < mt; m++)
        EACH(v) vst1q_f32(out + m * LANES + 4 * v, total[v][m]);
}

/* Four elements of a row of 16 at p, from lane 4 v on; float8 as 1/256 of its value. */
INLINE float32x4_t NAME(elements)(const uint8_t *p, int v, int form)
{
    switch (form) {
    case FORM_FLOAT32: return (float32x4_t)LOADF(p + 16 * v);
    case FORM_FLOAT16: return neon_half(p + 8 * v);
    case FORM_BFLOAT16: return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * v)), 16));
    default: return neon_float8(p + 4 * v);
    }
}

/* out[t][m][4 v .. 4 (v + vectors)] of `mt` rows and `nt` tiles of floats. */
INLINE void NAME(columns_of_floats)(const struct matrix *w, const uint8_t *tile, const float *q, int v, int vectors, int mt,
                                    int nt, int form, float *out)
{
    const int bytes = LANES * (form == FORM_FLOAT32 ? 4 : form == FORM_FLOAT8 ? 1 : 2); /* of a column */
    const uint8_t *codes = tile + w->codes_offset;
    float32x4_t sum[4][VECS][MAX_HEIGHT];
    UNROLL for (int t = 0; t < nt; t++)
        UNROLL for (int i = 0; i < vectors; i++)
            UNROLL for (int m = 0; m < mt; m++)
                sum[t][i][m] = vdupq_n_f32(0.0f);
    int k = 0;
    for (; k + 4 <= w->k; k += 4, codes += 4 * bytes, q += 4 * mt)
        UNROLL for (int j = 0; j < 4; j++)
            UNROLL for (int t = 0; t < nt; t++)
                UNROLL for (int i = 0; i < vectors; i++) {
                    const float32x4_t x = NAME(elements)(codes + t * w->tile_bytes + j * bytes, v + i, form);
                    UNROLL for (int m = 0; m < mt; m++) {
                        const int at = j * mt + m;
                        sum[t][i][m] = neon_fma_lane(sum[t][i][m], x, vld1q_f32(q + at / 4 * 4), at % 4);
                    }
                }
    for (; k < w->k; k++, codes += bytes, q += mt)
        UNROLL for (int t = 0; t < nt; t++)
            UNROLL for (int i = 0; i < vectors; i++)
                UNROLL for (int m = 0; m < mt; m++)
                    sum[t][i][m] =
                        vfmaq_n_f32(sum[t][i][m], NAME(elements)(codes + t * w->tile_bytes, v + i, form), q[m]);
    UNROLL for (int t = 0; t < nt; t++)
        UNROLL for (int i = 0; i < vectors; i++) {
            const float32x4_t one = vdupq_n_f32(1.0f);
            const float32x4_t scale =
                form == FORM_FLOAT8 ? (float32x4_t)LOADF(tile + t * w->tile_bytes + 16 * (v + i)) : one;
            UNROLL for (int m = 0; m < mt; m++)
                vst1q_f32(out + (t * MAX_HEIGHT + m) * LANES + 4 * (v + i), vmulq_f32(sum[t][i][m], scale));
        }
}

/* out[t][m][16] of `mt` rows and `nt` tiles of floats. */
INLINE void NAME(floats)(const struct linear *op, const uint8_t *tile, const struct activations *rows, int first, int mt,
                         int nt, int form, float *out)
{
    const struct matrix *w = op->matrix;
    const float *q = (const float *)rows->values + (int64_t)first * w->padded_k;
    const int vectors = mt <= 6 ? VECS : 2, together = mt == 1 || nt < 2 ? nt : mt == 2 ? 2 : 1; /* 24 sums at most */
    for (int t = 0; t < nt; t += together)
        for (int v = 0; v < VECS; v += vectors)
            NAME(columns_of_floats)(w, tile + t * w->tile_bytes, q, v, vectors, mt, together, form,
                                    out + t * MAX_HEIGHT * LANES);
}
#undef DOTS
