/* The matmul of integers by AMX, for whole tiles of rows. Included by matmul_kernels.h. The bits are those of every other
 * instruction set, as sums of codes are exact.
 *
 * A register holds 64 columns of a tile of rows, which are in one piece of memory; another, the codes of these columns, 4 bytes of
 * each of 16 output columns in a line, as weights of 8 bits are stored and others are unpacked, once for many rows. Two tiles of
 * codes are multiplied at once, and two blocks where they are short: a multiplication's latency is three times its issue interval, so
 * independent sums hide it. Sums of a block go through memory into vectors, which multiply them by both scales.
 */

enum {
    TILE_BLOCKS = 4, /* whose sums are added to the totals at once */
    CHUNK = TILE_BLOCK, /* columns that are unpacked at once, at most */
    STRETCH = 24,    /* tiles of rows that codes are unpacked for, at most */
    LINE = 64,       /* bytes of a register's row */
};

/* Of two tiles of codes, and a stretch of rows: 60 KB of a thread's stack, which has 128 with musl. */
struct tile_sums {
    union {
        float totals[2][HEIGHT * LANES];
        int32_t partial[2][HEIGHT * LANES]; /* where all columns are one block, until it ends */
    } rows[STRETCH];
    int32_t sums[TILE_BLOCKS][2][HEIGHT * LANES]; /* of a tile of rows */
    uint8_t codes[2][CHUNK * LANES];
};

/* Registers 0 and 1 are sums of two tiles of codes, 2 and 3 those of the next block; 4 and 5 rows of either; 6 and 7 codes. */
static TARGET void NAME(begin_tiles)(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.row_bytes[i] = LINE;
        shape.rows[i] = i < 6 ? HEIGHT : LINE / 4;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(shape) : "memory");
}

/* Until the next begin_tiles the system saves none of these registers for this thread. */
static TARGET void NAME(end_tiles)(void) { __asm__ volatile("tilerelease"); }

/* Add 64 columns of the rows at x times the codes of two tiles to two registers of sums. */
#define MULTIPLY_PIECE(SUM, NEXT_SUM, ROWS, x, codes, next_codes)                                                      \
    __asm__ volatile("tileloadd (%0,%3,1), %%tmm" #ROWS "\n\t"                                                         \
                     "tileloadd (%1,%3,1), %%tmm6\n\t"                                                                 \
                     "tileloadd (%2,%3,1), %%tmm7\n\t"                                                                 \
                     "tdpbsud %%tmm6, %%tmm" #ROWS ", %%tmm" #SUM "\n\t"                                               \
                     "tdpbsud %%tmm7, %%tmm" #ROWS ", %%tmm" #NEXT_SUM                                                 \
                     :                                                                                                 \
                     : "r"(x), "r"(codes), "r"(next_codes), "r"((int64_t)LINE)                                         \
                     : "memory")
#define STORE_SUMS(SUM, NEXT_SUM, to)                                                                                  \
    __asm__ volatile("tilestored %%tmm" #SUM ", (%0,%2,1)\n\ttilestored %%tmm" #NEXT_SUM ", (%1,%2,1)"                 \
                     :                                                                                                 \
                     : "r"((to)[0]), "r"((to)[1]), "r"((int64_t)LINE)                                                  \
                     : "memory")

/* to[t] = sums of `columns` columns of the rows at x and of two tiles of codes; begun at 0, or at from[t]. */
INLINE void NAME(multiply_block)(const int8_t *x, const uint8_t *codes, const uint8_t *next_codes, int columns,
                                 const int32_t (*from)[HEIGHT * LANES], int32_t (*to)[HEIGHT * LANES])
{
    if (from)
        __asm__ volatile("tileloadd (%0,%2,1), %%tmm0\n\ttileloadd (%1,%2,1), %%tmm1"
                         :
                         : "r"(from[0]), "r"(from[1]), "r"((int64_t)LINE)
                         : "memory");
    else
        __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1" : : : "memory");
    for (int i = 0; i < columns; i += LINE)
        MULTIPLY_PIECE(0, 1, 4, x + i * HEIGHT, codes + i * LANES, next_codes + i * LANES);
    STORE_SUMS(0, 1, to);
}

/* The same of two blocks of `columns` columns. */
INLINE void NAME(multiply_two_blocks)(const int8_t *x, const uint8_t *codes, const uint8_t *next_codes, int columns,
                                      int32_t (*to)[2][HEIGHT * LANES])
{
    __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" : : : "memory");
    for (int i = 0, j = columns; i < columns; i += LINE, j += LINE) {
        MULTIPLY_PIECE(0, 1, 4, x + i * HEIGHT, codes + i * LANES, next_codes + i * LANES);
        MULTIPLY_PIECE(2, 3, 5, x + j * HEIGHT, codes + j * LANES, next_codes + j * LANES);
    }
    STORE_SUMS(0, 1, to[0]);
    STORE_SUMS(2, 3, to[1]);
}

#undef MULTIPLY_PIECE
#undef STORE_SUMS

/* The codes of columns at .. at + columns, multiples of 32, as bytes: themselves where they have 8 bits, else in `space`. */
static TARGET const uint8_t *NAME(unpack)(const struct matrix *w, const uint8_t *tile, int at, int columns, uint8_t *space)
{
    const int bits = code_bits(w);
    const uint8_t *codes = tile + w->codes_offset + (int64_t)at * 2 * bits;
    if (bits == 8)
        return codes;
    for (int i = 0; i < columns; i += 32, codes += 64 * bits)
        UNROLL for (int group = 0; group < 8; group++) {
            vi *to = (vi *)(space + i * LANES + 64 * group);
            switch (bits) {
            case 2: *to = NAME(codes_of)(codes, 0, 2, group); break;
            case 3: *to = NAME(codes_of)(codes, 0, 3, group); break;
            default: *to = NAME(codes_of)(codes, 0, 4, group); break;
            }
        }
    return space;
}

enum zeros { NO_ZEROS, SHORT_ZEROS, WIDE_ZEROS };

/* totals [HEIGHT][16] += scales * (sums + what the zero points add), of `count` blocks, one after the other. */
INLINE void NAME(add_sums)(const int32_t (*sums)[2][HEIGHT * LANES], const int32_t *row_sums, const float *row_scales, int count,
                           const vf *scales, const vi *zeros, enum zeros kind, float *totals)
{
    for (int m = 0; m < HEIGHT; m++) {
        vf total = LOADF(totals + m * LANES);
        UNROLL for (int b = 0; b < count; b++) {
            vi sum = LOADI(sums[b][0] + m * LANES);
            const vi more = vseti(row_sums[b * HEIGHT + m]);
            if (kind == NO_ZEROS)
                sum += more;
            else if (kind == SHORT_ZEROS)
                sum = add_multiply16(sum, zeros[b], more);
            else
                sum += zeros[b] * more;
            total = vfma(__builtin_convertvector(sum, vf), scales[b] * vset(row_scales[b * HEIGHT + m]), total);
        }
        STOREF(totals + m * LANES, total);
    }
}

/* The same with the scales and zero points of blocks first_block .. first_block + count of a tile of codes. */
static TARGET void NAME(add_blocks)(const struct matrix *w, const uint8_t *tile, int first_block, int count, enum zeros kind,
                                    const int32_t (*sums)[2][HEIGHT * LANES], const int32_t *row_sums, const float *row_scales,
                                    float *totals)
{
    const uint8_t *zeros_of = tile + (int64_t)w->scale_blocks * LANES * w->scale_bytes;
    vf scales[TILE_BLOCKS];
    vi zeros[TILE_BLOCKS];
    for (int b = 0; b < count; b++) {
        const int64_t at = w->scale_blocks > 1 ? (int64_t)(first_block + b) * LANES : 0;
        scales[b] = w->scale_bytes == 2 ? vhalf(tile + 2 * at) : LOADF(tile + 4 * at);
        zeros[b] = kind == NO_ZEROS ? vseti(0) : vwiden8(zeros_of + at);
    }
#define CASE(COUNT, KIND)                                                                                              \
    case COUNT * 3 + KIND: NAME(add_sums)(sums, row_sums, row_scales, COUNT, scales, zeros, KIND, totals); break;
    switch (count * 3 + (int)kind) {
        CASE(1, NO_ZEROS) CASE(1, SHORT_ZEROS) CASE(1, WIDE_ZEROS)
        CASE(2, NO_ZEROS) CASE(2, SHORT_ZEROS) CASE(2, WIDE_ZEROS)
        CASE(3, NO_ZEROS) CASE(3, SHORT_ZEROS) CASE(3, WIDE_ZEROS)
        CASE(4, NO_ZEROS) CASE(4, SHORT_ZEROS) CASE(4, WIDE_ZEROS)
    }
#undef CASE
}

/* Totals of rows top .. bottom, whole tiles, and of two tiles of codes, which may be the same. */
static TARGET void NAME(multiply_stretch)(const struct linear *op, const uint8_t *const *tiles, const struct activations *rows, int top,
                                          int bottom, struct tile_sums *space)
{
    const struct matrix *w = op->matrix;
    const int blocks = activation_blocks(op), block = w->padded_k / blocks;
    const int at_once = block > CHUNK ? 1 : CHUNK / block < TILE_BLOCKS ? CHUNK / block : TILE_BLOCKS;
    const enum zeros kind = !w->has_zeros ? NO_ZEROS : has_wide_sums(w, blocks) ? WIDE_ZEROS : SHORT_ZEROS;
    const int bits = code_bits(w);
    for (int r = 0; blocks > 1 && r < (bottom - top) / HEIGHT; r++)
        memset(space->rows[r].totals, 0, sizeof space->rows[r].totals);
    for (int b = 0, at = 0; b < blocks;) { /* a chunk: some blocks, or columns of one */
        const int count = blocks - b < at_once ? blocks - b : at_once, left = (b + count) * block - at;
        const int columns = left < CHUNK ? left : CHUNK, each = columns / count, begins = at == b * block, ends = columns == left;
        const uint8_t *codes[2];
        for (int t = 0; t < 2; t++)
            codes[t] = NAME(unpack)(w, tiles[t], at, columns, space->codes[t]);
        /* The next chunk's codes are fetched a few lines for each tile of rows, as a burst would keep this chunk's rows waiting. */
        const int64_t next = at + columns < w->padded_k ? w->codes_offset + (int64_t)(at + columns) * 2 * bits : 2 * w->tile_bytes;
        for (int first = top, r = 0; first < bottom; first += HEIGHT, r++) {
            for (int line = r; line < CHUNK / 32 * bits; line += (bottom - top) / HEIGHT) {
                __builtin_prefetch(tiles[0] + next + line * LINE, 0, 2);
                __builtin_prefetch(tiles[1] + next + line * LINE, 0, 2);
            }
            const int8_t *x = (const int8_t *)rows->values + (int64_t)first * w->padded_k + (int64_t)at * HEIGHT;
            const int64_t place = (int64_t)first * blocks + (int64_t)b * HEIGHT;
            int i = 0;
            for (; i + 2 <= count; i += 2)
                NAME(multiply_two_blocks)(x + i * each * HEIGHT, codes[0] + i * each * LANES, codes[1] + i * each * LANES, each,
                                          space->sums + i);
            if (i < count)
                NAME(multiply_block)(x + i * each * HEIGHT, codes[0] + i * each * LANES, codes[1] + i * each * LANES, each,
                                     begins ? NULL : space->rows[r].partial, ends ? space->sums[i] : space->rows[r].partial);
            if (ends && blocks == 1)
                memset(space->rows[r].totals, 0, sizeof space->rows[r].totals);
            for (int t = 0; ends && t < 2; t++)
                NAME(add_blocks)(w, tiles[t], b, count, kind, (const int32_t (*)[2][HEIGHT * LANES])&space->sums[0][t],
                                 rows->sums + place, rows->scales + place, space->rows[r].totals[t]);
        }
        at += columns;
        b += ends ? count : 0;
    }
}

/* Whole tiles of rows first .. bottom, a stretch of them at most, times one or two tiles of codes. Returns the number of rows. */
static TARGET int NAME(multiply_tiles)(const struct linear *op, int unit, int count, const struct activations *rows, int first,
                                       int bottom, struct tile_sums *sums)
{
    const struct matrix *w = op->matrix;
    const uint8_t *tile = w->tiles + (int64_t)unit * (op->store == STORE_GATE ? 2 : 1) * w->tile_bytes;
    const uint8_t *const tiles[2] = {tile, count == 2 ? tile + w->tile_bytes : tile};
    const int most = STRETCH * HEIGHT, whole = (bottom - first < most ? bottom - first : most) / HEIGHT * HEIGHT;
    NAME(multiply_stretch)(op, tiles, rows, first, first + whole, sums);
    for (int r = 0; r < whole; r += HEIGHT)
        NAME(finish_tiles)(op, unit, count, rows, first + r, HEIGHT, sums->rows[r / HEIGHT].totals[0], HEIGHT * LANES);
    return whole;
}
