"""Recurrent layers by the C kernels and by numpy: the definition in float64, and equal bits however they are cut."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact import KVGeometry
from ingot.artifact.programs.recurrent import (
    LANES,
    STATE_TILE,
    ConvolutionFacts,
    DeltaRuleFacts,
    RecurrentFacts,
    ScanFacts,
    place_states,
)
from ingot.passes.numerics.recurrences import (
    DeltaRule,
    ScanAttributes,
    gated_delta_rule,
    selective_scan,
    short_convolution,
)
from ingot.runtime.cpu.native.kernels import find_kernels
from ingot.runtime.cpu.native.numpy_recurrence import NumpyRecurrence
from ingot.runtime.cpu.native.recurrence import NativeRecurrence, Recurrence, describe
from ingot.runtime.cpu.native.structures import ViewAt
from ingot.runtime.cpu.recurrent_operands import RecurrentOperands
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.sizes import round_up
from tests.runtime.cpu.native.kernel_cases import SETS, needs_library

LAYERS: dict[str, RecurrentFacts] = {
    "convolution of qwen3_next": ConvolutionFacts(layer=0, channels=520, taps=4, activation="silu"),
    "convolution without activation": ConvolutionFacts(layer=3, channels=17, taps=3),
    "convolution of one tap": ConvolutionFacts(layer=3, channels=40, taps=1, activation="silu"),
    "delta rule of qwen3_next": DeltaRuleFacts(
        layer=1, num_key_heads=2, num_value_heads=4, key_dim=128, value_dim=128, scale=128**-0.5, normalize=True
    ),
    "delta rule of odd sizes": DeltaRuleFacts(
        layer=1, num_key_heads=1, num_value_heads=3, key_dim=7, value_dim=85, scale=0.4
    ),
    "scan of mamba": ScanFacts(layer=2, num_heads=4, head_dim=64, state_dim=128, num_groups=2),
    "scan of odd sizes": ScanFacts(layer=2, num_heads=6, head_dim=23, state_dim=5, num_groups=3),
}
BACKENDS = [pytest.param("native", marks=needs_library), "numpy"]
each_layer = pytest.mark.parametrize("facts", LAYERS.values(), ids=[name.replace(" ", "-") for name in LAYERS])


def _random(rng: np.random.Generator, *shape: int) -> FloatArray:
    return rng.standard_normal(shape, np.float32)


def operands_of(facts: RecurrentFacts, tokens: int, seed: int = 0) -> RecurrentOperands:
    """Random operands, and an output of NaN."""
    rng = np.random.default_rng(seed)
    values = {name: _random(rng, tokens, columns) for name, columns in facts.widths.items()}
    values["output"][:] = np.nan
    if "decay" in values:
        np.multiply(np.abs(values["decay"]), -1 / 8, out=values["decay"])
        np.abs(np.tanh(values["beta"]), out=values["beta"])
    tensors: dict[str, FloatArray] = {}
    if isinstance(facts, ConvolutionFacts):
        tensors["weight"] = _random(rng, facts.taps, facts.channels)
        if facts.activation != "none":
            tensors["bias"] = _random(rng, facts.channels)
    elif isinstance(facts, ScanFacts):
        np.divide(np.abs(values["dt"]), 4, out=values["dt"])
        tensors["a"] = -np.abs(_random(rng, facts.num_heads))
        tensors["d"] = _random(rng, facts.num_heads)
    return RecurrentOperands(values, tensors)


def defined(facts: RecurrentFacts, operands: RecurrentOperands) -> tuple[NDArray[Any], NDArray[Any]]:
    """Result and last state of one sequence from its first token on, in float64."""
    values = {name: array.astype(np.float64) for name, array in operands.values.items()}
    tensors = {name: array.astype(np.float64) for name, array in operands.tensors.items()}
    match facts:
        case ConvolutionFacts():
            before = np.zeros((facts.taps - 1, facts.channels))
            activation = facts.activation.replace("none", "")
            return short_convolution(values["input"], tensors["weight"].T, tensors.get("bias"), activation, before)
        case DeltaRuleFacts():
            rule = DeltaRule(**facts.model_dump(exclude={"layer"}))
            q, k, v, decay, beta = (values[name] for name in ("query", "key", "value", "decay", "beta"))
            return gated_delta_rule(q, k, v, decay, beta, rule, np.zeros(rule.state_shape))
        case ScanFacts():
            scan = ScanAttributes(**facts.model_dump(exclude={"layer"}))
            x, dt, b, c = (values[name] for name in ("input", "dt", "b", "c"))
            return selective_scan(x, dt, b, c, tensors["a"], tensors["d"], scan, np.zeros(scan.state_shape))


def stored_state(facts: RecurrentFacts, state: FloatArray) -> FloatArray:
    """A layer's part of a slot as the definition has it."""
    match facts:
        case ConvolutionFacts():
            return state.reshape(facts.taps - 1, facts.channels)
        case DeltaRuleFacts():
            return _untiled(state, facts.num_value_heads, facts.key_dim, facts.value_dim)
        case ScanFacts():
            return _untiled(state, facts.num_heads, facts.state_dim, facts.head_dim).swapaxes(1, 2)


def _untiled(state: FloatArray, heads: int, rows: int, columns: int) -> FloatArray:
    padded = round_up(columns, LANES)
    by_head = state.reshape(heads, padded * rows)
    starts = range(0, padded, STATE_TILE)
    tiles = [by_head[:, at * rows : min(at + STATE_TILE, padded) * rows].reshape(heads, rows, -1) for at in starts]
    joined = np.concatenate(tiles, axis=2)
    assert not joined[:, :, columns:].any(), "padding is not zero"
    return joined[:, :, :columns]


def pool_of(facts: RecurrentFacts, num_slots: int) -> StatePool:
    """States of this layer and of another before it, so that it has an offset; filled with NaN."""
    other = ConvolutionFacts(layer=99, channels=5, taps=2)
    parts, size = place_states([other, facts])
    kv = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4, state=parts, state_bytes=size)
    pool = StatePool(kv, num_slots)
    pool.blocks.view(np.float32)[:] = np.nan
    return pool


def recurrence(backend: str, pool: StatePool, threads: int = 2) -> Recurrence:
    return NumpyRecurrence(pool) if backend == "numpy" else NativeRecurrence(pool, threads)


def batch_of(counts: Sequence[int], contexts: Sequence[int], slots: Sequence[int]) -> ForwardBatch:
    """A step of `counts` tokens of sequences, of `contexts` tokens after it; what recurrent layers read of it."""
    starts, none = np.cumsum([0, *counts]), np.zeros(0, np.int64)
    integers = [np.array(numbers, np.int32) for numbers in (starts, contexts, slots)]
    return ForwardBatch(none, none, none, integers[0], integers[1], np.zeros((len(counts), 1), np.int32), integers[2])


def run(
    facts: RecurrentFacts, operands: RecurrentOperands, backend: str, chunks: Sequence[int], threads: int = 2
) -> tuple[FloatArray, FloatArray]:
    """Result and last state of one sequence whose tokens come in these chunks, with another sequence."""
    pool = pool_of(facts, 4)
    layer, tokens = recurrence(backend, pool, threads), sum(chunks)
    result, at = np.empty((tokens, facts.widths["output"]), np.float32), 0
    for number, count in enumerate(chunks):
        mates = number % 3  # tokens of the sequence before it in the batch
        mate = operands_of(facts, 2, seed=number)
        values = {
            name: np.concatenate((mate.values[name][:mates], array[at : at + count]))
            for name, array in operands.values.items()
        }
        call = layer.bind(facts, RecurrentOperands(values, operands.tensors))
        layer.begin(batch_of([mates, count][not mates :], [mates, at + count][not mates :], [3, 1][not mates :]))
        call()
        result[at : at + count] = values["output"][mates:]
        at += count
    assert np.isnan(pool.blocks[[0, 2]].view(np.float32)).all(), "the state of another sequence was written"
    return result, pool.part(facts)[1].copy()


@each_layer
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_states_are_those_of_the_definition(facts: RecurrentFacts, backend: str) -> None:
    operands = operands_of(facts, 70)
    result, state = run(facts, operands, backend, [70])
    expected, last = defined(facts, operands)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_allclose(stored_state(facts, state), last, rtol=2e-4, atol=2e-5 * np.abs(last).max(initial=1))


@each_layer
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_batch_mates_and_threads_change_no_bit(facts: RecurrentFacts, backend: str) -> None:
    operands = operands_of(facts, 70)
    whole = run(facts, operands, backend, [70], threads=1)
    for chunks in ([1] * 70, [1, 2, 3, 64], [33, 1, 36], [69, 1]):
        for ours, theirs in zip(run(facts, operands, backend, chunks), whole, strict=True):
            assert ours.tobytes() == theirs.tobytes(), chunks


@needs_library
@each_layer
def test_every_instruction_set_gives_the_same_bits(facts: RecurrentFacts) -> None:
    results = {name: list(tiles(facts, name)) for name in SETS}
    for name in SETS:
        for ours, theirs in zip(results[name], results["portable"], strict=True):
            assert ours.tobytes() == theirs.tobytes(), name


def tiles(facts: RecurrentFacts, isa: str) -> Iterator[FloatArray]:
    """Result and state by the kernels of an instruction set, called one tile at a time."""
    operands, pool = operands_of(facts, 21), pool_of(facts, 2)
    _, bound = describe(facts, pool)
    for name, array in operands.values.items():
        setattr(bound, name, ViewAt(array.ctypes.data, array.shape[1], False))
    for name, array in operands.tensors.items():
        setattr(bound, name, array.ctypes.data)
    find_kernels(isa).run_recurrent(bound, tokens=21, slot=1)
    yield operands.values["output"]
    yield pool.part(facts)[1]
