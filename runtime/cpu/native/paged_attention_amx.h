/* Attention in bfloat16 in the order of AMX, included once per instruction set after paged_attention_bfloat16.h.
 *
 * Operands are rounded, and the softmax is made, as in paged_attention_bfloat16.h. What is multiplied is added up in pieces of
 * 32 dims, and of 32 tokens at fixed positions, in the order of tdpbf16ps (Intel, Software Developer's Manual, volume 2):
 *     sum += (that of dims 0, 2, 4, ... of the piece, in order) + (that of dims 1, 3, 5, ...)
 *     score[t]   sum over the pieces of dims, from 0
 *     output[d]  output * alpha + sum over the tile's two pieces of tokens, from 0
 * With zeros for dims that are missing and tokens that are not visible. Nothing is subnormal, which AMX would flush: see there.
 */

/* c [rows, 16 * blocks] = a [rows, 16 * pieces] times b [16 * pieces, 16 * blocks], of pairs; rows are so many floats apart. */
struct NAME(matmul) {
    const float *a, *b;
    float *c;
    int a_stride, b_stride, c_stride, rows, pieces, blocks;
};

/* `rows` rows of one block. */
INLINE void NAME(multiply_rows)(const struct NAME(matmul) *p, int rows, const float *a, const float *b, float *c)
{
    vf total[4][16 / VW];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < 16 / VW; j++)
            total[r][j] = vset(0.0f);
    for (int piece = 0; piece < p->pieces; piece++, a += AMX_PAIRS, b += AMX_PAIRS * p->b_stride) {
        vf even[4][16 / VW], odd[4][16 / VW];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < 16 / VW; j++)
                even[r][j] = odd[r][j] = vset(0.0f);
        for (int i = 0; i < AMX_PAIRS; i++)
            UNROLL for (int j = 0; j < 16 / VW; j++) {
                const vi of_b = (vi)LOADF(b + i * p->b_stride + j * VW), upper = (vi)vset(-0.0f) >> 15; /* 0xffff0000 */
                UNROLL for (int r = 0; r < rows; r++) {
                    const vi of_a = (vi)vset(a[r * p->a_stride + i]);
                    even[r][j] = vfma((vf)VSHIFT(of_a, 16), (vf)VSHIFT(of_b, 16), even[r][j]);
                    odd[r][j] = vfma((vf)(of_a & upper), (vf)(of_b & upper), odd[r][j]);
                }
            }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < 16 / VW; j++)
                total[r][j] += even[r][j] + odd[r][j];
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < 16 / VW; j++)
            STOREF(c + r * p->c_stride + j * VW, total[r][j]);
}

static TARGET void NAME(multiply_tiles)(const struct NAME(matmul) *p)
{
    for (int n = 0; n < p->blocks; n++) {
        int r = 0;
        for (; r + 4 <= p->rows; r += 4)
            NAME(multiply_rows)(p, 4, p->a + r * p->a_stride, p->b + 16 * n, p->c + r * p->c_stride + 16 * n);
        for (; r < p->rows; r++)
            NAME(multiply_rows)(p, 1, p->a + r * p->a_stride, p->b + 16 * n, p->c + r * p->c_stride + 16 * n);
    }
}

#ifdef HAS_AMX
/* Registers 0 to 3 are sums of `rows` rows and blocks of columns, 4 is of a, and 5 to 7 of b. */
INLINE void NAME(begin_tiles)(int rows)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.row_bytes[i] = 64;
        shape.rows[i] = i < 5 ? rows : AMX_PAIRS;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(shape) : "memory");
}

/* Until the next begin_tiles the system saves none of these registers for this thread. */
INLINE void NAME(end_tiles)(void) { __asm__ volatile("tilerelease"); }

#define LOAD_ROWS(at, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm4" : : "r"(at), "r"(stride) : "memory")
#define ADD_BLOCK(SUM, OF_B, at, stride)                                                                               \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #OF_B "\n\ttdpbf16ps %%tmm" #OF_B ", %%tmm4, %%tmm" #SUM              \
                     :                                                                                                 \
                     : "r"(at), "r"(stride)                                                                            \
                     : "memory")
#define STORE_BLOCK(SUM, at, stride) __asm__ volatile("tilestored %%tmm" #SUM ", (%0,%1,1)" : : "r"(at), "r"(stride) : "memory")

/* The same by AMX: of at most four blocks, as many as a tile of keys or a row of value columns has. */
INLINE void NAME(multiply_by_amx)(const struct NAME(matmul) *p)
{
    const int64_t a_stride = 4 * (int64_t)p->a_stride, b_stride = 4 * (int64_t)p->b_stride, c_stride = 4 * (int64_t)p->c_stride;
    const float *a = p->a, *b = p->b;
    float *c = p->c;
    __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" : : : "memory");
    for (int piece = 0; piece < p->pieces; piece++, a += AMX_PAIRS, b += AMX_PAIRS * p->b_stride) {
        LOAD_ROWS(a, a_stride);
        ADD_BLOCK(0, 5, b, b_stride);
        if (p->blocks > 1)
            ADD_BLOCK(1, 6, b + 16, b_stride);
        if (p->blocks > 2)
            ADD_BLOCK(2, 7, b + 32, b_stride);
        if (p->blocks > 3)
            ADD_BLOCK(3, 5, b + 48, b_stride);
    }
    STORE_BLOCK(0, c, c_stride);
    if (p->blocks > 1)
        STORE_BLOCK(1, c + 16, c_stride);
    if (p->blocks > 2)
        STORE_BLOCK(2, c + 32, c_stride);
    if (p->blocks > 3)
        STORE_BLOCK(3, c + 48, c_stride);
}

#undef LOAD_ROWS
#undef ADD_BLOCK
#undef STORE_BLOCK
#else
INLINE void NAME(begin_tiles)(int rows) { (void)rows; }
INLINE void NAME(end_tiles)(void) {}
INLINE void NAME(multiply_by_amx)(const struct NAME(matmul) *p) { NAME(multiply_tiles)(p); }
#endif

INLINE void NAME(multiply_pairs)(int by_amx, const struct NAME(matmul) *p)
{
    if (by_amx)
        NAME(multiply_by_amx)(p);
    else
        NAME(multiply_tiles)(p);
}

/* Probabilities of a group's rows from their scores; meanwhile the next tile's keys are fetched, at the first group. */
INLINE void NAME(soften_group)(struct softening *s, const struct tile *tile, int rows, int prefetches)
{
    for (int r = 0; r < rows; r++)
        NAME(find_maxima)(s, tile, r, 1);
    for (int r = 0; r < rows; r += VW)
        STOREF(s->alpha + r, NAME(exp2_negative)(LOADF(s->rows->maximum + r) - LOADF(s->maxima + r)));
    memcpy(s->rows->maximum, s->maxima, rows * sizeof(float));
    while (s->row < rows) {
        for (int d = s->row * tile->dim / rows; prefetches && d < (s->row + 1) * tile->dim / rows; d++)
            NAME(prefetch_keys)(tile, 0, d);
        NAME(soften_pairs)(s);
    }
}

/* Output of a group's rows: output * alpha + probabilities @ values, 64 columns at a time. */
INLINE void NAME(weigh_group)(int by_amx, const struct softening *s, const struct tile *tile, int rows, int prefetches)
{
    float sums[AMX_ROWS * 64] __attribute__((aligned(64)));
    const int columns = tile->columns;
    for (int column = 0; column < columns; column += 64) {
        const int width = columns - column < 64 ? columns - column : 64;
        const struct NAME(matmul) matmul = {
            (const float *)s->weights + s->begin / 2, tile->value_pairs + s->begin / 2 * columns + column, sums, TILE / 2, columns,
            64, rows, (s->end - s->begin) / (2 * AMX_PAIRS), (width + 15) / 16};
        for (int t = column * TILE / columns; prefetches && t < (column + width) * TILE / columns; t++)
            NAME(prefetch_value)(tile, t);
        NAME(multiply_pairs)(by_amx, &matmul);
        for (int r = 0; r < rows; r++) {
            float *output = s->rows->output + r * columns + column;
            for (int i = 0; i < width; i += VW)
                STOREF(output + i, LOADF(output + i) * vset(s->alpha[r]) + LOADF(sums + r * 64 + i));
        }
    }
}

INLINE void NAME(attend_groups)(int by_amx, struct rows *groups, int count, const struct tile *tile, int rows)
{
    struct softening s;
    if (by_amx)
        NAME(begin_tiles)(rows);
    for (int n = 0; n < count; n++) {
        s.rows = &groups[n], s.row = 0;
        s.begin = groups[n].first / (2 * AMX_PAIRS) * (2 * AMX_PAIRS);
        s.end = (groups[n].last + 2 * AMX_PAIRS - 1) / (2 * AMX_PAIRS) * (2 * AMX_PAIRS);
        const int depth = amx_pairs(tile->dim);
        const struct NAME(matmul) matmul = {groups[n].query, tile->key_pairs + s.begin, s.scores + s.begin, depth, TILE, TILE,
                                              rows, depth / AMX_PAIRS, (s.end - s.begin) / 16};
        NAME(multiply_pairs)(by_amx, &matmul);
        NAME(soften_group)(&s, tile, rows, n == 0);
        NAME(weigh_group)(by_amx, &s, tile, rows, n == 0);
    }
    if (by_amx)
        NAME(end_tiles)();
}

static TARGET void NAME(attend_in_tiles)(struct rows *groups, int count, const struct tile *tile, int rows)
{
    NAME(attend_groups)(0, groups, count, tile, rows);
}

#ifdef HAS_AMX
static TARGET void NAME(attend_by_amx)(struct rows *groups, int count, const struct tile *tile, int rows)
{
    NAME(attend_groups)(1, groups, count, tile, rows);
}
#endif
