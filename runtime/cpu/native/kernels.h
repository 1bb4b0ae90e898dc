/* What one instruction set offers to the walk of a program (launch_program.c). kernels.c has a table for each.
 *
 * Every function writes one row, or the given columns of rows, and nothing else: the walk may call it on any thread, in any
 * order, and leave rows out. No function allocates or fails. A row's bits depend on that row alone.
 */
#pragma once
#include "launch.h"

#define NO_SCORE (-1e30f) /* logit of an expert that has no share of a softmax: finite, so that differences are never NaN */

/* Rows of activations as multiply reads them: normed, and rounded by op->rounding. The tile of rows first .. first + height
 * is a stretch of its own, in which row m (0 .. height - 1) takes turns with the others:
 *
 *     values  int8   [padded_k / 4][height][4], padded with 0    at byte  first * padded_k; for AMX
 *             [padded_k / piece][height][piece] where whole tiles of rows have pieces of 64 columns
 *             float  [k][height], where rounding is ROUND_NONE   at float first * padded_k
 *     scales  [blocks][height]                                   at first * blocks; not for floats
 *     sums    [blocks][height]: of the codes, in a form that suits the instruction set; likewise
 *
 * where blocks is activation_blocks(op). Every array begins at 64 bytes. Tiles begin at multiples of max_height; only the
 * last one may be lower.
 */
struct activations {
    void *values;
    float *scales;
    int32_t *sums;
    int count; /* rows in all */
    const struct low_rank_rows *low_rank; /* what is added to rows that have an adapter; NULL for none */
};

/* Low-rank changes of the rows of an operation: low_rank.h. */
struct low_rank_rows {
    const struct low_rank *const *changes; /* [slots]: of the operation; NULL for adapters that do not change it */
    const int32_t *slots, *places;         /* [rows]: of the row's adapter, -1 for none; where its results are */
    const float *results;                  /* [places][stride]: A x' */
    int64_t stride;
};

/* Blocks of k whose codes are summed apart: 1 where neither the weight nor the activations have a scale per block. */
static inline int activation_blocks(const struct linear *op)
{
    const struct matrix *w = op->matrix;
    if (op->rounding == ROUND_NONE)
        return 0;
    return w->scale_blocks == 1 && op->rounding != ROUND_BLOCK ? 1 : w->padded_k / w->block;
}

/* Bits of a code of integers. */
static inline int code_bits(const struct matrix *w)
{
    return w->form == FORM_INT2 ? 2 : w->form == FORM_INT3 ? 3 : w->form == FORM_INT4 ? 4 : 8;
}

/* Bytes by which codes are fetched ahead: as was tried for the matrix where few rows wait for memory, else `usual`. */
static inline int64_t bytes_ahead(const struct matrix *w, const struct activations *rows, int64_t usual)
{
    enum { FEW_ROWS = 8 };
    return w->fetch_ahead > 0 && rows->count < FEW_ROWS ? w->fetch_ahead : usual;
}

/* Whether the sum of a block's codes may exceed 16 bits: 256 times -128 does. */
static inline int has_wide_sums(const struct matrix *w, int blocks) { return w->padded_k / blocks > 255; }

enum {
    LOW_RANK_ROWS = 4, /* of one adapter, that are multiplied by its A at once */
};

/* Rows first .. first + count: the tokens of one sequence in a step, and the slot of its side state. */
struct stretch {
    int64_t first, slot;
    int count, is_fresh;   /* is_fresh: they are the sequence's first, and its state is zero */
};

struct kernels {
    const char *name;
    int max_height; /* at most MAX_HEIGHT */

    /* Norm and round x [k] into row m of the tile of rows first .. first + height. scratch: padded_k floats, rounded up to
     * whole LANES, aligned. */
    void (*round_row)(const struct linear *op, const float *x, const struct activations *rows, int first, int height, int m,
                      float *scratch);

    /* Tiles begin .. end of output columns, LANES each, of rows 0 .. count of the output: the matmul, then alpha, bias,
     * cap, activation and store. With STORE_GATE a tile of output columns is two tiles of the matrix. Rows and tiles are
     * taken in an order that suits the caches, and several tiles at once, so give a thread its whole share. */
    void (*multiply)(const struct linear *op, const struct activations *rows, int count, int begin, int end);

    /* y [a->n, of tiles begin .. end] of rows x[0 .. count - 1] times A, each y `stride` floats after the one before; count is at
     * most LOW_RANK_ROWS. multiply adds what is multiplied by B. */
    void (*project_rows)(const struct matrix *a, const float *const *x, int count, float *y, int64_t stride, int begin, int end);

    void (*embed_row)(const struct embed *op, int64_t id, int64_t row);
    /* source: the row of views that are gathered */
    void (*normalize_row)(const struct normalize *op, int64_t source, int64_t row);
    void (*combine_row)(const struct combine *op, int64_t source, int64_t row);

    /* Scores [count] of a row's logits. */
    void (*score_row)(const struct experts *op, const float *logits, float *scores);
    /* Row `row` of the output: results [places][stride], padded to whole LANES, times weights, in their order. */
    void (*add_experts_row)(const struct experts *op, const float *results, int64_t stride, const int32_t *places,
                            const float *weights, int64_t row);

    /* Recurrent layers: all tokens of a stretch in their order, of one tile, from its state and to it. */
    void (*convolve_tile)(const struct convolve *op, const struct stretch *tokens, int tile);
    void (*delta_rule_tile)(const struct delta_rule *op, const struct stretch *tokens, int head, int tile);
    void (*scan_tile)(const struct scan *op, const struct stretch *tokens, int head, int tile);
};

/* The table by its name, or the best one for NULL; NULL if this CPU or build has no such instruction set. */
const struct kernels *find_kernels(const char *name);

/* Names of those that run here, best first; NULL from the end on. */
const char *kernels_name(int index);
