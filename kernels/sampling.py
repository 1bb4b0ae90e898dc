"""Chooses the next token of each row of logits: greedy, or sampled with temperature, top-k and top-p.

    greedy    the first of the largest logits
    draw      p = softmax(logits / temperature). Kept: the top_k largest with all that tie with the last of them; of
              those, the fewest of the largest that hold the share top_p of what they sum to, of ties the first
              (Holtzman et al., arXiv:1904.09751). The token is where the running sum of kept probabilities, in the
              order of the vocabulary, passes uniform * their sum

runtime/requests/sampler.py does the same in float64: the token is equal, unless rounding decides. -1 where a row holds
a NaN, or has no finite largest logit. `uniform` comes from the host, which keys it by the request's seed and the
token's index: the sampled token does not depend on the batch.

No row is sorted: the k-th largest logit, and the smallest that top_p keeps, are found by narrowing an interval of
logits until it holds one float32. A row is read three times, each time by a program for each of its blocks: for its
largest logit and their mean, by `greedy`; for a histogram between these two, and sums of probabilities, by
`bin_logits`; to store the candidates, the largest logits as far as they fit one program, by `draw`. Its last program
narrows the candidates alone. Only where top_k or top_p keeps more tokens than are candidates does it read the whole row
for every step. Where both keep all, it reads one block.
"""

import triton
import triton.language as tl

from ingot.kernels.common import is_last, wait_for_inputs

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
def greedy(
    logits,
    peaks,
    firsts,
    counters,
    facts,
    tokens,
    stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows, PARTS): a program has a block of a row, and the row's last one joins them.

    logits           [rows, VOCABULARY]
    peaks, firsts    [rows, PARTS, 3] float32, [rows, PARTS] int32: memory for what each program found: the largest
                     logit, the sum and the number of the finite ones; the first of the largest, -1 where one is NaN
    counters         [rows] int32, zeros before and after
    facts            [rows, 2] float32: the largest logit, and the mean of the finite ones, for `draw`
    tokens           [rows] int64: the first of the largest; -1 where a logit is NaN or the largest is infinite
    PARTS            the blocks of a row, rounded up to a power of two
    """
    wait_for_inputs(DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, _known, x = _load(logits + row * stride, part * BLOCK, VOCABULARY, BLOCK)
    strange, is_finite, own = tl.max((x != x).to(tl.int32)), tl.abs(x) < float("inf"), row * PARTS + part
    x = tl.where(x == x, x, float("-inf"))
    top = tl.max(x)
    first = tl.min(tl.where(x == top, token, VOCABULARY))
    tl.store(peaks + own * 3, top)
    tl.store(peaks + own * 3 + 1, tl.sum(tl.where(is_finite, x, 0.0)))
    tl.store(peaks + own * 3 + 2, tl.sum(tl.where(is_finite, 1.0, 0.0)))
    tl.store(firsts + own, tl.where(strange == 0, first, -1))
    if is_last(counters + row, PARTS):
        each = row * PARTS + tl.arange(0, PARTS)
        tops = tl.load(peaks + each * 3, cache_modifier=".cg")
        total = tl.sum(tl.load(peaks + each * 3 + 1, cache_modifier=".cg"))
        count = tl.sum(tl.load(peaks + each * 3 + 2, cache_modifier=".cg"))
        chosen = tl.load(firsts + each, cache_modifier=".cg")
        largest = tl.max(tops)
        is_sound = (tl.min(chosen) >= 0) & (tl.abs(largest) < float("inf"))
        chosen = tl.min(tl.where(tops == largest, chosen, VOCABULARY))
        tl.store(facts + row * 2, largest)
        tl.store(facts + row * 2 + 1, total / tl.maximum(count, 1.0))
        tl.store(tokens + row, tl.where(is_sound, chosen, -1).to(tl.int64))


@triton.jit
def _bin(x, top, bins_per_unit, BINS: tl.constexpr):
    """The bin of a logit by its distance from the largest; the last one has all that are further away."""
    return tl.minimum((top - x) * bins_per_unit, BINS - 1.0).to(tl.int32)


@triton.jit
def _scale(facts, row, BINS: tl.constexpr):
    """Bins for each unit of logits, so that BINS are from the largest to the mean."""
    return BINS / tl.maximum(tl.load(facts + row * 2) - tl.load(facts + row * 2 + 1), 1e-30)


@triton.jit
def bin_logits(
    logits,
    temperatures,
    facts,
    tokens,
    counts,
    masses,
    stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows, PARTS): a histogram of a block of a row, and its sum of exp((x - largest) / temperature).

    facts, tokens, temperatures    as in `draw`: the same rows are left out
    counts, masses                 [rows, PARTS, BINS] int32, [rows, PARTS] float32
    """
    wait_for_inputs(DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top, bins_per_unit = tl.load(temperatures + row), tl.load(facts + row * 2), _scale(facts, row, BINS)
    if (tl.load(tokens + row) >= 0) & (temperature > 0.0):
        _token, known, x = _load(logits + row * stride, part * BLOCK, VOCABULARY, BLOCK)
        own = row * PARTS + part
        found = tl.histogram(_bin(x, top, bins_per_unit, BINS), BINS, mask=known)
        tl.store(counts + own * BINS + tl.arange(0, BINS), found)
        tl.store(masses + own, tl.sum(tl.exp((x - top) / temperature)))


@triton.jit
def _store_candidates(
    logits,
    values,
    ids,
    counts,
    facts,
    row,
    part,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Store a block's candidates, after those of the blocks before it; return their number in the row.

    They are the logits up to the last bin up to which no more than MOST are, in the order of the vocabulary.
    """
    each, bin = tl.arange(0, PARTS)[:, None], tl.arange(0, BINS)
    found = tl.load(counts + (row * PARTS + each) * BINS + bin[None, :])
    last = tl.sum((tl.cumsum(tl.sum(found, 0), 0) <= MOST).to(tl.int32)) - 1
    found = tl.where(bin[None, :] <= last, found, 0)
    token, known, x = _load(logits, part * BLOCK, VOCABULARY, BLOCK)
    taken = known & (_bin(x, tl.load(facts + row * 2), _scale(facts, row, BINS), BINS) <= last)
    place = tl.sum(tl.where(each < part, found, 0)) + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(values + place, x, mask=taken)
    tl.store(ids + place, token, mask=taken)
    return tl.sum(found)


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
    """Choose among all tokens of a row, which is read for every step, by top_k or top_p."""
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
def _in_block(
    logits, masses, top, heat, mass, uniform, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """Choose among all tokens of a row when all are kept: only the block in which the sum passes is read."""
    each, bar = tl.arange(0, PARTS), uniform * mass
    shares = tl.load(masses + each)
    # Rounding may leave the bar beyond the last sum, of blocks or of tokens: then the last of any share is chosen.
    block = tl.min(tl.where(tl.cumsum(shares, 0) > bar, each, PARTS))
    block = tl.where(block < PARTS, block, tl.max(tl.where(shares > 0.0, each, 0)))
    ids, _known, x = _load(logits, block * BLOCK, VOCABULARY, BLOCK)
    share = tl.exp((x - top) / heat)
    sums = tl.sum(tl.where(each < block, shares, 0.0)) + tl.cumsum(share, 0)
    found = tl.min(tl.where((share > 0.0) & (sums > bar), ids, VOCABULARY))
    return tl.where(found < VOCABULARY, found, tl.max(tl.where(share > 0.0, ids, 0)))


@triton.jit
def draw(
    logits,
    temperatures,
    top_ks,
    top_ps,
    uniforms,
    facts,
    counts,
    masses,
    values,
    ids,
    counters,
    tokens,
    stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows, PARTS). temperatures, top_ps, uniforms [rows] float32; top_ks [rows] int32, 0 for all.

    facts, tokens  what `greedy` stored; rows of temperature 0, and of token -1, keep their tokens
    counts, masses what `bin_logits` stored
    values, ids    [rows, CANDIDATES] float32, int32: memory for the candidates of a row
    counters       [rows] int32, zeros before and after
    BINS           bins of the histogram from the largest logit down to their mean

    A program stores its block's candidates, and the row's last one chooses.
    """
    wait_for_inputs(DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits, values, ids = logits + row * stride, values + row * CANDIDATES, ids + row * CANDIDATES
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, uniform = tl.load(top_ps + row), tl.load(uniforms + row)
    top, token = tl.load(facts + row * 2), tl.load(tokens + row).to(tl.int32)
    if (token >= 0) & (temperature > 0.0):
        has_top_k, count = (top_k > 0) & (top_k < VOCABULARY), 0
        is_narrowed = has_top_k | (top_p < 1.0)
        if is_narrowed:
            count = _store_candidates(
                logits, values, ids, counts, facts, row, part, VOCABULARY, BLOCK, BINS, PARTS, CANDIDATES
            )
        if is_last(counters + row, PARTS):
            mass = tl.sum(tl.load(masses + row * PARTS + tl.arange(0, PARTS)))
            if is_narrowed:
                at = tl.arange(0, CANDIDATES)
                inside = at < count
                x = tl.load(values + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
                theirs = tl.sum(tl.where(inside, tl.exp((x - top) / temperature), 0.0))
                if (count > 0) & tl.where(has_top_k, top_k <= count, theirs >= mass * top_p):
                    found = tl.load(ids + at, mask=inside, other=0, cache_modifier=".cg")
                    limit = tl.where(has_top_k, top_k, 0)
                    token = _among_candidates(
                        x, found, inside, top, temperature, limit, top_p, mass, uniform, VOCABULARY
                    )
                else:
                    token = _in_row(logits, top, temperature, top_k, top_p, mass, uniform, VOCABULARY, BLOCK)
            else:
                token = _in_block(
                    logits, masses + row * PARTS, top, temperature, mass, uniform, VOCABULARY, BLOCK, PARTS
                )
            tl.store(tokens + row, token.to(tl.int64))
