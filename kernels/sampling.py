"""Chooses the next token of each row of logits: greedy, or sampled with temperature, top-k and top-p.

    greedy    the first of the largest logits
    draw      p = softmax(logits / temperature). Kept: the top_k largest with all that tie with the last of them; of
              those, the fewest of the largest that hold the share top_p of what they sum to, of ties the first
              (Holtzman et al., arXiv:1904.09751). The token is where the running sum of kept probabilities, in the
              order of the vocabulary, passes uniform * their sum

runtime/sampler.py does the same in float64: the token is equal, unless rounding decides. -1 where a row holds a NaN,
or has no finite largest logit. `uniform` comes from the host, which keys it by the request's seed and the token's
index: the sampled token does not depend on the batch.

No row is sorted: the k-th largest logit, and the smallest that top_p keeps, are found by narrowing an interval of
logits until it holds one float32. A row is read three times: for its largest logit and their mean; for a histogram
between these two, and the sum of probabilities; to store the candidates, the largest logits as far as they fit one
program. Narrowing then reads the candidates alone. Only where top_k or top_p keeps more tokens than are candidates is
the whole row read for every step.
"""

import triton
import triton.language as tl

from ingot.kernels.common import wait_for_inputs

LOWEST = tl.constexpr(-2147483647)  # below all logits in _ordered's order


@triton.jit
def _ordered(x):
    """float32 as int32 of the same order; -0.0 must have been made 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _load(logits, start, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens of a block, which of them exist, and their logits: -inf beyond the vocabulary, 0.0 for -0.0."""
    token = start + tl.arange(0, BLOCK)
    known = token < VOCABULARY
    x = tl.load(logits + token, mask=known, other=float("-inf")).to(tl.float32)
    return token, known, x + 0.0


@triton.jit
def _peak(logits, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Largest logit, its first token, mean of the finite ones, and whether a token can be chosen.

    None can be chosen where a logit is NaN or the largest is infinite.
    """
    largest = tl.zeros([BLOCK], tl.float32) + float("-inf")
    first = tl.zeros([BLOCK], tl.int32) + VOCABULARY
    strange = tl.zeros([BLOCK], tl.int32)
    total, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        token, _known, x = _load(logits, start, VOCABULARY, BLOCK)
        strange |= (x != x).to(tl.int32)
        first = tl.where(x > largest, token, first)
        largest = tl.where(x > largest, x, largest)
        is_finite = tl.abs(x) < float("inf")
        total += tl.where(is_finite, x, 0.0)
        count += tl.where(is_finite, 1.0, 0.0)
    top = tl.max(largest)
    token = tl.min(tl.where(largest == top, first, VOCABULARY))
    mean = tl.sum(total) / tl.maximum(tl.sum(count), 1.0)
    return top, token, mean, (tl.max(strange) == 0) & (tl.abs(top) < float("inf"))


@triton.jit
def greedy(logits, tokens, stride, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    """Grid (rows,). logits [rows, VOCABULARY]; tokens [rows] int64."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    _top, first, _mean, is_sound = _peak(logits + row * stride, VOCABULARY, BLOCK)
    tl.store(tokens + row, tl.where(is_sound, first, -1).to(tl.int64))


@triton.jit
def _bin(x, top, bins_per_unit, BINS: tl.constexpr):
    """The bin of a logit by its distance from the largest; the last one has all that are further away."""
    return tl.minimum((top - x) * bins_per_unit, BINS - 1.0).to(tl.int32)


@triton.jit
def _last_bin(
    logits,
    top,
    heat,
    bins_per_unit,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    MOST: tl.constexpr,
):
    """The last bin up to which no more than MOST logits are, or -1; and the sum of exp((x - top) / heat) of the row."""
    counts, mass = tl.zeros([BINS], tl.int32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        _token, known, x = _load(logits, start, VOCABULARY, BLOCK)
        counts += tl.histogram(_bin(x, top, bins_per_unit, BINS), BINS, mask=known)
        mass += tl.exp((x - top) / heat)
    return tl.sum((tl.cumsum(counts, 0) <= MOST).to(tl.int32)) - 1, tl.sum(mass)


@triton.jit
def _store_candidates(
    logits,
    values,
    ids,
    top,
    bins_per_unit,
    last,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Store the logits up to a bin and their tokens, in the order of the vocabulary; return their number."""
    count = 0
    for start in range(0, VOCABULARY, BLOCK):
        token, known, x = _load(logits, start, VOCABULARY, BLOCK)
        taken = known & (_bin(x, top, bins_per_unit, BINS) <= last)
        place = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(values + place, x, mask=taken & (place < MOST))
        tl.store(ids + place, token, mask=taken & (place < MOST))
        count += tl.sum(taken.to(tl.int32))
    return count


@triton.jit
def _quartered(low, high):
    """Three bars that quarter an interval of whole numbers, the highest included."""
    step = (high - low + 3) >> 2
    return low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)


@triton.jit
def _narrowed(low, high, one, two, three, by_one, by_two, by_three, goal):
    """The quarter with the highest bar that still reaches the goal; `by_one` is what bar `one` reaches."""
    over = tl.where(by_two < goal, two - 1, tl.where(by_three < goal, three - 1, high))
    under = tl.where(by_three >= goal, three, tl.where(by_two >= goal, two, one))
    return tl.where(by_one >= goal, under, low), tl.where(by_one < goal, one - 1, over)


@triton.jit
def _bar_of_candidates(place, share, low, top, goal):
    """The highest bar, not below `low`, that candidates of this share in sum reach."""
    low, high = low.to(tl.int64), _ordered(top).to(tl.int64)
    while low < high:
        one, two, three = _quartered(low, high)
        by_one = tl.sum(tl.where(place >= one.to(tl.int32), share, 0.0))
        by_two = tl.sum(tl.where(place >= two.to(tl.int32), share, 0.0))
        by_three = tl.sum(tl.where(place >= three.to(tl.int32), share, 0.0))
        low, high = _narrowed(low, high, one, two, three, by_one, by_two, by_three, goal)
    return low.to(tl.int32)


@triton.jit
def _ties_kept(goal, before, mass, tied):
    """Return how many logits at the bar the goal needs, where all sum to mass - before; and the sum with them."""
    share = (mass - before) / tied
    ties = tl.minimum(tl.maximum(tl.ceil((goal - before) / share), 1.0), tied)
    return ties.to(tl.int32), before + ties * share


@triton.jit
def _among_candidates(x, ids, inside, top, heat, top_k, top_p, mass, uniform, VOCABULARY: tl.constexpr):
    """Choose among candidates [MOST], which hold all tokens that are kept."""
    share = tl.where(inside, tl.exp((x - top) / heat), 0.0)
    place = tl.where(inside, _ordered(x), LOWEST)
    bar = tl.min(tl.where(inside, place, _ordered(top)))
    if top_k > 0:
        bar = _bar_of_candidates(place, tl.where(inside, 1.0, 0.0), bar, top, top_k.to(tl.float32))
        mass = tl.sum(tl.where(place >= bar, share, 0.0))
    ties = VOCABULARY
    if top_p < 1.0:
        goal = mass * top_p
        bar = _bar_of_candidates(place, share, bar, top, goal)
        before, mass = tl.sum(tl.where(place > bar, share, 0.0)), tl.sum(tl.where(place >= bar, share, 0.0))
        ties, mass = _ties_kept(goal, before, mass, tl.sum((place == bar).to(tl.float32)))
    tied = inside & (place == bar)
    kept = (inside & (place > bar)) | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= ties))
    sums = tl.cumsum(tl.where(kept, share, 0.0), 0)
    found = tl.min(tl.where(kept & (sums > uniform * mass), ids, VOCABULARY))
    return tl.where(found < VOCABULARY, found, tl.max(tl.where(kept, ids, 0)))  # rounding may leave uniform beyond


@triton.jit
def _reaching(
    logits, first, second, third, top, heat, BY_MASS: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    """Count logits at or above each of three bars (in _ordered's order), or sum their exp((x - top) / heat)."""
    one, two, three = (tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))
    for start in range(0, VOCABULARY, BLOCK):
        _token, known, x = _load(logits, start, VOCABULARY, BLOCK)
        share = tl.where(known, tl.exp((x - top) / heat) if BY_MASS else 1.0, 0.0)
        place = _ordered(x)
        one += tl.where(place >= first, share, 0.0)
        two += tl.where(place >= second, share, 0.0)
        three += tl.where(place >= third, share, 0.0)
    return tl.sum(one), tl.sum(two), tl.sum(three)


@triton.jit
def _highest_bar(logits, top, heat, least, goal, BY_MASS: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The highest bar, not below `least`, whose logits are as many as the goal, or sum to it."""
    low, high = least.to(tl.int64), _ordered(top).to(tl.int64)
    while low < high:
        one, two, three = _quartered(low, high)
        by_one, by_two, by_three = _reaching(
            logits, one.to(tl.int32), two.to(tl.int32), three.to(tl.int32), top, heat, BY_MASS, VOCABULARY, BLOCK
        )
        low, high = _narrowed(low, high, one, two, three, by_one, by_two, by_three, goal)
    return low.to(tl.int32)


@triton.jit
def _in_row(logits, top, heat, top_k, top_p, mass, uniform, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Choose among all tokens of a row, which is read for every step."""
    bar = _ordered(top) * 0 + LOWEST
    if (top_k > 0) & (top_k < VOCABULARY):
        bar = _highest_bar(logits, top, heat, bar, top_k.to(tl.float32), False, VOCABULARY, BLOCK)
        mass, _, _ = _reaching(logits, bar, bar, bar, top, heat, True, VOCABULARY, BLOCK)
    ties = VOCABULARY
    if top_p < 1.0:
        goal = mass * top_p
        bar = _highest_bar(logits, top, heat, bar, goal, True, VOCABULARY, BLOCK)
        mass, before, _ = _reaching(logits, bar, bar + 1, bar + 1, top, heat, True, VOCABULARY, BLOCK)
        count, above, _ = _reaching(logits, bar, bar + 1, bar + 1, top, heat, False, VOCABULARY, BLOCK)
        ties, mass = _ties_kept(goal, before, mass, count - above)
    passed, met, token, last = 0.0, 0, -1, 0
    for start in range(0, VOCABULARY, BLOCK):
        ids, known, x = _load(logits, start, VOCABULARY, BLOCK)
        tied = known & (_ordered(x) == bar)
        kept = (known & (_ordered(x) > bar)) | (tied & (met + tl.cumsum(tied.to(tl.int32), 0) <= ties))
        shares = tl.where(kept, tl.exp((x - top) / heat), 0.0)
        sums = passed + tl.cumsum(shares, 0)
        found = tl.min(tl.where(kept & (sums > uniform * mass), ids, VOCABULARY))
        token = tl.where((token < 0) & (found < VOCABULARY), found, token)
        last = tl.maximum(last, tl.max(tl.where(kept, ids, 0)))
        passed += tl.sum(shares)
        met += tl.sum(tied.to(tl.int32))
    return tl.where(token < 0, last, token)  # rounding may leave uniform beyond the sum


@triton.jit
def draw(
    logits,
    temperatures,
    top_ks,
    top_ps,
    uniforms,
    values,
    ids,
    tokens,
    stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows,). temperatures, top_ps, uniforms [rows] float32; top_ks [rows] int32, 0 for all; tokens [rows] int64.

    values, ids    [rows, CANDIDATES] float32, int32: memory for the candidates of a row
    BINS           bins of the histogram from the largest logit down to their mean

    A temperature of 0 is greedy.
    """
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    logits, values, ids = logits + row * stride, values + row * CANDIDATES, ids + row * CANDIDATES
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, uniform = tl.load(top_ps + row), tl.load(uniforms + row)
    top, token, mean, is_sound = _peak(logits, VOCABULARY, BLOCK)
    if is_sound & (temperature > 0.0):
        bins_per_unit = BINS / tl.maximum(top - mean, 1e-30)
        last, mass = _last_bin(logits, top, temperature, bins_per_unit, VOCABULARY, BLOCK, BINS, CANDIDATES)
        has_top_k = (top_k > 0) & (top_k < VOCABULARY)
        are_enough = False
        at = tl.arange(0, CANDIDATES)
        if (last >= 0) & (has_top_k | (top_p < 1.0)):
            count = _store_candidates(
                logits, values, ids, top, bins_per_unit, last, VOCABULARY, BLOCK, BINS, CANDIDATES
            )
            tl.debug_barrier()  # threads read what others stored
            inside = at < count
            x = tl.load(values + at, mask=inside, other=float("-inf"))
            theirs = tl.sum(tl.where(inside, tl.exp((x - top) / temperature), 0.0))
            are_enough = (count <= CANDIDATES) & tl.where(has_top_k, top_k <= count, theirs >= mass * top_p)
            if are_enough:
                found = tl.load(ids + at, mask=inside, other=0)
                limit = tl.where(has_top_k, top_k, 0)
                token = _among_candidates(x, found, inside, top, temperature, limit, top_p, mass, uniform, VOCABULARY)
        if not are_enough:
            token = _in_row(logits, top, temperature, top_k, top_p, mass, uniform, VOCABULARY, BLOCK)
    tl.store(tokens + row, tl.where(is_sound, token, -1).to(tl.int64))
