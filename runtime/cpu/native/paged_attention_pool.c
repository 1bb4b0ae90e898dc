/* Keys and values in the pool: where they are, how a step's tokens are written, and how tiles are brought in from it. */
#include "paged_attention_plan.h"

static uint8_t *block_at(const struct attention *job, int s, int position)
{
    const struct layer *l = job->layer;
    int64_t block = job->step->block_tables[(int64_t)s * job->step->max_blocks + position / l->block_tokens];
    return l->pool + block * l->block_bytes;
}

/* The key of the token at `slot` of a block. */
static struct stored key_in(const struct layer *l, uint8_t *block, int head, int slot)
{
    const int64_t unit = unit_bytes(l->key_kind), heads = (int64_t)head * l->block_tokens;
    struct stored at = {block + l->keys + heads * vector_bytes(l->key_kind, l->dim) + slot * unit, NULL,
                        l->block_tokens * unit, l->block_tokens};
    at.scales = (uint16_t *)(block + l->key_scales) + heads * scales_of(l->key_kind, l->dim, l->group) + slot;
    return at;
}

static struct stored value_in(const struct layer *l, uint8_t *block, int head, int slot)
{
    const int64_t row = (int64_t)head * l->block_tokens + slot;
    struct stored at = {block + l->values + row * vector_bytes(l->value_kind, l->value_dim), NULL, unit_bytes(l->value_kind), 1};
    at.scales = (uint16_t *)(block + l->value_scales) + row * scales_of(l->value_kind, l->value_dim, l->group);
    return at;
}

/* Store a vector; `codes` is room for `dim` of float16. */
static void store(const struct attention *job, enum kind kind, const float *x, int dim, const struct stored *to, uint16_t *codes)
{
    if (kind != FLOAT16 || job->isa->to_float16 == NULL || dim % job->isa->vector_floats != 0) {
        store_vector(kind, x, dim, job->layer->group, to);
        return;
    }
    if (to->stride == sizeof *codes) {
        job->isa->to_float16(x, dim, (uint16_t *)to->codes);
        return;
    }
    job->isa->to_float16(x, dim, codes);
    for (int d = 0; d < dim; d++)
        memcpy(to->codes + d * to->stride, codes + d, sizeof *codes);
}

/* Store tokens begin .. end, which belong to sequence s; `head` is room for two heads. */
static void write_tokens(const struct attention *job, int s, int begin, int end, float *head)
{
    const struct layer *l = job->layer;
    uint16_t *codes = (uint16_t *)(head + l->dim);
    for (int i = begin; i < end; i++) {
        const int position = job->step->context_lens[s] - job->step->query_starts[s + 1] + i, slot = position % l->block_tokens;
        uint8_t *block = block_at(job, s, position);
        for (int h = 0; h < l->num_kv_heads; h++) {
            const struct stored key = key_in(l, block, h, slot), value = value_in(l, block, h, slot);
            turn(job, l->key + i * l->key_stride + (int64_t)h * l->dim, position, 1.0f, head);
            store(job, l->key_kind, head, l->dim, &key, codes);
            if (!l->values_in_keys)
                store(job, l->value_kind, l->value + i * l->value_stride + (int64_t)h * l->value_dim, l->value_dim, &value, codes);
        }
    }
}

void attention_write(const struct attention *job, int first_token, int last_token, float *scratch)
{
    const int32_t *starts = job->step->query_starts;
    for (int s = 0; s < job->step->num_sequences && starts[s] < last_token; s++)
        if (job->layer->writes && starts[s + 1] > first_token)
            write_tokens(job, s, larger(first_token, starts[s]), smaller(last_token, starts[s + 1]), scratch);
}

void attention_find_tile(const struct attention *job, int s, int head, int start, int first, int last, struct places *places)
{
    const struct layer *l = job->layer;
    const int64_t key_bytes = vector_bytes(l->key_kind, l->dim), value_bytes = vector_bytes(l->value_kind, l->value_dim);
    const int64_t scales = scales_of(l->value_kind, l->value_dim, l->group);
    int slot = (start + first) % l->block_tokens;
    uint8_t *block = block_at(job, s, start + first);
    for (int t = first; t < last; t++, slot++) {
        if (slot == l->block_tokens) {
            slot = 0;
            block = block_at(job, s, start + t);
        }
        const int64_t row = (int64_t)head * l->block_tokens + slot;
        places->keys[t] = block + l->keys + row * key_bytes;
        places->values[t] = l->values_in_keys ? places->keys[t] : block + l->values + row * value_bytes;
        places->scales[t] = (const uint16_t *)(block + l->value_scales) + (l->values_in_keys ? 0 : row * scales);
        if (t == first || t % 16 == 0)
            places->of_16[t / 16] = key_in(l, block, head, slot - t % 16);
    }
    for (int t = 0; t < TILE; t++) {
        const int near = t < first ? first : t < last ? t : last - 1;
        places->keys[t] = places->keys[near];
        places->values[t] = places->values[near];
        places->scales[t] = places->scales[near];
        if (t % 16 == 0)
            places->of_16[t / 16] = places->of_16[near / 16];
    }
}

/* Copy one token's key, where 16 tokens do not follow each other in a block. */
static void copy_key(const struct layer *l, const struct stored *from, const struct stored *to)
{
    const int64_t unit = unit_bytes(l->key_kind);
    for (int64_t d = 0; d < units_of(l->key_kind, l->dim); d++)
        memcpy(to->codes + d * to->stride, from->codes + d * from->stride, unit);
    for (int64_t i = 0; i < scales_of(l->key_kind, l->dim, l->group); i++)
        to->scales[i * to->scale_stride] = from->scales[i * from->scale_stride];
}

/* Gather the keys of 16 tokens from `start` on, of which first .. last are in use. */
static struct stored gather_keys(const struct attention *job, struct scratch *m, int s, int head, int start, int first, int last)
{
    const struct layer *l = job->layer;
    const int64_t unit = unit_bytes(l->key_kind), at = (int64_t)(start % TILE) * l->dim;
    const struct stored copy = {m->codes + at * 4, m->scales + at, 16 * unit, 16};
    for (int t = larger(0, first); t < smaller(16, last); t++) {
        const int position = start + t;
        const struct stored from = key_in(l, block_at(job, s, position), head, position % l->block_tokens);
        const struct stored to = {copy.codes + t * unit, copy.scales + t, 16 * unit, 16};
        copy_key(l, &from, &to);
    }
    return copy;
}

/* Bring in the keys of tokens first .. last: decoded, or where they are. */
static void load_keys(const struct attention *job, struct scratch *m, const struct places *places, int s, int head, int first,
                      int last, struct tile *tile)
{
    const struct layer *l = job->layer;
    tile->key_stride = l->key_kind == FLOAT32 ? l->block_tokens % 16 ? 16 : l->block_tokens : TILE;
    for (int t = 0; t < TILE; t += 16) {
        const int is_used = t + 16 > first && t < last; /* what is not is masked: any number will do */
        struct stored keys = places->of_16[t / 16];
        if (l->block_tokens % 16 != 0)
            keys = gather_keys(job, m, s, head, tile->start + t, first - t, last - t);
        tile->keys[t / 16] = l->key_kind == FLOAT32 ? (const float *)keys.codes : m->keys + t;
        if (is_used && l->key_kind != FLOAT32)
            job->isa->keys[l->key_kind](&keys, l->dim, l->group, m->keys + t);
    }
}

/* Values that are the last elements of their keys: keys are stored by dim, and values are read by token. */
static void turn_values(const struct layer *l, struct scratch *m, int first, int last, struct tile *tile)
{
    const int start = l->dim - l->value_dim;
    for (int t = first; t < last; t++) {
        tile->values[t] = m->values + (int64_t)t * tile->columns;
        memset(m->values + (int64_t)t * tile->columns + l->value_dim, 0, (tile->columns - l->value_dim) * sizeof(float));
    }
    for (int from = first / 16 * 16; from < last; from += 16) {
        const float *keys = tile->keys[from / 16] + start * tile->key_stride;
        const int begin = larger(first - from, 0), end = smaller(last - from, 16);
        for (int at = 0; at < l->value_dim; at += 16) /* 16 tokens by 16 dims: two cache lines of each */
            for (int t = begin; t < end; t++) {
                float *row = m->values + (int64_t)(from + t) * tile->columns;
                for (int d = at; d < smaller(at + 16, l->value_dim); d++)
                    row[d] = keys[d * tile->key_stride + t];
            }
    }
}

/* Bring in values: decoded, or where they are, or padded with zeros for odd widths. */
static void load_values(const struct attention *job, struct scratch *m, const struct places *places, int first, int last,
                        struct tile *tile)
{
    const struct layer *l = job->layer;
    for (int t = first; t < last; t++) {
        float *row = m->values + (int64_t)t * tile->columns;
        tile->values[t] = row;
        if (l->value_kind != FLOAT32) {
            job->isa->value[l->value_kind](places->values[t], places->scales[t], l->value_dim, l->group, row);
        } else if (tile->columns == l->value_dim) {
            tile->values[t] = (const float *)places->values[t];
        } else {
            memcpy(row, places->values[t], l->value_dim * sizeof(float));
            memset(row + l->value_dim, 0, (tile->columns - l->value_dim) * sizeof(float));
        }
    }
}

/* Bring in the tile for bfloat16: pairs of rounded keys and values. */
static void load_pairs(const struct attention *job, struct scratch *m, const struct places *places, int s, int head, int first,
                       int last, struct tile *tile)
{
    const struct layer *l = job->layer;
    const int columns = tile->columns, lanes = job->isa->vector_floats, on_their_own = !l->values_in_keys;
    tile->key_pairs = m->keys, tile->value_pairs = m->values;
    if (l->key_kind == FLOAT16 && l->block_tokens % 16 == 0 && l->dim % lanes == 0 && l->dim % 2 == 0 && on_their_own) {
        for (int t = first / 16 * 16; t < last; t += 16)
            job->pairs->pair_keys(&places->of_16[t / 16], l->dim, m->keys + t);
    } else {
        load_keys(job, m, places, s, head, first, last, tile);
        if (l->values_in_keys)
            turn_values(l, m, first, last, tile);
        for (int t = 0; t < TILE && l->key_kind == FLOAT32; t += 16)
            for (int d = 0; d < l->dim; d++)
                memcpy(m->keys + (int64_t)d * TILE + t, tile->keys[t / 16] + d * tile->key_stride, 16 * sizeof(float));
        if (l->dim % 2)
            memset(m->keys + (int64_t)l->dim * TILE, 0, TILE * sizeof(float));
        job->pairs->pair_rows(m->keys, 0, (l->dim + 1) / 2, TILE, TILE);
    }
    if (l->value_kind == FLOAT16 && l->value_dim % lanes == 0 && on_their_own) {
        for (int t = first & ~1; t < last; t += 2)
            job->pairs->pair_float16(places->values[larger(t, first)], t + 1 < last ? places->values[t + 1] : NULL, columns,
                                    m->values + (int64_t)(t / 2) * columns);
        return;
    }
    if (on_their_own)
        load_values(job, m, places, first, last, tile);
    for (int t = first; t < last && tile->values[first] != m->values + (int64_t)first * columns; t++)
        memcpy(m->values + (int64_t)t * columns, tile->values[t], columns * sizeof(float));
    if (first % 2)
        memset(m->values + (int64_t)(first - 1) * columns, 0, columns * sizeof(float));
    if (last % 2)
        memset(m->values + (int64_t)last * columns, 0, columns * sizeof(float));
    job->pairs->pair_rows(m->values, first / 2, (last + 1) / 2, columns, columns);
}

/* Zeros for what AMX multiplies beyond the dims of a key, and around tokens first .. last of the values. */
static void pad_pairs(const struct attention *job, struct scratch *m, int first, int last, const struct tile *tile)
{
    const int pairs = (job->layer->dim + 1) / 2, columns = tile->columns;
    const int begin = first / 2, end = (last + 1) / 2;
    const int from = begin / AMX_PAIRS * AMX_PAIRS, to = round_up(end, AMX_PAIRS);
    memset(m->keys + (int64_t)pairs * TILE, 0, sizeof(float) * (amx_pairs(job->layer->dim) - pairs) * TILE);
    memset(m->values + (int64_t)from * columns, 0, sizeof(float) * (begin - from) * columns);
    memset(m->values + (int64_t)end * columns, 0, sizeof(float) * (to - end) * columns);
}

void attention_load_tile(const struct attention *job, struct scratch *m, const struct places *places, int s, int head, int first,
                         int last, struct tile *tile)
{
    if (in_bfloat16(job->layer)) {
        load_pairs(job, m, places, s, head, first, last, tile);
        if (in_amx_order(job->layer))
            pad_pairs(job, m, first, last, tile);
    } else {
        load_keys(job, m, places, s, head, first, last, tile);
        if (job->layer->values_in_keys)
            turn_values(job->layer, m, first, last, tile);
        else
            load_values(job, m, places, first, last, tile);
    }
}
