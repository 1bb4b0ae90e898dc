/* Attention over a paged KV pool: the structures, and the phases of one layer's attention for a team of threads.
 *
 *     attention_plan                     divides the work; the caller then gives results_bytes of memory for the results
 *     attention_write                    keys and values of some tokens enter the pool: any tokens, on any thread
 *     attention_item                     when all is written: items 0 .. items - 1
 *     attention_merge                    when all items are done and `pieces` is above 1: 0 .. merges - 1
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "abi_enums.h"

struct rows;
struct tile;

/* Groups of up to AMX_ROWS rows attend to a tile, in bfloat16 in the order of AMX (paged_attention_amx.h). */
typedef void attend_amx(struct rows *groups, int count, const struct tile *tile, int rows);

/* The layer's constants; attention.py's Layer mirrors it. */
struct layer {
    uint8_t *pool;
    int64_t block_bytes, keys, values, key_scales, value_scales; /* bytes: of a block, and to this layer's parts in it */
    const float *query, *key, *value; /* rows of strides floats: parts of one matrix, or three */
    float *output;                    /* rows of num_heads * value_dim, output_stride floats apart */
    const float *cos, *sin;           /* [positions, rotary_dim / 2] */
    const float *sinks;               /* [num_heads]: a score of each head that has no value; NULL for none */
    int64_t query_stride, key_stride, value_stride, output_stride;
    int32_t rotary_dim;               /* leading elements of a head that are rotated; 0 for none */
    int32_t key_kind, value_kind;     /* enum kind; both FLOAT32, or neither */
    int32_t group;                    /* dims of grouped int4 that share a scale and a minimum */
    int32_t writes;                   /* 0 for a layer that attends to another layer's keys and values */
    int32_t num_heads, num_kv_heads, dim, value_dim, block_tokens, window; /* dim: of a query and of a key */
    int32_t values_in_keys;           /* a value is the last value_dim elements of its key, and not stored (latent attention) */
    float scale, softcap;
    int32_t arithmetic; /* enum arithmetic: of queries, keys, probabilities and values */
};

static inline int in_bfloat16(const struct layer *l) { return l->arithmetic != IN_FLOAT32; }

/* The step; attention.py's Step mirrors it. */
struct step {
    const int32_t *query_starts, *context_lens, *block_tables;
    int32_t num_sequences, max_blocks, threads;
};

/* Work shared by the threads: items of (sequence, chunk of its tokens, a few KV heads).
 *
 * An item takes as many heads as keep its rows in cache: a block holds a layer's heads next to each other, and reading
 * memory in pieces of 32 KiB is two to three times as fast as in pieces of 4. */
struct attention {
    const struct isa *isa;
    const struct pairs_isa *pairs; /* for bfloat16 */
    attend_amx *amx;               /* for bfloat16 in the order of AMX */
    const struct layer *layer;
    const struct step *step;
    const int32_t *first_queries;  /* [sequences]: earlier tokens are written, and do not attend; NULL: all attend */
    int threads, chunk_tokens, max_heads, items, merges; /* threads: 1 if sharing is not worth it */
    int pieces, max_splits;  /* items of a context, and splits of the longest; pieces is 1 if items merge their splits */
    int64_t results_bytes;   /* 0 if pieces is 1 */
    float *results;          /* [rows and KV heads of all sequences, max_splits, result] */
    int64_t *first_result;   /* [sequences] */
};

/* Divide the work of a step for `threads` threads. Work of fewer than `min_parallel` multiply-adds is one thread's. Tokens
 * before first_queries [sequences] do not attend; NULL for none. */
void attention_plan(struct attention *job, const struct layer *layer, const struct step *step, const int32_t *first_queries,
                    int threads, double min_parallel);

/* Give the memory for the results of shared contexts: results_bytes, aligned to 64. NULL: contexts are not shared. */
void attention_share(struct attention *job, void *memory);

/* Bytes of scratch memory, aligned to 64, that one thread needs for any function below and any step. */
size_t attention_scratch_bytes(const struct layer *layer);

void attention_write(const struct attention *job, int first_token, int last_token, float *scratch);
void attention_item(const struct attention *job, int index, float *scratch);
void attention_merge(const struct attention *job, int index, float *scratch);
