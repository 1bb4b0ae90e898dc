"""Attention of prompts by warps that copy and warps that compute: launches, and cases over its head sizes."""

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import numpy as np
import torch

from ingot.kernels import prefill_attention as kernel_module
from tests.kernels.attention_cases import LIMITS, expected_rows, extras
from tests.kernels.cases import DOT_TYPES, Case, power_of_two, random
from tests.kernels.reference import FLOAT, Float64Array, Pool, numpy64
from tests.simulators import gluon_emulator

gluon_emulator.install(kernel_module)
TILE_QUERIES, ROWS, KEYS = 32, 128, 128
SHAPES = {  # heads, kv heads, dim
    "head 64, group 8": (16, 2, 64),
    "head 128, group 4": (8, 2, 128),
    "head 128, group 7": (7, 1, 128),
    "head 64, group 5": (5, 1, 64),
    "head 128, group 2": (4, 2, 128),
    "head 64, group 1": (2, 2, 64),
}
BLOCK_TOKENS = dict(zip(SHAPES, (16, 64, 8, 128, 16, 32), strict=True))


def prefill(
    q: torch.Tensor,
    pool: Pool,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    counts: list[int],
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    *,
    heads: int,
    tiles: list[tuple[int, int]] | None = None,
    module: ModuleType = kernel_module,
) -> torch.Tensor:
    """Launch the kernel for rows q [queries, heads * dim and perhaps more]; one tile is padding, none is NaN."""
    _, _, kv_heads, block_tokens, dim = pool.codes.shape
    group = power_of_two(heads // kv_heads)
    queries = ROWS // group
    usual = [(s, start) for s, count in enumerate(counts) for start in range(0, count, TILE_QUERIES)] + [(-1, 0)]
    sequences, starts = (torch.tensor(column, dtype=torch.int32) for column in zip(*(tiles or usual), strict=True))
    out = torch.full_like(q, torch.nan)
    module.prefill_attention[(len(sequences), kv_heads, max(1, TILE_QUERIES // queries))](
        *(q, pool.codes, pool.scales, tables, lengths, torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)),
        *(sequences, starts, sinks, out, scale, softcap, window, q.stride(0), out.stride(0), tables.stride(0)),
        **pool.strides,
        GROUP=heads // kv_heads,
        BLOCK_GROUP=group,
        DIM=dim,
        BLOCK_DIM=dim,
        WIDTH=dim,
        BLOCK_TOKENS=block_tokens,
        TILE_QUERIES=TILE_QUERIES,
        QUERIES=queries,
        TILE=KEYS,
        KIND=FLOAT,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        DTYPE=DOT_TYPES[torch.float16],
    )
    return out


def _prefill(shape: str, extra: str) -> tuple[Float64Array, Float64Array]:
    rng, (heads, kv_heads, dim) = np.random.default_rng(3), SHAPES[shape]
    lengths, counts, tokens = [1, 300, 130, 289], [1, 1, 40, 33], BLOCK_TOKENS[shape]
    needed = [-(-length // tokens) for length in lengths]
    pool = Pool.random(rng, (sum(needed) + 1, kv_heads, tokens, dim), FLOAT)
    tables, order = np.zeros((len(lengths), max(needed)), np.int32), rng.permutation(sum(needed) + 1)
    for row, count in enumerate(needed):
        tables[row, :count], order = order[:count], order[count:]
    q = random(rng, sum(counts), heads, dim, dtype=torch.float16)
    options, same = extras(rng, extra, heads)
    stored = torch.tensor(lengths, dtype=torch.int32)
    found = prefill(q.flatten(1), pool, torch.from_numpy(tables), stored, counts, dim**-0.5, heads=heads, **options)
    seen = [(s, lengths[s] - counts[s] + at + 1) for s in range(len(counts)) for at in range(counts[s])]
    wanted = expected_rows(q, pool, torch.from_numpy(tables), seen, dim**-0.5, **same)
    return numpy64(found).reshape(wanted.shape), wanted


def cases() -> Iterator[Case]:
    """Every head size, then a window, and a softcap and sinks with it."""
    grid: list[tuple[str, str]] = [(shape, "") for shape in SHAPES]
    grid += [("head 128, group 4", "window"), ("head 64, group 8", "window, softcap, sinks")]
    for shape, extra in grid:
        name = f"{shape}, {extra}" if extra else shape
        yield Case("prefill_attention", name, "float16", LIMITS[torch.float16], partial(_prefill, shape, extra))
