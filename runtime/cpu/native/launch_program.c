/* The walk of a program: one call per step, which takes the team through the phases of every operation.
 *
 *     embed, normalize, combine, rotate    rows
 *     linear                       tiles of rows are normed and rounded, and low-rank changes begun (low_rank.h); then tiles of
 *                                  output columns
 *     attention                    keys and values enter the pool; items; merges
 *     experts                      experts.h
 *     convolve, delta_rule, scan   recurrent.h
 *
 * A phase that is too small to share is done by the thread that ended the one before, so that a decode step has a barrier
 * per matrix and one or two per attention. A program of a group of processes makes its part of each operation, and exchanges
 * it (tensor_parallel.h).
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "experts.h"
#include "kernels.h"
#include "launch_program.h"
#include "low_rank.h"
#include "recurrent.h"
#include "thread_team.h"

#include "abi_layouts.h"

enum {
    LINE = 64,
    MIN_SHARED_VALUES = 1 << 14, /* values in rows that one thread works through alone */
    MIN_SHARED_CHANGES = 1 << 15, /* multiply-adds of low-rank changes that one thread does alone */
    MIN_SHARED_TOKENS = 16,     /* tokens whose keys and values one thread writes alone; and pieces of a prompt */
};
#define MIN_SHARED_ATTENTION 3.0e4 /* multiply-adds that one thread does alone; the team is awake */
#define MAX_RESULTS_BYTES (32 << 20)

enum stage { ROWS, ROUND, MULTIPLY, WRITE, ATTEND, MERGE, EXPERTS, RECUR, PUT, TAKE };

struct program {
    const struct operation *operations;
    int count, head_start, last_mixing, context_tokens, threads, max_tokens;
    const struct kernels *kernels;
    struct activations rounded;          /* the rows of the linear at hand */
    char **scratch;                      /* [threads] */
    char *results;                       /* of shared contexts */
    size_t results_bytes;
    int64_t min_vocabulary, min_positions; /* rows of the smallest tables */
    int head_of_logits;                    /* whether all that follows the last attention computes rows of logits alone */
    int has_states;                        /* whether it has recurrent layers */
    int32_t *first_queries;                /* [max_tokens]: of the last attention */
    struct low_rank_step low_rank;         /* of rows with adapters */
    size_t scratch_bytes;                  /* of one thread */

    const struct batch *batch;           /* the step */
    int begin, end, at, phase;           /* operations to walk; the one at hand, and which of its phases */
    enum stage stage;
    struct attention attention;
    struct expert_step experts;
    struct sequences sequences;
    double *seconds, since;

    struct rank_group group;             /* of processes; ranks 0: this process makes all */
    uint32_t arrivals;
    int is_made;                         /* whether the own part of the operation at hand is made */
    int exchanging;                      /* 0, or the phase of the exchange */
    struct exchange exchange;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int smaller(int a, int b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int pieces_of(int64_t n, int size) { return (int)((n + size - 1) / size); }
static inline int tiles_of(const struct linear *op) { return pieces_of(op->matrix->n, op->store == STORE_GATE ? 2 * LANES : LANES); }

static inline size_t row_bytes(const struct linear *op)
{
    return (size_t)op->matrix->padded_k * (op->rounding == ROUND_NONE ? sizeof(float) : 1);
}

static inline int rows_of(const struct program *p, int of_logits)
{
    return of_logits == OF_LOGITS ? p->batch->logits : p->batch->tokens;
}

/* The token of row `row` of an operation: the row of its inputs that are gathered. */
static inline int64_t source_of(const struct program *p, int of_logits, int row)
{
    return of_logits == OF_LOGITS ? p->batch->logits_indices[row] : row;
}

/* ---- the group of processes */

/* What this process makes of an operation; NULL for all. */
static inline const struct rank_part *part_of(const struct program *p, int at)
{
    return p->group.ranks > 0 && p->group.parts[at].bounds != NULL ? &p->group.parts[at] : NULL;
}

/* Whether the other ranks make all of the operation at hand. Those of experts divide each of its phases. */
static inline int has_no_part(const struct program *p)
{
    const struct rank_part *part = part_of(p, p->at);
    return part != NULL && p->operations[p->at].kind != OP_EXPERTS &&
           part->bounds[p->group.rank] == part->bounds[p->group.rank + 1];
}

/* Whether ranks read keys that one of them stores in the operation at hand. */
static inline int shares_keys(const struct program *p)
{
    const struct rank_part *part = part_of(p, p->at);
    return part != NULL && part->shares_keys;
}

struct tiles {
    int first, count;
};

/* The tiles of output columns that this process makes of a linear layer. */
static inline struct tiles tiles_here(const struct program *p, int at)
{
    const struct rank_part *part = part_of(p, at);
    return part != NULL ? (struct tiles){part->first, part->count} : (struct tiles){0, tiles_of(p->operations[at].arguments)};
}

static void begin_exchange(struct program *p, const struct exchange *exchange)
{
    p->exchange = *exchange;
    p->exchanging = 1;
}

/* The own part of an operation is made: the ranks exchange its output, or wait, where it is in memory that all share. */
static void end_part(struct program *p)
{
    const struct rank_part *part = part_of(p, p->at);
    p->is_made = 1;
    if (part == NULL || p->operations[p->at].kind == OP_EXPERTS)
        return;
    if (part->output == NULL) {
        ranks_wait(&p->group, &p->arrivals);
        return;
    }
    begin_exchange(p, &(struct exchange){
                          .at = part->output, .stride = part->stride, .rows = rows_of(p, part->rows), .bounds = part->bounds});
}

/* Two phases of rows, with a meeting between them. */
static int exchange_phase(struct program *p)
{
    const struct exchange *exchange = &p->exchange;
    const int is_shared = p->threads > 1 && (int64_t)exchange->rows * exchange->bounds[p->group.ranks] >= MIN_SHARED_VALUES;
    switch (p->exchanging++) {
    case 1:
        p->stage = PUT;
        if (is_shared)
            return exchange->rows;
        exchange_put(&p->group, p->arrivals, exchange, 0, exchange->rows);
        p->exchanging++;
        __attribute__((fallthrough));
    case 2:
        ranks_wait(&p->group, &p->arrivals);
        p->stage = TAKE;
        if (is_shared)
            return exchange->rows;
        exchange_take(&p->group, p->arrivals, exchange, 0, exchange->rows);
        __attribute__((fallthrough));
    default:
        p->exchanging = 0;
        return 0;
    }
}

/* ---- linear */

static void round_rows(const struct program *p, const struct linear *op, int thread, int first_tile, int last_tile)
{
    const int count = rows_of(p, op->rows), tallest = p->kernels->max_height;
    for (int first = first_tile * tallest; first < smaller(count, last_tile * tallest); first += tallest) {
        const int height = smaller(tallest, count - first);
        for (int m = 0; m < height; m++)
            p->kernels->round_row(op, row_at(&op->input, source_of(p, op->rows, first + m), first + m), &p->rounded, first,
                                  height, m, (float *)p->scratch[thread]);
    }
}

static inline int row_tiles_of(const struct program *p, const struct linear *op)
{
    return pieces_of(rows_of(p, op->rows), p->kernels->max_height);
}

/* Units begin .. end of the first phase: tiles of rows to round, then units of low-rank changes. */
static void prepare_rows(const struct program *p, const struct linear *op, int thread, int begin, int end)
{
    const int row_tiles = row_tiles_of(p, op);
    round_rows(p, op, thread, begin, smaller(end, row_tiles));
    if (end > row_tiles)
        low_rank_run(&p->low_rank, p->kernels, (int)larger(begin - row_tiles, 0), end - row_tiles, (float *)p->scratch[thread]);
}

static int linear_phase(struct program *p, const struct linear *op, int thread)
{
    switch (p->phase++) {
    case 0: {
        int64_t work;
        const int row_tiles = row_tiles_of(p, op);
        const int changes = low_rank_begin(&p->low_rank, p->at, op, p->batch, p->threads, &work);
        const int shares_rows = row_tiles > 1 && (int64_t)rows_of(p, op->rows) * op->matrix->k >= MIN_SHARED_VALUES;
        p->rounded.count = rows_of(p, op->rows);
        p->rounded.low_rank = changes > 0 ? &p->low_rank.rows : NULL;
        if (p->threads > 1 && (shares_rows || (changes > 1 && work >= MIN_SHARED_CHANGES))) {
            p->stage = ROUND;
            return row_tiles + changes;
        }
        prepare_rows(p, op, thread, 0, row_tiles + changes);
        p->phase++;
    }
        __attribute__((fallthrough));
    case 1:
        p->stage = MULTIPLY;
        return tiles_here(p, p->at).count;
    default:
        return 0;
    }
}

/* ---- rows of embed, normalize, combine, rotate */

static void rotate_row(const struct rotate *op, int64_t position, int64_t row)
{
    const int half = op->rotary_dim / 2;
    const float *x = op->input.at + row * op->input.stride, *cos = op->cos + position * half, *sin = op->sin + position * half;
    float *y = op->output.at + row * op->output.stride;
    for (int head = 0; head < op->heads; head++, x += op->head_dim, y += op->head_dim) {
        for (int d = 0; d < half; d++) {
            const float first = x[d], second = x[d + half];
            y[d] = first * cos[d] - second * sin[d];
            y[d + half] = second * cos[d] + first * sin[d];
        }
        for (int d = op->rotary_dim; d < op->head_dim; d++)
            y[d] = x[d];
    }
}

static void run_rows(const struct program *p, const struct operation *operation, int begin, int end)
{
    const struct kernels *kernels = p->kernels;
    if (operation->kind == OP_EMBED) {
        const struct embed *op = operation->arguments;
        const int64_t *ids = op->ids == POSITION_IDS ? p->batch->position_ids : p->batch->input_ids;
        for (int row = begin; row < end; row++)
            kernels->embed_row(op, ids[row], row);
    } else if (operation->kind == OP_NORMALIZE) {
        const struct normalize *op = operation->arguments;
        for (int row = begin; row < end; row++)
            kernels->normalize_row(op, source_of(p, op->rows, row), row);
    } else if (operation->kind == OP_ROTATE) {
        const struct rotate *op = operation->arguments;
        for (int row = begin; row < end; row++)
            rotate_row(op, p->batch->position_ids[row], row);
    } else {
        const struct combine *op = operation->arguments;
        for (int row = begin; row < end; row++)
            kernels->combine_row(op, source_of(p, op->rows, row), row);
    }
}

static int rows_phase(struct program *p, const struct operation *operation, int of_logits, int64_t columns)
{
    const int count = rows_of(p, of_logits);
    if (p->phase++ > 0)
        return 0;
    p->stage = ROWS;
    if (p->threads > 1 && count * columns >= MIN_SHARED_VALUES)
        return count;
    run_rows(p, operation, 0, count);
    return 0;
}

/* ---- attention */

/* The first token of each sequence that has logits. */
static const int32_t *find_first_queries(struct program *p)
{
    const struct batch *batch = p->batch;
    const int32_t *starts = batch->attention.query_starts;
    memcpy(p->first_queries, starts + 1, sizeof *starts * batch->attention.num_sequences);
    for (int i = 0; i < batch->logits; i++) {
        int s = 0, end = batch->attention.num_sequences; /* the sequence of token `at` is in s .. end */
        const int32_t at = (int32_t)batch->logits_indices[i];
        while (end - s > 1) {
            const int middle = (s + end) / 2;
            *(starts[middle] <= at ? &s : &end) = middle;
        }
        p->first_queries[s] = smaller(p->first_queries[s], at);
    }
    return p->first_queries;
}

static void plan_attention(struct program *p, const struct layer *layer)
{
    struct attention *job = &p->attention;
    /* In the last layer nothing reads the attention of tokens before the first that has logits. */
    const int is_last = p->at == p->last_mixing && (p->head_of_logits || p->batch->logits == 0);
    const int32_t *first_queries = is_last ? find_first_queries(p) : NULL;
    attention_plan(job, layer, &p->batch->attention, first_queries, p->threads, MIN_SHARED_ATTENTION);
    attention_share(job, job->results_bytes <= (int64_t)p->results_bytes ? p->results : NULL);
}

static int attention_phase(struct program *p, const struct layer *layer, int thread)
{
    struct attention *job = &p->attention;
    const int tokens = p->batch->tokens;
    float *scratch = (float *)p->scratch[thread];
    switch (p->phase++) {
    case 0:
        plan_attention(p, layer);
        p->stage = WRITE;
        if (p->threads > 1 && tokens > MIN_SHARED_TOKENS && layer->writes)
            return pieces_of(tokens, MIN_SHARED_TOKENS);
        attention_write(job, 0, tokens, scratch);
        p->phase++;
        __attribute__((fallthrough));
    case 1:
        if (shares_keys(p))
            ranks_wait(&p->group, &p->arrivals);
        p->stage = ATTEND;
        if (job->threads > 1)
            return job->items;
        for (int i = 0; i < job->items; i++)
            attention_item(job, i, scratch);
        return 0;
    case 2:
        p->stage = MERGE;
        return job->pieces > 1 ? job->merges : 0;
    default:
        return 0;
    }
}

/* ---- experts */

static int experts_phase(struct program *p, const struct experts *op, int thread)
{
    const int count = rows_of(p, op->rows);
    const struct rank_part *part = part_of(p, p->at);
    if (p->phase++ == 0)
        experts_begin(&p->experts, op, count, op->rows == OF_LOGITS ? p->batch->logits_indices : NULL, p->threads,
                      part != NULL ? &p->group : NULL, part);
    p->stage = EXPERTS;
    const int units = experts_next(&p->experts, thread, (float *)p->scratch[thread]);
    if (units == EXCHANGE_NEXT)
        begin_exchange(p, &p->experts.exchange);
    return units;
}

/* ---- recurrent layers */

static int recurrent_phase(struct program *p, const struct operation *operation)
{
    const struct rank_part *part = part_of(p, p->at);
    if (p->phase++ > 0)
        return 0;
    p->sequences.first_tile = part != NULL ? part->first : 0;
    p->sequences.num_tiles = part != NULL ? part->count : 0;
    const int units = recurrent_units(operation, &p->sequences);
    p->stage = RECUR;
    if (p->threads > 1 && recurrent_work(operation, p->batch->tokens) >= MIN_SHARED_ATTENTION)
        return units;
    recurrent_run(p->kernels, operation, &p->sequences, 0, units);
    return 0;
}

/* ---- the walk */

static int operation_phase(struct program *p, const struct operation *operation, int thread)
{
    const void *op = operation->arguments;
    switch (operation->kind) {
    case OP_EMBED:
        return rows_phase(p, operation, OF_TOKENS, ((const struct embed *)op)->table->k);
    case OP_NORMALIZE: {
        const struct normalize *normalize = op;
        return rows_phase(p, operation, normalize->rows, (int64_t)normalize->columns * normalize->groups);
    }
    case OP_COMBINE:
        return rows_phase(p, operation, ((const struct combine *)op)->rows, ((const struct combine *)op)->columns);
    case OP_ROTATE:
        return rows_phase(p, operation, OF_TOKENS, (int64_t)((const struct rotate *)op)->heads * ((const struct rotate *)op)->head_dim);
    case OP_LINEAR:
        return linear_phase(p, op, thread);
    case OP_EXPERTS:
        return experts_phase(p, op, thread);
    case OP_ATTEND:
        return attention_phase(p, op, thread);
    default:
        return recurrent_phase(p, operation);
    }
}

/* The next phase of the operation at hand: of the own part, or of an exchange. */
static int part_phase(struct program *p, int thread)
{
    for (;;) {
        if (p->exchanging) {
            const int units = exchange_phase(p);
            if (units > 0)
                return units;
        }
        if (p->is_made)
            return 0;
        int units = 0;
        if (!has_no_part(p))
            units = operation_phase(p, &p->operations[p->at], thread);
        else if (shares_keys(p))
            ranks_wait(&p->group, &p->arrivals);
        if (units > 0)
            return units;
        if (units == 0)
            end_part(p);
    }
}

static int next_phase(void *argument, int thread)
{
    struct program *p = argument;
    for (; p->at < p->end; p->at++, p->phase = p->is_made = 0) {
        const int units = part_phase(p, thread);
        if (p->seconds != NULL) {
            const double at = now();
            p->seconds[p->at] += at - p->since; /* all since the phase before began */
            p->since = at;
        }
        if (units > 0)
            return units;
    }
    return 0;
}

static void run(void *argument, int thread, int begin, int end)
{
    const struct program *p = argument;
    const struct operation *operation = &p->operations[p->at];
    float *scratch = (float *)p->scratch[thread];
    switch (p->stage) {
    case ROWS:
        run_rows(p, operation, begin, end);
        break;
    case ROUND:
        prepare_rows(p, operation->arguments, thread, begin, end);
        break;
    case MULTIPLY: {
        const struct linear *op = operation->arguments;
        const int first = tiles_here(p, p->at).first;
        p->kernels->multiply(op, &p->rounded, rows_of(p, op->rows), first + begin, first + end);
        break;
    }
    case WRITE:
        attention_write(&p->attention, begin * MIN_SHARED_TOKENS, smaller(p->batch->tokens, end * MIN_SHARED_TOKENS), scratch);
        break;
    case ATTEND:
        for (int i = begin; i < end; i++)
            attention_item(&p->attention, i, scratch);
        break;
    case MERGE:
        for (int i = begin; i < end; i++)
            attention_merge(&p->attention, i, scratch);
        break;
    case EXPERTS:
        experts_run(&p->experts, thread, begin, end, scratch);
        break;
    case RECUR:
        recurrent_run(p->kernels, operation, &p->sequences, begin, end);
        break;
    case PUT:
        exchange_put(&p->group, p->arrivals, &p->exchange, begin, end);
        break;
    case TAKE:
        exchange_take(&p->group, p->arrivals, &p->exchange, begin, end);
        break;
    }
}

/* The beginning of this thread's share of the next weights; after the last ones come the first, of the next step. */
static const void *look_ahead(void *argument, int thread)
{
    const struct program *p = argument;
    int at = p->at;
    do
        at = at + 1 < p->end ? at + 1 : p->begin;
    while (p->operations[at].kind != OP_LINEAR && at != p->at);
    if (p->operations[at].kind != OP_LINEAR)
        return NULL;
    const struct linear *op = p->operations[at].arguments;
    const int64_t matrices = op->store == STORE_GATE ? 2 : 1;
    const struct tiles tiles = tiles_here(p, at);
    return op->matrix->tiles + (tiles.first + share_begin(tiles.count, p->threads, thread)) * matrices * op->matrix->tile_bytes;
}

/* Token ids, positions and rows are addresses: they are checked here, as nothing after this is. */
static int check(const struct program *p, const struct batch *batch)
{
    const struct step *step = &batch->attention;
    if (batch->tokens < 1 || batch->tokens > p->max_tokens || batch->logits < 0 || batch->logits > batch->tokens ||
        batch->begin < 0 || batch->begin > batch->end || batch->end > p->count || step->num_sequences < 1 ||
        step->query_starts[0] != 0 || step->query_starts[step->num_sequences] != batch->tokens)
        return STEP_BAD_SIZE;
    for (int i = 0; i < batch->logits; i++)
        if (batch->logits_indices[i] < 0 || batch->logits_indices[i] >= batch->tokens)
            return STEP_BAD_SIZE;
    for (int s = 0; s < step->num_sequences; s++) {
        const int tokens = step->query_starts[s + 1] - step->query_starts[s];
        if (tokens < 1 || step->context_lens[s] < tokens || step->context_lens[s] > p->context_tokens)
            return STEP_BAD_SIZE;
        if (p->has_states && (batch->state_slots == NULL || batch->state_slots[s] < 0 || batch->state_slots[s] >= batch->num_states))
            return STEP_BAD_SIZE;
    }
    if (!low_rank_fits(&p->low_rank, batch))
        return STEP_BAD_SIZE;
    for (int i = 0; i < batch->tokens; i++)
        if (batch->input_ids[i] < 0 || batch->input_ids[i] >= p->min_vocabulary || batch->position_ids[i] < 0 ||
            batch->position_ids[i] >= p->min_positions)
            return STEP_BAD_TOKEN;
    return STEP_DONE;
}

static int compute(struct program *p, const struct batch *batch, double *seconds)
{
    const int found = check(p, batch);
    if (found != STEP_DONE)
        return found;
    p->batch = batch;
    p->at = p->begin = batch->begin, p->phase = 0;
    p->end = batch->logits > 0 ? batch->end : smaller(batch->end, p->head_start);
    if (p->at >= p->end)
        return STEP_DONE;
    p->sequences = (struct sequences){batch->attention.query_starts, batch->attention.context_lens, batch->state_slots,
                                      batch->attention.num_sequences, p->threads, 0, 0};
    p->is_made = p->exchanging = 0;
    low_rank_plan(&p->low_rank, batch);
    p->seconds = seconds;
    p->since = seconds != NULL ? now() : 0;
    const struct work work = {next_phase, run, look_ahead, p};
    team_run(&work, p->threads);
    if (p->group.ranks > 0) /* from here on no rank reads the step */
        ranks_wait(&p->group, &p->arrivals);
    return STEP_DONE;
}

int program_step(struct program *p, const struct batch *batch, double *seconds)
{
    const int result = compute(p, batch, seconds);
    atomic_store_explicit((_Atomic int32_t *)batch->is_computing, 0, memory_order_release);
    return result;
}

/* ---- memory */

/* Zeroed by the system when it is first written to; NULL for too little. */
static void *aligned(size_t bytes)
{
    void *memory;
    return posix_memalign(&memory, 4096, bytes > 0 ? bytes : 1) == 0 ? memory : NULL;
}

/* What the operations need at most. */
struct needs {
    size_t values, blocks; /* of the rounded rows: bytes, and scales */
    size_t scratch;        /* of one thread: bytes */
    struct expert_needs experts;
};

/* Bytes of scratch that low-rank changes need. */
static size_t low_rank_scratch(const struct program *p)
{
    size_t bytes = 0;
    for (int i = 0; i < p->count; i++)
        if (p->operations[i].kind == OP_LINEAR) {
            const struct linear *op = p->operations[i].arguments;
            bytes = larger(bytes, LOW_RANK_ROWS * (size_t)op->matrix->k * sizeof(float));
        }
    return bytes;
}

static struct needs needs_of(struct program *p)
{
    struct needs needs = {.scratch = LINE};
    const size_t rows = pieces_of(p->max_tokens, p->kernels->max_height) * (size_t)p->kernels->max_height;
    p->min_vocabulary = INT64_MAX, p->min_positions = p->context_tokens;
    for (int i = 0; i < p->count; i++) {
        const void *arguments = p->operations[i].arguments;
        if (p->operations[i].kind == OP_LINEAR) {
            const struct linear *op = arguments;
            needs.values = larger(needs.values, rows * row_bytes(op));
            needs.blocks = larger(needs.blocks, rows * activation_blocks(op));
            needs.scratch = larger(needs.scratch, ((size_t)op->matrix->padded_k + LANES) * sizeof(float));
        } else if (p->operations[i].kind == OP_ATTEND) {
            needs.scratch = larger(needs.scratch, attention_scratch_bytes(arguments));
        } else if (p->operations[i].kind == OP_EXPERTS) {
            experts_need(&needs.experts, arguments, p->max_tokens, p->kernels->max_height);
        } else if (p->operations[i].kind == OP_EMBED) {
            const struct embed *op = arguments;
            int64_t *rows_of_table = op->ids == POSITION_IDS ? &p->min_positions : &p->min_vocabulary;
            *rows_of_table = op->table->n < *rows_of_table ? op->table->n : *rows_of_table;
        }
    }
    needs.values = larger(needs.values, needs.experts.values);
    needs.blocks = larger(needs.blocks, needs.experts.blocks);
    needs.scratch = larger(needs.scratch, needs.experts.scratch);
    return needs;
}

static int is_of_logits(const struct operation *operation)
{
    const void *op = operation->arguments;
    switch (operation->kind) {
    case OP_LINEAR: return ((const struct linear *)op)->rows == OF_LOGITS;
    case OP_NORMALIZE: return ((const struct normalize *)op)->rows == OF_LOGITS;
    case OP_COMBINE: return ((const struct combine *)op)->rows == OF_LOGITS;
    case OP_EXPERTS: return ((const struct experts *)op)->rows == OF_LOGITS;
    default: return 0;
    }
}

/* The scratch memory of all threads; what is there stays where there is too little memory. */
static int allocate_scratch(struct program *p, size_t bytes)
{
    for (int i = 0; i < p->threads; i++) {
        void *memory = aligned(bytes);
        if (memory == NULL)
            return -1;
        free(p->scratch[i]);
        p->scratch[i] = memory;
    }
    p->scratch_bytes = bytes;
    return 0;
}

static int allocate(struct program *p)
{
    const struct needs needs = needs_of(p);
    p->rounded.values = aligned(needs.values);
    p->rounded.scales = aligned(needs.blocks * sizeof(float));
    p->rounded.sums = aligned(needs.blocks * sizeof(int32_t));
    p->results_bytes = p->threads > 1 ? MAX_RESULTS_BYTES : 0;
    p->results = aligned(p->results_bytes);
    p->scratch = calloc(p->threads, sizeof *p->scratch);
    p->first_queries = aligned(p->max_tokens * sizeof *p->first_queries);
    if (p->rounded.values == NULL || p->rounded.scales == NULL || p->rounded.sums == NULL || p->results == NULL ||
        p->scratch == NULL || p->first_queries == NULL)
        return -1;
    p->experts.kernels = p->kernels, p->experts.rounded = p->rounded;
    if (experts_allocate(&p->experts, &needs.experts, p->threads, p->kernels->max_height) != 0)
        return -1;
    return allocate_scratch(p, needs.scratch);
}

struct program *program_make(const struct operation *operations, int count, int head_start, int last_mixing,
                             int context_tokens, int threads, int max_tokens, const char *isa)
{
    const struct kernels *kernels = find_kernels(isa);
    struct program *p = kernels != NULL ? calloc(1, sizeof *p) : NULL;
    if (p == NULL)
        return NULL;
    p->operations = operations, p->count = count, p->head_start = head_start, p->context_tokens = context_tokens;
    p->last_mixing = last_mixing;
    p->threads = smaller(threads, MAX_THREADS), p->max_tokens = max_tokens;
    p->kernels = kernels;
    p->head_of_logits = 1;
    for (int i = head_start; i < count; i++)
        p->head_of_logits &= is_of_logits(&operations[i]);
    for (int i = 0; i < count; i++)
        p->has_states |= is_recurrent(&operations[i]);
    if (allocate(p) != 0) {
        program_free(p);
        return NULL;
    }
    return p;
}

void program_free(struct program *p)
{
    for (int i = 0; p->scratch != NULL && i < p->threads; i++)
        free(p->scratch[i]);
    free(p->scratch);
    experts_free(&p->experts);
    low_rank_free(&p->low_rank);
    free(p->first_queries);
    free(p->results);
    free(p->rounded.values);
    free(p->rounded.scales);
    free(p->rounded.sums);
    free(p);
}

void program_join(struct program *p, const struct rank_group *group) { p->group = *group; }

int program_reserve_adapters(struct program *p, int slots, int ranks)
{
    const size_t scratch = low_rank_scratch(p);
    if (scratch > p->scratch_bytes && allocate_scratch(p, scratch) != 0)
        return -1;
    return low_rank_reserve(&p->low_rank, p->count, p->max_tokens, slots, ranks);
}

void program_set_adapter(struct program *p, int slot, const struct low_rank *const *changes)
{
    low_rank_set(&p->low_rank, slot, changes);
}

/* Digest of the numbers and layouts that Python shares: a binding of another version refuses the library. */
const char *ingot_cpu_abi(void) { return ABI_DIGEST; }

const char *program_isa(const struct program *p) { return p->kernels->name; }
