"""Functions that kernels share: the softcap, the sigmoid, the sum of split-K partials; the wait for the launch before,
and the program of a launch that is last; queries of an attention program, and the sums that it stores."""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
NEVER = tl.constexpr(-1.0e30)  # smaller than any real score; 2 to the power of its difference to any of them is 0
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Let the next launch begin, if DEPENDENT; then wait until the one before has ended and its stores are visible.

    Programmatic dependent launch (CUDA Programming Guide; SM 90): the next launch's programs start once all of this one
    have come here, as far as there is room, and come as far as their own wait. So several launches may wait in a row,
    each with its first weights on their way. Every program of every such kernel waits before it reads or writes what
    another launch writes or reads; weights are not written by any. As each launch ends only after its wait, and so
    after all launches before it, nothing overtakes. Launched in the usual way both do nothing.
    """
    if DEPENDENT and not INTERPRETED:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def capped(x, softcap):
    """softcap * tanh(x / softcap), in a form that cannot overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(x) / softcap)
    return tl.where(x < 0, -softcap, softcap) * (1.0 - shrunk) / (1.0 + shrunk)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) for any x."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def load_parts(x, part_stride, mask, PARTS: tl.constexpr):
    """Load x in float32, or add PARTS split-K partials of it in order; zeros where the mask is false.

    Matmuls of few rows store split-K partials (matmul.py, matmul_nbits.py); the kernel that reads them adds them. With
    a stride of 0 the matmul added them itself: x is their sum.
    """
    total = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * part_stride, mask=mask & (part_stride > 0), other=0.0).to(tl.float32)
    return total


@triton.jit
def is_last(counter, programs):
    """Return whether all other programs have called this with the same counter, which is zero before and after.

    The last program may read what the others stored before their calls: from the L2 cache (cache_modifier=".cg").
    As in CUDA's sample threadFenceReduction, a barrier orders all stores of a program's threads before the addition by
    one of them, which releases them. The last addition acquires what all earlier ones released: reads and writes of one
    counter are a chain, and release and acquire are cumulative (PTX ISA, Memory Consistency Model). The barrier after
    it, with which Triton gives the sum to all threads, orders their loads after the addition.
    """
    tl.debug_barrier()
    count = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = count == programs - 1
    if last:
        # Every program has added: the next launch finds zero.
        tl.store(counter, 0)
    return last


@triton.jit
def query_bounds(sequence, query_starts, lengths):
    """A sequence's first query in the batch, how many queries it has, and its tokens, those of its queries included."""
    begin = tl.load(query_starts + sequence)
    return begin, tl.load(query_starts + sequence + 1) - begin, tl.load(lengths + sequence)


@triton.jit
def query_rows(bounds, start, first_head, heads, ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Rows of a program, each [ROWS]: query in the batch, its position, head, and whether there is such a row.

    A row is a head of a query: BLOCK_HEADS rows for each query from `start` on, of which the first `heads` exist.
    """
    begin, count, length = bounds
    row = tl.arange(0, ROWS)
    query, member = start + row // BLOCK_HEADS, row % BLOCK_HEADS
    own = (query < count) & (member < heads)
    return (begin + query).to(tl.int64), length - count + query, first_head + member, own


@triton.jit
def seen_tokens(bounds, start, window, QUERIES: tl.constexpr):
    """First token that QUERIES queries from `start` on attend to, and the end of such tokens; 0 without queries."""
    _, count, length = bounds
    position = length - count + start
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    return first, tl.where(start < count, tl.minimum(position + QUERIES, length), 0)


@triton.jit
def store_sums(sums, weights, state, at, own, mask, largest, total, found, DIM: tl.constexpr):
    """Store the softmax's state of rows over some of their keys, at places `state` [rows] where `own`.

    sums       [places, DIM] float32: `found` [rows, columns `at`], sum of 2^(score - largest) * v, where `mask`
    weights    [places, 2] float32: `largest` score, and `total`, the sum of 2^(score - largest)
    """
    tl.store(sums + state[:, None] * DIM + at[None, :], found, mask=mask)
    tl.store(weights + state * 2, largest, mask=own)
    tl.store(weights + state * 2 + 1, total, mask=own)
