/* The arithmetic of attention for one instruction set: what it is given, and the functions of each (paged_attention_isa.c).
 *
 * It is about tiles of TILE tokens and groups of up to isa->rows query rows, which are held in registers.
 */
#pragma once
#include "kv_precision.h"
#include "paged_attention.h"

#define TILE 64         /* tokens of a tile; part of the arithmetic */
#define AMX_ROWS 16     /* query rows of a group in the order of AMX */
#define AMX_PAIRS 16    /* pairs of bfloat16 that one multiplication by AMX adds up; part of that arithmetic */
#define LOWEST (-1e30f) /* what the running maximum begins with: finite, so that differences are never NaN */
#define HIDDEN (-2e30f) /* score of a token that is not visible: its probability is 0 next to any maximum */

/* Up to isa->rows query rows of one KV head, held together in registers. */
struct rows {
    const float *query;                /* [dim, rows], times scale; in bfloat16 pairs of dims [(dim + 1) / 2, rows], or for
                                        * AMX [rows, amx_pairs(dim)] */
    float *output, *maximum, *sums;    /* [rows, columns], [rows], [rows, 16] */
    const int32_t *position;           /* [rows] */
    int first, last;                   /* tokens of the tile that any of the rows attends to */
};

/* A tile's tokens in the pool. */
struct places {
    const uint8_t *keys[TILE], *values[TILE]; /* keys: as many bytes of their block as one has, for prefetching */
    const uint16_t *scales[TILE];             /* of values; any address for types without them */
    struct stored of_16[TILE / 16];           /* keys, where 16 tokens follow each other in a block */
};

struct tile {
    const float *key_pairs;       /* in bfloat16 [(dim + 1) / 2, TILE]: dims 2 j and 2 j + 1 of a token */
    const float *value_pairs;     /* in bfloat16 [TILE / 2, columns]: tokens 2 t and 2 t + 1 */
    const float *keys[TILE / 16]; /* [dim, 16] of 16 tokens each; key_stride floats from dim to dim */
    const float *values[TILE];    /* rows of `columns` floats: value_dim, rounded up */
    const struct places *codes;   /* instead of keys and values, if each is needed once: decoded in registers */
    float *factors;               /* room for scales and minima of the values' groups, decoded with codes */
    const struct places *next;    /* the next tile, to be prefetched; NULL for none */
    int64_t key_stride;
    int start, dim, value_dim, group, columns, window, key_bytes, value_bytes;
    float softcap, inverse_softcap;
};

/* A group of rows whose scores become probabilities, while those of the next group are computed. */
struct softening {
    struct rows *rows;
    int begin, end, row; /* tokens of the tile; the next row */
    float maxima[2 * AMX_ROWS], alpha[2 * AMX_ROWS]; /* alpha: what earlier sums are multiplied by; stored by whole vectors */
    float scores[AMX_ROWS * TILE] __attribute__((aligned(64)));
    uint16_t weights[AMX_ROWS * TILE] __attribute__((aligned(64), may_alias)); /* in bfloat16 */
};

/* Kinds of keys and values that are decoded in registers: equal ones by their kind, and keys of 8 bits with values of 4. */
enum { K8V4 = NUM_KINDS, GROUPED_K8V4, NUM_MIXES };

struct isa {
    int vector_floats, rows;
    void (*turn)(const float *head, const float *cos, const float *sin, int half, int dim, float scale, float *target);
    void (*to_float16)(const float *x, int dim, uint16_t *codes); /* half_of of each; NULL: no faster than that */
    void (*keys[NUM_KINDS])(const struct stored *from, int dim, int group, float *target); /* NULL: floats already */
    void (*value[NUM_KINDS])(const uint8_t *codes, const uint16_t *scales, int dim, int group, float *target);
    void (*attend[NUM_MIXES][4])(struct rows *groups, int count, const struct tile *tile); /* 1, 2, 4, 8 rows */
    void (*merge)(float *total, const float *output, const float *sums, float maximum, int columns);
};

/* The same in bfloat16; pairs of numbers take the room of a float. */
struct pairs_isa {
    void (*round_row)(float *row, int count);
    void (*pair_rows)(float *rows, int first, int last, int width, int stride);
    void (*pair_keys)(const struct stored *from, int dim, float *target); /* in float16, of 16 tokens */
    void (*pair_float16)(const uint8_t *lower, const uint8_t *upper, int width, float *target);
    void (*attend[2][4])(struct rows *groups, int count, const struct tile *tile); /* [1]: of codes in float16 */
    void (*merge)(float *total, const float *output, const float *sums, float maximum, int columns);
};

struct instruction_set {
    const char *name;
    int (*runs_here)(void);
    const struct isa *isa;
    const struct pairs_isa *pairs;
    attend_amx *amx;
};

/* Pairs of a vector of `count` numbers, with zeros up to whole multiplications. */
static inline int amx_pairs(int count) { return (count + 2 * AMX_PAIRS - 1) / (2 * AMX_PAIRS) * AMX_PAIRS; }

/* The one in use: the best one of this CPU, or what paged_attention_use_isa() named. */
const struct instruction_set *attention_instruction_set(void);
