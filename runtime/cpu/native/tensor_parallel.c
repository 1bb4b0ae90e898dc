/* The ranks' meetings, as tensor_parallel.h describes. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "spinning.h"
#include "tensor_parallel.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct line {
    _Atomic uint32_t arrivals, sleepers;
};

static struct line *line_of(const struct rank_group *group, int rank)
{
    return (struct line *)((char *)group->memory + (int64_t)rank * RANK_LINE);
}

static float *slot_of(const struct rank_group *group, uint32_t arrivals)
{
    float *slots = (float *)((char *)group->memory + (int64_t)group->ranks * RANK_LINE);
    return slots + (arrivals & 1) * group->slot_floats;
}

/* Other processes wait on these addresses: futexes that are not private. */
static void sleep_while(_Atomic uint32_t *word, uint32_t seen)
{
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
#else
    const struct timespec briefly = {.tv_nsec = 20000};
    (void)word, (void)seen;
    nanosleep(&briefly, NULL);
#endif
}

static void wake_all(_Atomic uint32_t *word)
{
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, MAX_RANKS, NULL, NULL, 0);
#else
    (void)word;
#endif
}

static inline int has_arrived(const struct line *line, uint32_t arrivals)
{
    return (int32_t)(atomic_load_explicit(&line->arrivals, memory_order_acquire) - arrivals) >= 0;
}

static void wait_for(struct line *line, uint32_t arrivals)
{
    const int64_t begin = nanoseconds();
    for (int64_t spun = 0; spun < SPIN_STEP; spun = nanoseconds() - begin) {
        for (int i = 0; i < PAUSES_PER_LOOK; i++, pause_briefly())
            if (has_arrived(line, arrivals))
                return;
        if (spun > SPIN_ALONE)
            sched_yield(); /* the rank that is waited for may need this core */
    }
    atomic_fetch_add(&line->sleepers, 1); /* who arrives looks at it afterwards, and so wakes this rank */
    for (uint32_t seen; (int32_t)((seen = atomic_load(&line->arrivals)) - arrivals) < 0;)
        sleep_while(&line->arrivals, seen);
    atomic_fetch_sub(&line->sleepers, 1);
}

void ranks_wait(const struct rank_group *group, uint32_t *arrivals)
{
    struct line *own = line_of(group, group->rank);
    atomic_store(&own->arrivals, ++*arrivals);
    if (atomic_load(&own->sleepers) > 0)
        wake_all(&own->arrivals);
    for (int rank = 0; rank < group->ranks; rank++)
        if (rank != group->rank)
            wait_for(line_of(group, rank), *arrivals);
}

static inline float *row_of(const struct exchange *e, int row)
{
    return e->at + (e->places != NULL ? e->places[row] : row) * e->stride;
}

static inline void copy(float *to, const float *from, int begin, int end)
{
    if (begin < end)
        memcpy(to + begin, from + begin, (size_t)(end - begin) * sizeof *to);
}

void exchange_put(const struct rank_group *group, uint32_t arrivals, const struct exchange *e, int begin, int end)
{
    const int columns = e->bounds[group->ranks], rank = group->rank;
    float *slot = slot_of(group, arrivals + 1);
    for (int row = begin; row < end; row++) {
        float *to = slot + (int64_t)row * columns;
        if (e->owners == NULL)
            copy(to, row_of(e, row), e->bounds[rank], e->bounds[rank + 1]);
        else if (e->owners[e->kinds[row]] == rank)
            copy(to, row_of(e, row), 0, columns);
    }
}

void exchange_take(const struct rank_group *group, uint32_t arrivals, const struct exchange *e, int begin, int end)
{
    const int columns = e->bounds[group->ranks], rank = group->rank;
    const float *slot = slot_of(group, arrivals);
    for (int row = begin; row < end; row++) {
        const float *from = slot + (int64_t)row * columns;
        if (e->owners == NULL) {
            copy(row_of(e, row), from, 0, e->bounds[rank]);
            copy(row_of(e, row), from, e->bounds[rank + 1], columns);
        } else if (e->owners[e->kinds[row]] != rank) {
            copy(row_of(e, row), from, 0, columns);
        }
    }
}
