/* Adapters of a step: which rows have one, and A x' of their linear operations.
 *
 *     plan, once a step      rows that have an adapter, sorted by it: units of up to LOW_RANK_ROWS rows of one adapter
 *     begin, each operation  the units whose adapter changes it, or 0: then the operation is computed as without adapters
 *     run                    norms the rows of units and multiplies them by A
 *
 * The kernels' `multiply` then adds B (A x') tile by tile, where the sums of x' @ W^T are in registers or cache. So all takes
 * time by the rows that have adapters. What a row gets depends on its input and its adapter alone.
 */
#pragma once
#include "kernels.h"
#include "launch_program.h"

struct low_rank_unit { /* sorted rows first .. first + count */
    int32_t slot, first, count;
};

/* Rows of tokens, or rows of logits. */
struct low_rank_plan {
    int32_t *slots, *places;     /* [rows]: of the adapter, -1 for none; the place among sorted rows */
    int32_t *sources;            /* [places]: the row */
    struct low_rank_unit *units; /* [num_units] */
    int num_units;
};

struct low_rank_step {
    const struct low_rank **changes; /* [operations][slots] */
    unsigned char *is_loaded;        /* [slots] */
    int num_operations, slots, ranks, max_rows;
    struct low_rank_plan plans[2];   /* by enum rows_of */
    int32_t *next;                   /* [slots] */
    float *results;                  /* [max_rows][ranks] */
    int is_used;                     /* by the step at hand */

    struct low_rank_rows rows;       /* the operation at hand */
    const struct linear *op;
    const int64_t *gathered;         /* the tokens of rows of logits; NULL for rows of tokens */
    int parts;                       /* of a unit, for threads to share: each has some of A's tiles */
};

int low_rank_reserve(struct low_rank_step *step, int operations, int max_rows, int slots, int ranks);
void low_rank_set(struct low_rank_step *step, int slot, const struct low_rank *const *changes);
void low_rank_free(struct low_rank_step *step);

/* Whether the slots of a batch's sequences have adapters. */
int low_rank_fits(const struct low_rank_step *step, const struct batch *batch);
void low_rank_plan(struct low_rank_step *step, const struct batch *batch);

/* The units of operation `at`; 0 where it is changed for no row. *work: their multiply-adds. */
int low_rank_begin(struct low_rank_step *step, int at, const struct linear *op, const struct batch *batch, int threads, int64_t *work);

/* scratch: LOW_RANK_ROWS rows of k floats */
void low_rank_run(const struct low_rank_step *step, const struct kernels *kernels, int begin, int end, float *scratch);
