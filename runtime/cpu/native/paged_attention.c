/* Attention over a paged KV pool for the CPU engine: arithmetic in float32, or of operands in bfloat16, over keys and values
 * that are stored in one of the types of kv_precision.h. Plain C, called through ctypes (attention.py).
 *
 * One call per layer and step: paged_attention() writes the step's keys and values into the pool and attends. A launch
 * program takes the same steps as phases of its own (paged_attention.h). Queries and keys may be rotated by the rotary
 * embedding as they are read. The arithmetic is in paged_attention_kernel.h and paged_attention_bfloat16.h, compiled here once per instruction
 * set and chosen on first use; thread_team.h distributes the work. A row's result depends on its own sequence alone, bit
 * for bit.
 *
 * Algorithm: online softmax over tiles (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) with tiles at fixed
 * absolute positions, whatever the block size. All query heads of a KV head share its keys and values in cache. Every
 * SPLIT tokens the softmax starts anew, and the results are merged in order: threads may take the splits of a long
 * context (Flash-Decoding, Dao et al. 2023), and one thread computes the same bits.
 */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kv_precision.h"
#include "paged_attention.h"
#include "thread_team.h"

#define TILE 64            /* tokens of a tile; part of the arithmetic */
#define SPLIT 512          /* tokens of a split, a multiple of TILE; part of the arithmetic */
#define LOWEST (-1e30f)    /* what the running maximum begins with: finite, so that differences are never NaN */
#define HIDDEN (-2e30f)    /* score of a token that is not visible: its probability is 0 next to any maximum */
#define LOG2_E 1.44269504088896341f
#define ROWS_PER_ITEM 64   /* query rows that share a tile's decoded keys and values, */
#define MOST_ROWS 192      /* and where that leaves items enough for the threads */
#define ITEMS_PER_THREAD 4 /* at least, where a long context can be shared: threads end at about the same time */
#define MIN_PARALLEL 1.0e6 /* multiply-adds below which waking threads costs more than it saves */

/* Up to isa->rows query rows of one KV head, held together in registers. */
struct rows {
    const float *query;                /* [dim, rows], times scale; in bfloat16 pairs of dims [(dim + 1) / 2, rows] */
    float *output, *maximum, *sums;    /* [rows, columns], [rows], [rows, 16] */
    const int32_t *position;           /* [rows] */
    int first, last;                   /* tokens of the tile that any of the rows attends to */
};

/* A tile's tokens in the pool. */
struct places {
    const uint8_t *keys[TILE], *values[TILE]; /* keys: as many bytes of their block as one has, for prefetching */
    const uint16_t *scales[TILE];             /* of values; any address for types without them */
    struct stored of_16[TILE / 16];           /* keys, where 16 tokens follow each other in a block */
};

struct tile {
    const float *key_pairs;       /* in bfloat16 [(dim + 1) / 2, TILE]: dims 2 j and 2 j + 1 of a token */
    const float *value_pairs;     /* in bfloat16 [TILE / 2, columns]: tokens 2 t and 2 t + 1 */
    const float *keys[TILE / 16]; /* [dim, 16] of 16 tokens each; key_stride floats from dim to dim */
    const float *values[TILE];    /* rows of `columns` floats */
    const struct places *codes;   /* instead of keys and values, if each is needed once: decoded in registers */
    float *factors;               /* room for scales and minima of the values' groups, decoded with codes */
    const struct places *next;    /* the next tile, to be prefetched; NULL for none */
    int64_t key_stride;
    int start, dim, group, columns, window, key_bytes, value_bytes;
    float softcap, inverse_softcap;
};

/* A group of rows whose scores become probabilities, while those of the next group are computed. */
struct softening {
    struct rows *rows;
    int begin, end, row; /* tokens of the tile; the next row */
    float maxima[16], alpha[16]; /* alpha: what earlier sums are multiplied by */
    float scores[8 * TILE] __attribute__((aligned(64)));
    uint16_t weights[8 * TILE] __attribute__((aligned(64), may_alias)); /* in bfloat16 */
};

/* Kinds of keys and values that are decoded in registers: equal ones by their kind, and keys of 8 bits with values of 4. */
enum { K8V4 = NUM_KINDS, GROUPED_K8V4, NUM_MIXES };

struct isa {
    int vector_floats, rows;
    void (*turn)(const float *head, const float *cos, const float *sin, int half, int dim, float scale, float *target);
    void (*to_float16)(const float *x, int dim, uint16_t *codes); /* half_of of each; NULL: no faster than that */
    void (*keys[NUM_KINDS])(const struct stored *from, int dim, int group, float *target); /* NULL: floats already */
    void (*value[NUM_KINDS])(const uint8_t *codes, const uint16_t *scales, int dim, int group, float *target);
    void (*attend[NUM_MIXES][4])(struct rows *groups, int count, const struct tile *tile); /* 1, 2, 4, 8 rows */
    void (*merge)(float *total, const float *output, const float *sums, float maximum, int columns);
};

/* The same in bfloat16; pairs of numbers take the room of a float. */
struct pairs_isa {
    void (*round_row)(float *row, int count);
    void (*pair_rows)(float *rows, int first, int last, int width, int stride);
    void (*pair_keys)(const struct stored *from, int dim, float *target); /* in float16, of 16 tokens */
    void (*pair_float16)(const uint8_t *lower, const uint8_t *upper, int width, float *target);
    void (*attend[2][4])(struct rows *groups, int count, const struct tile *tile); /* [1]: of codes in float16 */
    void (*merge)(float *total, const float *output, const float *sums, float maximum, int columns);
};

static inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
static inline int smaller(int a, int b) { return a < b ? a : b; }
static inline int larger(int a, int b) { return a > b ? a : b; }

#include "paged_attention_isa.h"

/* A row's result is columns + RESULT_FLOATS floats: output, 16 sums, the maximum, and padding. */
#define RESULT_FLOATS 32

/* One item's place in a thread's scratch memory. */
struct scratch {
    float *query, *output, *maximum, *sums, *results, *keys, *values;
    uint8_t *codes;
    uint16_t *scales;
    int32_t *position;
};

/* The first token of sequence s that attends, and how many do. */
static int first_query(const struct attention *job, int s)
{
    return job->first_queries != NULL ? job->first_queries[s] : job->step->query_starts[s];
}

static int queries_of(const struct attention *job, int s) { return job->step->query_starts[s + 1] - first_query(job, s); }

static int chunks_of(const struct attention *job, int s)
{
    return (queries_of(job, s) + job->chunk_tokens - 1) / job->chunk_tokens;
}

/* Rows of one KV head in the largest chunk of sequence s. */
static int rows_of(const struct attention *job, int s)
{
    return smaller(queries_of(job, s), job->chunk_tokens) * (job->layer->num_heads / job->layer->num_kv_heads);
}

/* KV heads of one item of sequence s; the last item of a chunk may have fewer. */
static int heads_of(const struct attention *job, int s)
{
    return larger(1, smaller(job->max_heads, ROWS_PER_ITEM / rows_of(job, s)));
}

static int items_of(const struct attention *job, int s)
{
    if (chunks_of(job, s) == 0)
        return 0;
    int heads = heads_of(job, s);
    return chunks_of(job, s) * ((job->layer->num_kv_heads + heads - 1) / heads);
}

static size_t take(size_t *used, size_t floats)
{
    size_t at = *used;
    *used += (floats + 15) / 16 * 16;
    return at;
}

/* Lay out the scratch memory at `base` for `rows` rows in all; return the floats it takes. */
static size_t lay_out(const struct layer *layer, float *base, size_t rows, struct scratch *s)
{
    size_t used = 0;
    size_t columns = round_up(layer->dim, 16);
    s->query = base + take(&used, rows * layer->dim);
    s->output = base + take(&used, rows * columns);
    s->maximum = base + take(&used, rows);
    s->sums = base + take(&used, rows * 16);
    s->results = base + take(&used, rows * (columns + RESULT_FLOATS));
    s->keys = base + take(&used, (size_t)round_up(layer->dim, 2) * TILE);
    s->values = base + take(&used, columns * TILE + 16); /* the last row's padding */
    s->codes = (uint8_t *)(base + take(&used, (size_t)layer->dim * TILE));
    s->scales = (uint16_t *)(base + take(&used, (size_t)layer->dim * TILE));
    s->position = (int32_t *)(base + take(&used, rows));
    return used;
}

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
    struct stored at = {block + l->values + row * vector_bytes(l->value_kind, l->dim), NULL, unit_bytes(l->value_kind), 1};
    at.scales = (uint16_t *)(block + l->value_scales) + row * scales_of(l->value_kind, l->dim, l->group);
    return at;
}

/* A head times `scale`, rotated by its position. */
static void turn(const struct attention *job, const float *head, int position, float scale, float *target)
{
    const struct layer *l = job->layer;
    const int64_t half = l->rotary_dim / 2, at = position * half;
    job->isa->turn(head, l->cos + at, l->sin + at, (int)half, l->dim, scale, target);
}

/* Store a vector; `codes` is room for `dim` of float16. */
static void store(const struct attention *job, enum kind kind, const float *x, const struct stored *to, uint16_t *codes)
{
    const struct layer *l = job->layer;
    if (kind != FLOAT16 || job->isa->to_float16 == NULL || l->dim % job->isa->vector_floats != 0) {
        store_vector(kind, x, l->dim, l->group, to);
        return;
    }
    if (to->stride == sizeof *codes) {
        job->isa->to_float16(x, l->dim, (uint16_t *)to->codes);
        return;
    }
    job->isa->to_float16(x, l->dim, codes);
    for (int d = 0; d < l->dim; d++)
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
            turn(job, l->key + i * l->key_stride + h * l->dim, position, 1.0f, head);
            store(job, l->key_kind, head, &key, codes);
            store(job, l->value_kind, l->value + i * l->value_stride + h * l->dim, &value, codes);
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

/* Cut `count` query rows into groups: full ones, then the smallest that holds the rest. Returns how many groups. */
static int group_rows(const struct isa *isa, int left)
{
    int size = isa->rows;
    while (size > 1 && size / 2 >= left)
        size /= 2;
    return size;
}

static int log2_of(int size) { return size == 8 ? 3 : size / 2; }

/* A score's factor: in bfloat16 a score is the exponent of 2, and softcap needs the natural one. */
static float scale_of_query(const struct layer *l)
{
    return l->arithmetic == IN_BFLOAT16 && l->softcap == 0.0f ? l->scale * LOG2_E : l->scale;
}

/* Pack queries [dim, rows] per group. Row i is token i / group, head i % group. */
static void pack_rows(const struct attention *job, struct scratch *m, int first_row, int first_position, int kv_head, int rows)
{
    const struct layer *l = job->layer;
    const int group = l->num_heads / l->num_kv_heads;
    const int in_pairs = l->arithmetic == IN_BFLOAT16, depth = in_pairs ? (l->dim + 1) / 2 : l->dim;
    float *packed = m->query, *head = m->values;
    for (int at = 0, size; at < rows; at += size) {
        size = group_rows(job->isa, rows - at);
        for (int r = 0; r < size; r++) {
            int row = smaller(at + r, rows - 1); /* a group's spare rows repeat the last one */
            const float *query = l->query + (first_row + row / group) * l->query_stride + (kv_head * group + row % group) * l->dim;
            turn(job, query, first_position + row / group, scale_of_query(l), head);
            for (int d = l->dim; d < round_up(l->dim, 16); d++)
                head[d] = 0.0f;
            if (in_pairs)
                job->pairs->round_row(head, round_up(l->dim, 16));
            for (int d = 0; d < depth; d++)
                packed[d * size + r] = head[d];
            m->position[at + r] = first_position + row / group;
        }
        packed += (size_t)size * l->dim;
    }
}

/* Clear the running sums of a split. */
static void start_rows(const struct attention *job, struct scratch *m, int rows)
{
    const int all = round_up(rows, group_rows(job->isa, rows));
    memset(m->output, 0, sizeof(float) * all * round_up(job->layer->dim, job->isa->vector_floats));
    memset(m->sums, 0, sizeof(float) * all * 16);
    for (int r = 0; r < all; r++)
        m->maximum[r] = LOWEST;
}

static size_t result_floats(const struct attention *job)
{
    return round_up(job->layer->dim, job->isa->vector_floats) + RESULT_FLOATS;
}

static void clear_results(const struct attention *job, float *results, int rows)
{
    const size_t floats = result_floats(job);
    memset(results, 0, sizeof(float) * rows * floats);
    for (int r = 0; r < rows; r++)
        results[r * floats + floats - 16] = LOWEST;
}

/* Divide by the sum of probabilities and store. The sum's order is fixed: halves of 16 lanes. Adding 0 makes -0 +0. */
static void finish_rows(const struct attention *job, float *results, int first_row, int kv_head, int rows)
{
    const struct layer *l = job->layer;
    const int group = l->num_heads / l->num_kv_heads;
    const size_t floats = result_floats(job);
    for (int r = 0; r < rows; r++) {
        const float *values = results + r * floats;
        float *sum = results + (r + 1) * floats - RESULT_FLOATS;
        for (int half = 8; half > 0; half /= 2)
            for (int i = 0; i < half; i++)
                sum[i] += sum[i + half];
        float *output = l->output + (first_row + r / group) * l->output_stride + (kv_head * group + r % group) * l->dim;
        float inverse = 1.0f / sum[0];
        for (int d = 0; d < l->dim; d++)
            output[d] = values[d] * inverse + 0.0f;
    }
}

/* Find tokens first .. last of the tile. Outside of that range any valid address may be used. */
static void find_tile(const struct attention *job, int s, int head, int start, int first, int last, struct places *places)
{
    const struct layer *l = job->layer;
    const int64_t key_bytes = vector_bytes(l->key_kind, l->dim), value_bytes = vector_bytes(l->value_kind, l->dim);
    const int64_t scales = scales_of(l->value_kind, l->dim, l->group);
    int slot = (start + first) % l->block_tokens;
    uint8_t *block = block_at(job, s, start + first);
    for (int t = first; t < last; t++, slot++) {
        if (slot == l->block_tokens) {
            slot = 0;
            block = block_at(job, s, start + t);
        }
        const int64_t row = (int64_t)head * l->block_tokens + slot;
        places->keys[t] = block + l->keys + row * key_bytes;
        places->values[t] = block + l->values + row * value_bytes;
        places->scales[t] = (const uint16_t *)(block + l->value_scales) + row * scales;
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
    const int64_t unit = unit_bytes(l->key_kind), at = start % TILE * l->dim;
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

/* Bring in values: decoded, or where they are, or padded with zeros for odd widths. */
static void load_values(const struct attention *job, struct scratch *m, const struct places *places, int first, int last,
                        struct tile *tile)
{
    const struct layer *l = job->layer;
    for (int t = first; t < last; t++) {
        float *row = m->values + t * tile->columns;
        tile->values[t] = row;
        if (l->value_kind != FLOAT32) {
            job->isa->value[l->value_kind](places->values[t], places->scales[t], l->dim, l->group, row);
        } else if (tile->columns == l->dim) {
            tile->values[t] = (const float *)places->values[t];
        } else {
            memcpy(row, places->values[t], l->dim * sizeof(float));
            memset(row + l->dim, 0, (tile->columns - l->dim) * sizeof(float));
        }
    }
}

/* Bring in the tile for bfloat16: pairs of rounded keys and values. */
static void load_pairs(const struct attention *job, struct scratch *m, const struct places *places, int s, int head, int first,
                       int last, struct tile *tile)
{
    const struct layer *l = job->layer;
    const int columns = tile->columns, is_half = l->dim % job->isa->vector_floats == 0 && l->dim % 2 == 0;
    tile->key_pairs = m->keys, tile->value_pairs = m->values;
    if (l->key_kind == FLOAT16 && l->block_tokens % 16 == 0 && is_half) {
        for (int t = first / 16 * 16; t < last; t += 16)
            job->pairs->pair_keys(&places->of_16[t / 16], l->dim, m->keys + t);
    } else {
        load_keys(job, m, places, s, head, first, last, tile);
        for (int t = 0; t < TILE && l->key_kind == FLOAT32; t += 16)
            for (int d = 0; d < l->dim; d++)
                memcpy(m->keys + d * TILE + t, tile->keys[t / 16] + d * tile->key_stride, 16 * sizeof(float));
        if (l->dim % 2)
            memset(m->keys + l->dim * TILE, 0, TILE * sizeof(float));
        job->pairs->pair_rows(m->keys, 0, (l->dim + 1) / 2, TILE, TILE);
    }
    if (l->value_kind == FLOAT16 && is_half) {
        for (int t = first & ~1; t < last; t += 2)
            job->pairs->pair_float16(places->values[larger(t, first)], t + 1 < last ? places->values[t + 1] : NULL, columns,
                                    m->values + t / 2 * columns);
        return;
    }
    load_values(job, m, places, first, last, tile);
    for (int t = first; t < last && tile->values[first] != m->values + first * columns; t++)
        memcpy(m->values + t * columns, tile->values[t], columns * sizeof(float));
    if (first % 2)
        memset(m->values + (first - 1) * columns, 0, columns * sizeof(float));
    if (last % 2)
        memset(m->values + last * columns, 0, columns * sizeof(float));
    job->pairs->pair_rows(m->values, first / 2, (last + 1) / 2, columns, columns);
}

/* Row of isa->attend for keys and values that are decoded in registers; -1 for a mix that has none. */
static int mix_of(const struct layer *l)
{
    if (l->key_kind == l->value_kind)
        return l->key_kind;
    if (l->key_kind != INT8)
        return -1;
    return l->value_kind == INT4 ? K8V4 : l->value_kind == GROUPED_INT4 ? GROUPED_K8V4 : -1;
}

/* Whether the rows can decode keys and values in registers: they fit into one group, and nothing needs padding. */
static int decodes_in_registers(const struct attention *job, int rows)
{
    const struct layer *l = job->layer;
    const int lanes = job->isa->vector_floats;
    const int has_mix = l->arithmetic == IN_BFLOAT16 ? l->key_kind == FLOAT16 && l->value_kind == FLOAT16
                                                     : l->key_kind != FLOAT32 && mix_of(l) >= 0;
    const int groups_fit = l->value_kind != GROUPED_INT4 || l->group % lanes == 0;
    return has_mix && rows <= job->isa->rows && l->block_tokens % 16 == 0 && l->dim % lanes == 0 && groups_fit;
}

static void attend_tile(const struct attention *job, const struct scratch *m, struct tile *tile, int first, int last, int rows)
{
    const float *packed = m->query;
    struct rows groups[64];
    for (int at = 0; at < rows;) {
        int count = 0;
        const int size = group_rows(job->isa, rows - at);
        for (; at < rows && count < 64 && group_rows(job->isa, rows - at) == size; at += size) {
            struct rows *g = &groups[count];
            *g = (struct rows){packed, m->output + (size_t)at * tile->columns, m->maximum + at, m->sums + at * 16,
                             m->position + at, first, last};
            if (tile->window)
                g->first = larger(first, g->position[0] - tile->window + 1 - tile->start);
            g->last = smaller(last, g->position[size - 1] + 1 - tile->start);
            if (g->first < g->last)
                count++;
            packed += (size_t)size * job->layer->dim;
        }
        if (count == 0)
            continue;
        if (job->layer->arithmetic == IN_BFLOAT16)
            job->pairs->attend[tile->codes != NULL][log2_of(size)](groups, count, tile);
        else
            job->isa->attend[tile->codes != NULL ? mix_of(job->layer) : FLOAT32][log2_of(size)](groups, count, tile);
        tile->next = NULL; /* fetched once */
    }
}

/* The scratch memory of the item's h-th head. */
static struct scratch scratch_of(const struct attention *job, const struct scratch *m, int h, int rows)
{
    struct scratch part = *m;
    size_t at = (size_t)h * round_up(rows, 8);
    part.query += at * job->layer->dim;
    part.output += at * round_up(job->layer->dim, job->isa->vector_floats);
    part.maximum += at;
    part.sums += at * 16;
    part.results += at * result_floats(job);
    part.position += at;
    return part;
}

/* The rows of an item: a chunk of a sequence's tokens, and some KV heads. */
struct item {
    int s, chunk, first_head, heads;
    int first_split, last_split; /* of the context; 0, 0: all, merged */
};

/* The tokens of an item. */
struct span {
    int first_row, first_position, rows, oldest, stop;
};

static struct span span_of(const struct attention *job, const struct item *item)
{
    const struct layer *l = job->layer;
    const int end = job->step->query_starts[item->s + 1], first_row = first_query(job, item->s) + item->chunk * job->chunk_tokens;
    const int tokens = smaller(job->chunk_tokens, end - first_row);
    const int first_position = job->step->context_lens[item->s] - end + first_row;
    return (struct span){first_row, first_position, tokens * (l->num_heads / l->num_kv_heads),
                         l->window ? larger(0, first_position - l->window + 1) : 0, first_position + tokens};
}

/* Attend to tokens from .. stop of one split: all heads of a tile, then the next tile. */
static void attend_split(const struct attention *job, struct scratch *m, struct scratch *parts, const struct item *item,
                         const struct span *span, int from, int stop)
{
    const struct layer *l = job->layer;
    const int in_registers = decodes_in_registers(job, span->rows);
    struct tile tile = {.dim = l->dim,
                        .group = l->group,
                        .columns = round_up(l->dim, job->isa->vector_floats),
                        .factors = m->values,
                        .window = l->window,
                        .key_bytes = (int)vector_bytes(l->key_kind, l->dim),
                        .value_bytes = (int)vector_bytes(l->value_kind, l->dim),
                        .softcap = l->arithmetic == IN_BFLOAT16 ? l->softcap * LOG2_E : l->softcap,
                        .inverse_softcap = l->softcap != 0.0f ? 1.0f / l->softcap : 0.0f};
    struct places places[2];
    int now = 0, head = 0, start = from / TILE * TILE;
    find_tile(job, item->s, item->first_head, start, larger(0, from - start), smaller(TILE, stop - start), &places[now]);
    for (int h = 0; h < item->heads; h++)
        start_rows(job, &parts[h], span->rows);
    while (start < stop) {
        int first = larger(0, from - start), last = smaller(TILE, stop - start);
        int next_head = (head + 1) % item->heads, next_start = next_head == 0 ? start + TILE : start;
        tile.start = start;
        tile.codes = in_registers ? &places[now] : NULL;
        tile.next = next_start < stop ? &places[1 - now] : NULL;
        if (tile.next != NULL)
            find_tile(job, item->s, item->first_head + next_head, next_start, larger(0, from - next_start),
                      smaller(TILE, stop - next_start), &places[1 - now]);
        if (!in_registers && l->arithmetic == IN_BFLOAT16) {
            load_pairs(job, m, &places[now], item->s, item->first_head + head, first, last, &tile);
        } else if (!in_registers) {
            load_keys(job, m, &places[now], item->s, item->first_head + head, first, last, &tile);
            load_values(job, m, &places[now], first, last, &tile);
        }
        attend_tile(job, &parts[head], &tile, first, last, span->rows);
        head = next_head, start = next_start, now = 1 - now;
    }
}

/* Where the results of a row, head and split are, if threads share the splits of a context. */
static float *shared_result(const struct attention *job, int s, int head, int row, int split)
{
    const int64_t rows = rows_of(job, s);
    return job->results + ((job->first_result[s] + head * rows + row) * job->max_splits + split) * result_floats(job);
}

/* Merge a split's result into a row's total. */
static void merge(const struct attention *job, float *total, const float *output, const float *sums, float maximum)
{
    const int columns = round_up(job->layer->dim, job->isa->vector_floats);
    (job->layer->arithmetic == IN_BFLOAT16 ? job->pairs->merge : job->isa->merge)(total, output, sums, maximum, columns);
}

/* Take the result of a split: of row r of an item's h-th head. It is kept, or merged at once. */
static void take_result(const struct attention *job, const struct scratch *m, const struct item *item, int h, int r, int split)
{
    const size_t columns = round_up(job->layer->dim, job->isa->vector_floats);
    const float *output = m->output + r * columns, *sums = m->sums + r * 16;
    if (item->last_split == 0) {
        merge(job, m->results + r * result_floats(job), output, sums, m->maximum[r]);
        return;
    }
    float *result = shared_result(job, item->s, item->first_head + h, r, split);
    memcpy(result, output, sizeof(float) * columns);
    memcpy(result + columns, sums, sizeof(float) * 16);
    result[columns + 16] = m->maximum[r];
}

static void attend_item(const struct attention *job, struct scratch *m, const struct item *item)
{
    const struct span span = span_of(job, item);
    const int is_shared = item->last_split > 0;
    const int first = is_shared ? item->first_split : span.oldest / SPLIT;
    const int last = is_shared ? smaller(item->last_split, (span.stop + SPLIT - 1) / SPLIT) : (span.stop + SPLIT - 1) / SPLIT;
    struct scratch parts[ROWS_PER_ITEM];
    for (int h = 0; h < item->heads; h++) {
        parts[h] = scratch_of(job, m, h, span.rows);
        pack_rows(job, &parts[h], span.first_row, span.first_position, item->first_head + h, span.rows);
        clear_results(job, parts[h].results, span.rows);
    }
    for (int split = larger(first, span.oldest / SPLIT); split < last; split++) {
        const int from = larger(span.oldest, split * SPLIT), stop = smaller(span.stop, (split + 1) * SPLIT);
        attend_split(job, m, parts, item, &span, from, stop);
        for (int h = 0; h < item->heads; h++)
            for (int r = 0; r < span.rows; r++)
                take_result(job, &parts[h], item, h, r, split);
    }
    for (int h = 0; h < item->heads && !is_shared; h++)
        finish_rows(job, parts[h].results, span.first_row, item->first_head + h, span.rows);
}

/* Longest contexts of a sequence first. */
void attention_item(const struct attention *job, int index, float *scratch)
{
    const int piece = index % job->pieces;
    int s = 0, at = index / job->pieces;
    for (; at >= items_of(job, s); s++)
        at -= items_of(job, s);
    const int heads = heads_of(job, s), shares = (job->layer->num_kv_heads + heads - 1) / heads;
    struct item item = {s, chunks_of(job, s) - 1 - at / shares, at % shares * heads, 0, 0, 0};
    item.heads = smaller(heads, job->layer->num_kv_heads - item.first_head);
    if (job->pieces > 1) {
        item.first_split = job->max_splits * piece / job->pieces;
        item.last_split = job->max_splits * (piece + 1) / job->pieces;
    }
    struct scratch m;
    lay_out(job->layer, scratch, (size_t)heads * round_up(rows_of(job, s), 8), &m);
    attend_item(job, &m, &item);
}

/* Merge the splits of one sequence and KV head, in order. */
void attention_merge(const struct attention *job, int index, float *scratch)
{
    const int s = index / job->layer->num_kv_heads, head = index % job->layer->num_kv_heads;
    const struct item item = {s, 0, head, 1, 0, 0};
    const struct span span = span_of(job, &item);
    const size_t floats = result_floats(job);
    clear_results(job, scratch, span.rows);
    for (int r = 0; r < span.rows; r++)
        for (int split = span.oldest / SPLIT; split * SPLIT < span.stop; split++) {
            const float *result = shared_result(job, s, head, r, split), *sums = result + floats - RESULT_FLOATS;
            merge(job, scratch + r * floats, result, sums, sums[16]);
        }
    finish_rows(job, scratch, span.first_row, head, span.rows);
}

size_t attention_scratch_bytes(const struct layer *layer)
{
    struct scratch m;
    const int group = layer->num_heads / layer->num_kv_heads;
    /* An item of h heads with r rows each has h * round_up(r, 8) rows, where h * r is at most ROWS_PER_ITEM or h is 1. */
    const int rows = larger(8 * smaller(layer->num_kv_heads, ROWS_PER_ITEM), round_up(larger(larger(2 * ROWS_PER_ITEM, MOST_ROWS), group), 8));
    const size_t of_item = lay_out(layer, NULL, rows, &m), of_merge = (size_t)(rows + 1) * (round_up(layer->dim, 16) + RESULT_FLOATS);
    return sizeof(float) * (of_item > of_merge ? of_item : of_merge);
}

static double multiply_adds(const struct attention *job)
{
    double scores = 0;
    for (int s = 0; s < job->step->num_sequences; s++) {
        double rows = queries_of(job, s);
        int context = job->step->context_lens[s];
        scores += rows * (job->layer->window ? smaller(context, job->layer->window) : context);
    }
    return 2.0 * scores * job->layer->num_heads * job->layer->dim;
}

/* Split long contexts, if there are too few items for the threads. */
static void plan_sharing(struct attention *job, int threads)
{
    const struct step *step = job->step;
    int64_t rows = 0;
    for (int s = 0; s < step->num_sequences; s++) {
        if (chunks_of(job, s) > 1)
            return; /* prompts have rows enough */
        job->max_splits = larger(job->max_splits, (step->context_lens[s] + SPLIT - 1) / SPLIT);
        rows += (int64_t)rows_of(job, s) * job->layer->num_kv_heads;
    }
    if (threads == 1 || job->items == 0 || job->items >= ITEMS_PER_THREAD * threads || job->max_splits < 2)
        return;
    job->pieces = smaller(job->max_splits, (ITEMS_PER_THREAD * threads + job->items - 1) / job->items);
    job->merges = step->num_sequences * job->layer->num_kv_heads;
    job->results_bytes = sizeof(int64_t) * round_up(step->num_sequences, 8) +
                         sizeof(float) * rows * job->max_splits * result_floats(job);
}

void attention_plan(struct attention *job, const struct layer *layer, const struct step *step, const int32_t *first_queries,
                    int threads, double min_parallel)
{
    const int group = layer->num_heads / layer->num_kv_heads;
    int chunks = 0, items = 0;
    const int isa = selected_isa();
    *job = (struct attention){.isa = ISAS[isa].isa, .pairs = ISAS[isa].pairs, .layer = layer, .step = step,
                              .first_queries = first_queries, .pieces = 1};
    job->chunk_tokens = larger(1, MOST_ROWS / group), job->max_heads = layer->num_kv_heads;
    if (multiply_adds(job) < min_parallel)
        threads = 1;
    for (int s = 0; s < step->num_sequences; s++)
        chunks += chunks_of(job, s);
    if (chunks * layer->num_kv_heads < ITEMS_PER_THREAD * threads) {
        job->chunk_tokens = larger(1, ROWS_PER_ITEM / group), chunks = 0;
        for (int s = 0; s < step->num_sequences; s++)
            chunks += chunks_of(job, s);
    }
    if (chunks < threads) /* too few sequences to keep the threads busy: distribute the heads */
        job->max_heads = larger(1, layer->num_kv_heads * chunks / threads);
    for (int s = 0; s < step->num_sequences; s++)
        items += items_of(job, s);
    job->items = items;
    job->threads = threads;
    plan_sharing(job, threads);
    job->items *= job->pieces;
}

void attention_share(struct attention *job, void *memory)
{
    if (job->pieces == 1)
        return;
    if (memory == NULL) {
        job->items /= job->pieces;
        job->pieces = 1, job->results_bytes = 0;
        return;
    }
    int64_t at = 0;
    job->first_result = memory;
    job->results = (float *)((char *)memory + sizeof(int64_t) * round_up(job->step->num_sequences, 8));
    for (int s = 0; s < job->step->num_sequences; s++) {
        job->first_result[s] = at;
        at += (int64_t)rows_of(job, s) * job->layer->num_kv_heads;
    }
}

/* Memory that a thread keeps until it ends, for callers that have made none: see paged_attention(). */
struct kept_memory {
    void *data;
    size_t bytes;
};

static pthread_key_t kept_key;

static void free_kept(void *memory)
{
    free(((struct kept_memory *)memory)->data);
    free(memory);
}

static void make_kept_key(void) { pthread_key_create(&kept_key, free_kept); }

/* This thread's memory, at least `bytes` long and aligned to 64. NULL: there is too little. */
static void *kept_memory(size_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_kept_key);
    struct kept_memory *memory = pthread_getspecific(kept_key);
    if (memory == NULL) {
        memory = calloc(1, sizeof *memory);
        if (memory == NULL || pthread_setspecific(kept_key, memory) != 0) {
            free(memory);
            return NULL;
        }
    }
    if (memory->bytes < bytes) {
        free(memory->data);
        memory->bytes = 0;
        if (posix_memalign(&memory->data, 64, bytes) != 0) {
            memory->data = NULL;
            return NULL;
        }
        memory->bytes = bytes;
    }
    return memory->data;
}

/* One layer's attention as a work of its own: items, then merges. */
struct alone {
    struct attention job;
    size_t scratch_bytes;
    int phase;
    atomic_int failed;
};

static int next_phase(void *argument, int thread)
{
    (void)thread;
    struct alone *alone = argument;
    const int units[] = {alone->job.items, alone->job.pieces > 1 && !atomic_load(&alone->failed) ? alone->job.merges : 0, 0};
    return units[alone->phase++];
}

static void run_units(void *argument, int thread, int begin, int end)
{
    (void)thread;
    struct alone *alone = argument;
    float *scratch = kept_memory(alone->scratch_bytes);
    if (scratch == NULL)
        atomic_store(&alone->failed, 1);
    for (int i = begin; i < end && scratch != NULL; i++)
        (alone->phase == 1 ? attention_item : attention_merge)(&alone->job, i, scratch);
}

/* Write keys and values into the pool, then attend. Returns 0, or -1 when there is too little memory for the scratch space. */
int paged_attention(const struct layer *layer, const struct step *step)
{
    struct alone alone = {.scratch_bytes = attention_scratch_bytes(layer)};
    attention_plan(&alone.job, layer, step, NULL, step->threads, MIN_PARALLEL);
    float *scratch = kept_memory(alone.scratch_bytes);
    void *results = NULL;
    if (scratch == NULL || (alone.job.results_bytes > 0 && posix_memalign(&results, 64, alone.job.results_bytes) != 0))
        return -1;
    attention_share(&alone.job, results);
    attention_write(&alone.job, 0, step->query_starts[step->num_sequences], scratch);
    const struct work work = {next_phase, run_units, NULL, &alone};
    team_run_now(&work, alone.job.threads);
    free(results);
    return atomic_load(&alone.failed) ? -1 : 0;
}
