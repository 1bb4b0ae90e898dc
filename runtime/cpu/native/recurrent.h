/* Recurrent layers: short convolutions, gated delta rules and selective scans over the side state of each sequence.
 *
 * The state of a head is a matrix [rows][columns]: of keys and values (delta rule), or of the state's and the head's dims
 * (scan, Mamba-2). Its columns are padded to whole LANES with zeros and stored in tiles of STATE_TILE, the last one narrower,
 * each [rows][width]: what a thread works on is one stretch of memory. A token's own work is that of the recurrence, so that
 * results do not depend on where a prompt was cut.
 *
 * A unit is one tile of one sequence, over all of its tokens. Sources: Gated DeltaNet, Yang et al. 2024 (arXiv:2412.06464);
 * Mamba-2, Dao and Gu 2024 (arXiv:2405.21060).
 */
#pragma once
#include "kernels.h"

/* The sequences of a step. slots [num_sequences]: of their side state. Tiles first_tile .. first_tile + num_tiles of a state are
 * computed; num_tiles 0: all. */
struct sequences {
    const int32_t *query_starts, *context_lens, *slots;
    int32_t num_sequences, threads, first_tile, num_tiles;
};

static inline int is_recurrent(const struct operation *operation) { return operation->kind >= OP_CONVOLVE; }

/* Units of a layer in a step, and about how many multiply-adds all take. */
int recurrent_units(const struct operation *operation, const struct sequences *sequences);
double recurrent_work(const struct operation *operation, int tokens);
void recurrent_run(const struct kernels *kernels, const struct operation *operation, const struct sequences *sequences,
                   int begin, int end);

/* One layer as a work of its own, with the best kernels of this CPU. */
void recurrent_layer(const struct operation *operation, const struct sequences *sequences);
