"""Attention over a paged pool: decode with its chunks, and ragged batches, over difficult shapes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from ingot.kernels.decode_attention import decode_attention
from ingot.kernels.ragged_attention import ragged_attention
from tests.kernels.cases import DOT_TYPES, NAMES, Case, power_of_two, random
from tests.kernels.reference import FLOAT, FP8, INT4, INT8, KINDS, Float64Array, Pool, attend, numpy64

BLOCK_TOKENS = 16
# Float32 sums only, or operands of the matmuls rounded to float16.
LIMITS = {torch.float32: 5e-6, torch.float16: 4e-3}
SHAPES = {  # heads, kv heads, dim
    "head 64, group 4": (8, 2, 64),
    "head 32, one head": (1, 1, 32),
    "head 128, group 7": (7, 1, 128),
    "head 8": (4, 4, 8),
    "head 80, group 3": (6, 2, 80),
    "head 96": (2, 2, 96),
    "head 256, group 2": (2, 1, 256),
}
GQA, ODD, WIDE = "head 64, group 4", "head 80, group 3", "head 256, group 2"
EXTRAS: dict[str, dict[str, Any]] = {
    "": {},
    "window": {"window": 20},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "window, softcap, sinks": {"window": 17, "softcap": 20.0, "sinks": True},
}
ALL = "window, softcap, sinks"
LENGTHS = [1, 17, 33, 70]


def shape_constants(pool: Pool, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of both kernels."""
    kv_heads, width = pool.codes.shape[2], pool.codes.shape[4]
    return {
        "GROUP": heads // kv_heads,
        "DIM": pool.dim,
        "BLOCK_DIM": power_of_two(pool.dim, 16),
        "WIDTH": width,
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "KIND": pool.kind,
        "DTYPE": DOT_TYPES[dtype],
    }


def tile_of(kind: int) -> int:
    """Tokens read at once: the fewest that compile (cubins.require_whole_fragments)."""
    return 32 if kind == INT4 else 16


def decode(
    q: torch.Tensor,
    pool: Pool,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> Float64Array:
    """Run the kernel: [sequences, heads, dim]. Three chunks of a tile at least, shared by two programs."""
    sequences, heads, dim = q.shape
    tile = tile_of(pool.kind)
    split = {"CHUNKS": 3, "FILLING": 2, "USUAL_CHUNK": tile, "TILE": tile}
    sums = torch.full((sequences, heads, 3, dim), torch.nan)
    weights = torch.full((sequences, heads, 3, 2), torch.nan)
    kv_heads = pool.codes.shape[2]
    counters, out = torch.zeros(sequences * kv_heads, dtype=torch.int32), torch.full_like(q, torch.nan)
    decode_attention[(sequences, kv_heads, 2)](
        *(q, pool.codes, pool.scales, tables, lengths, sinks, sums, weights, counters, out, scale, softcap, window),
        *(heads * dim, heads * dim, tables.shape[1]),
        **pool.strides,
        **shape_constants(pool, heads, q.dtype),
        **split,
        KV_HEADS=kv_heads,
        BLOCK_GROUP=power_of_two(heads // kv_heads, 16),
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
    )
    return numpy64(out)


def ragged(
    q: torch.Tensor,
    pool: Pool,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    counts: list[int],
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> Float64Array:
    """Run the kernel: [queries, heads, dim]. Tiles of 16 queries, 8 per program; one tile is padding."""
    _, heads, dim = q.shape
    kv_heads = pool.codes.shape[2]
    tiles = [(s, start) for s, count in enumerate(counts) for start in range(0, count, 16)] + [(-1, 0)]
    sequences, starts = (torch.tensor(column, dtype=torch.int32) for column in zip(*tiles, strict=True))
    out = torch.full_like(q, torch.nan)
    ragged_attention[(len(tiles), kv_heads, 2)](
        *(q, pool.codes, pool.scales, tables, lengths),
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        *(sequences, starts, sinks, out, scale, softcap, window, heads * dim, heads * dim, tables.shape[1]),
        **pool.strides,
        **shape_constants(pool, heads, q.dtype),
        BLOCK_GROUP=power_of_two(heads // kv_heads, 2),
        TILE_QUERIES=16,
        QUERIES=8,
        TILE=tile_of(pool.kind),
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
    )
    return numpy64(out)


def batch(
    rng: np.random.Generator, kind: int, dtype: torch.dtype, shape: tuple[int, int, int], lengths: list[int]
) -> tuple[Pool, torch.Tensor, torch.Tensor]:
    """A pool, tables of distinct blocks in random order, and lengths."""
    _, kv_heads, dim = shape
    needed = [-(-length // BLOCK_TOKENS) for length in lengths]
    blocks = sum(needed) + 2
    float_pool = torch.float32 if kind == FLOAT and dtype == torch.float32 else None
    pool = Pool.random(rng, (blocks, kv_heads, BLOCK_TOKENS, dim), kind, float_pool)
    order, tables = rng.permutation(blocks), np.zeros((len(lengths), max(needed)), np.int32)
    for row, count in enumerate(needed):
        tables[row, :count], order = order[:count], order[count:]
    return pool, torch.from_numpy(tables), torch.tensor(lengths, dtype=torch.int32)


def extras(rng: np.random.Generator, name: str, heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the kernel, and of the reference."""
    options = dict(EXTRAS[name])
    sinks = torch.from_numpy(rng.standard_normal(heads).astype(np.float32))
    if options.pop("sinks", False):
        return options | {"sinks": sinks}, options | {"sinks": numpy64(sinks)}
    return options, options


def expected_rows(
    q: torch.Tensor, pool: Pool, tables: torch.Tensor, seen: list[tuple[int, int]], scale: float, **options: Any
) -> Float64Array:
    """Reference results; `seen` gives for each query its sequence and how many of its tokens are visible."""
    rows = [pool.sequence(tables[sequence].numpy(), length) for sequence, length in seen]
    return np.stack([attend(numpy64(x), *kv, scale, **options) for x, kv in zip(q, rows, strict=True)])


def _decode(shape: str, extra: str, kind: int, dtype: torch.dtype) -> tuple[Float64Array, Float64Array]:
    rng, (heads, _, dim) = np.random.default_rng(0), SHAPES[shape]
    pool, tables, lengths = batch(rng, kind, dtype, SHAPES[shape], LENGTHS)
    q = random(rng, len(LENGTHS), heads, dim, dtype=dtype)
    options, same = extras(rng, extra, heads)
    wanted = expected_rows(q, pool, tables, list(enumerate(LENGTHS)), dim**-0.5, **same)
    return decode(q, pool, tables, lengths, dim**-0.5, **options), wanted


def _ragged(shape: str, extra: str, kind: int, dtype: torch.dtype) -> tuple[Float64Array, Float64Array]:
    rng, (heads, _, dim) = np.random.default_rng(1), SHAPES[shape]
    lengths, counts = [1, 20, 40, 17], [1, 1, 13, 17]  # first token, decode, chunk of a prompt, prompt
    pool, tables, stored = batch(rng, kind, dtype, SHAPES[shape], lengths)
    q = random(rng, sum(counts), heads, dim, dtype=dtype)
    options, same = extras(rng, extra, heads)
    seen = [(s, lengths[s] - counts[s] + at + 1) for s in range(len(counts)) for at in range(counts[s])]
    wanted = expected_rows(q, pool, tables, seen, dim**-0.5, **same)
    return ragged(q, pool, tables, stored, counts, dim**-0.5, **options), wanted


def cases() -> Iterator[Case]:
    """Every head size, then windows, softcaps and sinks, then precisions of the pool."""
    half = torch.float16
    grid = [
        *((shape, "", FLOAT, torch.float32) for shape in SHAPES),
        *((GQA, extra, FLOAT, torch.float32) for extra in EXTRAS if extra),
        *((ODD, ALL, kind, torch.float32) for kind in (FP8, INT8, INT4)),
        *((GQA, "", kind, half) for kind in (FLOAT, FP8, INT8, INT4)),
        *((WIDE, "", kind, half) for kind in (FLOAT, INT4)),
    ]
    for shape, extra, kind, dtype in grid:
        name = f"{shape}, {extra}" if extra else shape
        precision = NAMES[dtype] if kind == FLOAT else f"{NAMES[dtype]}, {KINDS[kind]} pool"
        for kernel, run in (("decode_attention", _decode), ("ragged_attention", _ragged)):
            yield Case(kernel, name, precision, LIMITS[dtype], partial(run, shape, extra, kind, dtype))
