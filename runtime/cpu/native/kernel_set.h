/* The kernels of one instruction set: included once for each (kernels_x86.h and others). The includer defines
 *
 *     NAME(x)                 the instruction set's own name for x, and SET, that name as a string
 *     TARGET                  function attribute that selects it
 *     VECTORS                 the vectors of vectors.h
 *     HEIGHT                  rows of a tile of activations: 4, 6 or 12
 *     FLOAT_TILES             tiles of floats that three and more rows are multiplied by at once: 1 or 2
 *     CHAINS                  sums of a row of integers that run side by side, for the latency of vdot: 1, 2 or 4
 *     AHEAD                   bytes by which codes are fetched ahead; floats by a quarter, as several tiles are read at once
 *     multiply16(a, b)        int32 lanes a, -255 .. 255, times b, 16 bits without sign extension
 *     vdot(sum, c, at)        sum of int32 + 4 bytes of c (unsigned) * 4 bytes at *at (int8), exact
 *     vdot_wide(sum, c, x)    the same with the bytes in all lanes of x, where 12 rows are multiplied by two tiles at once
 *     or, with SHORT_SUMS,    in place of vdot
 *     short_dot(c, at)        sums of 2 such terms in 16 bits, c at most 15
 *     short_add               their sum
 *     short_fold(s, factor)   factor * sums of two of them as int32; factor 1 or 16
 *     or OWN_DOTS             a file that has NAME(integers) and NAME(floats) in place of all that they need
 *     FIRST_WORD(m), WORD(group, height)   where row m's words of four codes are in a tile of rows, if not in turns
 *     TILES                   a file that has NAME(multiply_tiles), for tiles of rows that are in pieces, with
 *     PIECE(op, rows, height) columns of a row that are in one piece, in a tile of `height` rows of integers; 0: rows are in turns
 *     add_multiply16          sum + multiply16(a, b)
 */

#include "vectors.h"

typedef uint8_t NAME(vb) __attribute__((vector_size(VW), aligned(1), may_alias));

#define vb NAME(vb)
#define VECS (LANES / VW)
#ifndef PIECE
#define PIECE(op, rows, height) 0
#endif
#ifndef WORD
#define FIRST_WORD(m) (m)
#define WORD(group, height) ((int64_t)(group) * (height))
#endif
#define EACH(v) UNROLL for (int v = 0; v < VECS; v++)

#include "row_kernels.h"
#include "matmul_kernels.h"
#include "recurrent_kernels.h"

static const struct kernels NAME(kernels) = {
    .name = SET,
    .max_height = HEIGHT,
    .round_row = NAME(round_row),
    .multiply = NAME(multiply),
    .project_rows = NAME(project_rows),
    .embed_row = embed_row,
    .normalize_row = NAME(normalize_row),
    .combine_row = NAME(combine_row),
    .score_row = NAME(score_row),
    .add_experts_row = NAME(add_experts_row),
    .convolve_tile = NAME(convolve_tile),
    .delta_rule_tile = NAME(delta_rule_tile),
    .scan_tile = NAME(scan_tile),
};

#undef vb
#undef VECS
#undef EACH
#undef NAME
#undef SET
#undef TARGET
#undef VECTORS
#undef HEIGHT
#undef FLOAT_TILES
#undef CHAINS
#undef AHEAD
#undef OWN_DOTS
#undef TILES
#undef PIECE
#undef add_multiply16
#undef FIRST_WORD
#undef WORD
#undef SHORT_SUMS
#undef multiply16
#undef vdot
#undef vdot_wide
#undef short_dot
#undef short_add
#undef short_fold
