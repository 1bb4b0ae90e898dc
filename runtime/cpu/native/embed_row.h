/* Rows of a packed table, in plain C: each instruction set computes the same bits, and gathering is bound by memory. */

static inline float embedding_of_float(const struct matrix *w, const uint8_t *tile, int lane, int k)
{
    const int64_t at = (int64_t)k * LANES + lane;
    const uint8_t *codes = tile + w->codes_offset;
    uint16_t half;
    float number;
    switch (w->form) {
    case FORM_FLOAT32: memcpy(&number, codes + 4 * at, sizeof number); return number;
    case FORM_FLOAT16: memcpy(&half, codes + 2 * at, sizeof half); return float_of_half(half);
    case FORM_BFLOAT16: memcpy(&half, codes + 2 * at, sizeof half); return float_of((uint32_t)half << 16);
    default: /* e4m3fn */
        memcpy(&number, tile + 4 * lane, sizeof number);
        return float_of((uint32_t)(codes[at] & 0x7f) << 20 | (uint32_t)(codes[at] & 0x80) << 24) * 0x1p120f * number;
    }
}

/* Code k of a row: launch.h has the layouts. */
static inline int embedding_code(const struct matrix *w, const uint8_t *codes, int lane, int k)
{
    const uint8_t *line = codes + 4 * lane + k % 4;
    const int i = k / 4; /* group of four */
    switch (w->form) {
    case FORM_INT8: return line[i * 64];
    case FORM_INT4: return line[i / 2 * 64] >> 4 * (i % 2) & 15;
    case FORM_INT2: return line[i / 4 * 64] >> 2 * (i % 4) & 3;
    default: line += i / 8 * 192; return (line[i % 8 / 4 * 64] >> 2 * (i % 4) & 3) | (line[128] >> i % 8 & 1) << 2;
    }
}

/* Scale `at` of a tile. */
static inline float embedding_scale(const struct matrix *w, const uint8_t *tile, int at)
{
    uint16_t half;
    float number;
    if (w->scale_bytes == 2) {
        memcpy(&half, tile + 2 * at, sizeof half);
        return float_of_half(half);
    }
    memcpy(&number, tile + 4 * at, sizeof number);
    return number;
}

static void embed_row(const struct embed *op, int64_t id, int64_t row)
{
    const struct matrix *w = op->table;
    const int lane = (int)(id % LANES), is_float = w->form <= FORM_FLOAT8;
    const int bits = code_bits(w);
    const int block = is_float ? w->k : w->padded_k / w->scale_blocks;
    const uint8_t *tile = w->tiles + id / LANES * w->tile_bytes;
    const uint8_t *zeros = tile + (int64_t)w->scale_blocks * LANES * w->scale_bytes;
    float *output = op->output.at + row * op->output.stride;
    for (int b = 0, k = 0; k < w->k; b++) {
        const float scale = is_float ? 1.0f : embedding_scale(w, tile, b * LANES + lane);
        const int zero = w->has_zeros ? zeros[b * LANES + lane] : 1 << (bits - 1);
        for (const int end = w->k - k < block ? w->k : k + block; k < end; k++) {
            float x = is_float ? embedding_of_float(w, tile, lane, k)
                               : (float)(embedding_code(w, tile + w->codes_offset, lane, k) - zero) * scale;
            x *= op->scale;
            output[k] = op->adds ? output[k] + x : x;
        }
    }
}
