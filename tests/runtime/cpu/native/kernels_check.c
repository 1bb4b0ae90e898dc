/* Compares every table of kernels that runs here with the portable one, bit for bit: random operations of every form,
 * rounding, norm, activation and store, some rows with low-rank changes, and random recurrent layers, over random shapes. It needs nothing of Python, so that an emulator can run it.
 *
 *     kernels_check CASES SEED
 *
 * Prints the name of each table that agrees. Exits with 1 and describes the case where one does not.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { MAX_ROWS = 30, MANY_ROWS = 330, MAX_K = 1300, MAX_N = 90, PADDING = 17 };

static uint64_t state;

static uint32_t random_bits(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static int below(int limit) { return (int)(random_bits() % (unsigned)limit); }
static int between(int low, int high) { return low + below(high - low + 1); }
static float uniform(void) { return (float)random_bits() * 0x1p-32f; }

static float gaussian(void)
{
    float sum = -6.0f;
    for (int i = 0; i < 12; i++)
        sum += uniform();
    return sum;
}

static void *allocate(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (memory == NULL)
        exit(2);
    memset(memory, 255, bytes);
    return memory;
}

/* Floats from here on: mostly ordinary, now and then a number that is not finite, huge or tiny. */
static float *random_floats(int count, int strange)
{
    static const float STRANGE[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-40f, 0.0f, -0.0f};
    float *x = allocate(sizeof(float) * (size_t)count);
    for (int i = 0; i < count; i++)
        x[i] = strange && below(200) == 0 ? STRANGE[below(8)] : gaussian();
    return x;
}

static int padded(int k, int block)
{
    int size = (k + block - 1) / block * block;
    while (size % 32 != 0)
        size += block;
    return size;
}

static uint16_t random_half(void) { return (uint16_t)(random_bits() & 0x83ff) | (uint16_t)(between(9, 14) << 10); }

static void random_scales(const struct matrix *w, uint8_t *tile)
{
    for (int i = 0; i < w->scale_blocks * LANES; i++) {
        const uint16_t half = random_half() & 0x7fff;
        const float number = uniform() * 0.01f;
        memcpy(tile + i * w->scale_bytes, w->scale_bytes == 2 ? (const void *)&half : &number, (size_t)w->scale_bytes);
    }
}

static void random_codes(const struct matrix *w, uint8_t *codes, int bytes)
{
    for (int i = 0; i < bytes; i++)
        codes[i] = below(8) == 0 ? 255 * below(2) : (uint8_t)random_bits();
    for (int i = 0; w->form == FORM_FLOAT32 && i < bytes / 4; i++)
        ((float *)codes)[i] = gaussian();
    for (int i = 0; w->form == FORM_FLOAT16 && i < bytes / 2; i++)
        ((uint16_t *)codes)[i] = below(9) ? random_half() : (uint16_t)(random_bits() & 0x83ff); /* subnormal */
    for (int i = 0; w->form == FORM_BFLOAT16 && i < bytes / 2; i++)
        ((uint16_t *)codes)[i] = (uint16_t)((random_bits() & 0x807f) | (unsigned)between(120, 130) << 7);
}

/* A matrix of `tiles` tiles; k 0: a random one. */
static struct matrix random_matrix(int form, int n, int k, int tiles)
{
    static const int BLOCKS[] = {16, 32, 48, 64, 128, 256, 512, 576}, BITS[] = {32, 16, 16, 8, 2, 3, 4, 8};
    struct matrix w = {.n = n, .k = k > 0 ? k : between(1, MAX_K), .form = form};
    w.padded_k = w.k;
    if (form >= FORM_INT2) {
        w.block = BLOCKS[below(8)];
        w.padded_k = padded(w.k, w.block);
        w.scale_blocks = below(3) ? w.padded_k / w.block : 1;
        w.scale_bytes = below(2) ? 2 : 4;
        w.has_zeros = below(2);
    } else if (form == FORM_FLOAT8) {
        w.scale_blocks = 1;
        w.scale_bytes = 4;
    }
    const int code_bytes = w.padded_k * LANES * BITS[form] / 8;
    w.codes_offset = (w.scale_blocks * LANES * (w.scale_bytes + w.has_zeros) + 63) / 64 * 64;
    w.tile_bytes = w.codes_offset + (code_bytes + 63) / 64 * 64;
    uint8_t *memory = allocate((size_t)(tiles * w.tile_bytes));
    w.tiles = memory;
    for (int t = 0; t < tiles; t++, memory += w.tile_bytes) {
        random_scales(&w, memory);
        for (int i = 0; w.has_zeros && i < w.scale_blocks * LANES; i++)
            memory[w.scale_blocks * LANES * w.scale_bytes + i] = (uint8_t)(random_bits() & ((1u << BITS[form]) - 1));
        random_codes(&w, memory + w.codes_offset, code_bytes);
    }
    return w;
}

static struct norm random_norm(int columns)
{
    struct norm norm = {.epsilon = 1e-5f, .kind = below(3)};
    norm.weight = below(2) ? random_floats(columns, 0) : NULL;
    norm.bias = below(2) ? random_floats(columns, 0) : NULL;
    return norm;
}

static void free_norm(struct norm norm)
{
    free((void *)norm.weight);
    free((void *)norm.bias);
}

/* Whether two arrays have the same bits, where any NaN equals any other. */
static int same(const float *a, const float *b, int count, const char *what)
{
    for (int i = 0; i < count; i++)
        if (memcmp(a + i, b + i, sizeof *a) != 0 && !(isnan(a[i]) && isnan(b[i]))) {
            fprintf(stderr, "%s: element %d is %.9g, portable %.9g\n", what, i, a[i], b[i]);
            return 0;
        }
    return 1;
}

enum { ADAPTERS = 3, MOST_RANKS = 5 * LANES };

/* Adapters, and the one of each row, if it has any. */
struct adapters {
    struct low_rank all[ADAPTERS];
    const struct low_rank *changes[ADAPTERS];
    int32_t slots[MANY_ROWS], places[MANY_ROWS];
};

/* Changes of a matrix of so many tiles by one adapter, of any ranks for each tile. */
static struct low_rank random_change(const struct matrix *w, int tiles)
{
    const int ranks = between(1, MOST_RANKS / LANES), form = below(FORM_BFLOAT16 + 1);
    struct low_rank_tile *table = allocate(sizeof *table * (size_t)tiles);
    struct low_rank change = {.a = random_matrix(below(FORM_BFLOAT16 + 1), ranks * LANES, w->k, ranks), .tiles = table, .b_form = form};
    const struct matrix b = random_matrix(form, tiles * LANES, ranks * LANES, tiles);
    change.b = b.tiles;
    for (int t = 0; t < tiles; t++) {
        const int first = below(ranks * LANES);
        table[t] = (struct low_rank_tile){t * b.tile_bytes, first, below(4) ? between(1, ranks * LANES - first) : 0};
    }
    return change;
}

static void make_adapters(struct adapters *adapters, const struct matrix *w, int tiles, int rows)
{
    for (int i = 0; i < ADAPTERS; i++) {
        adapters->all[i] = random_change(w, tiles);
        adapters->changes[i] = below(4) ? &adapters->all[i] : NULL;
    }
    for (int row = 0; row < rows; row++) {
        adapters->slots[row] = between(-1, ADAPTERS - 1);
        adapters->places[row] = rows - 1 - row;
    }
}

static void free_adapters(const struct adapters *adapters)
{
    for (int i = 0; i < ADAPTERS; i++) {
        free((void *)adapters->all[i].a.tiles);
        free((void *)adapters->all[i].b);
        free((void *)adapters->all[i].tiles);
    }
}

/* A x of the rows of each adapter, several at once. */
static void project(const struct kernels *kernels, const struct linear *op, const struct adapters *adapters, int rows, float *results)
{
    for (int slot = 0; slot < ADAPTERS; slot++) {
        const struct matrix *a = &adapters->all[slot].a;
        for (int row = 0; row < rows;) {
            const float *x[LOW_RANK_ROWS];
            int count = 0;
            for (; count < LOW_RANK_ROWS && row + count < rows && adapters->slots[row + count] == slot; count++)
                x[count] = op->input.at + (row + count) * op->input.stride;
            if (count > 0) /* the places of rows descend */
                kernels->project_rows(a, x, count, results + adapters->places[row] * MOST_RANKS, -MOST_RANKS, 0, a->n / LANES);
            row += count > 0 ? count : 1;
        }
    }
}

static void run_linear(const struct kernels *kernels, const struct linear *op, const struct adapters *adapters, int rows, int begin,
                       int end)
{
    const struct matrix *w = op->matrix;
    const int blocks = activation_blocks(op);
    const size_t size = op->rounding == ROUND_NONE ? sizeof(float) : 1;
    struct activations to = {
        .values = allocate((size_t)rows * (size_t)w->padded_k * size),
        .scales = allocate((size_t)(rows * blocks) * sizeof(float)),
        .sums = allocate((size_t)(rows * blocks) * sizeof(int32_t)),
        .count = rows,
    };
    float *scratch = allocate(sizeof(float) * (size_t)(w->padded_k + LANES));
    for (int first = 0; first < rows; first += kernels->max_height)
        for (int m = 0; m < kernels->max_height && first + m < rows; m++) {
            const int height = rows - first < kernels->max_height ? rows - first : kernels->max_height;
            kernels->round_row(op, op->input.at + (first + m) * op->input.stride, &to, first, height, m, scratch);
        }
    float *results = allocate(sizeof(float) * (size_t)rows * MOST_RANKS);
    const struct low_rank_rows changed = {adapters ? adapters->changes : NULL, adapters ? adapters->slots : NULL,
                                          adapters ? adapters->places : NULL, results, MOST_RANKS};
    if (adapters != NULL) {
        project(kernels, op, adapters, rows, results);
        to.low_rank = &changed;
    }
    kernels->multiply(op, &to, rows, begin, end);
    free(results);
    free(to.values);
    free(to.scales);
    free(to.sums);
    free(scratch);
}

static int random_activation(int is_gate)
{
    const int activation = below(is_gate ? ACT_CLAMP + 1 : ACT_CLAMP);
    return !is_gate && activation == ACT_CLAMPED_SWIGLU ? ACT_CLAMP : activation;
}

static int check_linear(const struct kernels *kernels, const struct kernels *portable)
{
    const int form = below(NUM_FORMS), store = below(3), columns = between(1, MAX_N);
    const int rows = between(1, below(6) ? MAX_ROWS : MANY_ROWS);
    const int units = (columns + LANES - 1) / LANES, pair = store == STORE_GATE ? 2 : 1, begin = below(units);
    const int end = between(begin + 1, units);
    struct matrix w = random_matrix(form, pair * columns, 0, pair * units);
    const int stride = w.k + below(PADDING), wide = units * LANES;
    float *x = random_floats(rows * stride, below(4) == 0), *outputs[2] = {random_floats(rows * wide, 0), NULL};
    outputs[1] = allocate(sizeof(float) * (size_t)(rows * wide));
    memcpy(outputs[1], outputs[0], sizeof(float) * (size_t)(rows * wide));
    struct linear op = {
        .matrix = &w,
        .bias = below(2) ? random_floats(w.n, 0) : NULL,
        .input = {x, stride, 0},
        .norm = random_norm(w.k),
        .rounding = form < FORM_INT2 ? ROUND_NONE : between(ROUND_BLOCK, ROUND_STATIC),
        .store = store,
        .activation = random_activation(store == STORE_GATE),
        .numbers = {0.8f, 0.5f, 0.3f, -1e-6f},
        .static_scale = 0.02f,
        .alpha = below(2) ? 1.0f : gaussian(),
        .cap = below(4) ? 0.0f : 1.0f + uniform(),
    };
    struct adapters adapters;
    make_adapters(&adapters, &w, pair * units, rows);
    const int has_adapters = below(2);
    const struct kernels *tables[2] = {kernels, portable};
    for (int i = 0; i < 2; i++) {
        op.output = (struct view){outputs[i], wide, 0};
        run_linear(tables[i], &op, has_adapters ? &adapters : NULL, rows, begin, end);
    }
    char what[200];
    snprintf(what, sizeof what, "%s: linear: form %d, n %d, k %d, block %d, scale blocks %d, zeros %d, rows %d, rounding %d, store %d, adapters %d",
             kernels->name, form, w.n, w.k, w.block, w.scale_blocks, w.has_zeros, rows, op.rounding, store,
             has_adapters);
    const int agrees = same(outputs[0], outputs[1], rows * wide, what);
    free_adapters(&adapters);
    free((void *)w.tiles);
    free((void *)op.bias);
    free_norm(op.norm);
    free(x);
    free(outputs[0]);
    free(outputs[1]);
    return agrees;
}

static int check_rows(const struct kernels *kernels, const struct kernels *portable)
{
    const struct kernels *tables[2] = {kernels, portable};
    const int columns = between(1, 200), groups = between(1, 3), size = columns * groups;
    float *a = random_floats(size, below(4) == 0), *b = random_floats(size, 0), *outputs[2];
    struct normalize normalize = {
        .input = {a, size, 0}, .residual = {below(2) ? b : NULL, size, 0}, .norm = random_norm(columns), .columns = columns, .groups = groups,
    };
    struct combine combine = {
        .a = {a, size, 0}, .b = {below(4) ? b : NULL, size, 0}, .function = below(COMBINE_GATE + 1),
        .activation = random_activation(1), .numbers = {0.8f, 0.5f, 0.3f, -1e-6f}, .columns = size, .number = gaussian(), .scale = gaussian(), .cap = below(2) ? 0.0f : 2.0f,
    };
    int agrees = 1;
    for (int which = 0; which < 2; which++) {
        for (int i = 0; i < 2; i++) {
            outputs[i] = allocate(sizeof(float) * (size_t)size);
            normalize.output = combine.output = (struct view){outputs[i], size, 0};
            if (which == 0)
                tables[i]->normalize_row(&normalize, 0, 0);
            else
                tables[i]->combine_row(&combine, 0, 0);
        }
        char what[100];
        snprintf(what, sizeof what, "%s: %s of %d columns", kernels->name, which ? "combine" : "normalize", size);
        agrees = agrees && same(outputs[0], outputs[1], size, what);
        free(outputs[0]);
        free(outputs[1]);
    }
    free_norm(normalize.norm);
    free(a);
    free(b);
    return agrees;
}

/* Floats from -2 to 0, as decays are, or from 0 to 2. */
static float *random_range(int count, float sign)
{
    float *x = allocate(sizeof(float) * (size_t)count);
    for (int i = 0; i < count; i++)
        x[i] = sign * 2 * uniform();
    return x;
}

enum { TOKENS = 9 };

/* One layer of every kind over TOKENS tokens, with the state and the output one after another in what is compared. */
static int check_recurrent(const struct kernels *kernels, const struct kernels *portable)
{
    const struct kernels *tables[2] = {kernels, portable};
    const int kind = below(3), per_key = between(1, 2), key_heads = between(1, 2), heads = per_key * key_heads;
    const int rows = between(1, 40), columns = between(1, 150), padded = (columns + LANES - 1) / LANES * LANES;
    const int channels = between(1, 600), taps = between(1, 5), is_fresh = below(2), with_bias = below(2);
    const int width = kind == 0 ? channels : heads * columns, states = kind == 0 ? (taps - 1) * channels : heads * padded * rows;
    const int size = TOKENS * width, keys = key_heads * rows;
    float *x = random_floats(size, below(4) == 0), *k = random_floats(TOKENS * keys, 0), *q = random_floats(TOKENS * keys, 0);
    float *weight = random_floats((taps + 1) * channels, 0), *decay = random_range(TOKENS * heads, -1), *rate = random_range(TOKENS * heads, 1);
    float *before = random_floats(states + 1, 0), *results[2];
    for (int i = 0; i < 2; i++) {
        float *output = results[i] = allocate(sizeof(float) * (size_t)(size + states)), *state = output + size;
        memcpy(state, before, sizeof(float) * (size_t)states);
        const struct stretch tokens = {0, 0, TOKENS, is_fresh};
        const struct convolve convolve = {
            .input = {x, width, 0}, .output = {output, width, 0}, .weight = weight, .bias = with_bias ? weight + taps * channels : NULL,
            .states = state, .channels = channels, .taps = taps, .activation = is_fresh ? ACT_SILU : ACT_NONE,
        };
        const struct delta_rule rule = {
            .query = {q, keys, 0}, .key = {k, keys, 0}, .value = {x, width, 0}, .decay = {decay, heads, 0}, .beta = {rate, heads, 0},
            .output = {output, width, 0}, .states = state, .num_key_heads = key_heads, .num_value_heads = heads, .key_dim = rows,
            .value_dim = columns, .normalize = is_fresh, .scale = 0.3f,
        };
        const struct scan scan = {
            .input = {x, width, 0}, .dt = {rate, heads, 0}, .b = {k, keys, 0}, .c = {q, keys, 0}, .output = {output, width, 0},
            .a = decay, .d = rate, .states = state, .num_heads = heads, .head_dim = columns, .state_dim = rows, .num_groups = key_heads,
        };
        for (int tile = 0; kind == 0 && tile < (channels + CHANNEL_TILE - 1) / CHANNEL_TILE; tile++)
            tables[i]->convolve_tile(&convolve, &tokens, tile);
        for (int head = 0; kind > 0 && head < heads; head++)
            for (int tile = 0; tile < (columns + STATE_TILE - 1) / STATE_TILE; tile++)
                kind == 1 ? tables[i]->delta_rule_tile(&rule, &tokens, head, tile) : tables[i]->scan_tile(&scan, &tokens, head, tile);
    }
    char what[150];
    snprintf(what, sizeof what, "%s: recurrent: kind %d, heads %d of %d x %d, channels %d, taps %d", kernels->name, kind, heads, rows, columns,
             channels, taps);
    const int agrees = same(results[0], results[1], size + states, what);
    float *made[] = {x, k, q, weight, decay, rate, before, results[0], results[1]};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        free(made[i]);
    return agrees;
}

int main(int count, char **arguments)
{
    const int cases = count > 1 ? atoi(arguments[1]) : 1000;
    const uint64_t seed = 0x9e3779b97f4a7c15u * (count > 2 ? strtoull(arguments[2], NULL, 10) + 1 : 1);
    const struct kernels *portable = find_kernels("portable");
    const char *name;
    for (int i = 0; (name = kernels_name(i)) != NULL; i++) {
        const struct kernels *kernels = find_kernels(name);
        state = seed;
        for (int c = 0; c < cases; c++)
            if (!check_linear(kernels, portable) || !check_rows(kernels, portable) || !check_recurrent(kernels, portable))
                return 1;
        puts(name);
    }
    return 0;
}
