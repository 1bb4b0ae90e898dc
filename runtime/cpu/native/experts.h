/* A layer of experts in a step: rows are sorted by expert, and only the experts that have rows are multiplied.
 *
 *     route         scores of each row, its experts and their weights
 *     plan          the rows of each expert that has any, one after another, from a multiple of the kernels' height on
 *     gate and up   rows are rounded, then tiles of output columns of all these experts are shared among the threads
 *     down          the same
 *     combine       each row adds its experts' results, times their weights, in the order of its experts
 *
 * The arithmetic of a row does not depend on its place among the others (launch.h), nor does the order in which it adds: it has
 * the same bits in any company.
 */
#pragma once
#include "kernels.h"
#include "tensor_parallel.h"

struct hit { /* an expert that has rows */
    int32_t expert, first, count;
    int64_t values[2], blocks[2]; /* where its rounded rows begin: bytes, and scales; of gate and up, of down */
};

enum expert_stage { ROUTE_ROWS, ROUND_INPUT, MULTIPLY_UP, ROUND_INNER, MULTIPLY_DOWN, COMBINE_ROWS };

/* Memory for the largest layer, and the layer at hand. rows: of the operation; places: sorted rows. */
struct expert_step {
    const struct kernels *kernels;
    struct activations rounded;
    int32_t *ids, *places;        /* [rows * chosen] */
    float *weights, *ranked;      /* [rows * chosen]; scores of each thread's row, [threads][2][count] */
    int32_t *sources, *tile_hits; /* [places]: the row; [places / height]: the hit */
    int32_t *next;                /* [count] */
    struct hit *hits;             /* [count] */
    int32_t *own;                 /* [count]: the hits that this process multiplies */
    float *inner, *results;       /* [places][columns], strides of whole LANES */

    const struct experts *op;
    const int64_t *gathered;      /* [rows]: the tokens of rows of logits; NULL for rows of tokens */
    int rows, num_hits, num_own, tiles, threads, phase;
    enum expert_stage stage;
    const struct rank_group *group; /* NULL: this process makes all */
    const struct rank_part *part;
    int32_t inner_bounds[MAX_RANKS + 1]; /* columns of each rank; all of the first where ranks have whole experts */
    struct exchange exchange;
};

enum { EXCHANGE_NEXT = -1 };

/* What the layers of a program need at most. */
struct expert_needs {
    size_t pairs, places, count, inner, results; /* elements */
    size_t values, blocks, scratch;              /* of the rounded rows: bytes, and scales; of a thread: bytes */
};

void experts_need(struct expert_needs *needs, const struct experts *op, int max_rows, int height);

/* Returns -1 for too little memory. */
int experts_allocate(struct expert_step *step, const struct expert_needs *needs, int threads, int height);
void experts_free(struct expert_step *step);

/* Begin a layer, then prepare its phases one by one: the units of the next, EXCHANGE_NEXT where the ranks exchange `exchange`
 * before it goes on, or 0 after the last. scratch: the thread's. group, part: see tensor_parallel.h; NULL for all. */
void experts_begin(struct expert_step *step, const struct experts *op, int rows, const int64_t *gathered, int threads,
                   const struct rank_group *group, const struct rank_part *part);
int experts_next(struct expert_step *step, int thread, float *scratch);
void experts_run(const struct expert_step *step, int thread, int begin, int end, float *scratch);
