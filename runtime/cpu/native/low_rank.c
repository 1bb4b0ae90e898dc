/* Adapters of a step, as low_rank.h describes. */
#include <stdlib.h>
#include <string.h>

#include "low_rank.h"

static inline int smaller(int a, int b) { return a < b ? a : b; }

/* ---- the rows of a step */

int low_rank_fits(const struct low_rank_step *s, const struct batch *batch)
{
    for (int i = 0; batch->adapter_slots != NULL && i < batch->attention.num_sequences; i++) {
        const int slot = batch->adapter_slots[i];
        if (slot < -1 || slot >= s->slots || (slot >= 0 && !s->is_loaded[slot]))
            return 0;
    }
    return 1;
}

/* Sort the rows by their slots. */
static void sort_rows(struct low_rank_step *s, struct low_rank_plan *plan, int rows)
{
    memset(s->next, 0, sizeof *s->next * s->slots);
    for (int row = 0; row < rows; row++)
        if (plan->slots[row] >= 0)
            s->next[plan->slots[row]]++;
    plan->num_units = 0;
    for (int slot = 0, first = 0; slot < s->slots; slot++) {
        const int end = first + s->next[slot];
        s->next[slot] = first;
        for (; first < end; first += LOW_RANK_ROWS)
            plan->units[plan->num_units++] = (struct low_rank_unit){slot, first, smaller(LOW_RANK_ROWS, end - first)};
        first = end;
    }
    for (int row = 0; row < rows; row++)
        if (plan->slots[row] >= 0) {
            const int place = s->next[plan->slots[row]]++;
            plan->places[row] = place, plan->sources[place] = row;
        }
}

void low_rank_plan(struct low_rank_step *s, const struct batch *batch)
{
    s->is_used = 0;
    for (int i = 0; batch->adapter_slots != NULL && i < batch->attention.num_sequences; i++)
        s->is_used |= batch->adapter_slots[i] >= 0;
    if (!s->is_used)
        return;
    struct low_rank_plan *tokens = &s->plans[OF_TOKENS], *logits = &s->plans[OF_LOGITS];
    const int32_t *starts = batch->attention.query_starts;
    for (int i = 0; i < batch->attention.num_sequences; i++)
        for (int row = starts[i]; row < starts[i + 1]; row++)
            tokens->slots[row] = batch->adapter_slots[i];
    for (int row = 0; row < batch->logits; row++)
        logits->slots[row] = tokens->slots[batch->logits_indices[row]];
    sort_rows(s, tokens, batch->tokens);
    sort_rows(s, logits, batch->logits);
}

/* ---- an operation */

int low_rank_begin(struct low_rank_step *s, int at, const struct linear *op, const struct batch *batch, int threads, int64_t *work)
{
    *work = 0;
    if (!s->is_used)
        return 0;
    const struct low_rank *const *changes = s->changes + (int64_t)at * s->slots;
    const struct low_rank_plan *plan = &s->plans[op->rows];
    int tiles = 0;
    for (int i = 0; i < plan->num_units; i++) {
        const struct low_rank *change = changes[plan->units[i].slot];
        if (change == NULL)
            continue;
        *work += (int64_t)plan->units[i].count * change->a.n * change->a.k;
        tiles = change->a.n / LANES > tiles ? change->a.n / LANES : tiles;
    }
    if (tiles == 0)
        return 0;
    s->op = op, s->gathered = op->rows == OF_LOGITS ? batch->logits_indices : NULL;
    s->rows = (struct low_rank_rows){changes, plan->slots, plan->places, s->results, s->ranks};
    s->parts = plan->num_units < 2 * threads ? smaller(tiles, threads) : 1;
    return plan->num_units * s->parts;
}

/* x' of a unit's rows: where it is, or normed into scratch. */
static void norm_unit(const struct low_rank_step *s, const struct kernels *kernels, const struct low_rank_unit *unit, float *scratch,
                      const float **x)
{
    const struct linear *op = s->op;
    const struct view normed = {.at = scratch, .stride = op->matrix->k};
    const struct normalize norm = {.input = op->input, .output = normed, .norm = op->norm, .columns = op->matrix->k, .groups = 1};
    for (int m = 0; m < unit->count; m++) {
        const int row = s->plans[op->rows].sources[unit->first + m];
        const int64_t source = s->gathered != NULL ? s->gathered[row] : row;
        x[m] = row_at(&op->input, source, row);
        if (op->norm.kind == NORM_NONE)
            continue;
        struct normalize one = norm;
        one.input = (struct view){.at = (float *)x[m]};
        kernels->normalize_row(&one, 0, m);
        x[m] = scratch + m * normed.stride;
    }
}

void low_rank_run(const struct low_rank_step *s, const struct kernels *kernels, int begin, int end, float *scratch)
{
    const struct low_rank_plan *plan = &s->plans[s->op->rows];
    for (int i = begin; i < end; i++) {
        const struct low_rank_unit *unit = &plan->units[i / s->parts];
        const struct low_rank *change = s->rows.changes[unit->slot];
        if (change == NULL)
            continue;
        const int tiles = change->a.n / LANES, part = i % s->parts;
        const float *x[LOW_RANK_ROWS];
        norm_unit(s, kernels, unit, scratch, x);
        kernels->project_rows(&change->a, x, unit->count, s->results + unit->first * s->rows.stride, s->rows.stride,
                              part * tiles / s->parts, (part + 1) * tiles / s->parts);
    }
}

/* ---- memory */

void low_rank_set(struct low_rank_step *s, int slot, const struct low_rank *const *changes)
{
    s->is_loaded[slot] = changes != NULL;
    for (int at = 0; at < s->num_operations; at++)
        s->changes[(int64_t)at * s->slots + slot] = changes != NULL ? changes[at] : NULL;
}

static int allocate_plan(struct low_rank_plan *plan, size_t rows)
{
    plan->slots = malloc(rows * sizeof *plan->slots);
    plan->places = malloc(rows * sizeof *plan->places);
    plan->sources = malloc(rows * sizeof *plan->sources);
    plan->units = malloc(rows * sizeof *plan->units);
    return plan->slots && plan->places && plan->sources && plan->units ? 0 : -1;
}

static int allocate(struct low_rank_step *s)
{
    s->changes = calloc((size_t)s->num_operations * s->slots, sizeof *s->changes);
    s->is_loaded = calloc(s->slots, 1);
    s->next = malloc(s->slots * sizeof *s->next);
    const int has_results = posix_memalign((void **)&s->results, 4096, (size_t)s->max_rows * s->ranks * sizeof *s->results) == 0;
    if (!has_results)
        s->results = NULL;
    const int has_plans = allocate_plan(&s->plans[0], s->max_rows) == 0 && allocate_plan(&s->plans[1], s->max_rows) == 0;
    return s->changes && s->is_loaded && s->next && has_results && has_plans ? 0 : -1;
}

int low_rank_reserve(struct low_rank_step *s, int operations, int max_rows, int slots, int ranks)
{
    if (slots <= s->slots && ranks <= s->ranks)
        return 0;
    struct low_rank_step larger = {.num_operations = operations, .max_rows = max_rows};
    larger.slots = slots > s->slots ? slots : s->slots;
    larger.ranks = ranks > s->ranks ? ranks : s->ranks;
    if (allocate(&larger) != 0) {
        low_rank_free(&larger);
        return -1;
    }
    if (s->slots > 0)
        memcpy(larger.is_loaded, s->is_loaded, s->slots);
    for (int at = 0; s->slots > 0 && at < operations; at++)
        memcpy(larger.changes + (int64_t)at * larger.slots, s->changes + (int64_t)at * s->slots, sizeof *s->changes * s->slots);
    low_rank_free(s);
    *s = larger;
    return 0;
}

void low_rank_free(struct low_rank_step *s)
{
    for (int i = 0; i < 2; i++) {
        struct low_rank_plan *plan = &s->plans[i];
        free(plan->slots);
        free(plan->places);
        free(plan->sources);
        free(plan->units);
    }
    free(s->changes);
    free(s->is_loaded);
    free(s->next);
    free(s->results);
}
