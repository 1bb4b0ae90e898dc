/* Tensor parallel: processes, the ranks of a group, that compute each step of a program together.
 *
 * All walk the same operations, each over an arena of its own. A rank makes some columns of an operation's output, or of a
 * mixture some experts; then each takes the others' part, so that all have the whole output before the next operation. Only
 * outputs are divided, never a sum, so values have the bits of one process. KV blocks and side state are in memory that all
 * share; a head's are written and read by the same rank, unless ranks share a KV head, who wait after it was written.
 *
 *     memory   a line for each rank, with the number of its last arrival; then two slots for the values of an exchange
 *
 * An exchange: write the own part to a slot, arrive, wait for the others, read their parts. The next one uses the other slot.
 * One that comes back to this slot has waited for the next, where every rank arrives after it has read: so one wait is enough.
 */
#pragma once
#include <stdint.h>

#include "abi_enums.h"

/* What a rank makes of an operation. */
struct rank_part {
    const int32_t *bounds; /* [ranks + 1]: rank r makes columns bounds[r] .. bounds[r + 1]; NULL: every rank makes all */
    const int32_t *owners; /* of experts, [count]: the rank that has each; NULL: each rank has columns of all */
    float *output;         /* NULL: the ranks write to the same memory, and nothing is exchanged */
    int64_t stride;
    int32_t rows;          /* enum rows_of */
    int32_t first, count;  /* of linear and recurrent layers: the tiles that it makes */
    int32_t shares_keys;   /* of attention: other ranks read what one has stored */
};

/* The ranks, as one of them sees them. */
struct rank_group {
    const struct rank_part *parts; /* [operations] */
    void *memory;
    int64_t slot_floats;
    int32_t rank, ranks;
};

enum { RANK_LINE = 64 }; /* bytes of a line */

/* Values that the ranks exchange: each rank's columns of all rows, or all columns of the rows that it owns. */
struct exchange {
    float *at;               /* row i is at + places[i] * stride, or at + i * stride */
    const int32_t *places;
    int64_t stride;
    int rows;
    const int32_t *bounds;   /* [ranks + 1] */
    const int32_t *owners, *kinds; /* NULL, or row i is of rank owners[kinds[i]] */
};

/* Whole tiles of columns, divided evenly: bounds [ranks + 1]. */
static inline void divide_columns(int columns, int ranks, int32_t *bounds)
{
    const int tiles = (columns + LANES - 1) / LANES;
    for (int rank = 0; rank <= ranks; rank++) {
        const int end = (int)((int64_t)tiles * rank / ranks) * LANES;
        bounds[rank] = end < columns ? end : columns;
    }
}

/* Arrive, and wait for the others. */
void ranks_wait(const struct rank_group *group, uint32_t *arrivals);

/* Write this rank's part of rows begin .. end to the slot of the next arrival; read the others' from that of the last. */
void exchange_put(const struct rank_group *group, uint32_t arrivals, const struct exchange *exchange, int begin, int end);
void exchange_take(const struct rank_group *group, uint32_t arrivals, const struct exchange *exchange, int begin, int end);
