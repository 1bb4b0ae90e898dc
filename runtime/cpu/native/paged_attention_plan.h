/* What the files of attention share: how a step is divided into items, their rows and tokens, and where tiles come from. */
#pragma once
#include "paged_attention.h"
#include "paged_attention_isa.h"

#define SPLIT 512          /* tokens of a split, a multiple of TILE; part of the arithmetic */
#define ROWS_PER_ITEM 64   /* query rows that share a tile's decoded keys and values, or more: see most_rows() */
#define RESULT_FLOATS 32   /* of a row's result after its columns: 16 sums, the maximum, and padding */

static inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
static inline int smaller(int a, int b) { return a < b ? a : b; }
static inline int larger(int a, int b) { return a > b ? a : b; }

/* Query rows of an item at most: they stay in a cache of 512 KiB, with their outputs and results. */
static inline int most_rows(const struct layer *layer)
{
    return larger(ROWS_PER_ITEM, smaller(384, 24576 / larger(layer->dim, layer->value_dim)));
}

static inline int in_amx_order(const struct layer *l) { return l->arithmetic == IN_BFLOAT16_AMX; }

/* Rows of a group at most, on any CPU; rows of a head are padded to a multiple of it. */
static inline int group_padding(const struct layer *l) { return in_amx_order(l) ? AMX_ROWS : 8; }

/* Floats of a packed query: pairs that AMX multiplies are padded. */
static inline int query_floats(const struct layer *l) { return in_amx_order(l) ? larger(l->dim, AMX_PAIRS) : l->dim; }

/* The first token of sequence s that attends, and how many do. */
static inline int first_query(const struct attention *job, int s)
{
    return job->first_queries != NULL ? job->first_queries[s] : job->step->query_starts[s];
}

static inline int queries_of(const struct attention *job, int s) { return job->step->query_starts[s + 1] - first_query(job, s); }

static inline int chunks_of(const struct attention *job, int s)
{
    return (queries_of(job, s) + job->chunk_tokens - 1) / job->chunk_tokens;
}

/* Rows of one KV head in the largest chunk of sequence s. */
static inline int rows_of(const struct attention *job, int s)
{
    return smaller(queries_of(job, s), job->chunk_tokens) * (job->layer->num_heads / job->layer->num_kv_heads);
}

/* KV heads of one item of sequence s; the last item of a chunk may have fewer. */
static inline int heads_of(const struct attention *job, int s)
{
    return larger(1, smaller(job->max_heads, ROWS_PER_ITEM / rows_of(job, s)));
}

static inline int items_of(const struct attention *job, int s)
{
    if (chunks_of(job, s) == 0)
        return 0;
    int heads = heads_of(job, s);
    return chunks_of(job, s) * ((job->layer->num_kv_heads + heads - 1) / heads);
}

static inline size_t result_floats(const struct attention *job)
{
    return round_up(job->layer->value_dim, job->isa->vector_floats) + RESULT_FLOATS;
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

static inline struct span span_of(const struct attention *job, const struct item *item)
{
    const struct layer *l = job->layer;
    const int end = job->step->query_starts[item->s + 1], first_row = first_query(job, item->s) + item->chunk * job->chunk_tokens;
    const int tokens = smaller(job->chunk_tokens, end - first_row);
    const int first_position = job->step->context_lens[item->s] - end + first_row;
    return (struct span){first_row, first_position, tokens * (l->num_heads / l->num_kv_heads),
                         l->window ? larger(0, first_position - l->window + 1) : 0, first_position + tokens};
}

/* One item's place in a thread's scratch memory. */
struct scratch {
    float *query, *output, *maximum, *sums, *results, *keys, *values;
    uint8_t *codes;
    uint16_t *scales;
    int32_t *position;
};

/* paged_attention_pool.c */

/* Find tokens first .. last of the tile from `start` on. Outside of that range any valid address may be used. */
void attention_find_tile(const struct attention *job, int s, int head, int start, int first, int last, struct places *places);

/* Bring in keys and values of tokens first .. last: decoded, or where they are; for bfloat16 pairs of rounded ones. */
void attention_load_tile(const struct attention *job, struct scratch *m, const struct places *places, int s, int head, int first,
                         int last, struct tile *tile);

/* A head times `scale`, rotated by its position. */
static inline void turn(const struct attention *job, const float *head, int position, float scale, float *target)
{
    const struct layer *l = job->layer;
    const int64_t half = l->rotary_dim / 2, at = position * half;
    job->isa->turn(head, l->cos + at, l->sin + at, (int)half, l->dim, scale, target);
}
