/* Mixtures of experts, as experts.h describes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "experts.h"

enum { MIN_SHARED = 1 << 14, ALIGNED = 64 }; /* values that one thread works through alone */

static inline int smaller(int a, int b) { return a < b ? a : b; }
static inline size_t larger(size_t a, size_t b) { return a > b ? a : b; }
static inline int64_t rounded_up(int64_t n, int64_t size) { return (n + size - 1) / size * size; }
static inline const struct linear *layer_of(const struct experts *op, int which, int expert) { return (which ? op->down : op->up) + expert; }
/* Columns that up makes of a row, and down reads. */
static inline int inner_columns(const struct experts *op) { return op->up->store == STORE_GATE ? op->up->matrix->n / 2 : op->up->matrix->n; }
static inline int64_t inner_stride(const struct experts *op) { return rounded_up(inner_columns(op), LANES); }
static inline int64_t result_stride(const struct experts *op) { return rounded_up(op->down->matrix->n, LANES); }

/* Rows of experts: each row of the layer once for each expert that it has. experts_need() sees to it that an int holds them. */
static inline int64_t count_pairs(const struct experts *op, int rows) { return (int64_t)rows * op->chosen; }

static inline int64_t row_bytes(const struct linear *op)
{
    return (int64_t)op->matrix->padded_k * (op->rounding == ROUND_NONE ? (int64_t)sizeof(float) : 1);
}

static inline int columns_of(const struct experts *op, int which) { return which ? op->down->matrix->n : inner_columns(op); }

static inline int has_columns_of_all(const struct expert_step *s) { return s->part != NULL && s->part->owners == NULL; }

/* The columns of each rank, where ranks have columns of all experts. */
static inline const int32_t *bounds_of(const struct expert_step *s, int which) { return which ? s->part->bounds : s->inner_bounds; }

/* Tiles of output columns of one expert that this process makes, and how many. */
static inline int first_unit(const struct expert_step *s, int which)
{
    return has_columns_of_all(s) ? bounds_of(s, which)[s->group->rank] / LANES : 0;
}

static inline int units_of(const struct expert_step *s, int which)
{
    const int end = has_columns_of_all(s) ? bounds_of(s, which)[s->group->rank + 1] : columns_of(s->op, which);
    const int begin = has_columns_of_all(s) ? bounds_of(s, which)[s->group->rank] : 0;
    return begin < end ? (end + LANES - 1) / LANES - first_unit(s, which) : 0;
}

static inline const float *input_row(const struct expert_step *s, const struct view *view, int row)
{
    return row_at(view, s->gathered != NULL ? s->gathered[row] : row, row);
}

/* ---- route */

/* Number of the largest value that is not taken; of equal ones the first. NaN is never larger. */
static int largest(const float *values, int count, const int32_t *taken, int num_taken)
{
    int best = -1;
    for (int i = 0; i < count; i++) {
        int is_taken = 0;
        for (int j = 0; j < num_taken; j++)
            is_taken |= taken[j] == i;
        if (!is_taken && (best < 0 || values[i] > values[best]))
            best = i;
    }
    return best;
}

/* A group's largest value, or the sum of its two largest. */
static float group_score(const float *values, int count, int best)
{
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; i < count; i++) {
        if (values[i] > first)
            second = first, first = values[i];
        else if (values[i] > second)
            second = values[i];
    }
    return best == 1 ? first : first + second;
}

/* -infinity for the experts of groups that are not chosen. */
static void keep_groups(const struct experts *op, float *ranked)
{
    const int size = op->count / op->groups;
    float scores[MAX_GROUPS];
    int32_t chosen[MAX_GROUPS];
    for (int g = 0; g < op->groups; g++)
        scores[g] = group_score(ranked + (int64_t)g * size, size, op->group_best);
    for (int j = 0; j < op->chosen_groups; j++)
        chosen[j] = largest(scores, op->groups, chosen, j);
    for (int g = 0; g < op->groups; g++) {
        int is_chosen = 0;
        for (int j = 0; j < op->chosen_groups; j++)
            is_chosen |= chosen[j] == g;
        for (int i = 0; !is_chosen && i < size; i++)
            ranked[g * size + i] = -INFINITY;
    }
}

/* Experts with the largest scores. */
static void choose(const struct expert_step *s, const float *logits, float *scores, int32_t *ids, float *weights)
{
    const struct experts *op = s->op;
    float *ranked = scores + op->count;
    s->kernels->score_row(op, logits, scores);
    /* A softmax has the order of its logits, which is not rounded. */
    const float *by = op->score == SCORE_SOFTMAX && op->bias == NULL && op->groups == 1 ? logits : scores;
    for (int i = 0; i < op->count; i++)
        ranked[i] = op->bias != NULL ? by[i] + op->bias[i] : by[i];
    if (op->chosen_groups < op->groups)
        keep_groups(op, ranked);
    for (int j = 0; j < op->chosen; j++) {
        ids[j] = largest(ranked, op->count, ids, j);
        weights[j] = scores[ids[j]];
    }
}

/* SparseMixer: a softmax for each choice, over the experts that are left and near it. */
static void mix_sparsely(const struct expert_step *s, const float *logits, float *scores, int32_t *ids, float *weights)
{
    const struct experts *op = s->op;
    float *near = scores + op->count;
    for (int j = 0; j < op->chosen; j++) {
        ids[j] = largest(logits, op->count, ids, j);
        const float top = logits[ids[j]];
        for (int i = 0; i < op->count; i++) {
            const float size = fabsf(logits[i]);
            near[i] = top - logits[i] > op->margin * (size > top ? size : top) ? NO_SCORE : logits[i];
        }
        for (int i = 0; i < j; i++)
            near[ids[i]] = NO_SCORE;
        s->kernels->score_row(op, near, scores);
        weights[j] = scores[ids[j]];
    }
}

static void route_row(const struct expert_step *s, int row, float *scores)
{
    const struct experts *op = s->op;
    const float *logits = input_row(s, &op->logits, row);
    int32_t *ids = s->ids + (int64_t)row * op->chosen;
    float *weights = s->weights + (int64_t)row * op->chosen, sum = 0;
    (op->score == SCORE_SPARSEMIXER ? mix_sparsely : choose)(s, logits, scores, ids, weights);
    for (int j = 0; j < op->chosen; j++)
        sum += weights[j];
    const float divisor = sum > op->least_sum ? sum : op->least_sum;
    for (int j = 0; j < op->chosen; j++)
        weights[j] = (op->normalise ? weights[j] / divisor : weights[j]) * op->scale;
}

/* ---- plan */

/* Whether this process multiplies an expert's rows. */
static inline int is_own(const struct expert_step *s, int expert)
{
    return s->part == NULL || s->part->owners == NULL || s->part->owners[expert] == s->group->rank;
}

static void place_rounded(struct expert_step *s, int which)
{
    int64_t values = 0, blocks = 0;
    for (int i = 0; i < s->num_hits; i++) {
        struct hit *hit = &s->hits[i];
        const struct linear *op = layer_of(s->op, which, hit->expert);
        hit->values[which] = values, hit->blocks[which] = blocks;
        values += rounded_up(hit->count * row_bytes(op), ALIGNED);
        blocks += rounded_up((int64_t)hit->count * activation_blocks(op), ALIGNED / sizeof(float));
    }
}

static void plan(struct expert_step *s)
{
    const struct experts *op = s->op;
    const int height = s->kernels->max_height, pairs = (int)count_pairs(op, s->rows);
    memset(s->next, 0, sizeof *s->next * (size_t)op->count);
    for (int i = 0; i < pairs; i++)
        s->next[s->ids[i]]++;
    s->num_hits = s->num_own = s->tiles = 0;
    for (int e = 0; e < op->count; e++) {
        const int count = s->next[e], first = s->tiles * height;
        s->next[e] = first;
        if (count == 0)
            continue;
        s->hits[s->num_hits] = (struct hit){.expert = e, .first = first, .count = count};
        for (int tile = (count + height - 1) / height; tile > 0; tile--)
            s->tile_hits[s->tiles++] = s->num_hits;
        if (is_own(s, e))
            s->own[s->num_own++] = s->num_hits;
        s->num_hits++;
    }
    for (int i = 0; i < pairs; i++) {
        const int place = s->next[s->ids[i]]++;
        s->places[i] = place;
        s->sources[place] = i / op->chosen;
    }
    place_rounded(s, 0);
    place_rounded(s, 1);
}

/* ---- matmuls */

static struct activations rows_of_hit(const struct expert_step *s, const struct hit *hit, int which)
{
    return (struct activations){
        .values = (char *)s->rounded.values + hit->values[which],
        .scales = s->rounded.scales + hit->blocks[which],
        .sums = s->rounded.sums + hit->blocks[which],
        .count = hit->count,
    };
}

static void round_tiles(const struct expert_step *s, int which, int begin, int end, float *scratch)
{
    const int height = s->kernels->max_height;
    for (int tile = begin; tile < end; tile++) {
        const struct hit *hit = &s->hits[s->tile_hits[tile]];
        if (!is_own(s, hit->expert))
            continue;
        const struct activations rows = rows_of_hit(s, hit, which);
        const int first = tile * height - hit->first, count = smaller(height, hit->count - first);
        for (int m = 0; m < count; m++) {
            const int place = tile * height + m;
            const float *x = which ? s->inner + place * inner_stride(s->op) : input_row(s, &s->op->input, s->sources[place]);
            s->kernels->round_row(layer_of(s->op, which, hit->expert), x, &rows, first, count, m, scratch);
        }
    }
}

/* Units begin .. end: tiles of output columns of one expert after another. */
static void multiply(const struct expert_step *s, int which, int begin, int end)
{
    const int units = units_of(s, which), first = first_unit(s, which);
    const int64_t stride = which ? result_stride(s->op) : inner_stride(s->op);
    while (begin < end) {
        const struct hit *hit = &s->hits[s->own[begin / units]];
        const struct activations rows = rows_of_hit(s, hit, which);
        const int from = begin % units, to = smaller(units, from + end - begin);
        struct linear op = *layer_of(s->op, which, hit->expert);
        op.output = (struct view){.at = (which ? s->results : s->inner) + hit->first * stride, .stride = stride};
        s->kernels->multiply(&op, &rows, hit->count, first + from, first + to);
        begin += to - from;
    }
}

/* ---- the phases */

void experts_begin(struct expert_step *s, const struct experts *op, int rows, const int64_t *gathered, int threads,
                   const struct rank_group *group, const struct rank_part *part)
{
    s->op = op, s->rows = rows, s->gathered = gathered, s->threads = threads, s->phase = 0;
    s->group = group, s->part = part;
    if (has_columns_of_all(s))
        divide_columns(inner_columns(op), group->ranks, s->inner_bounds);
}

/* The rows of experts that the ranks exchange after a multiplication: columns of all, or the rows of their own experts. */
static void begin_exchange(struct expert_step *s, int which)
{
    s->exchange = (struct exchange){
        .at = which ? s->results : s->inner,
        .places = s->places,
        .stride = which ? result_stride(s->op) : inner_stride(s->op),
        .rows = (int)count_pairs(s->op, s->rows),
        .bounds = bounds_of(s, which),
        .owners = s->part->owners,
        .kinds = s->ids,
    };
}

static inline int is_shared(const struct expert_step *s, int units, int64_t values)
{
    return s->threads > 1 && units > 1 && values >= MIN_SHARED;
}

int experts_next(struct expert_step *s, int thread, float *scratch)
{
    const struct experts *op = s->op;
    const int64_t pairs = count_pairs(op, s->rows);
    switch (s->phase++) {
    case 0:
        s->stage = ROUTE_ROWS;
        if (is_shared(s, s->rows, (int64_t)s->rows * op->count))
            return s->rows;
        experts_run(s, thread, 0, s->rows, scratch);
        s->phase++;
        __attribute__((fallthrough));
    case 1:
        plan(s);
        s->stage = ROUND_INPUT;
        if (is_shared(s, s->tiles, pairs * op->up->matrix->k))
            return s->tiles;
        experts_run(s, thread, 0, s->tiles, scratch);
        s->phase++;
        __attribute__((fallthrough));
    case 2:
        s->stage = MULTIPLY_UP;
        if (s->num_own * units_of(s, 0) > 0)
            return s->num_own * units_of(s, 0);
        s->phase++;
        __attribute__((fallthrough));
    case 3:
        if (has_columns_of_all(s)) {
            begin_exchange(s, 0);
            return EXCHANGE_NEXT;
        }
        s->phase++;
        __attribute__((fallthrough));
    case 4:
        s->stage = ROUND_INNER;
        if (is_shared(s, s->tiles, pairs * op->down->matrix->k))
            return s->tiles;
        experts_run(s, thread, 0, s->tiles, scratch);
        s->phase++;
        __attribute__((fallthrough));
    case 5:
        s->stage = MULTIPLY_DOWN;
        if (s->num_own * units_of(s, 1) > 0)
            return s->num_own * units_of(s, 1);
        s->phase++;
        __attribute__((fallthrough));
    case 6:
        if (s->part != NULL) {
            begin_exchange(s, 1);
            return EXCHANGE_NEXT;
        }
        s->phase++;
        __attribute__((fallthrough));
    case 7:
        s->stage = COMBINE_ROWS;
        if (is_shared(s, s->rows, pairs * op->down->matrix->n))
            return s->rows;
        experts_run(s, thread, 0, s->rows, scratch);
        return 0;
    default:
        return 0;
    }
}

void experts_run(const struct expert_step *s, int thread, int begin, int end, float *scratch)
{
    const struct experts *op = s->op;
    switch (s->stage) {
    case ROUTE_ROWS:
        for (int row = begin; row < end; row++)
            route_row(s, row, s->ranked + (int64_t)thread * 2 * op->count);
        break;
    case ROUND_INPUT:
    case ROUND_INNER:
        round_tiles(s, s->stage == ROUND_INNER, begin, end, scratch);
        break;
    case MULTIPLY_UP:
    case MULTIPLY_DOWN:
        multiply(s, s->stage == MULTIPLY_DOWN, begin, end);
        break;
    case COMBINE_ROWS:
        for (int64_t row = begin; row < end; row++)
            s->kernels->add_experts_row(op, s->results, result_stride(op), s->places + row * op->chosen,
                                        s->weights + row * op->chosen, row);
        break;
    }
}

/* ---- memory */

void experts_need(struct expert_needs *needs, const struct experts *op, int max_rows, int height)
{
    const size_t pairs = (size_t)count_pairs(op, max_rows), hit = pairs < (size_t)op->count ? pairs : (size_t)op->count;
    const size_t places = pairs + hit * (height - 1);
    needs->pairs = larger(needs->pairs, pairs);
    needs->places = larger(needs->places, places);
    needs->count = larger(needs->count, op->count);
    needs->inner = larger(needs->inner, places * inner_stride(op));
    needs->results = larger(needs->results, places * result_stride(op));
    for (int which = 0; which < 2; which++)
        for (int e = 0; e < op->count; e++) {
            const struct linear *layer = layer_of(op, which, e);
            needs->values = larger(needs->values, pairs * row_bytes(layer) + hit * ALIGNED);
            needs->blocks = larger(needs->blocks, pairs * activation_blocks(layer) + hit * ALIGNED / sizeof(float));
            needs->scratch = larger(needs->scratch, ((size_t)layer->matrix->padded_k + LANES) * sizeof(float));
        }
}

/* Zeroed by the system when it is first written to; NULL for too little. */
static void *aligned(size_t bytes)
{
    void *memory;
    return posix_memalign(&memory, 4096, bytes > 0 ? bytes : 1) == 0 ? memory : NULL;
}

int experts_allocate(struct expert_step *s, const struct expert_needs *needs, int threads, int height)
{
    if (needs->places > INT32_MAX) /* places and sources are int32_t */
        return -1;
    s->ids = aligned(needs->pairs * sizeof *s->ids);
    s->places = aligned(needs->pairs * sizeof *s->places);
    s->weights = aligned(needs->pairs * sizeof *s->weights);
    s->ranked = aligned(needs->count * 2 * threads * sizeof *s->ranked);
    s->sources = aligned(needs->places * sizeof *s->sources);
    s->tile_hits = aligned((needs->places / height + needs->count + 1) * sizeof *s->tile_hits);
    s->next = aligned(needs->count * sizeof *s->next);
    s->hits = aligned(needs->count * sizeof *s->hits);
    s->own = aligned(needs->count * sizeof *s->own);
    s->inner = aligned(needs->inner * sizeof *s->inner);
    s->results = aligned(needs->results * sizeof *s->results);
    return s->ids && s->places && s->weights && s->ranked && s->sources && s->tile_hits && s->next && s->hits && s->own &&
                   s->inner && s->results
               ? 0
               : -1;
}

void experts_free(struct expert_step *s)
{
    void *all[] = {s->ids, s->places, s->weights, s->ranked, s->sources, s->tile_hits, s->next, s->hits, s->own, s->inner, s->results};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}
