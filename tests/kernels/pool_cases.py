"""Norms by head, rotary embedding, and vectors written into the pool."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from ingot.kernels.rotary_kv_write import rotary_kv_write, rotate_heads
from tests.kernels.cases import NAMES, Case, power_of_two, random
from tests.kernels.reference import FLOAT, FP8, INT4, INT8, KINDS, STEPS, Float64Array, Pool, numpy64, rope

SLOTS = [0, 3, 7, -1, 19, 10]  # of blocks of 4 tokens
BLOCK_TOKENS = 4
SHAPES = {  # heads, kv heads, dim, rotary dims
    "head 32": (4, 2, 32, 32),
    "head 80, partly rotated": (7, 1, 80, 32),
    "head 8, not rotated": (2, 2, 8, 0),
    "head 256": (3, 1, 256, 256),
}


def heads_of(
    name: str, kind: int, dtype: torch.dtype, *, normed: bool, parts: int
) -> tuple[Pool, Float64Array, Float64Array]:
    """The pool after the kernel, its queries [tokens, heads, dim], the expected [tokens, heads + 2 kv heads, dim]."""
    rng, (heads, kv_heads, dim, rotary) = np.random.default_rng(5), SHAPES[name]
    tokens, width = len(SLOTS), (heads + 2 * kv_heads) * dim
    qkv, positions = random(rng, parts, tokens, width, dtype=dtype), torch.arange(tokens) + 3
    cos, sin = random(rng, 20, rotary // 2), random(rng, 20, rotary // 2)
    norms = random(rng, 2, dim, dtype=dtype)
    pool = Pool.empty(5, kv_heads, BLOCK_TOKENS, dim, kind)
    q = torch.full((tokens, heads * dim), torch.nan, dtype=dtype)
    whole = qkv.reshape(parts, -1)
    at_once = 2
    rotary_kv_write[(tokens, -(-heads // at_once) + -(-kv_heads // at_once))](
        *(whole[0], whole[0, heads * dim :], whole[0, (heads + kv_heads) * dim :], positions, torch.tensor(SLOTS)),
        *(cos, sin, norms[0], norms[1], q, pool.codes, pool.scales, 1e-5),
        *(width, width, width, tokens * width, heads * dim),
        **pool.strides,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEADS_AT_ONCE=at_once,
        DIM=dim,
        BLOCK_DIM=power_of_two(dim, 16),
        ROTARY=rotary,
        BLOCK_TOKENS=BLOCK_TOKENS,
        PARTS=parts,
        HAS_NORM=normed,
        KIND=kind,
    )
    vectors = numpy64(qkv).sum(axis=0).reshape(tokens, -1, dim)
    turned, both = vectors, heads + kv_heads
    if normed:
        scaled = vectors / np.sqrt((vectors**2).mean(axis=-1, keepdims=True) + 1e-5)
        weights = np.repeat(numpy64(norms), [heads, kv_heads], axis=0)
        turned = np.concatenate([scaled[:, :both] * weights, vectors[:, both:]], axis=1)
    rotated = rope(turned, positions.numpy(), numpy64(cos), numpy64(sin)) if rotary else turned
    wanted = np.concatenate([rotated[:, :both], vectors[:, both:]], axis=1)
    return pool, numpy64(q).reshape(tokens, heads, dim), wanted


def _queries(name: str, dtype: torch.dtype, normed: bool, parts: int) -> tuple[Float64Array, Float64Array]:
    _, found, wanted = heads_of(name, FLOAT, dtype, normed=normed, parts=parts)
    return found, wanted[:, : found.shape[1]]


def _stored(name: str, kind: int, normed: bool) -> tuple[Float64Array, Float64Array]:
    """Stored vectors over their largest magnitude, which their scale depends on."""
    heads = SHAPES[name][0]
    pool, _, wanted = heads_of(name, kind, torch.float32, normed=normed, parts=1)
    tokens = [token for token, slot in enumerate(SLOTS) if slot >= 0]
    vectors = pool.vectors()
    found = np.stack([vectors[SLOTS[t] // BLOCK_TOKENS, :, :, SLOTS[t] % BLOCK_TOKENS] for t in tokens])
    kept = wanted[tokens, heads:].reshape(found.shape)
    largest = np.abs(kept).max(axis=-1, keepdims=True)
    return found / largest, kept / largest


def _rotated(dtype: torch.dtype) -> tuple[Float64Array, Float64Array]:
    rng = np.random.default_rng(6)
    x, positions = random(rng, 3, 2 * 80, dtype=dtype), torch.tensor([4, 0, 9])
    cos, sin, out = random(rng, 10, 16), random(rng, 10, 16), torch.full((3, 160), torch.nan, dtype=dtype)
    rotate_heads[(3, 2)](x, positions, cos, sin, out, 160, 160, DIM=80, BLOCK_DIM=128, ROTARY=32)
    wanted = rope(numpy64(x).reshape(3, 2, 80), positions.numpy(), numpy64(cos), numpy64(sin))
    return numpy64(out).reshape(3, 2, 80), wanted


def cases() -> Iterator[Case]:
    """Queries by shape, norm, parts and precision; stored vectors by precision of the pool."""
    limits = {torch.float32: 1e-6, torch.float16: 6e-4}
    for name in SHAPES:
        for normed, parts in ((False, 1), (True, 3)):
            more = ", normed, in parts" if normed else ""
            run = partial(_queries, name, torch.float32, normed, parts)
            yield Case("rotary_kv_write", f"{name}{more}", "float32", 1e-6, run)
    run = partial(_queries, "head 32", torch.float16, True, 1)
    yield Case("rotary_kv_write", "head 32, normed", "float16", limits[torch.float16], run)
    for kind in (FLOAT, FP8, INT8, INT4):
        for name in ("head 80, partly rotated", "head 32"):
            stored = partial(_stored, name, kind, normed=name == "head 32")
            yield Case("rotary_kv_write", f"{name}, stored", f"{KINDS[kind]} pool", STEPS[kind], stored)
    for dtype, limit in limits.items():
        yield Case("rotate_heads", "head 80, partly rotated", NAMES[dtype], limit, partial(_rotated, dtype))
