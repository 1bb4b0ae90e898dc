/* The work of a thread: an item's rows attend to their tokens, tile by tile, and the results of splits are merged. */
#include <math.h>
#include <stddef.h>

#include "paged_attention_plan.h"

#define LOG2_E 1.44269504088896341f

static size_t take(size_t *used, size_t floats)
{
    size_t at = *used;
    *used += (floats + 15) / 16 * 16;
    return at;
}

/* Lay out the scratch memory at `base` for `rows` rows in all; return the floats it takes. */
static size_t lay_out(const struct layer *layer, float *base, size_t rows, struct scratch *s)
{
    size_t used = 0;
    size_t columns = round_up(layer->value_dim, 16), widest = larger(round_up(layer->dim, 16), (int)columns);
    s->query = base + take(&used, rows * query_floats(layer));
    s->output = base + take(&used, rows * columns);
    s->maximum = base + take(&used, rows);
    s->sums = base + take(&used, rows * 16);
    s->results = base + take(&used, rows * (columns + RESULT_FLOATS));
    s->keys = base + take(&used, (size_t)larger(round_up(layer->dim, 2), amx_pairs(layer->dim)) * TILE);
    s->values = base + take(&used, columns * (TILE - 1) + widest + 16); /* the last row's padding, or a query */
    s->codes = (uint8_t *)(base + take(&used, (size_t)layer->dim * TILE));
    s->scales = (uint16_t *)(base + take(&used, (size_t)layer->dim * TILE));
    s->position = (int32_t *)(base + take(&used, rows));
    return used;
}

/* Cut `count` query rows into groups: full ones, then the smallest that holds the rest. Returns how many groups. */
static int group_rows(const struct attention *job, int left)
{
    int size = in_amx_order(job->layer) ? AMX_ROWS : job->isa->rows;
    while (size > 1 && size / 2 >= left)
        size /= 2;
    return size;
}

static int log2_of(int size) { return size == 8 ? 3 : size / 2; }

/* A score's factor: in bfloat16 a score is the exponent of 2, and softcap needs the natural one. */
static float scale_of_query(const struct layer *l)
{
    return in_bfloat16(l) && l->softcap == 0.0f ? l->scale * LOG2_E : l->scale;
}

/* Pack queries per group, as struct rows says. Row i is token i / group, head i % group. */
static void pack_rows(const struct attention *job, struct scratch *m, int first_row, int first_position, int kv_head, int rows)
{
    const struct layer *l = job->layer;
    const int group = l->num_heads / l->num_kv_heads;
    const int in_pairs = in_bfloat16(l), in_rows = in_amx_order(l);
    const int depth = in_rows ? amx_pairs(l->dim) : in_pairs ? (l->dim + 1) / 2 : l->dim;
    float *packed = m->query, *head = m->values;
    for (int at = 0, size; at < rows; at += size) {
        size = group_rows(job, rows - at);
        for (int r = 0; r < size; r++) {
            int row = smaller(at + r, rows - 1); /* a group's spare rows repeat the last one */
            const float *query = l->query + (first_row + row / group) * l->query_stride + (int64_t)(kv_head * group + row % group) * l->dim;
            turn(job, query, first_position + row / group, scale_of_query(l), head);
            for (int d = l->dim; d < round_up(l->dim, 32); d++)
                head[d] = 0.0f;
            if (in_pairs)
                job->pairs->round_row(head, round_up(l->dim, 32));
            for (int d = 0; d < depth; d++)
                packed[in_rows ? r * depth + d : d * size + r] = head[d];
            m->position[at + r] = first_position + row / group;
        }
        packed += (size_t)size * query_floats(l);
    }
}

/* Clear the running sums of a split. */
static void start_rows(const struct attention *job, struct scratch *m, int rows)
{
    const int all = round_up(rows, group_rows(job, rows));
    memset(m->output, 0, sizeof(float) * all * round_up(job->layer->value_dim, job->isa->vector_floats));
    memset(m->sums, 0, sizeof(float) * all * 16);
    for (int r = 0; r < all; r++)
        m->maximum[r] = LOWEST;
}

static void clear_results(const struct attention *job, float *results, int rows)
{
    const size_t floats = result_floats(job);
    memset(results, 0, sizeof(float) * rows * floats);
    for (int r = 0; r < rows; r++)
        results[r * floats + floats - 16] = LOWEST;
}

/* 2^x, infinity from 128 on: in double, one rounding at a time, so that the bits are the same on all CPUs. NaN gives 0. */
static float power_of_two(double x)
{
    if (!(x > -150.0) || x >= 128.0)
        return x >= 128.0 ? INFINITY : 0.0f;
    const double shift = 0x1.8p52, whole = (x + shift) - shift, r = x - whole;
    static const double factors[] = {1.3215486790144305e-06, 1.5252733804059838e-05, 0.00015403530393381606,
                                     0.0013333558146428441,  0.009618129107628477,   0.055504108664821576,
                                     0.2402265069591007,     0.6931471805599453,     1.0}; /* ln(2)^k / k! */
    double y = 0.0;
    for (int k = 0; k < 9; k++)
        y = y * r + factors[k];
    const union {
        int64_t bits;
        double number;
    } power = {((int64_t)whole + 1023) << 52};
    return (float)(y * power.number);
}

/* The share of a head's sink in the sum of probabilities, whose factor is e^-maximum: 2^-maximum in bfloat16. */
static float share_of_sink(const struct layer *l, int head, double maximum)
{
    const double log2_e = 1.4426950408889634;
    if (l->sinks == NULL)
        return 0.0f;
    return power_of_two(in_bfloat16(l) ? l->sinks[head] * log2_e - maximum : (l->sinks[head] - maximum) * log2_e);
}

/* Divide by the sum of probabilities and store. The sum's order is fixed: halves of 16 lanes. Adding 0 makes -0 +0. */
static void finish_rows(const struct attention *job, float *results, int first_row, int kv_head, int rows)
{
    const struct layer *l = job->layer;
    const int group = l->num_heads / l->num_kv_heads;
    const size_t floats = result_floats(job);
    for (int r = 0; r < rows; r++) {
        const float *values = results + r * floats;
        float *sum = results + (r + 1) * floats - RESULT_FLOATS;
        for (int half = 8; half > 0; half /= 2)
            for (int i = 0; i < half; i++)
                sum[i] += sum[i + half];
        const int head = kv_head * group + r % group;
        float *output = l->output + (first_row + r / group) * l->output_stride + (int64_t)head * l->value_dim;
        const float inverse = 1.0f / (sum[0] + share_of_sink(l, head, sum[16]));
        for (int d = 0; d < l->value_dim; d++)
            output[d] = values[d] * inverse + 0.0f;
    }
}

/* Row of isa->attend for keys and values that are decoded in registers; -1 for a mix that has none. */
static int mix_of(const struct layer *l)
{
    if (l->key_kind == l->value_kind)
        return l->key_kind;
    if (l->key_kind != INT8)
        return -1;
    return l->value_kind == INT4 ? K8V4 : l->value_kind == GROUPED_INT4 ? GROUPED_K8V4 : -1;
}

/* Whether the rows can decode keys and values in registers: they fit into one group, and nothing needs padding. */
static int decodes_in_registers(const struct attention *job, int rows)
{
    const struct layer *l = job->layer;
    const int lanes = job->isa->vector_floats;
    const int has_mix = in_bfloat16(l) ? l->key_kind == FLOAT16 && l->value_kind == FLOAT16
                                                     : l->key_kind != FLOAT32 && mix_of(l) >= 0;
    const int groups_fit = l->value_kind != GROUPED_INT4 || l->group % lanes == 0;
    const int dims_fit = l->dim % lanes == 0 && l->value_dim % lanes == 0;
    return has_mix && !in_amx_order(l) && !l->values_in_keys && rows <= job->isa->rows && l->block_tokens % 16 == 0 && dims_fit && groups_fit;
}

static void attend_tile(const struct attention *job, const struct scratch *m, struct tile *tile, int first, int last, int rows)
{
    const float *packed = m->query;
    struct rows groups[64];
    for (int at = 0; at < rows;) {
        int count = 0;
        const int size = group_rows(job, rows - at);
        for (; at < rows && count < 64 && group_rows(job, rows - at) == size; at += size) {
            struct rows *g = &groups[count];
            *g = (struct rows){packed, m->output + (size_t)at * tile->columns, m->maximum + at, m->sums + (int64_t)at * 16,
                             m->position + at, first, last};
            if (tile->window)
                g->first = larger(first, g->position[0] - tile->window + 1 - tile->start);
            g->last = smaller(last, g->position[size - 1] + 1 - tile->start);
            if (g->first < g->last)
                count++;
            packed += (size_t)size * query_floats(job->layer);
        }
        if (count == 0)
            continue;
        if (in_amx_order(job->layer))
            job->amx(groups, count, tile, size);
        else if (in_bfloat16(job->layer))
            job->pairs->attend[tile->codes != NULL][log2_of(size)](groups, count, tile);
        else
            job->isa->attend[tile->codes != NULL ? mix_of(job->layer) : FLOAT32][log2_of(size)](groups, count, tile);
        tile->next = NULL; /* fetched once */
    }
}

/* The scratch memory of the item's h-th head. */
static struct scratch scratch_of(const struct attention *job, const struct scratch *m, int h, int rows)
{
    struct scratch part = *m;
    size_t at = (size_t)h * round_up(rows, group_padding(job->layer));
    part.query += at * query_floats(job->layer);
    part.output += at * round_up(job->layer->value_dim, job->isa->vector_floats);
    part.maximum += at;
    part.sums += at * 16;
    part.results += at * result_floats(job);
    part.position += at;
    return part;
}

/* Attend to tokens from .. stop of one split: all heads of a tile, then the next tile. */
static void attend_split(const struct attention *job, struct scratch *m, struct scratch *parts, const struct item *item,
                         const struct span *span, int from, int stop)
{
    const struct layer *l = job->layer;
    const int in_registers = decodes_in_registers(job, span->rows);
    struct tile tile = {.dim = l->dim,
                        .value_dim = l->value_dim,
                        .group = l->group,
                        .columns = round_up(l->value_dim, job->isa->vector_floats),
                        .factors = m->values,
                        .window = l->window,
                        .key_bytes = (int)vector_bytes(l->key_kind, l->dim),
                        .value_bytes = l->values_in_keys ? 0 : (int)vector_bytes(l->value_kind, l->value_dim),
                        .softcap = in_bfloat16(l) ? l->softcap * LOG2_E : l->softcap,
                        .inverse_softcap = l->softcap != 0.0f ? 1.0f / l->softcap : 0.0f};
    struct places places[2];
    int now = 0, head = 0, start = from / TILE * TILE;
    attention_find_tile(job, item->s, item->first_head, start, larger(0, from - start), smaller(TILE, stop - start), &places[now]);
    for (int h = 0; h < item->heads; h++)
        start_rows(job, &parts[h], span->rows);
    while (start < stop) {
        int first = larger(0, from - start), last = smaller(TILE, stop - start);
        int next_head = (head + 1) % item->heads, next_start = next_head == 0 ? start + TILE : start;
        tile.start = start;
        tile.codes = in_registers ? &places[now] : NULL;
        tile.next = next_start < stop ? &places[1 - now] : NULL;
        if (tile.next != NULL)
            attention_find_tile(job, item->s, item->first_head + next_head, next_start, larger(0, from - next_start),
                      smaller(TILE, stop - next_start), &places[1 - now]);
        if (!in_registers)
            attention_load_tile(job, m, &places[now], item->s, item->first_head + head, first, last, &tile);
        attend_tile(job, &parts[head], &tile, first, last, span->rows);
        head = next_head, start = next_start, now = 1 - now;
    }
}

/* Where the results of a row, head and split are, if threads share the splits of a context. */
static float *shared_result(const struct attention *job, int s, int head, int row, int split)
{
    const int64_t rows = rows_of(job, s);
    return job->results + ((job->first_result[s] + head * rows + row) * job->max_splits + split) * result_floats(job);
}

/* Merge a split's result into a row's total. */
static void merge(const struct attention *job, float *total, const float *output, const float *sums, float maximum)
{
    const int columns = round_up(job->layer->value_dim, job->isa->vector_floats);
    (in_bfloat16(job->layer) ? job->pairs->merge : job->isa->merge)(total, output, sums, maximum, columns);
}

/* Take the result of a split: of row r of an item's h-th head. It is kept, or merged at once. */
static void take_result(const struct attention *job, const struct scratch *m, const struct item *item, int h, int r, int split)
{
    const size_t columns = round_up(job->layer->value_dim, job->isa->vector_floats);
    const float *output = m->output + r * columns, *sums = m->sums + (int64_t)r * 16;
    if (item->last_split == 0) {
        merge(job, m->results + r * result_floats(job), output, sums, m->maximum[r]);
        return;
    }
    float *result = shared_result(job, item->s, item->first_head + h, r, split);
    memcpy(result, output, sizeof(float) * columns);
    memcpy(result + columns, sums, sizeof(float) * 16);
    result[columns + 16] = m->maximum[r];
}

static void attend_item(const struct attention *job, struct scratch *m, const struct item *item)
{
    const struct span span = span_of(job, item);
    const int is_shared = item->last_split > 0;
    const int first = is_shared ? item->first_split : span.oldest / SPLIT;
    const int last = is_shared ? smaller(item->last_split, (span.stop + SPLIT - 1) / SPLIT) : (span.stop + SPLIT - 1) / SPLIT;
    struct scratch parts[ROWS_PER_ITEM];
    for (int h = 0; h < item->heads; h++) {
        parts[h] = scratch_of(job, m, h, span.rows);
        pack_rows(job, &parts[h], span.first_row, span.first_position, item->first_head + h, span.rows);
        clear_results(job, parts[h].results, span.rows);
    }
    for (int split = larger(first, span.oldest / SPLIT); split < last; split++) {
        const int from = larger(span.oldest, split * SPLIT), stop = smaller(span.stop, (split + 1) * SPLIT);
        attend_split(job, m, parts, item, &span, from, stop);
        for (int h = 0; h < item->heads; h++)
            for (int r = 0; r < span.rows; r++)
                take_result(job, &parts[h], item, h, r, split);
    }
    for (int h = 0; h < item->heads && !is_shared; h++)
        finish_rows(job, parts[h].results, span.first_row, item->first_head + h, span.rows);
}

/* Longest contexts of a sequence first. */
void attention_item(const struct attention *job, int index, float *scratch)
{
    const int piece = index % job->pieces;
    int s = 0, at = index / job->pieces;
    for (; at >= items_of(job, s); s++)
        at -= items_of(job, s);
    const int heads = heads_of(job, s), shares = (job->layer->num_kv_heads + heads - 1) / heads;
    struct item item = {s, chunks_of(job, s) - 1 - at / shares, at % shares * heads, 0, 0, 0};
    item.heads = smaller(heads, job->layer->num_kv_heads - item.first_head);
    if (job->pieces > 1) {
        item.first_split = job->max_splits * piece / job->pieces;
        item.last_split = job->max_splits * (piece + 1) / job->pieces;
    }
    struct scratch m;
    lay_out(job->layer, scratch, (size_t)heads * round_up(rows_of(job, s), group_padding(job->layer)), &m);
    attend_item(job, &m, &item);
}

/* Merge the splits of one sequence and KV head, in order. */
void attention_merge(const struct attention *job, int index, float *scratch)
{
    const int s = index / job->layer->num_kv_heads, head = index % job->layer->num_kv_heads;
    const struct item item = {s, 0, head, 1, 0, 0};
    const struct span span = span_of(job, &item);
    const size_t floats = result_floats(job);
    clear_results(job, scratch, span.rows);
    for (int r = 0; r < span.rows; r++)
        for (int split = span.oldest / SPLIT; split * SPLIT < span.stop; split++) {
            const float *result = shared_result(job, s, head, r, split), *sums = result + floats - RESULT_FLOATS;
            merge(job, scratch + r * floats, result, sums, sums[16]);
        }
    finish_rows(job, scratch, span.first_row, head, span.rows);
}

size_t attention_scratch_bytes(const struct layer *layer)
{
    struct scratch m;
    const int group = layer->num_heads / layer->num_kv_heads, padding = group_padding(layer);
    /* An item of h heads with r rows each has h * round_up(r, padding) rows, where h * r is at most ROWS_PER_ITEM or h is 1. */
    const int of_heads = padding * smaller(layer->num_kv_heads, ROWS_PER_ITEM), of_one = larger(larger(2 * ROWS_PER_ITEM, most_rows(layer)), group);
    const int rows = larger(of_heads, round_up(of_one, padding));
    const size_t of_item = lay_out(layer, NULL, rows, &m), of_merge = (size_t)(rows + 1) * (round_up(layer->value_dim, 16) + RESULT_FLOATS);
    return sizeof(float) * (of_item > of_merge ? of_item : of_merge);
}
