/* AMX on an x86-64 CPU without it: a handler of SIGILL that computes what its instructions do, and continues after them.
 *
 * Loading this library installs the handler. Each thread has its own eight tiles. An instruction that would fault, because
 * tiles are not configured or their shapes do not fit, ends the process with a message; so does any other illegal one.
 * Source: Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3, and Software Developer's Manual,
 * volume 2: the pseudocode of LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TILERELEASE, TDPBF16PS and TDPB[SU][SU]D.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { NUM_TILES = 8, MOST_ROWS = 16, MOST_BYTES = 64 };
enum prefix { NO_PREFIX, PREFIX_66, PREFIX_F3, PREFIX_F2 };

struct tile {
    int rows, bytes;
    uint8_t data[MOST_ROWS][MOST_BYTES];
};

static __thread struct tile tiles[NUM_TILES];
static __thread int is_configured;

static void fail(const char *what)
{
    fprintf(stderr, "amx.c: %s\n", what);
    abort();
}

static struct tile *tile_at(int index)
{
    if (!is_configured || index >= NUM_TILES || tiles[index].rows == 0 || tiles[index].bytes == 0)
        fail("a tile that is not configured");
    return &tiles[index];
}

static void configure(const uint8_t *from)
{
    if (from[0] > 1)
        fail("a palette that does not exist");
    memset(tiles, 0, sizeof tiles);
    is_configured = from[0] == 1;
    for (int i = 0; i < 16; i++) {
        uint16_t bytes;
        memcpy(&bytes, from + 16 + 2 * i, 2);
        const int rows = from[48 + i];
        if (rows > MOST_ROWS || bytes > MOST_BYTES || (i >= NUM_TILES && (rows || bytes)))
            fail("a shape that no tile can have");
        if (i < NUM_TILES)
            tiles[i].rows = rows, tiles[i].bytes = bytes;
    }
}

static void load(struct tile *t, const uint8_t *from, int64_t stride)
{
    memset(t->data, 0, sizeof t->data);
    for (int r = 0; r < t->rows; r++)
        memcpy(t->data[r], from + r * stride, t->bytes);
}

static void store(const struct tile *t, uint8_t *to, int64_t stride)
{
    for (int r = 0; r < t->rows; r++)
        memcpy(to + r * stride, t->data[r], t->bytes);
}

/* A subnormal number is 0 with its sign, as operand and as result. */
static float flushed(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000) == 0)
        bits &= 0x80000000;
    memcpy(&x, &bits, 4);
    return x;
}

static float bfloat16_at(const uint8_t *from)
{
    float x = 0;
    memcpy((uint8_t *)&x + 2, from, 2);
    return flushed(x);
}

static void multiply_bfloat16(struct tile *sum, const struct tile *a, const struct tile *b)
{
    for (int m = 0; m < sum->rows; m++) {
        float two[2][MOST_BYTES / 4] = {{0}};
        for (int k = 0; k < a->bytes / 4; k++)
            for (int n = 0; n < sum->bytes / 4; n++)
                for (int half = 0; half < 2; half++) {
                    const float x = bfloat16_at(a->data[m] + 4 * k + 2 * half), y = bfloat16_at(b->data[k] + 4 * n + 2 * half);
                    two[half][n] = flushed(__builtin_fmaf(x, y, two[half][n]));
                }
        for (int n = 0; n < sum->bytes / 4; n++) {
            float total;
            memcpy(&total, sum->data[m] + 4 * n, 4);
            total = flushed(flushed(total) + flushed(two[0][n] + two[1][n]));
            memcpy(sum->data[m] + 4 * n, &total, 4);
        }
    }
}

static void multiply_bytes(struct tile *sum, const struct tile *a, const struct tile *b, int a_is_signed, int b_is_signed)
{
    for (int m = 0; m < sum->rows; m++)
        for (int k = 0; k < a->bytes / 4; k++)
            for (int n = 0; n < sum->bytes / 4; n++) {
                uint32_t total;
                memcpy(&total, sum->data[m] + 4 * n, 4);
                for (int i = 0; i < 4; i++) {
                    const uint8_t x = a->data[m][4 * k + i], y = b->data[k][4 * n + i];
                    total += (uint32_t)((a_is_signed ? (int8_t)x : x) * (b_is_signed ? (int8_t)y : y));
                }
                memcpy(sum->data[m] + 4 * n, &total, 4);
            }
}

static void multiply(int opcode, enum prefix prefix, int target, int first, int second)
{
    struct tile *sum = tile_at(target), *a = tile_at(first), *b = tile_at(second);
    if (target == first || target == second || first == second)
        fail("two operands in one tile");
    if (sum->rows != a->rows || sum->bytes != b->bytes || a->bytes != 4 * b->rows || sum->bytes % 4 || a->bytes % 4)
        fail("tiles whose shapes do not fit");
    if (opcode == 0x5c && prefix == PREFIX_F3)
        multiply_bfloat16(sum, a, b);
    else if (opcode == 0x5e)
        multiply_bytes(sum, a, b, prefix == PREFIX_F2 || prefix == PREFIX_F3, prefix == PREFIX_F2 || prefix == PREFIX_66);
    else
        fail("a multiplication that is not known");
}

static uint64_t general_register(const ucontext_t *context, int index)
{
    static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)context->uc_mcontext.gregs[places[index]];
}

/* What follows the opcode of an instruction, and where it ends. */
struct operands {
    int mode, middle, base; /* of ModRM, with the extensions of VEX */
    uint64_t address, stride;
    const uint8_t *end;
};

static struct operands decode(const ucontext_t *context, const uint8_t *at, int extend_middle, int extend_index, int extend_base)
{
    struct operands found = {at[0] >> 6, (at[0] >> 3 & 7) | extend_middle << 3, (at[0] & 7) | extend_base << 3, 0, 0, at + 1};
    if (found.mode == 3)
        return found;
    int has_base = 1;
    if ((at[0] & 7) == 4) { /* SIB */
        const int index = (at[1] >> 3 & 7) | extend_index << 3;
        found.base = (at[1] & 7) | extend_base << 3;
        found.stride = index == 4 ? 0 : general_register(context, index) << (at[1] >> 6);
        has_base = !(found.mode == 0 && (at[1] & 7) == 5);
        found.end++;
    } else if (found.mode == 0 && (at[0] & 7) == 5) {
        fail("an address relative to the instruction, which is not emulated");
    }
    if (has_base)
        found.address = general_register(context, found.base);
    if (found.mode == 1) {
        found.address += (uint64_t)(int64_t)(int8_t)*found.end;
        found.end++;
    } else if (found.mode == 2 || !has_base) {
        int32_t offset;
        memcpy(&offset, found.end, 4);
        found.address += (uint64_t)(int64_t)offset;
        found.end += 4;
    }
    return found;
}

static void emulate(int number, siginfo_t *info, void *raw)
{
    (void)number, (void)info;
    ucontext_t *context = raw;
    const uint8_t *at = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || (at[2] & 0x84) != 0) /* VEX of three bytes, map 0F38, W0, 128 bits */
        fail("an illegal instruction that is not of AMX");
    const enum prefix prefix = at[2] & 3;
    const int opcode = at[3], other = ~(at[2] >> 3) & 15;
    const struct operands found = decode(context, at + 4, !(at[1] & 0x80), !(at[1] & 0x40), !(at[1] & 0x20));
    if (opcode == 0x49 && prefix == NO_PREFIX && found.mode != 3)
        configure((const uint8_t *)(found.address + found.stride));
    else if (opcode == 0x49 && prefix == NO_PREFIX)
        is_configured = 0;
    else if (opcode == 0x49 && prefix == PREFIX_F2 && found.mode == 3)
        memset(tile_at(found.middle)->data, 0, sizeof tiles->data);
    else if (opcode == 0x4b && (prefix == PREFIX_F2 || prefix == PREFIX_66) && found.mode != 3)
        load(tile_at(found.middle), (const uint8_t *)found.address, (int64_t)found.stride);
    else if (opcode == 0x4b && prefix == PREFIX_F3 && found.mode != 3)
        store(tile_at(found.middle), (uint8_t *)found.address, (int64_t)found.stride);
    else if (found.mode == 3)
        multiply(opcode, prefix, found.middle, found.base, other);
    else
        fail("an instruction of AMX that is not emulated");
    context->uc_mcontext.gregs[REG_RIP] = (greg_t)found.end;
}

__attribute__((constructor)) static void install(void)
{
    struct sigaction action = {.sa_sigaction = emulate, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGILL, &action, NULL) != 0)
        fail("no handler of SIGILL");
}
