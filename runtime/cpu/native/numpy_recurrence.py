"""Recurrent layers in numpy: same semantics and layout of states as the C kernels, but slower; see numpy_attention.py.

Token by token, with operations whose results do not depend on their number of rows: a sequence's result is the same to
the bit whatever its chunks and the batch.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ingot.artifact.programs.recurrent import (
    LANES,
    STATE_TILE,
    ConvolutionFacts,
    DeltaRuleFacts,
    RecurrentFacts,
    ScanFacts,
)
from ingot.runtime.cpu.recurrent_operands import RecurrentOperands
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.sizes import round_up

_EPSILON = np.float32(1e-6)


class NumpyRecurrence:
    """Recurrent layers in numpy over one pool of states. Implements `recurrence.Recurrence`."""

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._batch: ForwardBatch | None = None

    def begin(self, batch: ForwardBatch) -> None:
        """Set the step's sequences, for every call until the next `begin`."""
        assert batch.state_slots is not None
        self._batch = batch

    def bind(self, facts: RecurrentFacts, operands: RecurrentOperands) -> Callable[[], None]:
        """Return the call that runs the layer on these buffers."""
        states, tensors = self._pool.part(facts), operands.tensors
        compute: Callable[[dict[str, FloatArray], FloatArray], FloatArray]
        match facts:
            case ConvolutionFacts():
                compute = partial(_convolve, facts, tensors["weight"], tensors.get("bias"))
            case DeltaRuleFacts():
                compute = partial(_apply_delta_rule, facts)
            case ScanFacts():
                compute = partial(_scan, facts, tensors["a"], tensors["d"])

        def run() -> None:
            for rows, slot, is_fresh in self._sequences():
                if is_fresh:
                    states[slot] = 0
                values = {name: array[rows] for name, array in operands.values.items()}
                operands.values["output"][rows] = compute(values, states[slot])

        return run

    def _sequences(self) -> Iterator[tuple[slice, int, bool]]:
        """Rows of each sequence, the slot of its state, and whether the rows are its first."""
        batch = self._batch
        assert batch is not None
        assert batch.state_slots is not None
        for s, slot in enumerate(batch.state_slots):
            rows = slice(int(batch.query_starts[s]), int(batch.query_starts[s + 1]))
            yield rows, int(slot), int(batch.context_lens[s]) == rows.stop - rows.start


def _convolve(
    facts: ConvolutionFacts,
    weight: FloatArray,
    bias: FloatArray | None,
    values: dict[str, FloatArray],
    state: FloatArray,
) -> FloatArray:
    before = state.reshape(facts.taps - 1, facts.channels)
    inputs, tokens = np.concatenate((before, values["input"])), len(values["input"])
    total = np.zeros((tokens, facts.channels), np.float32) if bias is None else np.tile(bias, (tokens, 1))
    for tap in range(facts.taps):
        total += weight[tap] * inputs[tap : tap + tokens]
    before[:] = inputs[tokens:]
    return total * _sigmoid(total) if facts.activation == "silu" else total


def _apply_delta_rule(facts: DeltaRuleFacts, values: dict[str, FloatArray], state: FloatArray) -> FloatArray:
    tokens, heads, per_key = len(values["query"]), facts.num_value_heads, facts.num_value_heads // facts.num_key_heads
    query, key = (
        np.repeat(_heads(values[name], facts.num_key_heads, facts.normalize), per_key, axis=1)
        for name in ("query", "key")
    )  # [tokens, heads, key_dim]
    value = _padded(values["value"].reshape(tokens, heads, -1))
    result = np.empty_like(value)
    decay = np.exp(values["decay"])
    for tile, columns in _tiles(state, heads, facts.key_dim, facts.value_dim):
        for t in range(tokens):
            tile *= decay[t, :, None, None]
            change = values["beta"][t, :, None] * (value[t, :, columns] - _dot(tile, key[t]))
            tile += key[t, :, :, None] * change[:, None]
            result[t, :, columns] = _dot(tile, query[t]) * np.float32(facts.scale)
    return result[:, :, : facts.value_dim].reshape(tokens, -1)


def _scan(
    facts: ScanFacts, a: FloatArray, d: FloatArray, values: dict[str, FloatArray], state: FloatArray
) -> FloatArray:
    tokens, heads, per_group = len(values["input"]), facts.num_heads, facts.num_heads // facts.num_groups
    b, c = (np.repeat(_heads(values[name], facts.num_groups), per_group, axis=1) for name in ("b", "c"))
    x, dt = _padded(values["input"].reshape(tokens, heads, -1)), values["dt"]
    result = np.empty_like(x)
    decay = np.exp(dt * a)
    for tile, columns in _tiles(state, heads, facts.state_dim, facts.head_dim):
        for t in range(tokens):
            tile *= decay[t, :, None, None]
            tile += b[t, :, :, None] * (dt[t, :, None] * x[t, :, columns])[:, None]
            result[t, :, columns] = _dot(tile, c[t]) + d[:, None] * x[t, :, columns]
    return result[:, :, : facts.head_dim].reshape(tokens, -1)


def _tiles(state: FloatArray, heads: int, rows: int, columns: int) -> Iterator[tuple[FloatArray, slice]]:
    """Views [heads, rows, width] of the tiles of all heads, and their columns."""
    padded = round_up(columns, LANES)
    by_head = state.reshape(heads, rows * padded)
    for begin in range(0, padded, STATE_TILE):
        width = min(STATE_TILE, padded - begin)
        tile = by_head[:, begin * rows : (begin + width) * rows].reshape(heads, rows, width)
        yield tile, slice(begin, begin + width)


def _dot(tile: FloatArray, vector: FloatArray) -> FloatArray:
    """tile [heads, rows, width]^T vector [heads, rows], row after row."""
    result: FloatArray = np.einsum("hrw,hr->hw", tile, vector)
    return result


def _heads(x: FloatArray, heads: int, normalize: bool = False) -> FloatArray:
    """[tokens, heads, dim], of length 1 if `normalize`."""
    split: FloatArray = x.reshape(len(x), heads, -1).copy()
    if normalize:
        split /= np.sqrt(np.square(split).sum(axis=-1, keepdims=True) + _EPSILON)
    return split


def _padded(x: FloatArray) -> FloatArray:
    """Columns up to whole LANES, with zeros."""
    return np.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % LANES)))


def _sigmoid(x: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):
        result: FloatArray = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result
