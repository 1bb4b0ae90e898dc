"""Random problems of latent attention: the write of latents, attention to them, matmuls of each head."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from ingot.kernels.head_matmul import head_matmul, head_matmul_nbits
from ingot.kernels.latent_attention import latent_decode_attention, latent_kv_write, latent_ragged_attention
from tests.kernels.cases import DOT_TYPES, NAMES, Case, power_of_two, random
from tests.kernels.reference import FLOAT, FP8, INT8, STEPS, Float64Array, Pool, attend, numpy64, rope
from tests.kernels.row_cases import spans

Rng = np.random.Generator
Outcome = tuple[Float64Array, Float64Array, float]  # found, expected, and the largest error over the largest value
LIMITS = {torch.float32: 8e-6, torch.float16: 6e-3}
_MATMUL_LIMIT = 4e-6
_BLOCK_TOKENS = 8


def _precision(rng: Rng) -> tuple[int, torch.dtype]:
    """The pool's kind, and the type of the activations: the first numbers that problems with a pool draw."""
    kind = int(rng.choice([FLOAT, FP8, INT8]))
    return kind, torch.float32 if rng.integers(2) or kind == FLOAT else torch.float16


def _sizes(rng: Rng) -> tuple[int, int, int, int]:
    """Heads, plain dims of a query, rotated dims, rank."""
    heads, plain = int(rng.choice([1, 3, 4, 20, 40])), int(rng.choice([6, 16]))
    return heads, plain, int(rng.choice([2, 8, 16])), int(rng.choice([8, 24, 40, 64]))


@dataclass
class Latents:
    """A pool of latents [blocks, tokens, rope + rank] with NaN in all that no sequence has, and its sequences."""

    pool: Pool
    rank: int
    rope: int
    tables: NDArray[np.int32]
    lengths: list[int]

    @classmethod
    def random(cls, rng: Rng, rope_dims: int, rank: int, kind: int, lengths: list[int]) -> "Latents":
        used = [-(-length // _BLOCK_TOKENS) for length in lengths]
        floats = torch.float32 if kind == FLOAT else None
        shape = (sum(used) + 1, 1, _BLOCK_TOKENS, rope_dims + rank)
        pool, order = Pool.random(rng, shape, kind, floats), rng.permutation(sum(used) + 1)
        pool.codes, pool.scales = pool.codes[:, :1].contiguous(), pool.scales[:, :1].contiguous()
        poisoned = pool.codes if kind == FLOAT else pool.scales
        poisoned[order[-1]] = torch.nan
        tables = np.full((len(used), max(used) + 1), order[-1], np.int32)
        for row, (count, length) in enumerate(zip(used, lengths, strict=True)):
            tables[row, :count], order = order[:count], order[count:]
            if length % _BLOCK_TOKENS:
                poisoned[tables[row, count - 1], :, :, length % _BLOCK_TOKENS :] = torch.nan
        return cls(pool, rank, rope_dims, tables, lengths)

    @property
    def strides(self) -> dict[str, int]:
        return {
            "block_stride": _BLOCK_TOKENS * (self.rope + self.rank),
            "scale_block_stride": _BLOCK_TOKENS,
        }

    @property
    def constants(self) -> dict[str, int]:
        return {
            "RANK": self.rank,
            "BLOCK_RANK": power_of_two(self.rank, 16),
            "ROPE": self.rope,
            "BLOCK_ROPE": power_of_two(self.rope, 16),
            "BLOCK_TOKENS": _BLOCK_TOKENS,
            "KIND": self.pool.kind,
        }

    def keys(self, row: int, length: int) -> Float64Array:
        """Keys [length, 1, rope + rank]."""
        vectors = self.pool.vectors()[self.tables[row], 0, 0]
        return np.asarray(vectors.reshape(-1, 1, self.rope + self.rank)[:length])


@dataclass
class Queries:
    """Queries of random heads with their tables of a rope: raw [tokens, heads * (plain + rope)], and absorbed."""

    heads: int
    plain: int
    raw: torch.Tensor
    absorbed: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    scale: float

    @classmethod
    def random(cls, rng: Rng, count: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> "Queries":
        heads, plain, rope_dims, rank = sizes
        raw = random(rng, count, heads * (plain + rope_dims) + 5, dtype=dtype)
        cos, sin = (random(rng, 200, rope_dims // 2) for _ in range(2))
        absorbed = random(rng, count, heads * rank, dtype=dtype)
        return cls(heads, plain, raw, absorbed, cos, sin, float(rng.uniform(0.05, 0.3)))

    def attended(self, row: int, keys: Float64Array, rank: int) -> Float64Array:
        """The result [heads, rank] of a query that is the last of these keys [tokens, 1, rope + rank]."""
        width = self.plain + 2 * self.cos.shape[1]
        part = numpy64(self.raw[row, : self.heads * width]).reshape(1, self.heads, width)[..., self.plain :]
        turned = rope(part, np.array([len(keys) - 1]), numpy64(self.cos), numpy64(self.sin))[0]
        query = np.concatenate([turned, numpy64(self.absorbed[row]).reshape(self.heads, rank)], axis=1)
        values = np.concatenate([keys[..., -rank:], np.zeros_like(keys[..., rank:])], axis=-1)
        return attend(query, keys, values, self.scale)[:, :rank]

    def arguments(self) -> dict[str, object]:
        """Arguments and constants of both kernels."""
        width = self.plain + 2 * self.cos.shape[1]
        given = {"q": self.raw, "absorbed": self.absorbed, "cos": self.cos, "sin": self.sin, "scale": self.scale}
        strides = {"q_offset": self.plain, "q_stride": self.raw.stride(0), "absorbed_stride": self.absorbed.stride(0)}
        return {**given, **strides, "HEADS": self.heads, "HEAD_DIM": width, "DTYPE": DOT_TYPES[self.raw.dtype]}


def _problem(
    rng: Rng, precision: tuple[int, torch.dtype], lengths: list[int], count: int
) -> tuple[Latents, Queries, dict[str, object]]:
    """Latents, queries, and what both kernels are given."""
    sizes, (kind, dtype) = _sizes(rng), precision
    latents, queries = Latents.random(rng, sizes[2], sizes[3], kind, lengths), Queries.random(rng, count, sizes, dtype)
    given = {
        "pool": latents.pool.codes,
        "scales": latents.pool.scales,
        "tables": torch.from_numpy(latents.tables),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "out_stride": sizes[0] * sizes[3],
        "table_stride": latents.tables.shape[1],
        "TILE": 16,
    }
    return latents, queries, {**given, **queries.arguments(), **latents.strides, **latents.constants}


def decode(rng: Rng) -> Outcome:
    """Sequences of one query; one in five is padding. Chunks are shared by one to three programs."""
    precision = _precision(rng)
    lengths = [int(length) for length in rng.integers(1, 90, rng.integers(1, 4))]
    latents, queries, given = _problem(rng, precision, lengths, len(lengths))
    padding = rng.random(len(lengths)) < 0.2
    given["lengths"] = torch.tensor(np.where(padding, 0, lengths), dtype=torch.int32)
    heads, rank, block, chunks = queries.heads, latents.rank, 16 * int(rng.integers(1, 3)), 3
    tiles = -(-heads // block)
    out = torch.full((len(lengths), heads * rank), torch.nan, dtype=queries.raw.dtype)
    counters = torch.zeros(len(lengths) * tiles, dtype=torch.int32)
    latent_decode_attention[(len(lengths), tiles, int(rng.integers(1, 4)))](
        **given,
        sums=torch.full((len(lengths), heads, chunks, rank), torch.nan),
        weights=torch.full((len(lengths), heads, chunks, 2), torch.nan),
        counters=counters,
        out=out,
        BLOCK_HEADS=block,
        CHUNKS=chunks,
        FILLING=int(rng.integers(1, 9)),
        USUAL_CHUNK=32,
    )
    wanted = [
        queries.attended(row, latents.keys(row, length), rank) * (not padding[row])
        for row, length in enumerate(lengths)
    ]
    assert not counters.any()
    return numpy64(out).reshape(-1, heads, rank), np.array(wanted), LIMITS[queries.raw.dtype]


def ragged(rng: Rng) -> Outcome:
    """Chunks of prompts: several queries of each sequence, in tiles of 8, some of which do not exist."""
    precision = _precision(rng)
    lengths = [int(length) for length in rng.integers(1, 60, rng.integers(1, 4))]
    counts = [int(rng.integers(1, min(length, 20) + 1)) for length in lengths]
    latents, queries, given = _problem(rng, precision, lengths, sum(counts))
    heads, rank, block = queries.heads, latents.rank, int(rng.choice([4, 16, 32]))
    per_program = 4 if block == 4 else int(rng.choice([1, 2]))
    tiles = [(s, start) for s, count in enumerate(counts) for start in range(0, count, 8)] + [(-1, 0)]
    sequences, starts = (torch.tensor(column, dtype=torch.int32) for column in zip(*tiles, strict=True))
    out = torch.full((sum(counts), heads * rank), torch.nan, dtype=queries.raw.dtype)
    latent_ragged_attention[(len(tiles), -(-heads // block), 8 // per_program)](
        **given,
        query_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        tile_sequences=sequences,
        tile_starts=starts,
        out=out,
        BLOCK_HEADS=block,
        QUERIES=per_program,
    )
    ends = [
        (s, length - count + at + 1)
        for s, (length, count) in enumerate(zip(lengths, counts, strict=True))
        for at in range(count)
    ]
    wanted = [queries.attended(row, latents.keys(s, end), rank) for row, (s, end) in enumerate(ends)]
    return numpy64(out).reshape(-1, heads, rank), np.array(wanted), LIMITS[queries.raw.dtype]


def _written(rng: Rng) -> Outcome:
    """Stored vectors over their largest magnitude; what no slot names keeps its bytes."""
    kind, dtype = _precision(rng)[0], torch.float32
    (_, _, rope_dims, rank), parts, tokens = _sizes(rng), int(rng.integers(1, 4)), int(rng.integers(1, 7))
    latents = Latents.random(rng, rope_dims, rank, kind, [5 * _BLOCK_TOKENS])
    latents.pool.codes.zero_()
    latents.pool.scales.zero_()
    slots = rng.permutation(5 * _BLOCK_TOKENS)[:tokens]
    slots[rng.random(tokens) < 0.2] = -1
    x, gap = random(rng, parts, tokens, rank + rope_dims + 3, dtype=dtype), int(rng.integers(0, 4))
    positions = rng.integers(0, 50, tokens)
    cos, sin, norm = random(rng, 50, rope_dims // 2), random(rng, 50, rope_dims // 2), random(rng, rank, dtype=dtype)
    latent_kv_write[(tokens,)](
        *(x, x, torch.from_numpy(positions), torch.from_numpy(slots), cos, sin, norm),
        *(latents.pool.codes, latents.pool.scales, 1e-5, gap, gap + rank, x.shape[2], x[0].numel()),
        **latents.strides,
        **latents.constants,
        PARTS=parts,
    )
    rows = numpy64(x).sum(axis=0)
    latent = rows[:, gap : gap + rank]
    latent = latent / np.sqrt((latent**2).mean(axis=1, keepdims=True) + 1e-5) * numpy64(norm)
    turned = rope(rows[:, None, gap + rank : gap + rank + rope_dims], positions, numpy64(cos), numpy64(sin))[:, 0]
    wanted = np.zeros((6 * _BLOCK_TOKENS, rope_dims + rank))
    known = slots >= 0
    wanted[slots[known]] = np.concatenate([turned, latent], axis=1)[known]
    found = latents.pool.vectors()[:, 0, 0].reshape(wanted.shape)
    largest = np.abs(wanted).max(axis=1, keepdims=True)
    largest[largest == 0] = 1
    return found / largest, wanted / largest, _write_limit(kind)


def _write_limit(kind: int) -> float:
    return 1e-6 if kind == FLOAT else STEPS[kind]


def _multiplied(rng: Rng, *, bits: int) -> Outcome:
    """Each head by its own weight; a head's columns begin anywhere, with NaN between the heads."""
    rows, heads, n, columns = (
        int(rng.integers(1, 40)),
        int(rng.integers(1, 5)),
        int(rng.integers(1, 50)),
        int(rng.integers(3, 140)),
    )
    gap, offset = int(rng.integers(0, 9)), int(rng.integers(0, 5))
    x = torch.full((rows, offset + heads * (columns + gap)), torch.nan)
    values = random(rng, rows, heads, columns)
    x[:, offset:].view(rows, heads, columns + gap)[..., :columns] = values
    tile_rows, tile = int(rng.choice([16, 32])), int(rng.choice([16, 32]))
    out = torch.full((rows, heads * n), torch.nan)
    grid = (-(-rows // tile_rows), -(-n // tile), heads)
    common = {"rows": rows, "x_offset": offset, "x_stride": x.stride(0), "out_stride": heads * n, "out": out}
    shape = {"HEAD_STRIDE": columns + gap, "N": n, "COLUMNS": columns, "TILE_ROWS": tile_rows, "TILE": tile}
    if bits == 16:
        plain = random(rng, heads, n, columns)
        weight = numpy64(plain)
        head_matmul[grid](x, plain, **common, **shape, TILE_COLUMNS=32)
    else:
        group = int(rng.choice([32, 64, 128]))
        groups = -(-columns // group)
        codes = rng.integers(0, 1 << bits, (heads, n, columns), np.uint8)
        zeros = rng.integers(0, 1 << bits, (heads, n, groups), np.uint8)
        scales = rng.uniform(-0.1, 0.1, zeros.shape).astype(np.float16)
        of = np.arange(columns) // group
        weight = (codes.astype(np.float64) - zeros[:, :, of]) * scales.astype(np.float64)[:, :, of]
        packed = torch.stack([spans(one, bits) for one in codes])
        turned = [torch.from_numpy(np.ascontiguousarray(one.swapaxes(1, 2))) for one in (scales, zeros)]
        form = {"SPANS": packed.shape[2] // 64, "GROUP": group, "GROUPS": groups, "BITS": bits, "SPANS_AT_ONCE": 1}
        head_matmul_nbits[grid](
            *(x, packed, *turned), **common, **shape, **form, HAS_ZERO_POINTS=True, SCALE_WEIGHTS=True, DTYPE=tl.float32
        )
    wanted = np.einsum("rhk,hnk->rhn", numpy64(values), weight)
    return numpy64(out).reshape(wanted.shape), wanted, _MATMUL_LIMIT


RUNS: Mapping[str, Callable[[Rng], Outcome]] = {
    "latent_kv_write": _written,
    "latent_decode_attention": decode,
    "latent_ragged_attention": ragged,
    "head_matmul": partial(_multiplied, bits=16),
    "head_matmul_nbits": lambda rng: _multiplied(rng, bits=int(rng.choice([4, 8]))),
}


def cases() -> Iterator[Case]:
    """A few random problems of each kernel, the same each time."""
    for kernel in RUNS:
        for seed in range(3):
            limit, precision = _limit_of(kernel, _rng(kernel, seed))
            yield Case(kernel, f"random problem {seed}", precision, limit, partial(_case, kernel, seed))


def _limit_of(kernel: str, rng: Rng) -> tuple[float, str]:
    """The largest error of a problem, and its precision in words."""
    if kernel.startswith("head_matmul"):
        return _MATMUL_LIMIT, "float32" if kernel == "head_matmul" else "4 and 8 bits, float32"
    kind, dtype = _precision(rng)
    pool = {FLOAT: "float32", FP8: "fp8", INT8: "int8"}[kind]
    if kernel == "latent_kv_write":
        return _write_limit(kind), pool
    return LIMITS[dtype], f"{NAMES[dtype]}, {pool} pool"


def _rng(kernel: str, seed: int) -> Rng:
    return np.random.default_rng([seed, *kernel.encode()])


def _case(kernel: str, seed: int) -> tuple[Float64Array, Float64Array]:
    found, wanted, _ = RUNS[kernel](_rng(kernel, seed))
    return found, wanted
