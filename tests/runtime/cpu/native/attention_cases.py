"""Random attention problems and a float64 reference, shared by the tests of the C kernel and of numpy attention."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact import AttentionStep, KVGeometry
from ingot.artifact.kv_geometry import ElementType, KVType, key_type, value_type
from ingot.artifact.programs.cpu_program import Arithmetic
from ingot.runtime.cpu.attention_operands import AttentionOperands, RotaryOperands
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.kv_precision import decode, encode
from ingot.runtime.cpu.native.attention import Attention, NativeAttention
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.forward_batch import FloatArray, ForwardBatch

DoubleArray = NDArray[np.float64]


@dataclass(frozen=True)
class Sequence:
    """Queries [n, H * D], keys and values [n, KV * D] of all its tokens."""

    query: FloatArray
    key: FloatArray
    value: FloatArray


@dataclass(frozen=True)
class Case:
    """One layer's shape, and sequences to attend over. The step is the second of two layers.

    rotary_dim   leading elements of each head that are rotated; 0 for none
    packed       query, key and value are columns of one matrix
    dtype        type of the pool's elements
    int4_group   dims of int4 that share a scale and a minimum
    has_sinks    whether each head has a score without a value
    value_dim    dims of a value; 0: those of a key
    is_latent    a value is the last value_dim dims of its key, as the pool holds it
    """

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_tokens: int = 16
    softcap: float = 0.0
    window: int = 0
    lengths: tuple[int, ...] = (1, 20, 150)
    seed: int = 0
    rotary_dim: int = 0
    packed: bool = False
    dtype: KVType = "float32"
    int4_group: int = 0
    has_sinks: bool = False
    value_dim: int = 0
    is_latent: bool = False
    sequences: tuple[Sequence, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        object.__setattr__(self, "sequences", tuple(self._random(rng, n) for n in self.lengths))

    def _random(self, rng: np.random.Generator, tokens: int) -> Sequence:
        widths = (self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.output_dim)
        query, key, value = (rng.standard_normal((tokens, width), dtype=np.float32) for width in widths)
        return Sequence(query, key, value)

    def protect(self) -> None:
        """Refuse changes of the arrays, which tests share; `replace(case)` is a copy with arrays of its own."""
        for sequence in self.sequences:
            for array in (sequence.query, sequence.key, sequence.value):
                array.flags.writeable = False

    @property
    def output_dim(self) -> int:
        return self.value_dim or self.dim

    @property
    def geometry(self) -> KVGeometry:
        return KVGeometry(
            num_layers=2, num_kv_heads=self.kv_heads, head_dim=self.dim, block_tokens=self.block_tokens,
            dtype=self.dtype, int4_group=self.int4_group, value_dim=0 if self.is_latent else self.output_dim,
        )  # fmt: skip

    @property
    def step(self) -> AttentionStep:
        return AttentionStep(
            layer=1, query="q", key="k", value=None if self.is_latent else "v", output="o", num_heads=self.heads,
            num_kv_heads=self.kv_heads, head_dim=self.dim, scale=self.dim**-0.5, softcap=self.softcap,
            window=self.window, value_dim=self.value_dim or None,
        )  # fmt: skip

    @property
    def angles(self) -> FloatArray:
        """Radians [positions, rotary_dim / 2] of the rotary embedding."""
        frequencies = 0.7 ** np.arange(self.rotary_dim // 2, dtype=np.float32)
        return np.outer(np.arange(max(self.lengths), dtype=np.float32), frequencies).astype(np.float32)

    @property
    def rotation(self) -> RotaryOperands | None:
        """The rotary tables, exactly as long as the longest sequence."""
        return RotaryOperands(np.cos(self.angles), np.sin(self.angles)) if self.rotary_dim else None

    @property
    def sinks(self) -> FloatArray | None:
        """Scores [heads] from about -5 to 5; one is beyond every other score, and one adds nothing."""
        if not self.has_sinks:
            return None
        sinks = np.random.default_rng(self.seed + 1).uniform(-5, 5, self.heads).astype(np.float32)
        sinks[1:3] = (150, -150)[: self.heads - 1]
        return sinks

    def pool(self) -> KVPool:
        """A pool that holds all sequences and 3 blocks more, filled with NaN: unwritten memory must not be read."""
        blocks = sum(-(-n // self.block_tokens) for n in self.lengths) + 3
        pool = KVPool(self.geometry, blocks)
        pool.blocks[:] = 0xFF  # NaN as float32, float16, bfloat16 and fp8, and as a scale
        return pool


def stored(case: Case, dtype: ElementType, vectors: FloatArray, rotated_by: RotaryOperands | None = None) -> FloatArray:
    """What the pool holds of keys or values [tokens, kv heads * dim]: [tokens, kv heads, dim], rotated and rounded."""
    heads = vectors.reshape(len(vectors), case.kv_heads, -1)
    if rotated_by is not None:
        heads = rotated_by.apply(heads, np.arange(len(heads)))
    codes, scales = encode(heads, dtype, case.int4_group)
    return decode(codes, scales, dtype, case.int4_group)


def expected(case: Case, sequence: Sequence) -> FloatArray:
    """Compute attention of one sequence in float64, by the definition; over rounded keys and values, if they are."""
    return exact(case, sequence)[0].astype(np.float32)


def exact(case: Case, sequence: Sequence) -> tuple[DoubleArray, DoubleArray]:
    """Return `expected` [tokens, heads * dim] in float64, and the same over the magnitudes of the values."""
    group, tokens = case.heads // case.kv_heads, len(sequence.query)
    q = sequence.query.reshape(tokens, case.heads, case.dim).astype(np.float64)
    if case.rotary_dim:
        q = rotated(case, q)
    keys = stored(case, key_type(case.dtype), sequence.key, case.rotation)
    values = keys[:, :, case.dim - case.output_dim :]
    if not case.is_latent:
        values = stored(case, value_type(case.dtype), sequence.value)
    k, v = (x.repeat(group, axis=1).astype(np.float64) for x in (keys, values))
    scores = np.einsum("ihd,jhd->hij", q, k) * case.dim**-0.5
    if case.softcap:
        scores = np.tanh(scores / case.softcap) * case.softcap
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    seen = (distance >= 0) & (distance < (case.window or tokens))
    scores = np.where(seen, scores, -np.inf)
    sinks = np.full(case.heads, -np.inf) if case.sinks is None else case.sinks.astype(np.float64)
    top = np.maximum(scores.max(axis=-1), sinks[:, None])[..., None]
    weights = np.exp(scores - top)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None, None] - top)
    output, magnitudes = (np.einsum("hij,jhd->ihd", weights, x).reshape(tokens, -1) for x in (v, np.abs(v)))
    return output, magnitudes


def rotated(case: Case, heads: DoubleArray) -> DoubleArray:
    """Rotate heads [tokens, heads, dim] from position 0 on in float64: complex numbers times exp(i * angle)."""
    half = case.rotary_dim // 2
    angles = case.angles.astype(np.float64)[: len(heads), None]
    pairs = (heads[..., :half] + 1j * heads[..., half : 2 * half]) * np.exp(1j * angles)
    return np.concatenate((pairs.real, pairs.imag, heads[..., 2 * half :]), axis=-1)


def tables(case: Case, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Block tables [S, max blocks] in a random order of the pool's blocks, padded with -1."""
    counts = [-(-n // case.block_tokens) for n in case.lengths]
    order = np.random.default_rng(seed).permutation(sum(counts) + 3).astype(np.int32)
    table = np.full((len(counts), max(counts)), -1, np.int32)
    for s, count in enumerate(counts):
        table[s, :count] = order[sum(counts[:s]) : sum(counts[:s]) + count]
    return table


def run_alone(case: Case, attention: Attention) -> list[FloatArray]:
    """Run each sequence in one piece, alone in its batch."""
    plan = [[(s, len(sequence.query))] for s, sequence in enumerate(case.sequences)]
    return run_plan(case, attention, plan, tables(case))


def run_shuffled(case: Case, attention: Attention, seed: int) -> list[FloatArray]:
    """Run all sequences in steps of random chunks, batched in a random order, on shuffled blocks."""
    rng = np.random.default_rng(seed)
    left = list(case.lengths)
    plan = []
    while any(left):
        batch = [(s, int(rng.integers(1, left[s] + 1))) for s in rng.permutation(len(left)) if left[s]]
        batch = [(s, min(n, int(rng.choice([1, 3, 200])))) for s, n in batch if rng.random() < 0.7]
        for s, n in batch:
            left[s] -= n
        plan.append(batch)
    return run_plan(case, attention, [batch for batch in plan if batch], tables(case, seed + 1))


def operands(case: Case, query: FloatArray, key: FloatArray, value: FloatArray) -> AttentionOperands:
    """Return the arrays as they are, or as columns of one matrix."""
    if case.is_latent:
        return AttentionOperands(query, key)
    if not case.packed:
        return AttentionOperands(query, key, value)
    matrix = np.concatenate((query, key, value), axis=1)
    widths = np.cumsum([query.shape[1], key.shape[1]])
    return AttentionOperands(*np.split(matrix, widths, axis=1))


def run_plan(
    case: Case,
    attention: Attention,
    plan: list[list[tuple[int, int]]],
    table: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
) -> list[FloatArray]:
    """Run the plan's steps, each a list of (sequence, tokens); return each sequence's outputs."""
    width = case.heads * case.output_dim
    outputs = [np.full((len(sequence.query), width), np.nan, np.float32) for sequence in case.sequences]
    done = [0] * len(case.sequences)
    for batch in plan:
        parts = [(s, slice(done[s], done[s] + n)) for s, n in batch]
        q, k, v = (
            np.concatenate([getattr(case.sequences[s], name)[part] for s, part in parts])
            for name in ("query", "key", "value")
        )
        result = np.full((len(q), width), np.nan, np.float32)
        starts = np.cumsum([0, *(n for _, n in batch)]).astype(np.int32)
        lens = np.array([part.stop for _, part in parts], np.int32)
        nothing = np.zeros(len(q), np.int64)
        attention.begin(ForwardBatch(nothing, nothing, nothing, starts, lens, table[[s for s, _ in batch]]))
        attention.bind(case.step, operands(case, q, k, v), result, case.rotation, case.sinks)()
        for i, (s, part) in enumerate(parts):
            outputs[s][part] = result[starts[i] : starts[i + 1]]
            done[s] = part.stop
    return outputs


Backend = Callable[[KVPool], Attention]
TOLERANCE = 2e-6  # float32 sums of up to 300 terms against float64
SHAPES = [
    Case(),
    Case(heads=3, kv_heads=3, dim=8),
    Case(heads=14, kv_heads=2, dim=64),
    Case(heads=5, kv_heads=1, dim=80, block_tokens=8),
    Case(heads=8, kv_heads=1, dim=96, block_tokens=5),
    Case(heads=2, kv_heads=2, dim=128, block_tokens=64),
    Case(heads=2, kv_heads=1, dim=256, block_tokens=128),
    Case(heads=72, kv_heads=1, dim=20, lengths=(3, 70)),
    Case(window=1),
    Case(window=37, lengths=(300, 20, 130)),
    Case(softcap=3.0, window=64, heads=6, dim=24),
    Case(packed=True),
    Case(rotary_dim=16, packed=True),
    Case(heads=9, kv_heads=3, dim=64, rotary_dim=64, packed=True),
    Case(heads=6, kv_heads=2, dim=20, rotary_dim=10, window=33, softcap=4.0),
    Case(heads=4, kv_heads=1, dim=96, rotary_dim=24, packed=True, lengths=(70, 3)),
    Case(has_sinks=True, window=37, lengths=(300, 20, 130)),
    Case(heads=5, kv_heads=1, dim=80, softcap=3.0, has_sinks=True),
    Case(heads=4, kv_heads=2, dim=24, value_dim=40, packed=True),
    Case(heads=3, kv_heads=1, dim=40, value_dim=10, block_tokens=5, window=33),
    Case(heads=16, kv_heads=1, dim=96, value_dim=64, rotary_dim=32, is_latent=True),
    Case(heads=5, kv_heads=1, dim=44, value_dim=37, rotary_dim=6, block_tokens=5, is_latent=True, has_sinks=True),
    Case(heads=6, kv_heads=2, dim=20, value_dim=20, window=37, softcap=4.0, is_latent=True, lengths=(300, 20, 130)),
    Case(heads=130, kv_heads=1, dim=144, value_dim=128, rotary_dim=16, is_latent=True, lengths=(3, 40)),
]
TYPES: tuple[KVType, ...] = ("float16", "bfloat16", "fp8", "int8", "int4", "k8v4")
PRECISIONS: tuple[tuple[KVType, int], ...] = (*((dtype, 0) for dtype in TYPES), ("int4", 32), ("k8v4", 16), ("int4", 6))
"""Every type that is rounded, and int4 in groups: of whole vectors of the instruction sets, and of others."""

ROUNDED = [
    case
    for dtype, group in PRECISIONS
    for case in (
        Case(dtype=dtype, int4_group=group),
        Case(dtype=dtype, int4_group=group, heads=6, kv_heads=2, dim=20, rotary_dim=10, window=33, softcap=4.0),
        Case(dtype=dtype, int4_group=group, heads=8, kv_heads=1, dim=96, block_tokens=5),
        Case(dtype=dtype, int4_group=group, heads=2, kv_heads=2, dim=128, rotary_dim=128, block_tokens=64, packed=True),
        Case(dtype=dtype, int4_group=group, heads=3, kv_heads=3, dim=8, block_tokens=48),
        Case(dtype=dtype, int4_group=group, heads=2, kv_heads=1, dim=80, lengths=(33, 70), has_sinks=True),
        Case(dtype=dtype, int4_group=group, heads=3, kv_heads=1, dim=48, value_dim=16, lengths=(33, 70)),
        Case(dtype=dtype, int4_group=group, heads=8, kv_heads=1, dim=40, value_dim=24, rotary_dim=16, is_latent=True),
    )
]

for _case in SHAPES + ROUNDED:
    _case.protect()


def native_attention(threads: int, arithmetic: Arithmetic = "float32") -> Backend:
    """Return what makes the C kernel's attention over a pool; skips the test where the kernel was not built."""
    if native_library() is None:
        pytest.skip("the kernel is not built")
    return lambda pool: NativeAttention(pool, threads, arithmetic)
