/* Low-rank changes of linear operations (launch.h), included once per instruction set by matmul_kernels.h. */

/* sum[m] of codes [count][16] times x[m] [count], one lane for each of the 16. */
INLINE void NAME(sum_columns)(const uint8_t *codes, const float *const *x, int count, int mt, int form, vf (*sum)[VECS])
{
    const int bytes = LANES * (form == FORM_FLOAT32 ? 4 : 2);
    vf part[LOW_RANK_ROWS][4][VECS];
    UNROLL for (int m = 0; m < mt; m++)
        UNROLL for (int j = 0; j < 4; j++)
            EACH(v) part[m][j][v] = vset(0.0f);
    int i = 0;
    for (; i + 4 <= count; i += 4, codes += 4 * bytes)
        UNROLL for (int j = 0; j < 4; j++)
            EACH(v) {
                const vf w = (vf)NAME(elements)(codes + j * bytes, v, form);
                UNROLL for (int m = 0; m < mt; m++)
                    part[m][j][v] = vfma(w, vset(x[m][i + j]), part[m][j][v]);
            }
    UNROLL for (int j = 0; j < 3; j++)
        if (i + j < count)
            EACH(v) {
                const vf w = (vf)NAME(elements)(codes + j * bytes, v, form);
                UNROLL for (int m = 0; m < mt; m++)
                    part[m][j][v] = vfma(w, vset(x[m][i + j]), part[m][j][v]);
            }
    UNROLL for (int m = 0; m < mt; m++)
        EACH(v) sum[m][v] = (part[m][0][v] + part[m][1][v]) + (part[m][2][v] + part[m][3][v]);
}

INLINE void NAME(sum_columns_of)(const uint8_t *codes, const float *const *x, int count, int mt, int form, vf (*sum)[VECS])
{
    switch (form) {
    case FORM_FLOAT32: NAME(sum_columns)(codes, x, count, mt, FORM_FLOAT32, sum); break;
    case FORM_FLOAT16: NAME(sum_columns)(codes, x, count, mt, FORM_FLOAT16, sum); break;
    default: NAME(sum_columns)(codes, x, count, mt, FORM_BFLOAT16, sum); break;
    }
}

/* `mt` rows of x times tiles begin .. end of A. */
INLINE void NAME(project)(const struct matrix *a, const float *const *x, int mt, float *y, int64_t stride, int begin, int end)
{
    for (int tile = begin; tile < end; tile++) {
        vf sum[LOW_RANK_ROWS][VECS];
        NAME(sum_columns_of)(a->tiles + tile * a->tile_bytes, x, a->k, mt, a->form, sum);
        UNROLL for (int m = 0; m < mt; m++)
            EACH(v) STOREF(y + m * stride + tile * LANES + v * VW, sum[m][v]);
    }
}

static TARGET void NAME(project_rows)(const struct matrix *a, const float *const *x, int count, float *y, int64_t stride, int begin,
                                      int end)
{
    if (VECS == 1 && count == LOW_RANK_ROWS) { /* their sums fill the registers of AVX-512 */
        NAME(project)(a, x, LOW_RANK_ROWS, y, stride, begin, end);
        return;
    }
    for (int m = 0; m < count; m++)
        NAME(project)(a, x + m, 1, y + m * stride, stride, begin, end);
}

/* Add to y [mt][16], rows first .. of one tile of the matrix, what their adapters change. */
static TARGET void NAME(add_low_rank)(const struct low_rank_rows *rows, int tile, int first, int mt, float *y)
{
    for (int m = 0; m < mt; m++, y += LANES) {
        const int slot = rows->slots[first + m];
        const struct low_rank *change = slot < 0 ? NULL : rows->changes[slot];
        if (change == NULL || change->tiles[tile].count == 0)
            continue;
        const struct low_rank_tile *own = &change->tiles[tile];
        const float *x = rows->results + rows->places[first + m] * rows->stride + own->first;
        vf sum[1][VECS];
        NAME(sum_columns_of)(change->b + own->at, &x, own->count, 1, change->b_form, sum);
        EACH(v) STOREF(y + v * VW, LOADF(y + v * VW) + sum[0][v]);
    }
}
