/* One team of threads for the process: team_run(work, threads) takes them through the phases of a work.
 *
 * A phase is a number of equal units. Each thread has an even share of them, so that what it will read is known ahead, and
 * takes it in pieces; then it takes pieces of the others' shares. A phase ends when every unit is done, not when every
 * thread has come by: a thread without a core delays no other, unless it lost the core in the middle of a piece. The thread
 * that ends a phase prepares the next one. Waiting threads spin for a while, then sleep.
 */
#pragma once
#include <stdint.h>

enum { MAX_THREADS = 256, MAX_UNITS = (1 << 24) - 1, MAX_CORES = 8192 };

struct work {
    /* End the phase at hand and prepare the next. Called by one thread at a time. Returns its units, 0 after the last. */
    int (*next_phase)(void *argument, int thread);
    void (*run)(void *argument, int thread, int begin, int end); /* units begin .. end */
    /* This thread found no more units: what it reads first in the next phase, to be fetched meanwhile. NULL for nothing. */
    const void *(*look_ahead)(void *argument, int thread);
    void *argument;
};

/* Do the work with up to `threads` threads, the caller being thread 0; fewer if the system refuses to start them. One work
 * is done at a time: a second caller waits. */
void team_run(const struct work *work, int threads);

/* The same, but when the team is busy the caller does all of the work itself. */
void team_run_now(const struct work *work, int threads);

/* Start the threads of works ahead of the first one. Returns how many there are, the caller included: fewer than asked if
 * the system refuses. */
int team_start(int threads);

/* Let thread t of the team run on core cores[t] alone, for t < count: the threads of the team from now on, and a caller
 * while it works. Threads from `count` on may run anywhere, with count 0 all. Returns 0, or the system's error number with
 * nothing changed. A forked child keeps the cores. */
int team_pin(const int32_t *cores, int count);

/* Units of thread `thread`'s share: begin .. end. */
static inline int share_begin(int units, int threads, int thread) { return (int)((long long)units * thread / threads); }
