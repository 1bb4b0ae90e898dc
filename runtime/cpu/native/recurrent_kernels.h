/* Recurrent layers, included once per instruction set by kernel_set.h: one tile of a state over the tokens of a sequence.
 *
 * A token changes the state by what the token before it left, whatever the step, and each column of a state by itself:
 * chunks, batch mates, tiles and the width of vectors change no bit.
 */

enum { NAME(WIDE) = 4 }; /* vectors of columns at a time, if there are as many: sums that run side by side */

/* state [rows][width] of `count` vectors of columns = decay * state + a u^T; y = state^T b. */
INLINE void NAME(advance)(float *state, int width, int rows, vf decay, const float *a, const float *b, const vf *u, vf *y,
                          const int count)
{
    UNROLL for (int v = 0; v < count; v++) y[v] = vset(0.0f);
    for (int i = 0; i < rows; i++, state += width) {
        const vf by = vset(a[i]), with = vset(b[i]);
        UNROLL for (int v = 0; v < count; v++)
        {
            const vf next = vfma(by, u[v], decay * LOADF(state + v * VW));
            STOREF(state + v * VW, next);
            y[v] = vfma(with, next, y[v]);
        }
    }
}

/* y = state^T a */
INLINE void NAME(recall)(const float *state, int width, int rows, const float *a, vf *y, const int count)
{
    UNROLL for (int v = 0; v < count; v++) y[v] = vset(0.0f);
    for (int i = 0; i < rows; i++, state += width)
        UNROLL for (int v = 0; v < count; v++) y[v] = vfma(vset(a[i]), LOADF(state + v * VW), y[v]);
}

/* e^x of one number, x <= 0 */
INLINE float NAME(exp_one)(float x) { return NAME(exp_negative)(vset(x))[0]; }

INLINE int NAME(tile_width)(int columns, int begin)
{
    const int padded = (columns + LANES - 1) / LANES * LANES;
    return padded - begin < STATE_TILE ? padded - begin : STATE_TILE;
}

/* Columns of one token: v and y have `count` numbers of WIDE vectors or of VECS, and a copy is made where fewer exist. */
INLINE void NAME(delta_columns)(float *state, int width, int rows, float decay, float beta, const float *key,
                                const float *query, const float *v, float *y, const int count)
{
    vf u[NAME(WIDE)], sum[NAME(WIDE)];
    NAME(recall)(state, width, rows, key, sum, count);
    UNROLL for (int i = 0; i < count; i++) u[i] = vset(beta) * (LOADF(v + i * VW) - vset(decay) * sum[i]);
    NAME(advance)(state, width, rows, vset(decay), key, query, u, sum, count);
    UNROLL for (int i = 0; i < count; i++) STOREF(y + i * VW, sum[i]);
}

/* to = x [dim] times a factor, over its length if `normalize`. */
INLINE void NAME(scale_head)(const float *x, int dim, int normalize, float factor, float *to)
{
    const float inverse = normalize ? 1.0f / sqrtf(NAME(sum)(x, dim, 1, 0.0f) + 1e-6f) : 1.0f;
    for (int i = 0; i < dim; i++)
        to[i] = x[i] * inverse * factor;
}

static TARGET void NAME(delta_rule_tile)(const struct delta_rule *op, const struct stretch *tokens, int head, int tile)
{
    const int rows = op->key_dim, columns = op->value_dim, begin = tile * STATE_TILE, width = NAME(tile_width)(columns, begin);
    const int padded = (columns + LANES - 1) / LANES * LANES, key_head = head / (op->num_value_heads / op->num_key_heads);
    float *state = op->states + tokens->slot * op->state_stride + (int64_t)head * padded * rows + (int64_t)begin * rows;
    float key[MAX_KEY_DIM], query[MAX_KEY_DIM], spaces[2][LANES];
    if (tokens->is_fresh)
        memset(state, 0, sizeof(float) * width * rows);
    for (int t = 0; t < tokens->count; t++) {
        const int64_t row = tokens->first + t;
        NAME(scale_head)(op->key.at + row * op->key.stride + key_head * rows, rows, op->normalize, 1.0f, key);
        NAME(scale_head)(op->query.at + row * op->query.stride + key_head * rows, rows, op->normalize, op->scale, query);
        const float decay = NAME(exp_one)(op->decay.at[row * op->decay.stride + head]);
        const float beta = op->beta.at[row * op->beta.stride + head];
        const float *value = op->value.at + row * op->value.stride + head * columns + begin;
        float *output = op->output.at + row * op->output.stride + head * columns + begin;
        int i = 0;
        for (; i + NAME(WIDE) * VW <= columns - begin && i + NAME(WIDE) * VW <= width; i += NAME(WIDE) * VW)
            NAME(delta_columns)(state + i, width, rows, decay, beta, key, query, value + i, output + i, NAME(WIDE));
        for (; i < width; i += LANES) {
            const int count = columns - begin - i;
            const float *v = NAME(lanes_at)(value + i, count, 0, spaces[0]);
            NAME(delta_columns)(state + i, width, rows, decay, beta, key, query, v, spaces[1], VECS);
            memcpy(output + i, spaces[1], sizeof(float) * (count < LANES ? count : LANES));
        }
    }
}

INLINE void NAME(scan_columns)(float *state, int width, int rows, float decay, float dt, float d, const float *b,
                               const float *c, const float *x, float *y, const int count)
{
    vf u[NAME(WIDE)], sum[NAME(WIDE)];
    UNROLL for (int i = 0; i < count; i++) u[i] = vset(dt) * LOADF(x + i * VW);
    NAME(advance)(state, width, rows, vset(decay), b, c, u, sum, count);
    UNROLL for (int i = 0; i < count; i++) STOREF(y + i * VW, vfma(vset(d), LOADF(x + i * VW), sum[i]));
}

static TARGET void NAME(scan_tile)(const struct scan *op, const struct stretch *tokens, int head, int tile)
{
    const int rows = op->state_dim, columns = op->head_dim, begin = tile * STATE_TILE, width = NAME(tile_width)(columns, begin);
    const int padded = (columns + LANES - 1) / LANES * LANES, group = head / (op->num_heads / op->num_groups);
    float *state = op->states + tokens->slot * op->state_stride + (int64_t)head * padded * rows + (int64_t)begin * rows;
    float spaces[2][LANES];
    if (tokens->is_fresh)
        memset(state, 0, sizeof(float) * width * rows);
    for (int t = 0; t < tokens->count; t++) {
        const int64_t row = tokens->first + t;
        const float dt = op->dt.at[row * op->dt.stride + head], decay = NAME(exp_one)(dt * op->a[head]), d = op->d[head];
        const float *b = op->b.at + row * op->b.stride + group * rows, *c = op->c.at + row * op->c.stride + group * rows;
        const float *input = op->input.at + row * op->input.stride + head * columns + begin;
        float *output = op->output.at + row * op->output.stride + head * columns + begin;
        int i = 0;
        for (; i + NAME(WIDE) * VW <= columns - begin && i + NAME(WIDE) * VW <= width; i += NAME(WIDE) * VW)
            NAME(scan_columns)(state + i, width, rows, decay, dt, d, b, c, input + i, output + i, NAME(WIDE));
        for (; i < width; i += LANES) {
            const int count = columns - begin - i;
            const float *x = NAME(lanes_at)(input + i, count, 0, spaces[0]);
            NAME(scan_columns)(state + i, width, rows, decay, dt, d, b, c, x, spaces[1], VECS);
            memcpy(output + i, spaces[1], sizeof(float) * (count < LANES ? count : LANES));
        }
    }
}

/* Channels begin .. end of the state: the last inputs, of which some may be those of the state before. */
INLINE void NAME(keep_inputs)(const struct convolve *op, const struct stretch *tokens, float *state, int begin, int end)
{
    for (int i = 0; i < op->taps - 1; i++) { /* upwards: a row is read before it is written */
        const int64_t at = (int64_t)tokens->count - (op->taps - 1) + i;
        const float *from = at < 0 ? state + (at + op->taps - 1) * op->channels : op->input.at + (tokens->first + at) * op->input.stride;
        memmove(state + (int64_t)i * op->channels + begin, from + begin, sizeof(float) * (end - begin));
    }
}

static TARGET void NAME(convolve_tile)(const struct convolve *op, const struct stretch *tokens, int tile)
{
    const int begin = tile * CHANNEL_TILE, taps = op->taps;
    const int end = op->channels - begin < CHANNEL_TILE ? op->channels : begin + CHANNEL_TILE;
    float *state = op->states + tokens->slot * op->state_stride, spaces[3][LANES];
    if (tokens->is_fresh)
        for (int i = 0; i < taps - 1; i++)
            memset(state + (int64_t)i * op->channels + begin, 0, sizeof(float) * (end - begin));
    for (int t = 0; t < tokens->count; t++) {
        const float *x[MAX_TAPS];
        for (int j = 0; j < taps; j++) {
            const int64_t at = (int64_t)t - (taps - 1) + j;
            x[j] = at < 0 ? state + (at + taps - 1) * op->channels : op->input.at + (tokens->first + at) * op->input.stride;
        }
        float *output = op->output.at + (tokens->first + t) * op->output.stride;
        for (int i = begin; i < end; i += LANES) {
            const float *bias = op->bias ? NAME(lanes_at)(op->bias + i, end - i, 0, spaces[0]) : NULL;
            vf y[VECS];
            EACH(v) y[v] = bias ? LOADF(bias + v * VW) : vset(0.0f);
            for (int j = 0; j < taps; j++) {
                const float *weight = NAME(lanes_at)(op->weight + (int64_t)j * op->channels + i, end - i, 0, spaces[1]);
                const float *from = NAME(lanes_at)(x[j] + i, end - i, 0, spaces[2]);
                EACH(v) y[v] = vfma(LOADF(weight + v * VW), LOADF(from + v * VW), y[v]);
            }
            EACH(v) y[v] = NAME(activate)(op->activation, NULL, y[v]);
            NAME(store_lanes)(output + i, end - i, y);
        }
    }
    NAME(keep_inputs)(op, tokens, state, begin, end);
}
