"""Attention kernels against float64 on random problems that no table lists: shapes, strides, windows, poisoned memory.

All that a kernel must not read is NaN: blocks of other sequences, tokens after a sequence's last, columns between rows.
`--kernel-cases N` draws N problems of each kernel instead of the few that CI takes.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from ingot.kernels.decode_attention import chunks_of, decode_attention
from ingot.kernels.ragged_attention import ragged_attention
from ingot.pipeline.targets.cuda.attention_operands import Chunks
from tests.kernels.attention_cases import LIMITS
from tests.kernels.cases import DOT_TYPES, power_of_two, random
from tests.kernels.reference import FLOAT, INT4, Float64Array, Pool, attend, numpy64
from tests.simulators.triton_interpreter import use_shuffled_programs

UNUSED_COLUMNS = 3  # of rows and of block tables


@dataclass(frozen=True)
class Problem:
    """Sequences over a pool; `counts` queries end each of them. A length of 0 is padding."""

    rng: np.random.Generator = field(repr=False)
    kv_heads: int
    group: int
    dim: int
    block_tokens: int
    kind: int
    dtype: torch.dtype
    lengths: list[int]
    counts: list[int]
    window: int
    softcap: float
    has_sinks: bool
    scale: float

    @classmethod
    def draw(cls, seed: int, *, is_decode: bool) -> "Problem":
        """Draw a problem: one query a sequence, or any number."""
        rng = np.random.default_rng([seed, is_decode])
        sequences = int(rng.integers(1, 4))
        lengths = [
            int(rng.integers(*[(0, 1), (1, 2), (2, 40), (40, 150)][rng.integers(0, 4)])) for _ in range(sequences)
        ]
        counts = [1 if is_decode else int(rng.integers(0, min(length, 30) + 1)) for length in lengths]
        return cls(
            rng=rng,
            kv_heads=int(rng.integers(1, 3)),
            group=int(rng.integers(1, 8)),
            dim=int(rng.choice([8, 16, 24, 32, 48, 64, 80, 128])),
            block_tokens=int(rng.choice([8, 16, 32, 64, 128])),
            kind=int(rng.integers(0, 4)),
            dtype=[torch.float32, torch.float16][rng.integers(0, 2)],
            lengths=lengths,
            counts=counts,
            window=int(rng.integers(*[(0, 1), (1, 20), (20, 100)][rng.integers(0, 3)])),
            softcap=float(rng.choice([0.0, rng.uniform(1, 30)])),
            has_sinks=bool(rng.integers(0, 2)),
            scale=float(rng.uniform(0.05, 0.4)),
        )

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def memory(self) -> tuple[Pool, torch.Tensor, torch.Tensor]:
        """A pool whose unused vectors are NaN, tables [sequences, blocks] with unused entries of such, lengths."""
        used = [-(-length // self.block_tokens) for length in self.lengths]
        blocks = sum(used) + 2
        floats = torch.float32 if self.kind == FLOAT and self.dtype == torch.float32 else None
        pool = Pool.random(self.rng, (blocks, self.kv_heads, self.block_tokens, self.dim), self.kind, floats)
        order = self.rng.permutation(blocks)
        tables = np.full((len(used), max(used) + UNUSED_COLUMNS), order[-1], np.int32)
        poisoned = pool.codes if self.kind == FLOAT else pool.scales
        poisoned[order[sum(used) :]] = torch.nan
        for row, (count, length) in enumerate(zip(used, self.lengths, strict=True)):
            tables[row, :count], order = order[:count], order[count:]
            if length % self.block_tokens:
                poisoned[tables[row, count - 1], :, :, length % self.block_tokens :] = torch.nan
        return pool, torch.from_numpy(tables), torch.tensor(self.lengths, dtype=torch.int32)

    def rows(self, count: int) -> torch.Tensor:
        """Queries [count, heads, dim], rows further apart than they are long, and NaN in between."""
        width = self.heads * self.dim
        memory = torch.full((count, width + UNUSED_COLUMNS), torch.nan, dtype=self.dtype)
        memory[:, :width] = random(self.rng, count, width, dtype=self.dtype)
        return memory

    def sinks(self) -> torch.Tensor | None:
        return random(self.rng, self.heads) if self.has_sinks else None

    def constants(self, pool: Pool) -> dict[str, Any]:
        return {
            "GROUP": self.group,
            "DIM": self.dim,
            "BLOCK_DIM": power_of_two(self.dim, 16),
            "WIDTH": self.dim // 2 if self.kind == INT4 else self.dim,
            "BLOCK_TOKENS": self.block_tokens,
            "KIND": self.kind,
            "DTYPE": DOT_TYPES[self.dtype],
            "HAS_SOFTCAP": self.softcap > 0,
            **pool.strides,
        }

    def expected(self, q: torch.Tensor, pool: Pool, tables: torch.Tensor, sinks: torch.Tensor | None) -> Float64Array:
        """Attention in float64, one query after the other: [queries, heads, dim]; zeros of padding."""
        options: dict[str, Any] = {"softcap": self.softcap, "window": self.window}
        if sinks is not None:
            options["sinks"] = numpy64(sinks)
        vectors, made = (
            numpy64(q[:, : self.heads * self.dim]).reshape(len(q), self.heads, self.dim),
            list[Float64Array](),
        )
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            keys, values = pool.sequence(tables[row].numpy(), length)
            for end in range(length - count + 1, length + 1):
                query = vectors[len(made)]
                made.append(attend(query, keys[:end], values[:end], self.scale, **options) if end else query * 0)
        return np.array(made).reshape(vectors.shape)

    def check(self, out: torch.Tensor, expected: Float64Array) -> None:
        """Compare with float64, and what is between the rows with what was there."""
        width = self.heads * self.dim
        found = numpy64(out[:, :width]).reshape(expected.shape)
        error = np.abs(found - expected).max(initial=0.0) / max(np.abs(expected).max(initial=0.0), 1e-30)
        assert error <= LIMITS[self.dtype], f"{self}: {error}"
        assert out[:, width:].isnan().all(), f"{self}: wrote between rows"


def decoded(problem: Problem, inputs: tuple[Any, ...], split: dict[str, int], programs: int) -> torch.Tensor:
    """The result of chunks shared by so many programs; counters are zeros before and after."""
    (q, pool, tables, lengths, sinks), rows, heads = inputs, len(problem.lengths), problem.heads
    sums = torch.full((rows, heads, split["CHUNKS"], problem.dim), torch.nan)
    weights, out = torch.full((rows, heads, split["CHUNKS"], 2), torch.nan), torch.full_like(q, torch.nan)
    counters = torch.zeros(rows * problem.kv_heads, dtype=torch.int32)
    decode_attention[(rows, problem.kv_heads, programs)](
        *(q, pool.codes, pool.scales, tables, lengths, sinks, sums, weights, counters, out),
        *(problem.scale, problem.softcap, problem.window, q.stride(0), out.stride(0), tables.stride(0)),
        **problem.constants(pool),
        **split,
        KV_HEADS=problem.kv_heads,
        BLOCK_GROUP=power_of_two(problem.group, 16),
        HAS_SINKS=sinks is not None,
    )
    assert not counters.any(), problem
    return out


def test_decode_attention_is_that_of_float64_however_many_programs_share_the_chunks(kernel_case: int) -> None:
    problem = Problem.draw(kernel_case, is_decode=True)
    pool, tables, lengths = problem.memory()
    tile, chunks = int(problem.rng.choice([16, 32])), int(problem.rng.integers(1, 7))
    split = {"CHUNKS": chunks, "USUAL_CHUNK": tile * int(problem.rng.integers(1, 3)), "TILE": tile}
    split["FILLING"] = int(problem.rng.integers(1, 9))
    inputs = problem.rows(len(lengths)), pool, tables, lengths, problem.sinks()
    found = decoded(problem, inputs, split, int(problem.rng.integers(1, chunks + 1)))
    problem.check(found, problem.expected(inputs[0], pool, tables, inputs[4]))
    assert torch.equal(found.nan_to_num(9.0), decoded(problem, inputs, split, chunks).nan_to_num(9.0)), problem


@triton.jit
def _sizes_of_chunks(sizes, most: tl.constexpr, filling: tl.constexpr, usual: tl.constexpr):
    length = tl.program_id(0) * 37 + 1
    tl.store(sizes + tl.program_id(0), chunks_of(length, 0, most, filling, usual, 32)[2])


def test_one_sequence_fills_a_large_gpu_from_few_tokens_on_with_the_same_chunks_in_every_bucket() -> None:
    one, many = (Chunks.of(8192, rows, groups=8) for rows in (1, 64))
    assert one.constants == many.constants
    assert (one.programs, many.programs) == (64, 4)
    lengths, sizes = 1 + 37 * np.arange(222), torch.zeros(222, dtype=torch.int32)
    _sizes_of_chunks[(222,)](sizes, *one.constants.values())
    counts = -(-lengths // sizes.numpy())
    assert {int(size) for size in sizes} == {32, 64, 96, 128}
    assert counts.max() <= one.count
    assert (8 * counts[lengths > 550] >= 96).all()  # programs of one sequence that have a chunk
    of_1024 = int(np.searchsorted(lengths, 1024))
    assert (int(sizes[of_1024]), int(counts[of_1024])) == (64, 17)


def test_the_order_in_which_programs_finish_changes_no_bit(kernel_case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.draw(kernel_case, is_decode=True)
    pool, tables, lengths = problem.memory()
    inputs = problem.rows(len(lengths)), pool, tables, lengths, problem.sinks()
    split = {"CHUNKS": 6, "FILLING": 4, "USUAL_CHUNK": 32, "TILE": 16}
    in_order = decoded(problem, inputs, split, 6).nan_to_num(9.0)
    use_shuffled_programs(monkeypatch, problem.rng)
    assert torch.equal(in_order, decoded(problem, inputs, split, 6).nan_to_num(9.0)), problem


def test_ragged_attention_is_that_of_float64(kernel_case: int) -> None:
    problem = Problem.draw(kernel_case, is_decode=False)
    pool, tables, lengths = problem.memory()
    q, sinks = problem.rows(sum(problem.counts)), problem.sinks()
    queries = int(problem.rng.choice([1, 4, 8, 16]))
    tiles = [(row, start) for row, count in enumerate(problem.counts) for start in range(0, count, 16)] + [(-1, 0)] * 2
    places = problem.rng.permutation(np.array(tiles, np.int32))
    out = torch.full_like(q, torch.nan)
    ragged_attention[(len(tiles), problem.kv_heads, 16 // queries)](
        *(q, pool.codes, pool.scales, tables, lengths),
        torch.tensor([0, *np.cumsum(problem.counts)], dtype=torch.int32),
        *map(torch.from_numpy, np.ascontiguousarray(places.T)),
        *(sinks, out, problem.scale, problem.softcap, problem.window, q.stride(0), out.stride(0), tables.stride(0)),
        **problem.constants(pool),
        BLOCK_GROUP=max(power_of_two(problem.group), 16 // queries),
        TILE_QUERIES=16,
        QUERIES=queries,
        TILE=int(problem.rng.choice([16, 32, 64])),
        HAS_SINKS=sinks is not None,
    )
    problem.check(out, problem.expected(q, pool, tables, sinks))
