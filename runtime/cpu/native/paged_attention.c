/* Attention over a paged KV pool for the CPU engine: arithmetic in float32, or of operands in bfloat16, over keys and values
 * that are stored in one of the types of kv_precision.h. Plain C, called through ctypes (attention.py).
 *
 * One call per layer and step: paged_attention() writes the step's keys and values into the pool and attends. A launch
 * program takes the same steps as phases of its own (paged_attention.h). Queries and keys may be rotated by the rotary
 * embedding as they are read. A row's result depends on its own sequence alone, bit for bit.
 *
 *     paged_attention_plan.c     which thread does what
 *     paged_attention_pool.c     keys and values: written to the pool, and brought in from it by tiles
 *     paged_attention_items.c    the rows of an item attend to the tiles of their tokens
 *     paged_attention_isa.c      the arithmetic (paged_attention_kernel.h, paged_attention_bfloat16.h), once per instruction set
 *
 * Algorithm: online softmax over tiles (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) with tiles at fixed
 * absolute positions, whatever the block size. All query heads of a KV head share its keys and values in cache. Every
 * SPLIT tokens the softmax starts anew, and the results are merged in order: threads may take the splits of a long
 * context (Flash-Decoding, Dao et al. 2023), and one thread computes the same bits.
 */

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "paged_attention.h"
#include "thread_team.h"

#define MIN_PARALLEL 1.0e6 /* multiply-adds below which waking threads costs more than it saves */

/* Memory that a thread keeps until it ends, for callers that have made none: see paged_attention(). */
struct kept_memory {
    void *data;
    size_t bytes;
};

static pthread_key_t kept_key;

static void free_kept(void *memory)
{
    free(((struct kept_memory *)memory)->data);
    free(memory);
}

static void make_kept_key(void) { pthread_key_create(&kept_key, free_kept); }

/* This thread's memory, at least `bytes` long and aligned to 64. NULL: there is too little. */
static void *kept_memory(size_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_kept_key);
    struct kept_memory *memory = pthread_getspecific(kept_key);
    if (memory == NULL) {
        memory = calloc(1, sizeof *memory);
        if (memory == NULL || pthread_setspecific(kept_key, memory) != 0) {
            free(memory);
            return NULL;
        }
    }
    if (memory->bytes < bytes) {
        free(memory->data);
        memory->bytes = 0;
        if (posix_memalign(&memory->data, 64, bytes) != 0) {
            memory->data = NULL;
            return NULL;
        }
        memory->bytes = bytes;
    }
    return memory->data;
}

/* One layer's attention as a work of its own: items, then merges. */
struct alone {
    struct attention job;
    size_t scratch_bytes;
    int phase;
    atomic_int failed;
};

static int next_phase(void *argument, int thread)
{
    (void)thread;
    struct alone *alone = argument;
    const int units[] = {alone->job.items, alone->job.pieces > 1 && !atomic_load(&alone->failed) ? alone->job.merges : 0, 0};
    return units[alone->phase++];
}

static void run_units(void *argument, int thread, int begin, int end)
{
    (void)thread;
    struct alone *alone = argument;
    float *scratch = kept_memory(alone->scratch_bytes);
    if (scratch == NULL)
        atomic_store(&alone->failed, 1);
    for (int i = begin; i < end && scratch != NULL; i++)
        (alone->phase == 1 ? attention_item : attention_merge)(&alone->job, i, scratch);
}

/* Write keys and values into the pool, then attend. Returns 0, or -1 when there is too little memory for the scratch space. */
int paged_attention(const struct layer *layer, const struct step *step)
{
    struct alone alone = {.scratch_bytes = attention_scratch_bytes(layer)};
    attention_plan(&alone.job, layer, step, NULL, step->threads, MIN_PARALLEL);
    float *scratch = kept_memory(alone.scratch_bytes);
    void *results = NULL;
    if (scratch == NULL || (alone.job.results_bytes > 0 && posix_memalign(&results, 64, alone.job.results_bytes) != 0))
        return -1;
    attention_share(&alone.job, results);
    attention_write(&alone.job, 0, step->query_starts[step->num_sequences], scratch);
    const struct work work = {next_phase, run_units, NULL, &alone};
    team_run_now(&work, alone.job.threads);
    free(results);
    return atomic_load(&alone.failed) ? -1 : 0;
}
