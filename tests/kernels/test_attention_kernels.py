"""Paged attention in the interpreter: decode with its chunks, and ragged batches, over shapes that hurt."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from ingot.kernels.decode_attention import decode_attention, join_chunks
from ingot.kernels.ragged_attention import ragged_attention
from tests.kernels.reference import FLOAT, FP8, INT4, INT8, Float64Array, Pool, attend, numpy64

BLOCK_TOKENS = 16
DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16}
# Against float64: float32 sums alone, or operands of the products rounded to float16.
LIMITS = {torch.float32: 5e-6, torch.float16: 4e-3}


def power_of_two(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length())


def shape_constants(pool: Pool, heads: int, dtype: torch.dtype) -> dict[str, Any]:
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


def decode(
    q: torch.Tensor,
    pool: Pool,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    chunk: int = 32,
    tile: int = 16,
) -> Float64Array:
    """Both kernels, one after the other: [sequences, heads, dim]."""
    sequences, heads, dim = q.shape
    chunks = -(-tables.shape[1] * BLOCK_TOKENS // chunk)
    sums = torch.full((sequences, heads, chunks, dim), torch.nan)
    weights = torch.full((sequences, heads, chunks, 2), torch.nan)
    kv_heads = pool.codes.shape[2]
    constants = shape_constants(pool, heads, q.dtype)
    decode_attention[(sequences, kv_heads, chunks)](
        *(q, pool.codes, pool.scales, tables, lengths, sums, weights, scale, softcap, window),
        *(heads * dim, tables.shape[1]),
        **pool.strides,
        **constants,
        KV_HEADS=kv_heads,
        BLOCK_GROUP=power_of_two(heads // kv_heads, 16),
        CHUNK=chunk,
        TILE=tile,
        HAS_SOFTCAP=softcap > 0,
    )
    out = torch.full_like(q, torch.nan)
    join_chunks[(sequences, heads)](
        *(sums, weights, lengths, sinks, out, window, chunks, heads * dim),
        HEADS=heads,
        DIM=dim,
        BLOCK_DIM=constants["BLOCK_DIM"],
        CHUNK=chunk,
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
    tile_queries: int = 8,
) -> Float64Array:
    """[queries, heads, dim]; one tile more than is needed, as in a bucket."""
    _, heads, dim = q.shape
    kv_heads = pool.codes.shape[2]
    tiles = [(s, start) for s, count in enumerate(counts) for start in range(0, count, tile_queries)] + [(-1, 0)]
    sequences, starts = (torch.tensor(column, dtype=torch.int32) for column in zip(*tiles, strict=True))
    out = torch.full_like(q, torch.nan)
    ragged_attention[(len(tiles), kv_heads)](
        *(q, pool.codes, pool.scales, tables, lengths),
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        *(sequences, starts, sinks, out, scale, softcap, window, heads * dim, heads * dim, tables.shape[1]),
        **pool.strides,
        **shape_constants(pool, heads, q.dtype),
        BLOCK_GROUP=power_of_two(heads // kv_heads, -(-16 // tile_queries)),
        TILE_QUERIES=tile_queries,
        TILE=16,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
    )
    return numpy64(out)


def batch(
    rng: np.random.Generator, kind: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, lengths: list[int]
) -> tuple[Pool, torch.Tensor, torch.Tensor]:
    """A pool, tables of distinct blocks in random order, and lengths."""
    needed = [-(-length // BLOCK_TOKENS) for length in lengths]
    blocks = sum(needed) + 2
    float_pool = torch.float32 if kind == FLOAT and dtype == torch.float32 else None
    pool = Pool.random(rng, (blocks, kv_heads, BLOCK_TOKENS, dim), kind, float_pool)
    order, tables = rng.permutation(blocks), np.zeros((len(lengths), max(needed)), np.int32)
    for row, count in enumerate(needed):
        tables[row, :count], order = order[:count], order[count:]
    return pool, torch.from_numpy(tables), torch.tensor(lengths, dtype=torch.int32)


SHAPES = {  # heads, kv heads, dim
    "GQA": (8, 2, 64),
    "one head": (1, 1, 32),
    "group of 7": (7, 1, 128),
    "tiny head": (4, 4, 8),
    "odd head": (6, 2, 80),
    "wide head": (2, 1, 256),
}
LENGTHS = [1, 17, 32, 33, 70]
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all": {"window": 17, "softcap": 20.0, "sinks": True},
}


def extras(rng: np.random.Generator, name: str, heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's arguments, and the reference's."""
    options = dict(EXTRAS[name])
    sinks = torch.from_numpy(rng.standard_normal(heads).astype(np.float32))
    if options.pop("sinks", False):
        return options | {"sinks": sinks}, options | {"sinks": numpy64(sinks)}
    return options, options


def expected_rows(
    q: torch.Tensor, pool: Pool, tables: torch.Tensor, seen: list[tuple[int, int]], scale: float, **options: Any
) -> Float64Array:
    """seen: for each query its sequence and how many tokens of it came by then."""
    rows = [pool.sequence(tables[sequence].numpy(), length) for sequence, length in seen]
    return np.stack([attend(numpy64(x), *kv, scale, **options) for x, kv in zip(q, rows, strict=True)])


CASES = [
    *((shape, "plain", FLOAT, torch.float32) for shape in SHAPES),
    *(("GQA", extra, FLOAT, torch.float32) for extra in EXTRAS if extra != "plain"),
    *((shape, "all", kind, torch.float32) for shape in ("GQA", "odd head") for kind in (FP8, INT8, INT4)),
    *((shape, "plain", kind, torch.float16) for shape in ("GQA", "wide head") for kind in (FLOAT, FP8, INT8, INT4)),
]


@pytest.mark.parametrize(("shape", "extra", "kind", "dtype"), CASES)
def test_decode_attention_equals_numpy(shape: str, extra: str, kind: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    heads, kv_heads, dim = SHAPES[shape]
    pool, tables, lengths = batch(rng, kind, dtype, heads, kv_heads, dim, LENGTHS)
    q = torch.from_numpy(rng.standard_normal((len(LENGTHS), heads, dim))).to(dtype)
    options, same = extras(rng, extra, heads)
    wanted = expected_rows(q, pool, tables, list(enumerate(LENGTHS)), dim**-0.5, **same)
    found = decode(q, pool, tables, lengths, dim**-0.5, **options)
    assert np.abs(found - wanted).max() <= LIMITS[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize(("shape", "extra", "kind", "dtype"), CASES)
def test_ragged_attention_equals_numpy(shape: str, extra: str, kind: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    heads, kv_heads, dim = SHAPES[shape]
    lengths, counts = [1, 20, 40, 17], [1, 1, 13, 17]  # first token, decode, chunk of a prompt, prompt, chunk
    pool, tables, stored = batch(rng, kind, dtype, heads, kv_heads, dim, lengths)
    q = torch.from_numpy(rng.standard_normal((sum(counts), heads, dim))).to(dtype)
    options, same = extras(rng, extra, heads)
    seen = [(s, lengths[s] - counts[s] + at + 1) for s in range(len(counts)) for at in range(counts[s])]
    wanted = expected_rows(q, pool, tables, seen, dim**-0.5, **same)
    found = ragged(q, pool, tables, stored, counts, dim**-0.5, **options)
    assert np.abs(found - wanted).max() <= LIMITS[dtype] * np.abs(wanted).max()


def test_a_sequence_of_the_buckets_padding_gives_zeros_and_reads_nothing() -> None:
    rng = np.random.default_rng(2)
    pool, tables, _ = batch(rng, FLOAT, torch.float32, 4, 2, 32, [20, 20])
    q = torch.from_numpy(rng.standard_normal((2, 4, 32)).astype(np.float32))
    found = decode(q, pool, tables, torch.tensor([20, 0], dtype=torch.int32), 1.0)
    assert (found[1] == 0).all()
    assert np.isfinite(found[0]).all()


def test_the_bits_of_a_row_do_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(3)
    pool, tables, lengths = batch(rng, INT8, torch.float32, 8, 2, 64, [70, 3, 40])
    q = torch.from_numpy(rng.standard_normal((3, 8, 64)).astype(np.float32))
    together = decode(q, pool, tables, lengths, 0.125)
    for row in range(3):
        alone = decode(q[row : row + 1], pool, tables[row : row + 1], lengths[row : row + 1], 0.125)
        np.testing.assert_array_equal(alone[0], together[row])
