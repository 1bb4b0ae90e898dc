/* Sampling: one token per row of float32 logits, exactly as runtime/truncation_sampling.py defines it.
 *
 * A token's weight is 2^44 exp((score - highest) / temperature), rounded to a whole number. So all sums are exact, whatever
 * their order, and the token is the same on every CPU, with every compiler, and in numpy. Only the weight itself is computed
 * in floating point: by double additions and multiplications, each rounded, from constants that truncation_sampling.py repeats.
 *
 * No vocabulary is sorted. Scores are looked at in groups of 16 neighbours, by the largest of each group or by their sum:
 *
 *     top-k   the k-th largest of the groups' maxima is at most the k-th largest score. Groups below it are skipped; radix
 *             selection finds the exact score among what is left, about 16 k scores
 *     top-p   n tokens that weigh less than (total - enough) / n cannot be among the most likely ones that reach `enough`;
 *             radix selection by weight finds where the others do
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

const char *paged_attention_isa(void); /* the instruction set in use */

enum { GROUP = 16, DIGIT = 2048 }; /* scores of a group; values of 11 bits */
#define UNIT 0x1p44                /* weight of the most likely token */
#define LEAST_EXPONENT (-48.0)     /* below which a weight is rounded to 0 */

/* How to sample one row; sample_tokens.py packs it. */
struct choice {
    double factor; /* log2(e) / temperature, finite; 0 takes the most likely token, below 0 skips the row */
    double top_p;  /* 1 keeps all */
    int64_t top_k; /* 0 keeps all */
    int64_t least; /* weight that a token must have: min_p * UNIT, rounded up */
};

/* Scores to choose from: a row, or what top-k leaves of it. */
struct scores {
    const float *at;    /* [count] */
    const int32_t *ids; /* ascending; NULL if they are 0 .. count - 1 */
    int64_t count;
    double best, factor;
};

/* Tokens with their weights, in order of id. */
struct list {
    uint64_t *weights;
    int32_t *ids;
    int64_t count;
};

static inline int64_t groups_of(int64_t count) { return (count + GROUP - 1) / GROUP; }

/* A float's bits as an integer of the same order; -0 equals 0. NaN is not ordered. */
static inline int32_t key_of(float score)
{
    int32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, sizeof bits);
    return bits ^ ((bits >> 31) & INT32_MAX);
}

static inline float score_of(int32_t key)
{
    float score;
    key ^= (key >> 31) & INT32_MAX;
    memcpy(&score, &key, sizeof score);
    return score;
}

static inline uint64_t weight_of(double score, double best, double factor)
{
    static const double C[] = {0x1.62e42fefa39f7p-1,  0x1.ebfbdff82c590p-3,  0x1.c6b08d7044119p-5,  0x1.3b2ab6fba385fp-7,
                               0x1.5d87fe908f88ap-10, 0x1.4309130378460p-13, 0x1.ffcb76789860fp-17, 0x1.62bfe46117445p-20,
                               0x1.b6571de2f2351p-24, 0x1.e5e9f548e5725p-28}; /* 2^f = 1 + f (C[0] + f (C[1] + ...)) */
    double exponent = (score - best) * factor, rounded, power = C[9];
    exponent = exponent > LEAST_EXPONENT ? exponent : LEAST_EXPONENT;
    rounded = exponent + 0x1.8p52; /* the nearest whole number, in the low bits */
    const double f = exponent - (rounded - 0x1.8p52);
    for (int i = 8; i >= 0; i--)
        power = power * f + C[i];
    power = power * f + 1.0;
    uint64_t bits, whole;
    memcpy(&bits, &power, sizeof bits);
    memcpy(&whole, &rounded, sizeof whole);
    bits += whole << 52; /* times 2^whole */
    memcpy(&power, &bits, sizeof power);
    power = power * UNIT + 0x1p52;
    memcpy(&bits, &power, sizeof bits);
    return bits & ((UINT64_C(1) << 52) - 1);
}

/* The last scores of a row, filled up to a group by minus infinity; NULL if all groups are whole. */
static inline const float *last_group(const float *row, int64_t count, float *scores)
{
    const int64_t left = count % GROUP;
    for (int i = 0; i < GROUP; i++)
        scores[i] = i < left ? row[count - left + i] : -__builtin_inff();
    return left ? scores : NULL;
}

/* The loops over a vocabulary, compiled once per instruction set below. */
#define INLINE static inline __attribute__((always_inline))

INLINE int32_t largest_key(const float *scores, int32_t *magnitude)
{
    int32_t largest = INT32_MIN, most = *magnitude;
    for (int i = 0; i < GROUP; i++) {
        const int32_t key = key_of(scores[i]), size = key_of(__builtin_fabsf(scores[i]));
        largest = key > largest ? key : largest;
        most = size > most ? size : most;
    }
    *magnitude = most;
    return largest;
}

/* Largest key of each group of a row; returns the largest of all, or INT32_MIN if there is a NaN or no finite maximum. */
INLINE int32_t find_maxima(const float *row, int64_t count, int32_t *maxima)
{
    const int64_t whole = count / GROUP;
    int32_t most = INT32_MIN, magnitude = 0;
    float rest[GROUP];
    for (int64_t g = 0; g < whole; g++) {
        maxima[g] = largest_key(row + g * GROUP, &magnitude);
        most = maxima[g] > most ? maxima[g] : most;
    }
    if (last_group(row, count, rest) != NULL) {
        maxima[whole] = largest_key(rest, &magnitude);
        most = maxima[whole] > most ? maxima[whole] : most;
    }
    const int32_t infinity = 0x7f800000;
    return magnitude > infinity || most >= infinity || most == key_of(-__builtin_inff()) ? INT32_MIN : most;
}

INLINE uint64_t weigh(const float *scores, double best, double factor, uint64_t *weights)
{
    uint64_t sum = 0;
    for (int i = 0; i < GROUP; i++)
        sum += weights[i] = weight_of(scores[i], best, factor);
    return sum;
}

/* Weights of group g; 0 beyond its last score. */
INLINE void weigh_group(const struct scores *s, int64_t g, uint64_t *weights)
{
    float rest[GROUP];
    const float *at = s->at + g * GROUP;
    if ((g + 1) * GROUP > s->count)
        at = last_group(s->at, s->count, rest);
    weigh(at, s->best, s->factor, weights);
}

/* Sum of the weights of each group; returns that of all. */
INLINE uint64_t add_weights(const struct scores *s, uint64_t *sums)
{
    const int64_t whole = s->count / GROUP;
    uint64_t total = 0, weights[GROUP];
    float rest[GROUP];
    for (int64_t g = 0; g < whole; g++)
        total += sums[g] = weigh(s->at + g * GROUP, s->best, s->factor, weights);
    if (last_group(s->at, s->count, rest) != NULL)
        total += sums[whole] = weigh(rest, s->best, s->factor, weights);
    return total;
}

/* The tokens that weigh at least `least`, which is above 0. */
INLINE void list_tokens(const struct scores *s, const uint64_t *sums, uint64_t least, struct list *list)
{
    int64_t found = 0;
    for (int64_t g = 0; g < groups_of(s->count); g++) {
        uint64_t weights[GROUP];
        if (sums[g] < least)
            continue;
        weigh_group(s, g, weights);
        for (int i = 0; i < GROUP; i++) {
            list->weights[found] = weights[i];
            list->ids[found] = (int32_t)(g * GROUP + i);
            found += weights[i] >= least;
        }
    }
    list->count = found;
}

/* Keys of a row that are at least `bound`, with their ids. */
INLINE int64_t list_keys(const float *row, int64_t count, const int32_t *maxima, int32_t bound, int32_t *keys, int32_t *ids)
{
    int64_t found = 0;
    for (int64_t g = 0; g < groups_of(count); g++) {
        if (maxima[g] < bound)
            continue;
        const int64_t end = (g + 1) * GROUP < count ? (g + 1) * GROUP : count;
        for (int64_t i = g * GROUP; i < end; i++) {
            keys[found] = key_of(row[i]);
            ids[found] = (int32_t)i;
            found += keys[found] >= bound;
        }
    }
    return found;
}

/* A row with minus infinity where a bit is 0; returns whether the row itself has neither NaN nor plus infinity. */
INLINE int mask_row(const float *row, int64_t count, const uint32_t *bits, float *masked)
{
    int32_t most = INT32_MIN, magnitude = 0;
    for (int64_t start = 0; start < count; start += 32) {
        const uint32_t word = bits[start / 32];
        const int64_t end = start + 32 < count ? 32 : count - start;
        for (int64_t i = 0; i < end; i++) {
            const float score = row[start + i];
            const int32_t key = key_of(score), size = key_of(__builtin_fabsf(score));
            most = key > most ? key : most;
            magnitude = size > magnitude ? size : magnitude;
            masked[start + i] = word >> i & 1 ? score : -__builtin_inff();
        }
    }
    return magnitude <= 0x7f800000 && most < 0x7f800000;
}

struct loops {
    const char *isa;
    int32_t (*find_maxima)(const float *row, int64_t count, int32_t *maxima);
    uint64_t (*add_weights)(const struct scores *s, uint64_t *sums);
    void (*list_tokens)(const struct scores *s, const uint64_t *sums, uint64_t least, struct list *list);
    int64_t (*list_keys)(const float *row, int64_t count, const int32_t *maxima, int32_t bound, int32_t *keys, int32_t *ids);
    int (*mask_row)(const float *row, int64_t count, const uint32_t *bits, float *masked);
};

#define LOOPS_OF(ISA, TARGET) \
    TARGET static int32_t find_maxima_##ISA(const float *row, int64_t count, int32_t *maxima) \
    { \
        return find_maxima(row, count, maxima); \
    } \
    TARGET static uint64_t add_weights_##ISA(const struct scores *s, uint64_t *sums) { return add_weights(s, sums); } \
    TARGET static void list_tokens_##ISA(const struct scores *s, const uint64_t *sums, uint64_t least, struct list *list) \
    { \
        list_tokens(s, sums, least, list); \
    } \
    TARGET static int64_t list_keys_##ISA(const float *row, int64_t count, const int32_t *maxima, int32_t bound, \
                                          int32_t *keys, int32_t *ids) \
    { \
        return list_keys(row, count, maxima, bound, keys, ids); \
    } \
    TARGET static int mask_row_##ISA(const float *row, int64_t count, const uint32_t *bits, float *masked) \
    { \
        return mask_row(row, count, bits, masked); \
    } \
    static const struct loops loops_##ISA = {#ISA,              find_maxima_##ISA, add_weights_##ISA, \
                                             list_tokens_##ISA, list_keys_##ISA,   mask_row_##ISA};

#if defined(__x86_64__)
LOOPS_OF(avx512, __attribute__((target("avx512f,avx2"))))
LOOPS_OF(avx2, __attribute__((target("avx2"))))
#endif
LOOPS_OF(baseline, )

static const struct loops *loops_for(const char *isa)
{
#if defined(__x86_64__)
    if (strcmp(isa, loops_avx512.isa) == 0)
        return &loops_avx512;
    if (strcmp(isa, loops_avx2.isa) == 0)
        return &loops_avx2;
#else
    (void)isa;
#endif
    return &loops_baseline;
}

/* The k-th largest of `count` keys; `room` has space for as many, and may be the same array. */
static int32_t kth_largest(const int32_t *keys, int64_t count, int64_t k, int32_t *room)
{
    static const int SHIFTS[] = {21, 10, 0};
    uint32_t found = 0;
    for (int pass = 0; pass < 3; pass++) {
        const int shift = SHIFTS[pass], digits = pass == 2 ? 1024 : DIGIT;
        int64_t counts[DIGIT] = {0}, kept = 0;
        for (int64_t i = 0; i < count; i++)
            counts[((uint32_t)keys[i] ^ 0x80000000u) >> shift & (digits - 1)]++;
        int digit = digits - 1;
        while (counts[digit] < k)
            k -= counts[digit--];
        for (int64_t i = 0; i < count; i++) {
            const int32_t key = keys[i];
            room[kept] = key;
            kept += (((uint32_t)key ^ 0x80000000u) >> shift & (digits - 1)) == (uint32_t)digit;
        }
        found |= (uint32_t)digit << shift;
        keys = room;
        count = kept;
    }
    return (int32_t)(found ^ 0x80000000u);
}

/* Leave the k largest scores and all that equal the k-th. `keys` has space for a row, `scores` and `ids` get what is left. */
static void keep_top_k(const struct loops *loops, struct scores *s, const int32_t *maxima, int64_t k, int32_t *keys,
                       int32_t *room, float *scores, int32_t *ids)
{
    const int64_t groups = groups_of(s->count);
    int64_t left = 0;
    if (k <= 0 || k >= s->count)
        return;
    const int32_t bound = k <= groups ? kth_largest(maxima, groups, k, room) : INT32_MIN;
    const int64_t found = loops->list_keys(s->at, s->count, maxima, bound, keys, ids);
    const int32_t kth = kth_largest(keys, found, k, room);
    for (int64_t i = 0; i < found; i++) {
        scores[left] = score_of(keys[i]);
        ids[left] = ids[i];
        left += keys[i] >= kth;
    }
    *s = (struct scores){scores, ids, left, s->best, s->factor};
}

/* Tokens that weigh more than `weight` are kept, and `ties` of those that weigh as much; together they weigh `total`. */
struct cut {
    uint64_t weight, ties, total;
};

/* A weight above 0 as an integer of the same order: exponent and mantissa of a double. Below 2^58, and 8 bits are 0. */
static inline uint64_t code_of(uint64_t weight)
{
    const double exact = (double)(int64_t)weight; /* a conversion of its own in every instruction set */
    uint64_t bits;
    memcpy(&bits, &exact, sizeof bits);
    return bits - (UINT64_C(1023) << 52);
}

/* Where the heaviest tokens of a list reach `enough`; `room` has space for its weights. */
static struct cut cut_list(const struct list *list, uint64_t enough, uint64_t *room)
{
    const uint64_t *weights = list->weights;
    uint64_t above = 0, total = 0;
    int64_t count = list->count;
    for (int64_t i = 0; i < count; i++)
        total += weights[i];
    if (total < enough)
        return (struct cut){0, 0, total};
    for (int shift = 47;; shift -= 11) {
        uint64_t sums[DIGIT] = {0}, least = UINT64_MAX, most = 0;
        int64_t kept = 0;
        int digit = DIGIT - 1;
        for (int64_t i = 0; i < count; i++)
            sums[code_of(weights[i]) >> shift & (DIGIT - 1)] += weights[i];
        while (above + sums[digit] < enough)
            above += sums[digit--];
        for (int64_t i = 0; i < count; i++) {
            const uint64_t weight = weights[i];
            room[kept] = weight;
            if ((code_of(weight) >> shift & (DIGIT - 1)) == (uint64_t)digit) {
                least = weight < least ? weight : least;
                most = weight > most ? weight : most;
                kept++;
            }
        }
        if (least == most) {
            const uint64_t ties = (enough - above + least - 1) / least;
            return (struct cut){least, ties, above + ties * least};
        }
        weights = room;
        count = kept;
    }
}

/* A number below `total`: uniform, in [0, 1), of it. */
static uint64_t point_in(uint64_t total, double uniform)
{
    return (uint64_t)((unsigned __int128)(uint64_t)(uniform * 0x1p53) * total >> 53);
}

/* Invert the cumulative distribution of the listed tokens that a cut keeps. */
static int32_t token_in_list(const struct list *list, struct cut cut, double uniform)
{
    uint64_t point = point_in(cut.total, uniform);
    for (int64_t i = 0; i < list->count; i++) {
        uint64_t weight = list->weights[i];
        if (weight == cut.weight && cut.ties-- == 0) {
            cut.ties = 0;
            continue;
        }
        weight = weight >= cut.weight ? weight : 0; /* no branch, as none could be predicted */
        if (point < weight)
            return list->ids[i];
        point -= weight;
    }
    return -1;
}

/* The same for all scores, by the sums of their groups. */
static int32_t token_in_groups(const struct scores *s, const uint64_t *sums, uint64_t total, double uniform)
{
    uint64_t point = point_in(total, uniform), weights[GROUP];
    int64_t g = 0;
    int i = 0;
    while (point >= sums[g])
        point -= sums[g++];
    weigh_group(s, g, weights);
    while (point >= weights[i])
        point -= weights[i++];
    return (int32_t)(g * GROUP + i);
}

/* Bytes of scratch memory for a vocabulary: one array after another, as choose_token lays them out. */
int64_t sample_tokens_scratch(int64_t vocab)
{
    return (groups_of(vocab) + 1) * GROUP * (int64_t)(2 * sizeof(uint64_t) + 4 * sizeof(int32_t));
}

/* The token of one row; -1 if a logit is NaN or none is a finite maximum. */
static int32_t choose_token(const struct loops *loops, const float *row, int64_t vocab, const struct choice *choice,
                            double uniform, uint64_t *scratch)
{
    const int64_t space = (groups_of(vocab) + 1) * GROUP; /* lists write one entry beyond their last */
    uint64_t *sums = scratch, *room = scratch; /* sums are read before room is written */
    struct list list = {sums + space, (int32_t *)(sums + 2 * space), 0};
    int32_t *maxima = list.ids + space, *ids = maxima + space;
    float *kept = (float *)(ids + space);
    const int32_t most = loops->find_maxima(row, vocab, maxima);
    if (most == INT32_MIN)
        return -1;
    if (choice->factor == 0) {
        int64_t g = 0, i = 0;
        while (maxima[g] != most)
            g++;
        while (key_of(row[g * GROUP + i]) != most)
            i++;
        return (int32_t)(g * GROUP + i);
    }
    struct scores s = {row, NULL, vocab, score_of(most), choice->factor};
    keep_top_k(loops, &s, maxima, choice->top_k, (int32_t *)list.weights, (int32_t *)scratch, kept, ids);
    const uint64_t total = loops->add_weights(&s, sums);
    int32_t token;
    if (choice->top_p == 1 && choice->least == 0) {
        token = token_in_groups(&s, sums, total, uniform);
    } else {
        const double share = __builtin_ceil((double)total * choice->top_p);
        const uint64_t enough = (uint64_t)share < total ? (uint64_t)share : total;
        const uint64_t unlikely = (total - enough) / (uint64_t)s.count;
        const uint64_t least = unlikely > (uint64_t)choice->least ? unlikely : (uint64_t)choice->least;
        loops->list_tokens(&s, sums, least ? least : 1, &list);
        token = token_in_list(&list, cut_list(&list, enough, room), uniform);
    }
    return s.ids == NULL ? token : s.ids[token];
}

/* tokens[r] of `count` rows of logits, `stride` floats apart; -1 where a row has none, -2 where it is skipped. */
void sample_tokens(const float *logits, int64_t stride, int64_t vocab, int64_t count, const struct choice *choices,
                   const double *uniforms, void *scratch, int32_t *tokens)
{
    const struct loops *loops = loops_for(paged_attention_isa());
    for (int64_t r = 0; r < count; r++)
        tokens[r] = choices[r].factor < 0
                        ? -2
                        : choose_token(loops, logits + r * stride, vocab, choices + r, uniforms[r], scratch);
}

/* Forbid tokens of a row: minus infinity where a bit is 0. Returns 0 where the row has a NaN or plus infinity, else 1. */
int mask_logits(const float *row, int64_t vocab, const uint32_t *bits, float *masked)
{
    return loops_for(paged_attention_isa())->mask_row(row, vocab, bits, masked);
}
