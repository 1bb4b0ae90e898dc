"""Chooses the next token of each row of logits: greedy, or sampled with temperature, top-k and top-p.

    greedy    the first of the largest logits
    draw      p = softmax(logits / temperature). Kept: the top_k largest with all that tie with the last of them; of
              those, the fewest of the largest that hold the share top_p of what they sum to, of ties the first
              (Holtzman et al., arXiv:1904.09751). The token is where the running sum of kept probabilities, in the
              order of the vocabulary, passes uniform * their sum

runtime/sampler.py does the same in float64: the token is equal, unless rounding decides. -1 where a row holds a NaN,
or has no finite largest logit. No row is sorted: the k-th largest logit, and the smallest that top_p keeps, are found
by narrowing an interval of logits until it holds one float32. `uniform` comes from the host, which keys it by the
request's seed and the token's index: the sampled token does not depend on the batch.
"""

import triton
import triton.language as tl


@triton.jit
def _ordered(x):
    """float32 as int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _peak(logits, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit, its first token, and whether a token can be chosen: it is finite, and nothing is NaN."""
    at = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32) + float("-inf")
    token = tl.zeros([BLOCK], tl.int32) + VOCABULARY
    strange = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        x = tl.load(logits + start + at, mask=start + at < VOCABULARY, other=float("-inf")).to(tl.float32)
        strange |= (x != x).to(tl.int32)
        token = tl.where(x > largest, start + at, token)
        largest = tl.where(x > largest, x, largest)
    top = tl.max(largest)
    first = tl.min(tl.where(largest == top, token, VOCABULARY))
    return top, first, (tl.max(strange) == 0) & (tl.abs(top) < float("inf"))


@triton.jit
def greedy(logits, tokens, stride, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows,). logits [rows, VOCABULARY]; tokens [rows] int64."""
    row = tl.program_id(0).to(tl.int64)
    _top, first, is_sound = _peak(logits + row * stride, VOCABULARY, BLOCK)
    tl.store(tokens + row, tl.where(is_sound, first, -1).to(tl.int64))


@triton.jit
def _reaching(
    logits, first, second, third, top, heat, BY_MASS: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    """How many logits are at or above each of three bars (in _ordered's order), or the sum of exp((x - top) / heat)."""
    at = tl.arange(0, BLOCK)
    one, two, three = (tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))
    for start in range(0, VOCABULARY, BLOCK):
        known = start + at < VOCABULARY
        x = tl.load(logits + start + at, mask=known, other=float("-inf")).to(tl.float32)
        share = tl.where(known, tl.exp((x - top) / heat) if BY_MASS else 1.0, 0.0)
        place = _ordered(x)
        one += tl.where(place >= first, share, 0.0)
        two += tl.where(place >= second, share, 0.0)
        three += tl.where(place >= third, share, 0.0)
    return tl.sum(one), tl.sum(two), tl.sum(three)


@triton.jit
def _highest_bar(logits, top, heat, least, goal, BY_MASS: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The highest bar, not below `least`, whose logits are as many as the goal, or sum to it. Quarters an interval."""
    low, high = least.to(tl.int64), _ordered(top).to(tl.int64)
    while low < high:
        step = (high - low + 3) >> 2
        one, two, three = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        reached_one, reached_two, reached_three = _reaching(
            logits, one.to(tl.int32), two.to(tl.int32), three.to(tl.int32), top, heat, BY_MASS, VOCABULARY, BLOCK
        )
        over = tl.where(reached_two < goal, two - 1, tl.where(reached_three < goal, three - 1, high))
        high = tl.where(reached_one < goal, one - 1, over)
        under = tl.where(reached_three >= goal, three, tl.where(reached_two >= goal, two, one))
        low = tl.where(reached_one >= goal, under, low)
    return low.to(tl.int32)


@triton.jit
def draw(
    logits,
    temperatures,
    top_ks,
    top_ps,
    uniforms,
    tokens,
    stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,). temperatures, top_ps, uniforms [rows] float32; top_ks [rows] int32, 0 for all; tokens [rows] int64.

    A temperature of 0 is greedy.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, uniform = tl.load(top_ps + row), tl.load(uniforms + row)
    at = tl.arange(0, BLOCK)
    top, _first, is_sound = _peak(logits, VOCABULARY, BLOCK)
    top = tl.where(is_sound, top, 0.0)
    is_greedy = temperature <= 0.0
    heat = tl.where(is_greedy, 1.0, temperature)
    uniform = tl.where(is_greedy, 0.0, uniform)  # the first, where logits tie
    bar = tl.where(is_greedy, _ordered(top), _ordered(top) * 0 - 2147483647)
    if is_sound & (temperature > 0.0) & (top_k > 0) & (top_k < VOCABULARY):
        bar = _highest_bar(logits, top, heat, bar, top_k.to(tl.float32), False, VOCABULARY, BLOCK)
    mass, _, _ = _reaching(logits, bar, bar, bar, top, heat, True, VOCABULARY, BLOCK)
    ties = VOCABULARY  # how many of the logits at the bar are kept
    if is_sound & (temperature > 0.0) & (top_p < 1.0):
        goal = mass * top_p
        bar = _highest_bar(logits, top, heat, bar, goal, True, VOCABULARY, BLOCK)
        mass, before, _ = _reaching(logits, bar, bar + 1, bar + 1, top, heat, True, VOCABULARY, BLOCK)
        count, above, _ = _reaching(logits, bar, bar + 1, bar + 1, top, heat, False, VOCABULARY, BLOCK)
        tied = count - above
        share = (mass - before) / tied
        ties = tl.minimum(tl.maximum(tl.ceil((goal - before) / share), 1.0), tied).to(tl.int32)
        mass = before + ties * share
    passed, met, token, last = 0.0, 0, -1, 0
    for start in range(0, VOCABULARY, BLOCK):
        known = start + at < VOCABULARY
        x = tl.load(logits + start + at, mask=known, other=float("-inf")).to(tl.float32)
        tied = known & (_ordered(x) == bar)
        kept = (known & (_ordered(x) > bar)) | (tied & (met + tl.cumsum(tied.to(tl.int32), 0) <= ties))
        shares = tl.where(kept, tl.exp((x - top) / heat), 0.0)
        sums = passed + tl.cumsum(shares, 0)
        found = tl.min(tl.where(kept & (sums > uniform * mass), start + at, VOCABULARY))
        token = tl.where((token < 0) & (found < VOCABULARY), found, token)
        last = tl.maximum(last, tl.max(tl.where(kept, start + at, 0)))
        passed += tl.sum(shares)
        met += tl.sum(tied.to(tl.int32))
    token = tl.where(token < 0, last, token)  # rounding may leave uniform beyond the sum
    tl.store(tokens + row, tl.where(is_sound, token, -1).to(tl.int64))
