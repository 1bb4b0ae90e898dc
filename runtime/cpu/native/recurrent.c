/* The units of recurrent layers, and a layer as a work of its own (between onnxruntime's segments). See recurrent.h. */
#include <stddef.h>

#include "recurrent.h"
#include "thread_team.h"

#define MIN_PARALLEL 1.0e5 /* multiply-adds below which waking threads costs more than it saves */

static int tiles_of(int columns, int tile) { return (columns + tile - 1) / tile; }

/* Tiles of one sequence's state. */
static int tiles(const struct operation *operation)
{
    switch (operation->kind) {
    case OP_CONVOLVE: return tiles_of(((const struct convolve *)operation->arguments)->channels, CHANNEL_TILE);
    case OP_DELTA_RULE: {
        const struct delta_rule *op = operation->arguments;
        return op->num_value_heads * tiles_of(op->value_dim, STATE_TILE);
    }
    default: {
        const struct scan *op = operation->arguments;
        return op->num_heads * tiles_of(op->head_dim, STATE_TILE);
    }
    }
}

/* Those of them that are computed. */
static int tiles_here(const struct operation *operation, const struct sequences *sequences)
{
    return sequences->num_tiles > 0 ? sequences->num_tiles : tiles(operation);
}

int recurrent_units(const struct operation *operation, const struct sequences *sequences)
{
    return sequences->num_sequences * tiles_here(operation, sequences);
}

double recurrent_work(const struct operation *operation, int tokens)
{
    switch (operation->kind) {
    case OP_CONVOLVE: {
        const struct convolve *op = operation->arguments;
        return (double)tokens * op->channels * op->taps;
    }
    case OP_DELTA_RULE: {
        const struct delta_rule *op = operation->arguments;
        return 3.0 * tokens * op->num_value_heads * op->key_dim * op->value_dim;
    }
    default: {
        const struct scan *op = operation->arguments;
        return 2.0 * tokens * op->num_heads * op->head_dim * op->state_dim;
    }
    }
}

static void run_tile(const struct kernels *kernels, const struct operation *operation, const struct stretch *tokens, int tile)
{
    const void *op = operation->arguments;
    if (operation->kind == OP_CONVOLVE) {
        kernels->convolve_tile(op, tokens, tile);
    } else if (operation->kind == OP_DELTA_RULE) {
        const int per_head = tiles_of(((const struct delta_rule *)op)->value_dim, STATE_TILE);
        kernels->delta_rule_tile(op, tokens, tile / per_head, tile % per_head);
    } else {
        const int per_head = tiles_of(((const struct scan *)op)->head_dim, STATE_TILE);
        kernels->scan_tile(op, tokens, tile / per_head, tile % per_head);
    }
}

void recurrent_run(const struct kernels *kernels, const struct operation *operation, const struct sequences *sequences,
                   int begin, int end)
{
    const int per_sequence = tiles_here(operation, sequences);
    for (int unit = begin; unit < end; unit++) {
        const int s = unit / per_sequence, first = sequences->query_starts[s], count = sequences->query_starts[s + 1] - first;
        const struct stretch tokens = {first, sequences->slots[s], count, sequences->context_lens[s] == count};
        run_tile(kernels, operation, &tokens, sequences->first_tile + unit % per_sequence);
    }
}

struct alone {
    const struct operation *operation;
    const struct sequences *sequences;
    const struct kernels *kernels;
    int phase;
};

static int next_phase(void *argument, int thread)
{
    (void)thread;
    struct alone *alone = argument;
    return alone->phase++ == 0 ? recurrent_units(alone->operation, alone->sequences) : 0;
}

static void run_units(void *argument, int thread, int begin, int end)
{
    (void)thread;
    const struct alone *alone = argument;
    recurrent_run(alone->kernels, alone->operation, alone->sequences, begin, end);
}

void recurrent_layer(const struct operation *operation, const struct sequences *sequences)
{
    struct alone alone = {operation, sequences, find_kernels(NULL), 0};
    const struct work work = {next_phase, run_units, NULL, &alone};
    const int tokens = sequences->query_starts[sequences->num_sequences];
    team_run_now(&work, recurrent_work(operation, tokens) < MIN_PARALLEL ? 1 : sequences->threads);
}
