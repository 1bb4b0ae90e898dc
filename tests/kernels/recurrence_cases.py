"""Random problems of the kernels of recurrent layers, against passes/numerics/recurrences.py in float64.

Rows are further apart than they are long. NaN is in slots of other sequences, in states that a new sequence must not
read, in rows of padding, and in all results beforehand.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ingot.kernels.chunked_recurrence import chunked_recurrence, recurrence_chunks
from ingot.kernels.recurrence import NO_CURVE, SIGMOID, SOFTPLUS, recurrence, recurrence_rates
from ingot.kernels.short_convolution import short_convolution
from ingot.passes.numerics.recurrences import DeltaRule, ScanAttributes, gated_delta_rule, selective_scan
from ingot.passes.numerics.recurrences import short_convolution as convolved
from tests.kernels.cases import HALF_STEP, Case, power_of_two, random
from tests.kernels.reference import Float64Array, numpy64

Rng = np.random.Generator
Types = Sequence[torch.dtype]  # of activations, of which a problem has one
Outcome = tuple[Float64Array, Float64Array, float]  # found, expected, and the largest error over the largest value
_LIMIT = 4e-6  # of sums in float32
_LIMITS = {torch.float32: _LIMIT, torch.float16: 1.01 * HALF_STEP}
_TYPES = (torch.float32, torch.float16)
CHUNKS, LEAST_CHUNKED = (16, 32, 64), 4
_TILE_ROWS = 32


@dataclass(frozen=True)
class Step:
    """Sequences of a step: tokens before it and in it, and the slots of their states. The last sequence is padding."""

    before: tuple[int, ...]
    counts: tuple[int, ...]
    slots: tuple[int, ...]

    @classmethod
    def random(cls, rng: Rng, most: int, *, ragged: bool = True) -> "Step":
        """One to three sequences, some of them new; without `ragged`, of a token each."""
        number = int(rng.integers(1, 4))
        before = tuple(int(rng.choice([0, 1, int(rng.integers(200))])) for _ in range(number))
        counts = tuple(int(rng.choice([1, int(rng.integers(1, most + 1))])) if ragged else 1 for _ in range(number))
        return cls(before, counts, tuple(int(slot) for slot in rng.permutation(number + 1)[:number]))

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return sum(self.counts)

    @property
    def starts(self) -> list[int]:
        """First row of each sequence, and the end of the last."""
        return [sum(self.counts[:number]) for number in range(len(self.counts) + 1)]

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The kernels' operands, padded by one sequence."""
        lengths = [before + count for before, count in zip(self.before, self.counts, strict=True)]
        given = {
            "state_slots": [*self.slots, -1],
            "lengths": [*lengths, 0],
            "query_starts": [*self.starts, self.rows],
        }
        return {name: torch.tensor(values, dtype=torch.int32) for name, values in given.items()}

    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and first token of each tile, and one of padding."""
        found = [(s, at) for s, count in enumerate(self.counts) for at in range(0, count, _TILE_ROWS)]
        sequences, starts = zip(*found, (-1, 0), strict=True)
        return torch.tensor(sequences, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)


class States:
    """A pool with one slot more than sequences, and 5 floats of another layer after each state."""

    def __init__(self, rng: Rng, step: Step, shape: tuple[int, ...], *, tiled: bool) -> None:
        self.step, self.shape, self.tiled = step, shape, tiled
        size = int(np.prod((*shape[:-1], -(-shape[-1] // 16) * 16 if tiled else shape[-1])))
        self.pool = torch.full((len(step.counts) + 1, size + 5), torch.nan)
        self.before = rng.standard_normal((len(step.counts), *shape)).astype(np.float32)
        for number, (slot, before) in enumerate(zip(step.slots, step.before, strict=True)):
            if before:
                self.pool[slot, :size] = torch.from_numpy(self._stored(self.before[number]))
            else:
                self.before[number] = 0

    def after(self) -> Float64Array:
        """The states, [sequences, *shape]; infinite where something else was written."""
        size = self.pool.shape[1] - 5
        other = [slot for slot in range(len(self.pool)) if slot not in self.step.slots]
        if not (self.pool[:, size:].isnan().all() and self.pool[other].isnan().all()):
            return np.full(self.before.shape, np.inf)
        return np.stack([self._logical(self.pool[slot, :size].numpy()) for slot in self.step.slots]).astype(np.float64)

    def _stored(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        if not self.tiled:
            return state.reshape(-1)
        padded = np.pad(state, ((0, 0), (0, 0), (0, -state.shape[2] % 16)))
        return np.concatenate(
            [part.reshape(-1) for head in padded for part in np.split(head, range(64, head.shape[1], 64), axis=1)]
        )

    def _logical(self, stored: NDArray[np.float32]) -> NDArray[np.float32]:
        if not self.tiled:
            return stored.reshape(self.shape)
        heads, keys, values = self.shape
        padded = -(-values // 16) * 16
        found = np.empty((heads, keys, padded), np.float32)
        for head, flat in zip(found, stored.reshape(heads, -1), strict=True):
            for tile in range(0, padded, 64):
                width = min(64, padded - tile)
                head[:, tile : tile + width] = flat[tile * keys : (tile + width) * keys].reshape(keys, width)
        return found[:, :, :values]


def _strided(rng: Rng, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random rows, further apart than they are long, NaN in between."""
    memory = torch.full((rows, columns + int(rng.integers(9))), torch.nan, dtype=dtype)
    memory[:, :columns] = random(rng, rows, columns, dtype=dtype)
    return memory[:, :columns]


def _scaled(*pairs: tuple[Float64Array, Float64Array], term: float = 0.0) -> tuple[Float64Array, Float64Array]:
    """Several results next to each other, each over its largest expected value; the first over `term` if larger."""
    largest = [max(float(np.abs(wanted).max(initial=0)), 1e-30) for _, wanted in pairs]
    largest[0] = max(largest[0], term)
    found, wanted = (
        np.concatenate([pair[which].reshape(-1) / size for pair, size in zip(pairs, largest, strict=True)])
        for which in (0, 1)
    )
    return found, wanted


def _convolution(rng: Rng, types: Types = _TYPES) -> Outcome:
    """Results and states; several tiles of a sequence, tokens fewer than taps, partials."""
    ragged, dtype = bool(rng.integers(4)), types[int(rng.integers(len(types)))]
    step = Step.random(rng, 80, ragged=ragged)
    channels, taps, parts = int(rng.integers(1, 90)), int(rng.integers(2, 6)), int(rng.choice([1, 3]))
    has_bias, has_silu = (bool(one) for one in rng.integers(0, 2, 2))
    x = torch.stack([_strided(np.random.default_rng(seed), step.rows, channels, dtype) for seed in [7] * parts])
    x = x.float() if parts > 1 else x
    weight, bias = random(rng, taps, channels), random(rng, channels)
    states = States(rng, step, (taps - 1, channels), tiled=False)
    out = torch.full((step.rows, channels), torch.nan, dtype=dtype)
    tiles = step.tiles()
    given = step.tensors
    grid = len(tiles[0]) if ragged else len(step.counts) + 1
    short_convolution[(grid, -(-channels // 32))](
        *(x, weight, bias, out, states.pool, given["state_slots"], given["lengths"], given["query_starts"], *tiles),
        *(x.stride(1), x.stride(0), channels, states.pool.stride(0)),
        CHANNELS=channels,
        BLOCK=32,
        TAPS=taps,
        BLOCK_TAPS=power_of_two(taps - 1),
        TILE=_TILE_ROWS if ragged else 1,
        PARTS=parts,
        HAS_BIAS=has_bias,
        HAS_SILU=has_silu,
        RAGGED=ragged,
    )
    wanted, after = [], []
    for number, (start, end) in enumerate(zip(step.starts, step.starts[1:], strict=False)):
        result, state = convolved(
            numpy64(x).sum(axis=0)[start:end],
            numpy64(weight).T,
            numpy64(bias) if has_bias else None,
            "silu" if has_silu else "",
            states.before[number].astype(np.float64),
        )
        wanted.append(result)
        after.append(state)
    found, expected = _scaled((numpy64(out), np.concatenate(wanted)), (states.after(), np.stack(after)))
    return found, expected, _LIMITS[dtype]


def _rates(rng: Rng, types: Types = _TYPES) -> Outcome:
    """Relative errors: a small decay counts as much as a large one over many tokens."""
    rows, columns, parts = int(rng.integers(1, 6)), int(rng.integers(1, 40)), int(rng.choice([1, 2]))
    curve = (NO_CURVE, SOFTPLUS, SIGMOID)[rng.integers(3)]
    has_bias, has_factors, is_limited = (bool(one) for one in rng.integers(0, 2, 3))
    least, most = (0.2, 0.8) if is_limited else (-3.0e38, 3.0e38)
    x = torch.stack([_strided(np.random.default_rng(3), rows, columns + 3) for _ in range(parts)]) * 6
    bias, factors = random(rng, columns), random(rng, columns)
    out = torch.full((rows, columns), torch.nan)
    recurrence_rates[(rows,)](
        *(x, bias, factors, out, 3, x.stride(1), x.stride(0), least, most, -1.5),
        COLUMNS=columns,
        BLOCK=power_of_two(columns),
        PARTS=parts,
        CURVE=curve.value,
        HAS_BIAS=has_bias,
        HAS_FACTORS=has_factors,
    )
    wanted = x.numpy().sum(axis=0)[:, 3:] + (bias.numpy() if has_bias else np.float32(0))
    exact: Float64Array = wanted.astype(np.float64)
    if curve.value == SOFTPLUS.value:
        exact = np.logaddexp(0, exact)
    if curve.value == SIGMOID.value:
        exact = 1 / (1 + np.exp(-exact))
    exact = -1.5 * np.clip(exact, least, most) * (numpy64(factors) if has_factors else 1)
    return numpy64(out) / exact, np.ones_like(exact), 2e-6


@dataclass(frozen=True)
class Recurrence:
    """A random problem of the delta rule or the scan."""

    rng: Rng
    step: Step
    sizes: DeltaRule | ScanAttributes
    dtype: torch.dtype
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    gate: torch.Tensor
    rate: torch.Tensor
    skip: torch.Tensor
    states: States
    out: torch.Tensor
    chunk: int

    @classmethod
    def random(cls, rng: Rng, most: int, types: Types, *, ragged: bool = True) -> "Recurrence":
        """Decays from hardly any to nearly all; in some problems all keys are equal, which needs a stable inverse."""
        step, key_heads = Step.random(rng, most, ragged=ragged), int(rng.integers(1, 3))
        heads = key_heads * int(rng.integers(1, 3))
        keys, values = int(rng.choice([8, 12, 16, 40])), int(rng.choice([8, 20, 70]))
        sizes: DeltaRule | ScanAttributes = ScanAttributes(heads, values, keys, key_heads)
        if rng.integers(2):
            sizes = DeltaRule(key_heads, heads, keys, values, float(rng.uniform(0.2, 1)), bool(rng.integers(4)))
        dtype = types[int(rng.integers(len(types)))]
        q, k = (_strided(rng, step.rows, key_heads * keys, dtype) for _ in range(2))
        if isinstance(sizes, DeltaRule):
            k *= 1 if sizes.normalize else keys**-0.5
            if rng.integers(3) == 0:
                k[:] = k[0].clone()
        gate = random(rng, step.rows, heads).sigmoid()
        strength = 10.0 ** rng.uniform(-4, 1, heads).astype(np.float32)
        decay = -random(rng, step.rows, heads).abs() * torch.from_numpy(strength)
        return cls(
            rng, step, sizes, dtype, q, k,
            _strided(rng, step.rows, heads * values, dtype), decay, gate, -torch.from_numpy(strength),
            random(rng, heads), States(rng, step, (heads, keys, values), tiled=True),
            torch.full((step.rows, heads * values), torch.nan, dtype=dtype), int(rng.choice(CHUNKS)),
        )  # fmt: skip

    @property
    def is_scan(self) -> bool:
        """Whether it is a scan."""
        return isinstance(self.sizes, ScanAttributes)

    @property
    def scale(self) -> float:
        """Factor of queries."""
        return 1.0 if isinstance(self.sizes, ScanAttributes) else self.sizes.scale

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """Pointers of both kernels that read values, up to skip."""
        return (self.q, self.k, self.v, self.decay, self.gate, self.rate, self.skip)

    @property
    def places(self) -> tuple[Any, ...]:
        """Pointers and numbers of both kernels, from the result on."""
        given, strides = self.step.tensors, (self.q, self.k, self.v, self.out, self.states.pool)
        pointers = (self.out, self.states.pool, given["state_slots"], given["lengths"], given["query_starts"])
        return (*pointers, *(each.stride(0) for each in strides), self.scale)

    @property
    def constants(self) -> dict[str, Any]:
        """Sizes, for all kernels."""
        heads, keys, _ = self.states.shape
        key_heads = self.sizes.num_groups if isinstance(self.sizes, ScanAttributes) else self.sizes.num_key_heads
        return {
            "HEADS": heads,
            "KEY_HEADS": key_heads,
            "KEYS": keys,
            "BLOCK_KEYS": power_of_two(keys, 16),
            "IS_SCAN": self.is_scan,
        }

    @property
    def normalizes(self) -> bool:
        """Whether queries and keys have length 1."""
        return isinstance(self.sizes, DeltaRule) and self.sizes.normalize

    def run(self, *, ragged: bool = True, most: int = 0, tile: int = 16) -> None:
        """Compute sequences of up to `most` tokens, or all, token by token."""
        heads, _, values = self.states.shape
        recurrence[(len(self.step.counts) + 1, heads, -(-values // tile))](
            *self.operands, *self.places, **self.constants, VALUES=values, TILE=tile, NORMALIZES=self.normalizes,
            RAGGED=ragged, MOST=most,
        )  # fmt: skip

    def chunks(self, least: int = LEAST_CHUNKED) -> tuple[torch.Tensor, ...]:
        """Compute T, P and factors of sequences of `least` tokens or more."""
        heads, rows, given = self.states.shape[0], self.step.rows, self.step.tensors
        sizes = ((rows, heads, self.chunk), (rows, heads, self.chunk), (rows, heads, 2))
        made = tuple(torch.full(size, torch.nan) for size in sizes)
        sequences = len(self.step.counts) + 1
        recurrence_chunks[(rows // self.chunk + 2 * sequences, heads)](
            *(self.q, self.k, self.decay, self.gate, self.rate, *made, given["lengths"], given["query_starts"]),
            *(self.q.stride(0), self.k.stride(0), self.scale),
            **self.constants,
            SEQUENCES=sequences,
            BLOCK_SEQUENCES=power_of_two(sequences),
            CHUNK=self.chunk,
            LEAST=least,
            NORMALIZES=self.normalizes,
            EXACT=True,
        )
        return made

    def run_chunked(self, least: int = LEAST_CHUNKED, tile: int = 32) -> None:
        """Compute sequences of `least` tokens or more by chunks."""
        heads, _, values = self.states.shape
        chunked_recurrence[(len(self.step.counts) + 1, heads, -(-values // tile))](
            *self.operands, *self.chunks(least), *self.places, **self.constants, VALUES=values, TILE=tile,
            CHUNK=self.chunk, LEAST=least, EXACT=True,
        )  # fmt: skip

    def wanted(self) -> tuple[Float64Array, Float64Array]:
        """Results and states in float64."""
        results, after = [], []
        q, k, v, decay, gate, rate, skip = map(numpy64, self.operands)
        for number, (start, end) in enumerate(zip(self.step.starts, self.step.starts[1:], strict=False)):
            own, state = slice(start, end), self.states.before[number].astype(np.float64)
            if isinstance(self.sizes, DeltaRule):
                result, state = gated_delta_rule(q[own], k[own], v[own], decay[own], gate[own], self.sizes, state)
            else:
                turned = state.swapaxes(1, 2)
                result, turned = selective_scan(v[own], gate[own], k[own], q[own], rate, skip, self.sizes, turned)
                state = turned.swapaxes(1, 2)
            results.append(result)
            after.append(state)
        return np.concatenate(results), np.stack(after)

    def outcome(self) -> Outcome:
        """What was computed, over what is expected."""
        result, after = self.wanted()
        # A query may be all but orthogonal to the state: the sum of such terms is far smaller than they are.
        term = self.scale * float(self.q.abs().max()) * float(np.abs(after).max(initial=0))
        found, expected = _scaled((numpy64(self.out), result), (self.states.after(), after), term=term)
        return found, expected, _LIMITS[self.dtype]


def _recurrence(rng: Rng, types: Types = _TYPES) -> Outcome:
    ragged = bool(rng.integers(3))
    problem = Recurrence.random(rng, 12, types, ragged=ragged)
    problem.run(ragged=ragged, tile=int(rng.choice([16, 32])))
    return problem.outcome()


def _chunked(rng: Rng, types: Types = _TYPES) -> Outcome:
    """Each sequence by the kernel that is for its number of tokens."""
    problem = Recurrence.random(rng, 150, types)
    problem.run(most=LEAST_CHUNKED - 1)
    problem.run_chunked()
    return problem.outcome()


def _inverses(rng: Rng, types: Types = _TYPES) -> Outcome:
    """T times the matrix that it inverts, and P, of every chunk."""
    problem = Recurrence.random(rng, 150, types)
    inverses, weights, factors = map(numpy64, problem.chunks())
    q, k, _, decay, gate, rate, _ = map(numpy64, problem.operands)
    heads, keys, _ = problem.states.shape
    group = heads // problem.constants["KEY_HEADS"]
    q, k = (np.repeat(x.reshape(len(x), -1, keys), group, axis=1) for x in (q, k))
    lengths = [np.sqrt((x**2).sum(axis=-1) + 1e-6) if problem.normalizes else np.ones(x.shape[:2]) for x in (q, k)]
    q, k = q / lengths[0][..., None], k / lengths[1][..., None]
    decay = gate * rate if problem.is_scan else decay
    pairs: list[tuple[Float64Array, Float64Array]] = []
    untouched = np.ones(problem.step.rows, bool)
    for start, before, count in zip(problem.step.starts, problem.step.before, problem.step.counts, strict=False):
        if count < LEAST_CHUNKED:
            continue
        untouched[start : start + count] = False
        cuts = [start, *(start + at - before for at in range(before + 1, before + count) if at % problem.chunk == 0)]
        for begin, end in zip(cuts, [*cuts[1:], start + count], strict=True):
            own, size = slice(begin, end), end - begin
            sums = np.cumsum(decay[own], axis=0).T
            decays = np.exp(np.minimum(sums[:, :, None] - sums[:, None, :], 0))
            p = np.tril(problem.scale * decays * np.einsum("ihk,jhk->hij", q[own], k[own]))
            pairs.append((weights[own, :, :size].swapaxes(0, 1), p))
            a = np.tril(decays * np.einsum("ihk,jhk->hij", k[own], k[own]) * gate[own].T[:, :, None], -1)
            if not problem.is_scan:
                pairs.append((inverses[own, :, :size].swapaxes(0, 1), np.linalg.inv(np.eye(size) + a)))
            pairs.append((factors[own].reshape(-1, 2), 1 / np.stack([each[own].reshape(-1) for each in lengths], 1)))
    clean = np.isnan(weights[untouched]).all() and (not problem.is_scan or np.isnan(inverses).all())
    pairs.append((np.array([1.0 if clean else np.inf]), np.ones(1)))
    found, expected = _scaled(*pairs)
    return found, expected, _LIMIT


RUNS: Mapping[str, Callable[..., Outcome]] = {
    "short_convolution": _convolution,
    "recurrence_rates": _rates,
    "recurrence": _recurrence,
    "recurrence_chunks": _inverses,
    "chunked_recurrence": _chunked,
}


def cases() -> Iterator[Case]:
    """A few random problems of each kernel with activations in float32, the same each time."""
    for kernel in RUNS:
        for seed in range(4):
            yield Case(kernel, f"random problem {seed}", "float32", _LIMIT, partial(_case, kernel, seed))


def _case(kernel: str, seed: int) -> tuple[Float64Array, Float64Array]:
    found, wanted, _ = RUNS[kernel](np.random.default_rng([seed, *kernel.encode()]), (torch.float32,))
    return found, wanted
