/* The team of thread_team.h.
 *
 * `state` holds the phase: its serial number, units and threads in one word, so that whatever a thread concludes from it
 * is true of that very phase. `taken` of a share holds the serial number of the phase in which a piece was last taken, and
 * the next unit. To take a piece is to replace that word, which fails for a phase that is over: its shares are used up
 * or belong to a later one. A thread reads the work only while it has a piece, when the work cannot end. So a thread may
 * be asleep or late for any number of phases and works, and nothing has to be reset.
 *
 * Sleeping: a thread sets its flag, looks at the state once more, and sleeps on its bell; who changes the state looks at
 * the flags afterwards. Both are sequentially consistent, so one of the two sees the other. Two threads are woken with a
 * phase, and each of them wakes two more: starting a large team delays no one thread. The caller alone must be woken at
 * the end; the others are never waited for.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "spinning.h"
#include "thread_team.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { LINE = 64, PIECES = 4, WOKEN_AT_ONCE = 2, REFRESH_BITS = 28 };
enum { FETCHED_AT_ONCE = 8192, FETCHED_WAITING = 128 << 10, FETCHED_PER_LOOK = 512 }; /* bytes of what is read next */
/* Nanoseconds of spinning before a thread sleeps between works: if they follow each other that closely, and else. */
static const int64_t MAX_SPIN_BETWEEN = 1500000, SPIN_IDLE = 20000;

struct bell {
    _Alignas(LINE) atomic_uint rung;
#if !defined(__linux__)
    pthread_mutex_t lock;
    pthread_cond_t ringing;
#endif
};

struct share {
    _Alignas(LINE) _Atomic uint64_t taken; /* serial number << 32 | next unit */
};

static struct {
    _Alignas(LINE) _Atomic uint64_t state; /* serial number << 32 | threads - 1 << 24 | units; units 0: no work */
    _Alignas(LINE) atomic_int done;        /* units of the phase */
    _Alignas(LINE) const struct work *work;
    int members;                           /* threads besides the caller */
    int64_t ended;                         /* when the last work did; nanoseconds */
    _Atomic int64_t spin_between;          /* works */
    _Alignas(LINE) atomic_uchar asleep[MAX_THREADS];
    struct share shares[MAX_THREADS];
    struct bell bells[MAX_THREADS];
    pthread_t threads[MAX_THREADS];        /* members */
} team;

static struct {
    int count;
    int32_t cores[MAX_THREADS];
} pinned;
static atomic_int callers_core = -1; /* -1: any */

/* Held during a work; protects team.work, the members and `pinned`. */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static inline uint32_t serial_of(uint64_t state) { return (uint32_t)(state >> 32); }
static inline int threads_of(uint64_t state) { return (int)(state >> 24 & 255) + 1; }
static inline int units_of_phase(uint64_t state) { return (int)(state & MAX_UNITS); }

#if defined(__linux__)
static void wait_for_bell(struct bell *bell, unsigned heard)
{
    syscall(SYS_futex, &bell->rung, FUTEX_WAIT_PRIVATE, heard, NULL, NULL, 0);
}

static void ring(struct bell *bell)
{
    atomic_fetch_add(&bell->rung, 1);
    syscall(SYS_futex, &bell->rung, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void make_bell(struct bell *bell) { atomic_store(&bell->rung, 0); }
#else
static void wait_for_bell(struct bell *bell, unsigned heard)
{
    pthread_mutex_lock(&bell->lock);
    while (atomic_load(&bell->rung) == heard)
        pthread_cond_wait(&bell->ringing, &bell->lock);
    pthread_mutex_unlock(&bell->lock);
}

static void ring(struct bell *bell)
{
    pthread_mutex_lock(&bell->lock);
    atomic_fetch_add(&bell->rung, 1);
    pthread_cond_signal(&bell->ringing);
    pthread_mutex_unlock(&bell->lock);
}

static void make_bell(struct bell *bell)
{
    atomic_store(&bell->rung, 0);
    pthread_mutex_init(&bell->lock, NULL);
    pthread_cond_init(&bell->ringing, NULL);
}
#endif

/* ---- cores */

struct cores {
    unsigned long bits[MAX_CORES / 8 / sizeof(unsigned long)];
};

#if defined(__linux__)
static int get_cores(struct cores *cores)
{
    return pthread_getaffinity_np(pthread_self(), sizeof *cores, (cpu_set_t *)cores);
}

static int set_cores(pthread_t thread, const struct cores *cores)
{
    return pthread_setaffinity_np(thread, sizeof *cores, (const cpu_set_t *)cores);
}
#else
static int get_cores(struct cores *cores) { return (void)cores, ENOSYS; }
static int set_cores(pthread_t thread, const struct cores *cores) { return (void)thread, (void)cores, ENOSYS; }
#endif

static int set_core(pthread_t thread, int core)
{
    struct cores cores = {{0}};
    const int bits = 8 * sizeof *cores.bits;
    cores.bits[core / bits] = 1ul << core % bits;
    return set_cores(thread, &cores);
}

/* ---- waiting */

/* Wake the thread if it sleeps. Returns whether it did. */
static int wake(int thread)
{
    if (!atomic_load(&team.asleep[thread]) || !atomic_exchange(&team.asleep[thread], 0))
        return 0;
    ring(&team.bells[thread]);
    return 1;
}

static void wake_some(int threads)
{
    for (int thread = 0, woken = 0; thread < threads && woken < WOKEN_AT_ONCE; thread++)
        woken += wake(thread);
}

/* Sleep until the state is another than `seen`; return it. */
static uint64_t sleep_until_changed(int thread, uint64_t seen)
{
    for (;;) {
        const unsigned heard = atomic_load(&team.bells[thread].rung);
        atomic_store(&team.asleep[thread], 1);
        uint64_t state = atomic_load(&team.state);
        if (state == seen) {
            wait_for_bell(&team.bells[thread], heard);
            state = atomic_load(&team.state);
        }
        if (state != seen) {
            atomic_store(&team.asleep[thread], 0);
            if (units_of_phase(state) > 0)
                wake_some(threads_of(state));
            return state;
        }
    }
}

static inline void fetch(const char *from, int bytes)
{
    for (int i = 0; i < bytes; i += LINE)
        __builtin_prefetch(from + i, 0, 2);
}

/* Fetch more, until the state is another than `seen`. The work may have ended meanwhile: nothing of it is read here. */
static void fetch_while_waiting(uint64_t seen, const char *from)
{
    for (int i = FETCHED_AT_ONCE; i < FETCHED_WAITING; i += FETCHED_PER_LOOK) {
        if (atomic_load_explicit(&team.state, memory_order_acquire) != seen)
            return;
        fetch(from + i, FETCHED_PER_LOOK);
    }
}

static uint64_t wait_until_changed(int thread, uint64_t seen)
{
    const int64_t between = atomic_load_explicit(&team.spin_between, memory_order_relaxed);
    const int64_t limit = thread >= threads_of(seen) ? 0 : units_of_phase(seen) > 0 ? SPIN_STEP : between;
    const int64_t begin = nanoseconds();
    for (int64_t spun = 0; spun < limit; spun = nanoseconds() - begin) {
        for (int i = 0; i < PAUSES_PER_LOOK; i++, pause_briefly()) {
            const uint64_t state = atomic_load_explicit(&team.state, memory_order_acquire);
            if (state != seen)
                return state;
        }
        if (spun > SPIN_ALONE)
            sched_yield(); /* the thread that is waited for may need this core */
    }
    return sleep_until_changed(thread, seen);
}

/* Take a piece of a share: units *begin .. *end. Returns 0 if nothing is left of it, or the phase is over. */
static int take_piece(uint64_t state, int share, int *begin, int *end)
{
    const int units = units_of_phase(state), threads = threads_of(state);
    const int first = share_begin(units, threads, share), last = share_begin(units, threads, share + 1);
    uint64_t taken = atomic_load_explicit(&team.shares[share].taken, memory_order_relaxed);
    while (first < last) {
        const int32_t phases_ahead = (int32_t)(serial_of(taken) - serial_of(state));
        const int next = phases_ahead == 0 ? (int)(uint32_t)taken : first;
        if (phases_ahead > 0 || next >= last)
            return 0;
        const int size = (last - next + PIECES - 1) / PIECES;
        const uint64_t replaced = (uint64_t)serial_of(state) << 32 | (uint32_t)(next + size);
        if (atomic_compare_exchange_weak(&team.shares[share].taken, &taken, replaced)) {
            *begin = next, *end = next + size;
            return 1;
        }
    }
    return 0;
}

/* Prepare and announce the phase after `state`. One that is not shared is done at once. */
static void begin_next_phase(uint64_t state, int thread)
{
    const struct work *work = team.work;
    int units;
    while ((units = work->next_phase(work->argument, thread)) == 1)
        work->run(work->argument, thread, 0, 1);
    atomic_store_explicit(&team.done, 0, memory_order_relaxed);
    atomic_store(&team.state, (uint64_t)(serial_of(state) + 1) << 32 | (state & 0xff000000) | (unsigned)units);
    if (units == 0)
        wake(0);
    else
        wake_some(threads_of(state));
}

/* Do units of the phase until none is left to take. */
static void take_part(uint64_t state, int thread)
{
    const int threads = threads_of(state);
    int count = 0, begin, end;
    for (int i = 0; i < threads; i++)
        while (take_piece(state, (thread + i) % threads, &begin, &end)) {
            team.work->run(team.work->argument, thread, begin, end);
            count += end - begin;
        }
    if (count == 0)
        return;
    const char *next = team.work->look_ahead != NULL ? team.work->look_ahead(team.work->argument, thread) : NULL;
    if (next != NULL)
        fetch(next, FETCHED_AT_ONCE);
    if (atomic_fetch_add(&team.done, count) + count == units_of_phase(state))
        begin_next_phase(state, thread);
    else if (next != NULL)
        fetch_while_waiting(state, next);
}

static void *member_main(void *argument)
{
    const int thread = (int)(intptr_t)argument;
    fesetenv(FE_DFL_ENV);
    for (uint64_t state = atomic_load(&team.state);; state = wait_until_changed(thread, state))
        if (thread < threads_of(state) && units_of_phase(state) > 0)
            take_part(state, thread);
    return NULL;
}

static void forget_team(void)
{
    memset((void *)&team, 0, sizeof team);
    pthread_mutex_init(&turn, NULL);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_team); }

/* Start members until there are `count`; fewer when the system refuses. They leave signals to the other threads, but
 * those of their own faults, which end the process without its handler (a traceback) where they are blocked. */
static void start_members(int count)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (team.members >= count)
        return;
    sigset_t all, before;
    const int own[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    sigfillset(&all);
    for (int i = 0; i < (int)(sizeof own / sizeof *own); i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (team.members == 0)
        make_bell(&team.bells[0]);
    while (team.members < count) {
        const int member = team.members + 1;
        make_bell(&team.bells[member]);
        if (pthread_create(&team.threads[member], NULL, member_main, (void *)(intptr_t)member) != 0)
            break;
        pthread_detach(team.threads[member]);
        if (member < pinned.count)
            set_core(team.threads[member], pinned.cores[member]);
        team.members = member;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void run_alone(const struct work *work)
{
    for (int units; (units = work->next_phase(work->argument, 0)) > 0;)
        work->run(work->argument, 0, 0, units);
}

/* Serial numbers are compared by their difference: one that no phase used for long is brought forward. */
static void refresh_shares(uint32_t serial)
{
    static uint32_t refreshed;
    if (serial >> REFRESH_BITS == refreshed)
        return;
    refreshed = serial >> REFRESH_BITS;
    for (int i = 0; i < MAX_THREADS; i++)
        atomic_store(&team.shares[i].taken, (uint64_t)serial << 32);
}

/* The caller has the turn. */
static void run_together(const struct work *work, int threads)
{
    const int64_t pause = nanoseconds() - team.ended;
    atomic_store_explicit(&team.spin_between, 2 * pause < MAX_SPIN_BETWEEN ? 2 * pause : SPIN_IDLE, memory_order_relaxed);
    team.work = work;
    const uint64_t idle = atomic_load(&team.state);
    refresh_shares(serial_of(idle));
    begin_next_phase((uint64_t)serial_of(idle) << 32 | (uint64_t)(threads - 1) << 24, 0);
    for (uint64_t state = atomic_load(&team.state); units_of_phase(state) > 0; state = wait_until_changed(0, state))
        take_part(state, 0);
    team.ended = nanoseconds();
}

static void run(const struct work *work, int threads, int has_turn)
{
    fenv_t environment; /* the caller may have changed how it rounds, and flushes subnormals: no result depends on that */
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    if (has_turn)
        start_members(threads - 1); /* before this thread is on one core, as they inherit its cores */
    struct cores before;
    const int core = has_turn || threads == 1 ? atomic_load(&callers_core) : -1;
    const int is_moved = core >= 0 && get_cores(&before) == 0 && set_core(pthread_self(), core) == 0;
    if (has_turn)
        run_together(work, threads);
    else
        run_alone(work);
    if (is_moved)
        set_cores(pthread_self(), &before);
    fesetenv(&environment);
    if (has_turn)
        pthread_mutex_unlock(&turn);
}

/* Digest of the sources, by which the bindings detect a library of another version. */
#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST ""
#endif
const char *ingot_cpu_source(void) { return SOURCE_DIGEST; }

static inline int at_most(int threads) { return threads < MAX_THREADS ? threads : MAX_THREADS; }

void team_run(const struct work *work, int threads)
{
    run(work, at_most(threads), threads > 1 && pthread_mutex_lock(&turn) == 0);
}

void team_run_now(const struct work *work, int threads)
{
    run(work, at_most(threads), threads > 1 && pthread_mutex_trylock(&turn) == 0);
}

int team_start(int threads)
{
    pthread_mutex_lock(&turn);
    start_members(at_most(threads) - 1);
    const int found = team.members + 1;
    pthread_mutex_unlock(&turn);
    return found < threads ? found : threads;
}

/* The caller has the turn. */
static int pin(const int32_t *cores, int count)
{
    struct cores before;
    int problem = count > MAX_THREADS ? EINVAL : get_cores(&before);
    if (problem != 0)
        return count == 0 ? 0 : problem;
    for (int i = 0; i < count && problem == 0; i++) /* whether the system allows them all */
        problem = cores[i] < 0 || cores[i] >= MAX_CORES ? EINVAL : set_core(pthread_self(), cores[i]);
    set_cores(pthread_self(), &before);
    if (problem != 0)
        return problem;
    for (int member = 1; member <= team.members; member++) {
        if (member < count)
            set_core(team.threads[member], cores[member]);
        else if (member < pinned.count)
            set_cores(team.threads[member], &before);
    }
    pinned.count = count;
    memcpy(pinned.cores, cores, count * sizeof *cores);
    atomic_store(&callers_core, count > 0 ? cores[0] : -1);
    return 0;
}

int team_pin(const int32_t *cores, int count)
{
    pthread_mutex_lock(&turn);
    const int problem = pin(cores, count);
    pthread_mutex_unlock(&turn);
    return problem;
}
