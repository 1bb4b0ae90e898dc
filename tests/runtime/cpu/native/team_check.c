/* Works of random phases on the team: every unit of a phase is run once, after all of the phase before and by no thread
 * beyond those asked for; and on the thread's core where the team is pinned. Called as team_check CALLERS WORKS FORKS
 * [CORE ...]; exits with 0 if all is well. test_thread_team.py builds it with thread_team.c. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "thread_team.h"

enum { MAX_PHASE_UNITS = 300, MOST_THREADS = 9 };

static int32_t cores[MOST_THREADS];
static int num_cores;

struct check {
    int works, phases, phase, units, threads, may_be_alone;
    unsigned seed;
    int plain[MAX_PHASE_UNITS]; /* not atomic: a missing order of memory shows as a data race, or as a wrong sum */
    long expected;
    atomic_int ran[MAX_PHASE_UNITS], looks;
};

static void fail(const char *what, int value)
{
    fprintf(stderr, "%s: %d\n", what, value);
    _exit(1);
}

/* A caller that finds the team busy works alone, and is not pinned then. */
static void check_core(const struct check *check, int thread)
{
#if defined(__linux__)
    if (thread < num_cores && !(thread == 0 && check->may_be_alone) && sched_getcpu() != cores[thread])
        fail("core of thread", thread);
#endif
    (void)check, (void)thread;
}

static int next_phase(void *argument, int thread)
{
    struct check *check = argument;
    long sum = 0;
    check_core(check, thread);
    if (thread < 0 || thread >= check->threads) fail("next_phase on thread", thread);
    for (int i = 0; i < check->units; i++) {
        if (atomic_exchange(&check->ran[i], 0) != 1) fail("a unit was not run once", i);
        sum += check->plain[i];
    }
    if (sum != check->expected) fail("sum of a phase", (int)sum);
    if (check->phase++ == check->phases) return check->units = 0;
    const unsigned kind = rand_r(&check->seed) % 4; /* one unit, fewer than threads, some, many */
    check->units = kind == 0 ? 1 : 1 + (int)(rand_r(&check->seed) % (kind == 1 ? 4 : kind == 2 ? 40 : MAX_PHASE_UNITS));
    check->expected = 0;
    for (int i = 0; i < check->units; i++) check->expected += i + check->phase;
    return check->units;
}

static void run(void *argument, int thread, int begin, int end)
{
    struct check *check = argument;
    if (thread < 0 || thread >= check->threads) fail("run on thread", thread);
    check_core(check, thread);
    if (begin < 0 || begin >= end || end > check->units) fail("units of a phase", check->units);
    for (int i = begin; i < end; i++) {
        check->plain[i] = i + check->phase;
        atomic_fetch_add(&check->ran[i], 1);
    }
}

static const void *look_ahead(void *argument, int thread)
{
    struct check *check = argument;
    atomic_fetch_add(&check->looks, 1);
    return thread % 2 ? check->plain : NULL;
}

/* Cores that this thread may run on. */
static int count_cores(void)
{
#if defined(__linux__)
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : -1;
#else
    return 0;
#endif
}

static void *call(void *argument)
{
    struct check *check = argument;
    const int allowed = count_cores();
    for (int i = 0; i < check->works; i++) {
        const struct work work = {next_phase, run, i % 3 ? look_ahead : NULL, check};
        check->phase = check->units = 0, check->expected = 0;
        check->phases = (int)(rand_r(&check->seed) % 12);
        check->threads = 1 + (int)(rand_r(&check->seed) % MOST_THREADS);
        check->may_be_alone = i % 5 == 0;
        if (check->may_be_alone) team_run_now(&work, check->threads);
        else team_run(&work, check->threads);
        if (check->phase != check->phases + 1) fail("phases of a work", check->phase);
        if (count_cores() != allowed) fail("cores of the caller after a work", count_cores());
        if (i % 50 == 0) usleep(400); /* the team falls asleep */
    }
    return NULL;
}

static void call_from(int callers, int works)
{
    pthread_t threads[16];
    struct check *checks = calloc(callers, sizeof *checks);
    for (int i = 0; i < callers; i++) {
        checks[i].works = works, checks[i].seed = (unsigned)i + 1;
        if (pthread_create(&threads[i], NULL, call, &checks[i]) != 0) fail("pthread_create", i);
    }
    for (int i = 0; i < callers; i++) pthread_join(threads[i], NULL);
    free(checks);
}

int main(int count, char **arguments)
{
    if (count < 4 || count - 4 > MOST_THREADS) fail("arguments", count);
    for (; num_cores < count - 4; num_cores++) cores[num_cores] = atoi(arguments[4 + num_cores]);
    if (num_cores > 0 && team_pin(cores, num_cores) != 0) fail("team_pin", num_cores);
    const int callers = atoi(arguments[1]), works = atoi(arguments[2]), forks = atoi(arguments[3]);
    call_from(callers, works);
    for (int i = 0; i < forks; i++) {
        const pid_t child = fork();
        if (child == 0) {
            call_from(callers, works / 10);
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status != 0) fail("child", status);
    }
    call_from(callers, works / 10);
    return 0;
}
