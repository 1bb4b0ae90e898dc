"""Attention with splits of fixed size, over difficult shapes: added by one program, and joined from several."""

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from ingot.kernels.fixed_split_attention import fixed_split_attention, join_fixed_splits
from tests.kernels.attention_cases import (
    ALL,
    GQA,
    LIMITS,
    ODD,
    SHAPES,
    WIDE,
    batch,
    expected_rows,
    extras,
    shape_constants,
    tile_of,
)
from tests.kernels.cases import NAMES, Case, power_of_two, random
from tests.kernels.reference import FLOAT, FP8, INT4, INT8, KINDS, Float64Array, Pool, numpy64

SPLIT, SPLITS = 32, 3
TILE_QUERIES, QUERIES = 16, 8


def attention(
    q: torch.Tensor,
    pool: Pool,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    counts: list[int],
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    programs: int = 1,
    sinks: torch.Tensor | None = None,
) -> Float64Array:
    """Results [queries, heads, dim]; one tile of queries is padding. With several programs the splits are joined."""
    queries, heads, dim = q.shape
    kv_heads = pool.codes.shape[2]
    tiles = [(s, start) for s, count in enumerate(counts) for start in range(0, count, TILE_QUERIES)] + [(-1, 0)]
    sequences, starts = (torch.tensor(column, dtype=torch.int32) for column in zip(*tiles, strict=True))
    sums = torch.full((queries, heads, SPLITS, dim), torch.nan)
    weights = torch.full((queries, heads, SPLITS, 2), torch.nan)
    out = torch.full_like(q, torch.nan)
    constants = {**shape_constants(pool, heads, q.dtype), "HAS_SINKS": sinks is not None}
    exponents = None if sinks is None else sinks * math.log2(math.e)
    fixed_split_attention[(len(tiles), kv_heads * (TILE_QUERIES // QUERIES), programs)](
        *(q, pool.codes, pool.scales, tables, lengths),
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        *(sequences, starts, exponents, sums, weights, out, scale, softcap, window),
        *(heads * dim, heads * dim, tables.shape[1]),
        **pool.strides,
        **constants,
        KV_HEADS=kv_heads,
        BLOCK_GROUP=power_of_two(heads // kv_heads, 2),
        QUERIES=QUERIES,
        SPLITS=SPLITS,
        SPLIT=SPLIT,
        TILE=tile_of(pool.kind),
        HAS_SOFTCAP=softcap > 0,
    )
    if programs > 1:
        ends = zip(lengths.tolist(), counts, strict=True)
        positions = torch.tensor([at for end, count in ends for at in range(end - count, end)])
        join_fixed_splits[(queries, heads)](
            *(sums, weights, positions, exponents, out, window, heads * dim),
            HEADS=heads,
            DIM=dim,
            BLOCK_DIM=constants["BLOCK_DIM"],
            SPLITS=SPLITS,
            SPLIT=SPLIT,
            AT_ONCE=2,
            HAS_SINKS=constants["HAS_SINKS"],
        )
    return numpy64(out)


def _case(programs: int, shape: str, extra: str, kind: int, dtype: torch.dtype) -> tuple[Float64Array, Float64Array]:
    rng, (heads, _, dim) = np.random.default_rng(1), SHAPES[shape]
    lengths, counts = [1, 20, 70, 37], [1, 1, 13, 17]  # first token, decode, chunk of a prompt, prompt
    pool, tables, stored = batch(rng, kind, dtype, SHAPES[shape], lengths)
    q = random(rng, sum(counts), heads, dim, dtype=dtype)
    options, same = extras(rng, extra, heads)
    seen = [(s, lengths[s] - counts[s] + at + 1) for s in range(len(counts)) for at in range(counts[s])]
    wanted = expected_rows(q, pool, tables, seen, dim**-0.5, **same)
    return attention(q, pool, tables, stored, counts, dim**-0.5, programs=programs, **options), wanted


def cases() -> Iterator[Case]:
    """Every head size, then windows, softcaps and sinks, then precisions of the pool."""
    grid = [
        *((shape, "", FLOAT, torch.float32) for shape in SHAPES),
        *((GQA, extra, FLOAT, torch.float32) for extra in ("window", "softcap", "sinks", ALL)),
        *((ODD, "window", kind, torch.float32) for kind in (FP8, INT8, INT4)),
        *((GQA, "", kind, torch.float16) for kind in (FLOAT, INT8)),
        (WIDE, "", INT4, torch.float16),
    ]
    for shape, extra, kind, dtype in grid:
        name = f"{shape}, {extra}" if extra else shape
        precision = NAMES[dtype] if kind == FLOAT else f"{NAMES[dtype]}, {KINDS[kind]} pool"
        for kernel, programs in (("fixed_split_attention", 1), ("join_fixed_splits", 2)):
            yield Case(kernel, name, precision, LIMITS[dtype], partial(_case, programs, shape, extra, kind, dtype))
