/* The structures of a CPU launch program: what Python hands over, and the packed layouts of weights and activations.
 *
 * A decoder step is a flat list of operations over one arena, walked by a team of threads in one call. The program is data
 * of the artifact (ingot/artifact/programs/cpu_program.py describes it); native/program.py turns it into these structures.
 *
 * WEIGHTS [n, k], one layout for all row counts and instruction sets: tiles of 16 output rows, one after another, each one
 * contiguous stretch of memory, so that a thread reads its share as one stream. k is padded to `padded_k`, a multiple of the
 * block and of 32, and n to whole tiles, with codes that mean 0. A tile of integer codes is
 *
 *     scales  [scale_blocks][16]      float16 or float32
 *     zeros   [scale_blocks][16]      uint8; left out where all are 2^(bits - 1)
 *     padding to 64 bytes
 *     codes   8 bits  [k / 4][64]     byte 4 r + j: row r's code k + j
 *             4 bits  [k / 8][64]     byte 4 r + j: codes k + j (low half) and k + 4 + j (high half)
 *             2 bits  [k / 16][64]    byte 4 r + j: codes k + 4 i + j in bits 2 i and 2 i + 1
 *             3 bits  [k / 32][192]   two times 64 bytes of the codes' two low bits, as with 2 bits; then 64 bytes of their
 *                                     high bits: byte 4 r + j has that of code k + 4 i + j in bit i, i = 0 .. 7
 *
 * and a tile of floats is scales [16] float32 and padding (float8 only), then [k][16] elements. A 32-bit lane is one output
 * row: nothing is ever summed across lanes. A matrix of gate and up projections has their tiles in turns: gate, up, gate, up.
 *
 * ACTIVATIONS [m, k]: float32, or int8 rounded per block of the weight, per token, or with a static scale. Rounded rows are
 * interleaved by fours of k within a tile of up to MAX_HEIGHT rows, or by 64 for AMX (kernels.h). The height changes addresses only, never arithmetic, so
 * a row has the same bits in any company, on any number of threads and with any instruction set:
 *
 *     codes q                       rint(x / scale_x), ties to even, from -128 to 127; scale_x = max(peak, 1e-30) / 127,
 *                                   where peak is the largest |x| of the block (ROUND_BLOCK) or row (ROUND_TOKEN). All in
 *                                   float32 (passes/numerics/activation_rounding.py). NaN among them makes scale_x NaN
 *     integer, blocks               out = fma(float(sum of (code - zero) * q), scale_w * scale_x, out), block after block;
 *                                   the sum is exact, in 32 bits. With a token's or a static scale all blocks have the same
 *                                   scale_x; with ROUND_BLOCK and one scale per output row, the same scale_w
 *     integer, both scales of rows  (scale_blocks 1 and ROUND_TOKEN or ROUND_STATIC) one block of all of k: one exact sum,
 *                                   one rounding
 *     float                         out = fma(w[k], x[k], out), k after k; float8: out * scale_w at the end
 *                                   (codes of NaN, 0x7f and 0xff, are not allowed: they would be read as 480)
 */
#pragma once
#include <stdint.h>

#include "abi_enums.h"

/* The numbers of operations and of their fields: abi_enums.h.
 *
 *     store          store: out = y; add: out += y; gate: out = activation(gate) * up
 *     rows_of        the rows that an operation computes
 *     combination    gate: activation(a) * b
 *     operation_kind from OP_CONVOLVE on: recurrent layers
 */
enum { MAX_HEIGHT = 12 };

struct matrix { /* cpu_program.Matrix */
    const uint8_t *tiles;
    int64_t tile_bytes, codes_offset; /* of a tile; of its codes within it */
    int32_t n, k, padded_k;
    int32_t form;                     /* enum form */
    int32_t block;                    /* columns that share a scale of the activations; and of the weight, if it has several */
    int32_t scale_blocks;             /* padded_k / block, or 1: a scale per output row */
    int32_t scale_bytes;              /* 2 or 4; 0 for floats without scales */
    int32_t has_zeros;
    int32_t fetch_ahead;              /* bytes by which few rows fetch the codes ahead, as tried at load; 0: as their kernels do */
};

/* Rows of float32, `stride` floats apart. Buffers of the arena begin at 64 bytes and have strides of whole 16 floats.
 * gathered: an operation of rows of logits reads rows of tokens, by logits_indices. */
struct view {
    float *at;
    int64_t stride;
    int32_t gathered;
};

/* The row of a view that is read for row `row` of the output; `source` is its token. */
static inline const float *row_at(const struct view *view, int64_t source, int64_t row)
{
    return view->at + (view->gathered ? source : row) * view->stride;
}

struct norm {
    const float *weight, *bias; /* [columns]; bias NULL for none */
    float epsilon;
    int32_t kind;               /* enum norm_kind */
};

/* OPERATIONS: the structures in abi_operations.h are generated from the rows of cpu_program.py, which say what each computes.
 *
 *     pointers       NULL for none; a view's `at` likewise
 *     activation     of STORE_STORE and STORE_ADD after the cap, of STORE_GATE on the gate; cap 0: none
 *     b, number      of combine: the number where b.at is NULL; a vector is a view with stride 0
 *     up, down       of experts [count], all of one size: up is of gate and up, with STORE_GATE, or of up alone; their views
 *                    are unused
 *     states         of recurrent layers (recurrent.h): those in slot s begin at states + s * state_stride floats
 */
#include "abi_operations.h"

/* LOW-RANK CHANGES of a linear operation, of rows whose sequence has an adapter: B (A x') is added to x' @ W^T, before alpha and
 * all that follows it. x' is the normed input, not rounded. A and B are floats, and sums have four parts:
 *
 *     sum of w[i] * x[i]    s_j = fma(w[i], x[i], s_j) for j = i mod 4, in the order of i; then (s_0 + s_1) + (s_2 + s_3)
 *     A [ranks, k]          tiles as of any matrix of floats
 *     B [n, ranks]          for each tile of the changed matrix, at 64 bytes, [count][16] elements of the ranks
 *                           first .. first + count that change its rows
 */
struct low_rank_tile {
    int64_t at;                 /* bytes from low_rank.b on */
    int32_t first, count;       /* count 0: nothing is added to the tile */
};

struct low_rank {
    struct matrix a;            /* n: ranks, whole LANES */
    const uint8_t *b;
    const struct low_rank_tile *tiles; /* [tiles of the changed matrix], in its order */
    int32_t b_form;             /* enum form: float32, float16 or bfloat16 */
};

struct operation {
    int32_t kind;               /* enum operation_kind */
    const void *arguments;      /* a structure above; struct layer of paged_attention.c */
};
