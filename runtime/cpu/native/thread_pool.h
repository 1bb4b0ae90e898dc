/* A small persistent thread pool: run_parallel(function, argument, items, threads).
 *
 * Threads take items from a counter, so that a slow thread delays no other. A thread that wakes when all items are taken
 * goes back to sleep, and the caller waits only for threads that took an item. When another call uses the pool, or threads
 * cannot be made, the caller does the work itself: results never depend on the thread. A forked child has an empty pool.
 */

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

enum { MAX_WORKERS = 255, SPINS = 2000 }; /* about 20 us of spinning before a thread sleeps */

typedef int (*item_function)(void *argument, int index);

struct shared_work {
    item_function function;
    void *argument;
    int items;
    atomic_int next, failed;
};

static struct {
    pthread_mutex_t callers, lock; /* callers: one parallel call at a time; lock: all fields below */
    pthread_cond_t wake, done;
    int workers, wanted, joined, running;
    struct shared_work *work;
    atomic_uint generation;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER,
          0, 0, 0, 0, NULL, 0};

static inline void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_items(struct shared_work *work)
{
    int index;
    while ((index = atomic_fetch_add(&work->next, 1)) < work->items)
        if (work->function(work->argument, index) != 0)
            atomic_store(&work->failed, 1);
}

static void *worker_main(void *unused)
{
    (void)unused;
    unsigned seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.generation) == seen; i++)
            pause_briefly();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.generation) == seen)
            pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.generation);
        struct shared_work *work = pool.joined < pool.wanted ? pool.work : NULL;
        if (work != NULL) {
            pool.joined++;
            pool.running++;
            pthread_mutex_unlock(&pool.lock);
            take_items(work);
            pthread_mutex_lock(&pool.lock);
            if (--pool.running == 0)
                pthread_cond_signal(&pool.done);
        }
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

static void forget_pool(void)
{
    pthread_mutex_init(&pool.callers, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.workers = pool.wanted = pool.joined = pool.running = 0;
    pool.work = NULL;
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_pool); }

/* Start threads until there are `count`; fewer when the system refuses. */
static void start_workers(int count)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    for (; pool.workers < count && pool.workers < MAX_WORKERS; pool.workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker_main, NULL) != 0)
            return;
        pthread_detach(thread);
    }
}

static void share(struct shared_work *work, int threads)
{
    start_workers(threads - 1);
    pthread_mutex_lock(&pool.lock);
    pool.work = work;
    pool.wanted = threads - 1;
    pool.joined = 0;
    atomic_fetch_add(&pool.generation, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    take_items(work);
    pthread_mutex_lock(&pool.lock);
    pool.work = NULL;
    while (pool.running > 0)
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* Run function(argument, 0 .. items - 1). Returns 0, or -1 when an item failed. */
static int run_parallel(item_function function, void *argument, int items, int threads)
{
    struct shared_work work = {function, argument, items, 0, 0};
    if (threads > items)
        threads = items;
    if (threads > 1 && pthread_mutex_trylock(&pool.callers) == 0) {
        share(&work, threads);
        pthread_mutex_unlock(&pool.callers);
    } else {
        take_items(&work);
    }
    return atomic_load(&work.failed) ? -1 : 0;
}

struct scratch_memory {
    void *data;
    size_t bytes;
};

static pthread_key_t scratch_key;

static void free_scratch(void *memory)
{
    free(((struct scratch_memory *)memory)->data);
    free(memory);
}

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free_scratch); }

/* This thread's scratch memory, at least `bytes` long and 64-byte aligned; kept until the thread ends. NULL: no memory. */
static void *thread_scratch(size_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_scratch_key);
    struct scratch_memory *memory = pthread_getspecific(scratch_key);
    if (memory == NULL) {
        memory = calloc(1, sizeof *memory);
        if (memory == NULL || pthread_setspecific(scratch_key, memory) != 0) {
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
