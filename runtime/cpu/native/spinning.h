/* Waiting for another thread or process: a look at memory again and again, before sleeping. */
#pragma once
#include <stdint.h>
#include <time.h>

enum { PAUSES_PER_LOOK = 32 };
/* Nanoseconds of spinning before a thread sleeps within a step, and after which it offers its core to others. */
static const int64_t SPIN_STEP = 50000, SPIN_ALONE = 5000;

static inline void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
