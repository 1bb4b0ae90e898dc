"""The next token of each row of logits, on the device: greedy, or drawn from the top-k and top-p of a temperature.

    greedy    the first of the largest logits
    draw      p = softmax(logits / temperature); kept: the top_k largest, and of those as many of the largest as first
              reach the share top_p of what they sum to (Holtzman et al., arXiv:1904.09751); the token is where the
              running sum of kept probabilities, in the order of the vocabulary, passes uniform * their sum

No row is sorted. The k-th largest logit and the smallest that top_p keeps are found by halving an interval of logits
until it holds one float32 apart: logits that tie with the last one are all kept. `uniform` comes from the host, which
keys it by the request's seed and the token's index: a draw does not depend on the batch.
"""

import triton
import triton.language as tl

_HALVINGS = tl.constexpr(32)


@triton.jit
def _ordered(x):
    """float32 as int32 that compare alike."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def greedy(logits, tokens, stride, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows,). logits [rows, VOCABULARY]; tokens [rows] int64."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    best = float("-inf")
    token = tl.program_id(0) * 0
    for start in range(0, VOCABULARY, BLOCK):
        x = tl.load(logits + row * stride + start + at, mask=start + at < VOCABULARY, other=float("-inf"))
        x = x.to(tl.float32)
        largest = tl.max(x)
        if largest > best:
            best = largest
            token = tl.min(tl.where(x == largest, start + at, VOCABULARY))
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _count_and_mass(logits, bar, largest, temperature, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits are at or above the bar (in _ordered's order), and the sum of their exp((x - largest) / t)."""
    at = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        known = start + at < VOCABULARY
        x = tl.load(logits + start + at, mask=known, other=float("-inf")).to(tl.float32)
        kept = known & (_ordered(x) >= bar)
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp((x - largest) / temperature), 0.0)
    return tl.sum(count), tl.sum(mass)


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
    largest = tl.zeros([BLOCK], tl.float32) + float("-inf")
    for start in range(0, VOCABULARY, BLOCK):
        x = tl.load(logits + start + at, mask=start + at < VOCABULARY, other=float("-inf"))
        largest = tl.maximum(largest, x.to(tl.float32))
    top = tl.max(largest)
    wanted = tl.where(temperature > 0.0, tl.where(top_k > 0, top_k, VOCABULARY), 1)
    uniform = tl.where(temperature > 0.0, uniform, 0.0)  # the first, where logits tie
    heat = tl.where(temperature > 0.0, temperature, 1.0)
    low, high = (_ordered(top) * 0 - 2147483647).to(tl.int64), _ordered(top).to(tl.int64)
    for _ in range(_HALVINGS):  # the largest bar that `wanted` logits reach
        middle = (low + high + 1) >> 1
        count, _mass = _count_and_mass(logits, middle.to(tl.int32), top, heat, VOCABULARY, BLOCK)
        low, high = tl.where(count >= wanted, middle, low), tl.where(count >= wanted, high, middle - 1)
    _count, mass = _count_and_mass(logits, low.to(tl.int32), top, heat, VOCABULARY, BLOCK)
    goal, high = mass * top_p, _ordered(top).to(tl.int64)
    for _ in range(_HALVINGS):  # the largest bar whose logits have the share top_p
        middle = (low + high + 1) >> 1
        _count, part = _count_and_mass(logits, middle.to(tl.int32), top, heat, VOCABULARY, BLOCK)
        low, high = tl.where(part >= goal, middle, low), tl.where(part >= goal, high, middle - 1)
    bar = low.to(tl.int32)
    _count, mass = _count_and_mass(logits, bar, top, heat, VOCABULARY, BLOCK)
    passed, token, last = 0.0, -1, 0
    for start in range(0, VOCABULARY, BLOCK):
        known = start + at < VOCABULARY
        x = tl.load(logits + start + at, mask=known, other=float("-inf")).to(tl.float32)
        kept = known & (_ordered(x) >= bar)
        shares = tl.where(kept, tl.exp((x - top) / heat), 0.0)
        sums = passed + tl.cumsum(shares, 0)
        found = tl.min(tl.where(kept & (sums > uniform * mass), start + at, VOCABULARY))
        token = tl.where((token < 0) & (found < VOCABULARY), found, token)
        last = tl.maximum(last, tl.max(tl.where(kept, start + at, 0)))
        passed += tl.sum(shares)
    tl.store(tokens + row, tl.where(token < 0, last, token).to(tl.int64))  # rounding may leave uniform beyond the sum
