/* Copies of KV blocks between a pool and host memory: many in one call, so that the caller's thread runs no Python for each. */
#include <stdint.h>
#include <string.h>

/* Copy `bytes` bytes from sources[i] to targets[i], for i < count, in order. */
void copy_blocks(const uint64_t *sources, const uint64_t *targets, int count, uint64_t bytes)
{
    for (int i = 0; i < count; i++)
        memcpy((void *)(uintptr_t)targets[i], (const void *)(uintptr_t)sources[i], bytes);
}
