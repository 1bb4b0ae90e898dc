/* Streams through a buffer with several threads, to learn how fast this machine reads memory.
 *
 * stream_read(buffer, bytes, threads) sums the buffer once, each thread its own contiguous part, and returns seconds
 * of the slowest path from first start to last join. Eight independent sums keep the loads, not the adds, the limit.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define MAX_THREADS 256
#define LANES 64

typedef struct {
    const uint64_t *begin;
    size_t words;
    uint64_t sum;
} Part;

static void *sum_part(void *argument) {
    Part *part = argument;
    uint64_t lanes[LANES] = {0};
    for (size_t word = 0; word + LANES <= part->words; word += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += part->begin[word + lane];
    for (int lane = 0; lane < LANES; lane++) part->sum += lanes[lane];
    return NULL;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Returns seconds, or a negative number when a thread could not be started; *checksum keeps the loop alive. */
double stream_read(const void *buffer, size_t bytes, int threads, uint64_t *checksum) {
    if (threads < 1 || threads > MAX_THREADS) return -1.0;
    Part parts[MAX_THREADS];
    pthread_t handles[MAX_THREADS];
    size_t words = bytes / sizeof(uint64_t) / (size_t)threads;
    double start = now();
    for (int index = 0; index < threads; index++) {
        parts[index] = (Part){(const uint64_t *)buffer + (size_t)index * words, words, 0};
        if (pthread_create(&handles[index], NULL, sum_part, &parts[index]) != 0) return -1.0;
    }
    for (int index = 0; index < threads; index++) {
        pthread_join(handles[index], NULL);
        *checksum += parts[index].sum;
    }
    return now() - start;
}
