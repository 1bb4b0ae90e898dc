/* Norms, rounding and elementwise operations on rows, included once per instruction set by kernel_set.h.
 *
 * Sums over a row have 16 lanes, added in one order, whatever the width of vectors: the same bits everywhere.
 */

INLINE vf NAME(activate)(int activation, const float *numbers, vf x)
{
    switch (activation) {
    case ACT_SILU: return x * NAME(sigmoid)(x);
    case ACT_GELU_ERF: return NAME(gelu_erf)(x);
    case ACT_GELU_TANH: return NAME(gelu_tanh)(x);
    case ACT_RELU: return PICK(x < vset(0.0f), vset(0.0f), x);
    case ACT_RELU2:
        x = PICK(x < vset(0.0f), vset(0.0f), x);
        return x * x;
    case ACT_SIGMOID: return NAME(sigmoid)(x);
    case ACT_TANH: return NAME(tanh)(x);
    case ACT_SOFTPLUS: return NAME(softplus)(x);
    case ACT_CLAMP: /* between numbers[0] and numbers[1] */
        x = PICK(x > vset(numbers[1]), vset(numbers[1]), x);
        return PICK(x < vset(numbers[0]), vset(numbers[0]), x);
    case ACT_XIELU: return NAME(xielu)(numbers, x);
    default: return x;
    }
}

/* activation(gate) * up; ACT_CLAMPED_SWIGLU, numbers {alpha, limit}: g sigmoid(alpha g) (u + 1), g at most limit, u within it. */
INLINE vf NAME(gated)(int activation, const float *numbers, vf gate, vf up)
{
    if (activation != ACT_CLAMPED_SWIGLU)
        return NAME(activate)(activation, numbers, gate) * up;
    const vf limit = vset(numbers[1]), least = vset(-numbers[1]);
    const vf g = PICK(gate > limit, limit, gate);
    vf u = PICK(up > limit, limit, up);
    u = PICK(u < least, least, u);
    return g * NAME(sigmoid)(g * vset(numbers[0])) * (u + vset(1.0f));
}

/* LANES floats at p of which `count` exist: p itself, or a copy in `space` filled up with `filler`. */
INLINE const float *NAME(lanes_at)(const float *p, int count, float filler, float *space)
{
    if (count >= LANES)
        return p;
    for (int i = 0; i < LANES; i++)
        space[i] = i < count ? p[i] : filler;
    return space;
}

INLINE void NAME(store_lanes)(float *p, int count, const vf *x)
{
    if (count >= LANES) {
        EACH(v) STOREF(p + v * VW, x[v]);
        return;
    }
    float space[LANES];
    EACH(v) STOREF(space + v * VW, x[v]);
    memcpy(p, space, sizeof(float) * count);
}

INLINE float NAME(sum_of_lanes)(const vf *x)
{
    float lanes[LANES];
    EACH(v) STOREF(lanes + v * VW, x[v]);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Sum of x, or of (x - mean)^2. */
INLINE float NAME(sum)(const float *x, int columns, int squares, float mean)
{
    vf sum[VECS];
    float space[LANES];
    EACH(v) sum[v] = vset(0.0f);
    for (int i = 0; i < columns; i += LANES) {
        const float *p = NAME(lanes_at)(x + i, columns - i, mean, space);
        EACH(v) {
            const vf d = LOADF(p + v * VW) - vset(mean);
            if (squares)
                sum[v] = vfma(d, d, sum[v]);
            else
                sum[v] += d;
        }
    }
    return NAME(sum_of_lanes)(sum);
}

/* output = norm of x [columns], + residual unless NULL; output may be one of them. */
static TARGET void NAME(norm_row)(const struct norm *norm, const float *x, int columns, const float *residual, float *output)
{
    const float mean = norm->kind == NORM_LAYER ? NAME(sum)(x, columns, 0, 0.0f) / (float)columns : 0.0f;
    const float variance = NAME(sum)(x, columns, 1, mean) / (float)columns;
    const float inverse = norm->kind == NORM_NONE ? 1.0f : 1.0f / sqrtf(variance + norm->epsilon);
    float spaces[4][LANES];
    for (int i = 0; i < columns; i += LANES) {
        const int count = columns - i;
        const float *from = NAME(lanes_at)(x + i, count, 0, spaces[0]);
        const float *weight = norm->weight ? NAME(lanes_at)(norm->weight + i, count, 0, spaces[1]) : NULL;
        const float *bias = norm->bias ? NAME(lanes_at)(norm->bias + i, count, 0, spaces[2]) : NULL;
        const float *more = residual ? NAME(lanes_at)(residual + i, count, 0, spaces[3]) : NULL;
        vf y[VECS];
        EACH(v) {
            y[v] = (LOADF(from + v * VW) - vset(mean)) * vset(inverse);
            if (weight)
                y[v] *= LOADF(weight + v * VW);
            if (bias)
                y[v] += LOADF(bias + v * VW);
            if (more)
                y[v] += LOADF(more + v * VW);
        }
        NAME(store_lanes)(output + i, count, y);
    }
}

/* Bits of the largest |x| of columns begin .. end, multiples of LANES; as whole numbers, NaN > infinity > any other. */
INLINE uint32_t NAME(peak)(const float *x, int begin, int end)
{
    vi top[VECS];
    EACH(v) top[v] = vseti(0);
    for (int i = begin; i < end; i += LANES)
        EACH(v) top[v] = vmaxi(top[v], (vi)NAME(magnitude)(LOADF(x + i + v * VW)));
    EACH(v) top[0] = vmaxi(top[0], top[v]);
    return (uint32_t)vhmaxi(top[0]);
}

/* The codes of VW numbers, of which those that are too close to a tie for multiplication are marked in *close. `divides`: none is. */
INLINE vi NAME(codes_of_numbers)(vf x, vf scale, vf inverse, int divides, vi *close)
{
    const vf shift = vset(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number, ties to even */
    if (divides) {
        vf y = x / scale;
        y = PICK(y > vset(127.0f), vset(127.0f), y);
        y = PICK(y < vset(-128.0f), vset(-128.0f), y);
        return (vi)(y + shift) - (vi)shift;
    }
    const vf y = x * inverse, whole = y + shift;
    *close |= NAME(magnitude)(y - (whole - shift)) > vset(0.4999f);
    return (vi)whole - (vi)shift;
}

/* Codes of columns begin .. end, as words of four in their places, with their sum in *sum. scale NaN: codes 0. Division
 * takes most of the time, and is left out if `divides` is 0: for |x| <= 127 scale, x times 1 / scale is within 2^-15 of x / scale, and
 * so has the same nearest whole number unless it is close to a tie. Returns whether one is: then call again. */
INLINE int NAME(round_columns)(const float *x, int begin, int end, float scale, int divides, int32_t *words, int height,
                             int piece, int32_t *sum)
{
    const vf inverse = vset(1.0f / scale);
    const vi known = vseti(scale == scale ? -1 : 0);
    vi total = vseti(0), close = vseti(0);
    for (int i = begin; i < end; i += LANES) {
        union {
            int8_t bytes[LANES];
            int32_t words[LANES / 4];
        } four;
        EACH(v) {
            const vi code = NAME(codes_of_numbers)(LOADF(x + i + v * VW), vset(scale), inverse, divides, &close) & known;
            total += code;
            *(vb *)(four.bytes + v * VW) = __builtin_convertvector(code, vb);
        }
        if (piece) {
            memcpy(words + (i / piece * piece * height + i % piece) / 4, four.words, sizeof four);
            continue;
        }
        for (int j = 0; j < LANES / 4; j++)
            words[WORD(i / 4 + j, height)] = four.words[j];
    }
    *sum = vhaddi(total);
    return vany(close);
}

INLINE float NAME(scale_of)(uint32_t peak, float static_scale)
{
    if (peak >= 0x7f800000)
        return NAN;
    const float size = float_of(peak);
    return static_scale != 0 ? static_scale : (size > 1e-30f ? size : 1e-30f) / 127.0f;
}

/* What is added to a block's sum of codes * q for the zero points: the sum itself where the matrix has zeros of its own. */
INLINE int32_t NAME(sum_for_zeros)(const struct matrix *w, int blocks, int32_t sum)
{
    if (w->has_zeros)
        return has_wide_sums(w, blocks) ? -sum : -sum & 0xffff; /* what multiply16 expects */
    const int bits = code_bits(w);
    return -sum * (1 << (bits - 1));
}

static TARGET void NAME(round_row)(const struct linear *op, const float *x, const struct activations *rows, int first,
                                   int height, int m, float *scratch)
{
    const struct matrix *w = op->matrix;
    const int k = w->k, padded_k = w->padded_k;
    if (op->norm.kind != NORM_NONE) {
        NAME(norm_row)(&op->norm, x, k, NULL, scratch);
        x = scratch;
    }
    if (op->rounding == ROUND_NONE) {
        float *to = (float *)rows->values + (int64_t)first * padded_k + m;
        const float factor = w->form == FORM_FLOAT8 ? 256.0f : 1.0f; /* float8 is read as 1/256 of its value */
        for (int i = 0; i < k; i++)
            to[(int64_t)i * height] = x[i] * factor;
        return;
    }
    if (k != padded_k) {
        if (x != scratch)
            memcpy(scratch, x, sizeof(float) * k);
        memset(scratch + k, 0, sizeof(float) * (padded_k - k));
        x = scratch;
    }
    const int blocks = activation_blocks(op), block = padded_k / blocks;
    const int piece = PIECE(op, rows, height);
    int32_t *words = (int32_t *)((int8_t *)rows->values + (int64_t)first * padded_k) + (piece ? m * (piece / 4) : FIRST_WORD(m));
    const float fixed = op->rounding == ROUND_STATIC ? op->static_scale : 0.0f;
    float scale = op->rounding == ROUND_BLOCK ? 0.0f : NAME(scale_of)(NAME(peak)(x, 0, padded_k), fixed);
    for (int b = 0; b < blocks; b++) {
        if (op->rounding == ROUND_BLOCK)
            scale = NAME(scale_of)(NAME(peak)(x, b * block, (b + 1) * block), 0.0f);
        int32_t sum;
        if (op->rounding == ROUND_STATIC || NAME(round_columns)(x, b * block, (b + 1) * block, scale, 0, words, height, piece, &sum))
            NAME(round_columns)(x, b * block, (b + 1) * block, scale, 1, words, height, piece, &sum);
        const int64_t at = (int64_t)first * blocks + (int64_t)b * height + m;
        rows->scales[at] = scale;
        rows->sums[at] = NAME(sum_for_zeros)(w, blocks, sum);
    }
}

static TARGET void NAME(normalize_row)(const struct normalize *op, int64_t source, int64_t row)
{
    for (int g = 0; g < op->groups; g++) {
        const int64_t column = (int64_t)g * op->columns;
        const float *residual = op->residual.at ? row_at(&op->residual, source, row) + column : NULL;
        NAME(norm_row)(&op->norm, row_at(&op->input, source, row) + column, op->columns, residual,
                       op->output.at + row * op->output.stride + column);
    }
}

INLINE vf NAME(combined)(const struct combine *op, vf a, vf b)
{
    switch (op->function) {
    case COMBINE_ADD: a += b; break;
    case COMBINE_MULTIPLY: a *= b; break;
    case COMBINE_GATE: a = NAME(gated)(op->activation, op->numbers, a, b); break;
    }
    return NAME(capped)(op->cap, a * vset(op->scale));
}

static TARGET void NAME(combine_row)(const struct combine *op, int64_t source, int64_t row)
{
    const float *a = row_at(&op->a, source, row), *b = op->b.at ? row_at(&op->b, source, row) : NULL;
    float *output = op->output.at + row * op->output.stride, spaces[2][LANES], number[LANES];
    for (int i = 0; i < LANES; i++)
        number[i] = b && op->broadcast ? *b : op->number;
    if (op->broadcast)
        b = NULL;
    for (int i = 0; i < op->columns; i += LANES) {
        const int count = op->columns - i;
        const float *p = NAME(lanes_at)(a + i, count, 0, spaces[0]);
        const float *q = b ? NAME(lanes_at)(b + i, count, 0, spaces[1]) : number;
        vf y[VECS];
        EACH(v) y[v] = NAME(combined)(op, LOADF(p + v * VW), LOADF(q + v * VW));
        NAME(store_lanes)(output + i, count, y);
    }
}

static TARGET void NAME(score_row)(const struct experts *op, const float *logits, float *scores)
{
    const int is_softmax = op->score != SCORE_SIGMOID;
    float top = logits[0], space[LANES];
    for (int i = 1; i < op->count; i++)
        top = logits[i] > top ? logits[i] : top;
    vf sum[VECS];
    EACH(v) sum[v] = vset(0.0f);
    for (int i = 0; i < op->count; i += LANES) {
        const float *x = NAME(lanes_at)(logits + i, op->count - i, NO_SCORE, space);
        vf y[VECS];
        EACH(v) {
            y[v] = is_softmax ? NAME(exp_negative)(LOADF(x + v * VW) - vset(top)) : NAME(sigmoid)(LOADF(x + v * VW));
            sum[v] += y[v];
        }
        NAME(store_lanes)(scores + i, op->count - i, y);
    }
    const float total = NAME(sum_of_lanes)(sum);
    for (int i = 0; is_softmax && i < op->count; i++)
        scores[i] /= total;
}

static TARGET void NAME(add_experts_row)(const struct experts *op, const float *results, int64_t stride, const int32_t *places,
                                         const float *weights, int64_t row)
{
    const int columns = op->down->matrix->n;
    float *output = op->output.at + row * op->output.stride, space[LANES];
    for (int i = 0; i < columns; i += LANES) {
        const float *before = op->adds ? NAME(lanes_at)(output + i, columns - i, 0, space) : NULL;
        vf total[VECS];
        EACH(v) total[v] = vset(0.0f);
        for (int j = 0; j < op->chosen; j++)
            EACH(v) total[v] = vfma(vset(weights[j]), LOADF(results + places[j] * stride + i + v * VW), total[v]);
        EACH(v) if (before) total[v] += LOADF(before + v * VW);
        NAME(store_lanes)(output + i, columns - i, total);
    }
}
