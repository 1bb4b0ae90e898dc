/* What one instruction set offers to the walk of a program (launch_program.c). kernels.c has a table for each.
 *
 * Every function writes one row, or one tile of up to `max_height` rows by 16 columns, and nothing else: the walk may call
 * it on any thread, in any order, and leave rows out. No function allocates or fails.
 */
#pragma once
#include "launch.h"

/* Rows of activations as dot_tile reads them: normed, and rounded by op->rounding. The tile of rows first .. first + height
 * is a stretch of its own, in which row m (0 .. height - 1) takes turns with the others:
 *
 *     values  int8   [padded_k / 4][height][4], padded with 0    at byte  first * padded_k
 *             float  [k][height], where rounding is ROUND_NONE   at float first * padded_k
 *     scales  [padded_k / block][height]                         at first * padded_k / block; not for floats
 *     sums    [padded_k / block][height]: of the codes           likewise
 *
 * Every array begins at 64 bytes. Tiles begin at multiples of max_height; only the last one may be lower.
 */
struct activations {
    void *values;
    float *scales;
    int32_t *sums;
};

struct kernels {
    const char *name;
    int max_height; /* at most MAX_HEIGHT */

    /* Norm and round x [k] into row m of the tile of rows first .. first + height. scratch: [padded_k] floats, aligned. */
    void (*round_row)(const struct linear *op, const float *x, const struct activations *rows, int first, int height, int m,
                      float *scratch);

    /* out[m][16] = rows m of the tile of activations times one tile of weights, at `tile`. */
    void (*dot_tile)(const struct linear *op, const uint8_t *tile, const struct activations *rows, int first, int height,
                     float *out);

    /* Bias, cap, activation and store of columns 16 * tile .. of output rows first .. first + height. `tile` counts tiles
     * of output columns: with STORE_GATE y is of tile 2 * tile of the matrix, the gate's, and `up` of the one after it. */
    void (*finish)(const struct linear *op, int tile, int first, int height, const float *y, const float *up);

    void (*embed_row)(const struct embed *op, int64_t id, int64_t row);
    void (*normalize_row)(const struct normalize *op, int64_t source, int64_t row); /* input and residual are rows `source` */
    void (*combine_row)(const struct combine *op, int64_t row);
};

/* The table by its name, or the best one for NULL; NULL if this CPU or build has no such instruction set. */
const struct kernels *find_kernels(const char *name);

/* Names of those that run here, best first; NULL from the end on. */
const char *kernels_name(int index);
