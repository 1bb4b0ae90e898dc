/* Which thread does what: chunks of sequences and heads, and where those are too few, splits of long contexts. */
#include "paged_attention_plan.h"

#define ITEMS_PER_THREAD 4 /* at least, where a long context can be shared: threads end at about the same time */

static double multiply_adds(const struct attention *job)
{
    double scores = 0;
    for (int s = 0; s < job->step->num_sequences; s++) {
        double rows = queries_of(job, s);
        int context = job->step->context_lens[s];
        scores += rows * (job->layer->window ? smaller(context, job->layer->window) : context);
    }
    return scores * job->layer->num_heads * (job->layer->dim + job->layer->value_dim);
}

/* Split long contexts, if there are too few items for the threads. */
static void plan_sharing(struct attention *job, int threads)
{
    const struct step *step = job->step;
    int64_t rows = 0;
    for (int s = 0; s < step->num_sequences; s++) {
        if (chunks_of(job, s) > 1)
            return; /* prompts have rows enough */
        job->max_splits = larger(job->max_splits, (step->context_lens[s] + SPLIT - 1) / SPLIT);
        rows += (int64_t)rows_of(job, s) * job->layer->num_kv_heads;
    }
    if (threads == 1 || job->items == 0 || job->items >= ITEMS_PER_THREAD * threads || job->max_splits < 2)
        return;
    job->pieces = smaller(job->max_splits, (ITEMS_PER_THREAD * threads + job->items - 1) / job->items);
    job->merges = step->num_sequences * job->layer->num_kv_heads;
    job->results_bytes = sizeof(int64_t) * round_up(step->num_sequences, 8) +
                         sizeof(float) * rows * job->max_splits * result_floats(job);
}

/* Choose the tokens of a chunk: many rows share what is decoded, where that leaves items enough. Returns the number of chunks. */
static int choose_chunks(struct attention *job, int threads)
{
    const struct layer *l = job->layer;
    for (int rows = most_rows(l);; rows /= 2) {
        int64_t chunks = 0;
        job->chunk_tokens = larger(1, larger(rows, ROWS_PER_ITEM) / (l->num_heads / l->num_kv_heads));
        for (int s = 0; s < job->step->num_sequences; s++)
            chunks += chunks_of(job, s);
        if (rows <= ROWS_PER_ITEM || chunks * l->num_kv_heads >= (int64_t)ITEMS_PER_THREAD * threads)
            return chunks < INT32_MAX ? (int)chunks : INT32_MAX;
    }
}

void attention_plan(struct attention *job, const struct layer *layer, const struct step *step, const int32_t *first_queries,
                    int threads, double min_parallel)
{
    int items = 0;
    const struct instruction_set *set = attention_instruction_set();
    *job = (struct attention){.isa = set->isa, .pairs = set->pairs, .amx = set->amx, .layer = layer, .step = step,
                              .first_queries = first_queries, .pieces = 1};
    job->max_heads = layer->num_kv_heads;
    if (multiply_adds(job) < min_parallel)
        threads = 1;
    const int chunks = choose_chunks(job, threads);
    if (chunks < threads) /* too few sequences to keep the threads busy: distribute the heads */
        job->max_heads = larger(1, (int)((int64_t)layer->num_kv_heads * chunks / threads));
    for (int s = 0; s < step->num_sequences; s++)
        items += items_of(job, s);
    job->items = items;
    job->threads = threads;
    plan_sharing(job, threads);
    job->items *= job->pieces;
}

void attention_share(struct attention *job, void *memory)
{
    if (job->pieces == 1)
        return;
    if (memory == NULL) {
        job->items /= job->pieces;
        job->pieces = 1, job->results_bytes = 0;
        return;
    }
    int64_t at = 0;
    job->first_result = memory;
    job->results = (float *)((char *)memory + sizeof(int64_t) * round_up(job->step->num_sequences, 8));
    for (int s = 0; s < job->step->num_sequences; s++) {
        job->first_result[s] = at;
        at += (int64_t)rows_of(job, s) * job->layer->num_kv_heads;
    }
}
