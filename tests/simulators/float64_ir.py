"""A model's IR in numpy, with 64-bit floats, before it is lowered: what its nodes mean, without an engine's rounding.

Sequences are computed whole or in chunks, several to a step. Weights are what their stored forms restore to;
activations that a pass quantizes are rounded as QuantizeLinear does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.lowering.expand_experts import routing_of
from ingot.passes.numerics.experts import combine, dispatch, route
from ingot.passes.numerics.recurrences import gated_delta_rule, selective_scan, short_convolution
from ingot.passes.recurrent_ops import delta_rule_of, scan_of, state_shape
from ingot.passes.weights import float32_values, is_stored
from tests.reference_runner import SCHEDULE, run_ragged

Array = NDArray[Any]


def float64_logits(model: ir.Model, tokens: list[int]) -> NDArray[np.float64]:
    """Logits [length, vocabulary] of a prompt."""
    return Float64Runner(model).step({0: tokens})[0]


class Float64Runner:
    """One model, and what it remembers of its sequences: keys and values, and states of recurrent ops."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self._weights: dict[str, Array] = {}
        self._seen: dict[int, int] = {}  # sequence -> tokens
        self._memory: dict[tuple[int, str], Any] = {}  # of a sequence and a node

    def step(self, batch: Mapping[int, Sequence[int]]) -> dict[int, Array]:
        """Feed the tokens of each sequence after those it has; return logits of all of them, [tokens, vocab] each."""
        ids = np.concatenate([np.array(tokens, np.int64) for tokens in batch.values()])
        first = {sequence: self._seen.get(sequence, 0) for sequence in batch}
        ranges = [np.arange(first[sequence], first[sequence] + len(tokens)) for sequence, tokens in batch.items()]
        self._seen |= {sequence: first[sequence] + len(tokens) for sequence, tokens in batch.items()}
        values = {"input_ids": ids, "position_ids": np.concatenate(ranges), "logits_indices": np.arange(len(ids))}
        ends = np.cumsum([len(tokens) for tokens in batch.values()])
        for node in self.model.graph:
            if not is_stored(node.outputs[0]):
                operands = [None if operand is None else self._value(operand, values) for operand in node.inputs]
                results = self._compute(node, operands, list(batch), ends)
                values |= zip((output.name or "" for output in node.outputs), results, strict=True)
        return dict(zip(batch, np.split(values["logits"], ends[:-1]), strict=True))

    def run_ragged(
        self, sequences: Sequence[Sequence[int]], schedule: Sequence[Sequence[int]] = SCHEDULE
    ) -> list[Array]:
        """Feed all sequences by the schedule; return the logits of each, [length, vocab]."""
        return run_ragged(self.step, sequences, schedule)

    def _compute(
        self, node: ir.Node, operands: list[Array | None], sequences: list[int], ends: NDArray[np.int64]
    ) -> list[Array]:
        if node.op_type not in _REMEMBERS:
            results = _NODES[node.op_type](node, *operands)
            return results if isinstance(results, list) else [results]
        compute, count = _REMEMBERS[node.op_type]
        starts, by_token = [0, *ends[:-1]], []
        for sequence, start, end in zip(sequences, starts, ends, strict=True):
            rows = [None if operand is None else operand[start:end] for operand in operands[:count]]
            key = sequence, node.name or ""
            result, self._memory[key] = compute(node, *rows, *operands[count:], self._memory.get(key))
            by_token.append(result)
        return [np.concatenate(by_token)]

    def _value(self, operand: ir.Value, values: Mapping[str, Array]) -> Array:
        name = operand.name or ""
        if name in values:
            return values[name]
        if name not in self._weights:
            tensor = None if operand.producer() is not None or _is_float(operand) else operand.const_value
            self._weights[name] = float32_values(operand).astype(np.float64) if tensor is None else tensor.numpy()
        return self._weights[name]


def _is_float(operand: ir.Value) -> bool:
    return operand.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _rms_norm(node: ir.Node, x: Array, weight: Array) -> Array:
    epsilon = node.attributes["epsilon"].as_float()
    normed: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon) * weight
    return normed


def _layer_norm(node: ir.Node, x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return _rms_norm(node, centred, weight) + bias


def _gemm(node: ir.Node, x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
    assert node.attributes.get_int("transB") == 1
    return x @ weight.T + bias


def _split(node: ir.Node, x: Array, sizes: Array | None = None) -> list[Array]:
    count = len(node.outputs)
    return np.split(x, count if sizes is None else np.cumsum(sizes)[:-1], axis=-1)


def _rotate(node: ir.Node, x: Array, cos: Array, sin: Array, positions: Array) -> Array:
    """Pairs of the two halves of a head, or of its first dims; x [T, heads * dim] or [1, T, heads * dim]."""
    heads = node.attributes["num_heads"].as_int()
    assert not node.attributes.get_int("interleaved", 0)
    by_head = x.reshape(-1, heads, x.shape[-1] // heads)
    c, s = (table[positions.reshape(-1)][:, None] for table in (cos, sin))  # [T, 1, dim / 2]
    rotary_dim = node.attributes.get_int("rotary_embedding_dim", 0) or by_head.shape[-1]
    a, b = np.split(by_head[..., :rotary_dim], 2, axis=-1)
    parts = (a * c - b * s, b * c + a * s, by_head[..., rotary_dim:])
    return np.concatenate(parts, axis=-1).reshape(x.shape)


def _attend(node: ir.Node, query: Array, key: Array, value: Array, *more: Any) -> tuple[Array, tuple[Array, Array]]:
    """Attention over the sequence's earlier keys and values too; `more` are cos, sin, sinks, and those."""
    *tables, past = more
    assert not any(table is not None for table in tables[:2])
    sinks = tables[2] if len(tables) > 2 else None
    if past is not None:
        key, value = (np.concatenate(pair) for pair in zip(past, (key, value), strict=True))
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "num_kv_heads"))
    window = node.attributes["window"].as_int()
    assert not node.attributes["softcap"].as_float()
    q, k, v = (x.reshape(len(x), count, -1) for x, count in ((query, heads), (key, kv_heads), (value, kv_heads)))
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * node.attributes["scale"].as_float()
    distance = np.arange(len(key) - len(query), len(key))[:, None] - np.arange(len(key))
    scores[:, (distance < 0) | (distance >= (window or len(key)))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    extra = 0.0 if sinks is None else np.exp(sinks[:, None, None] - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True) + extra
    return np.einsum("hts,shd->thd", weights, v).reshape(query.shape), (key, value)


def _convolve(node: ir.Node, x: Array, weight: Array, *more: Array | None) -> tuple[Array, Array]:
    """`more`: the bias, if there is one, and the state."""
    *bias, state = more
    before = np.zeros(state_shape(node)) if state is None else state
    activation = node.attributes["activation"].as_string()
    return short_convolution(x, weight, bias[0] if bias else None, activation, before)


def _delta_rule(
    node: ir.Node, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array | None
) -> tuple[Array, Array]:
    before = np.zeros(state_shape(node)) if state is None else state
    return gated_delta_rule(q, k, v, decay, beta, delta_rule_of(node), before)


def _scan(node: ir.Node, *operands: Any) -> tuple[Array, Array]:
    x, dt, b, c, a, d, state = operands
    return selective_scan(x, dt, b, c, a, d, scan_of(node), np.zeros(state_shape(node)) if state is None else state)


def _quantize(node: ir.Node, x: Array, scale: Array, zero: Array | int = 0) -> Array:
    return np.clip(np.rint(x / _per_row(scale)) + zero, -128, 127)


def _dequantize(node: ir.Node, codes: Array, scale: Array, zero: Array | int = 0) -> Array:
    return (codes - zero) * _per_row(scale)


def _per_row(scale: Array) -> Array:
    return scale[:, None] if scale.ndim else scale


_NODES: Mapping[str, Callable[..., Array | list[Array]]] = {
    "Abs": lambda node, x: np.abs(x),
    "Add": lambda node, a, b: a + b,
    "DequantizeLinear": _dequantize,
    "Clip": lambda node, x, low, high=np.inf: np.clip(x, low, high),
    "CombineExperts": lambda node, ids, weights, *rows: combine(ids, weights, rows),
    "Concat": lambda node, *parts: np.concatenate(parts, axis=node.attributes["axis"].as_int()),
    "DispatchExperts": lambda node, x, ids: dispatch(x, ids, len(node.outputs)),
    "Div": lambda node, a, b: a / b,
    "Gather": lambda node, table, ids: table[ids],
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "Max": lambda node, a, b: np.maximum(a, b),
    "Mul": lambda node, a, b: a * b,
    "QuantizeLinear": _quantize,
    "QuickGelu": lambda node, x: x / (1 + np.exp(-x)),  # fuse-gated-activation makes it with an alpha of 1
    "RMSNormalization": _rms_norm,
    "ReduceMax": lambda node, x, axes: x.max(axis=tuple(axes)),
    "RotaryEmbedding": _rotate,
    "Relu": lambda node, x: np.maximum(x, 0),
    "Reshape": lambda node, x, sizes: x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]),
    "RouteExperts": lambda node, logits, bias=None: list(route(logits, routing_of(node), bias)),
    "Sigmoid": lambda node, x: 1 / (1 + np.exp(-x)),
    "Softplus": lambda node, x: np.logaddexp(x, 0),
    "Split": _split,
    "Squeeze": lambda node, x, axes: np.squeeze(x, tuple(axes)),
    "Swish": lambda node, x: x / (1 + np.exp(-x)),
    "Unsqueeze": lambda node, x, axes: np.expand_dims(x, tuple(axes)),
}

# Nodes that remember something of a sequence -> what computes them, given its rows of the operands by token (how many)
# and what it returned for the sequence before.
_REMEMBERS: Mapping[str, tuple[Callable[..., tuple[Array, Any]], int]] = {
    "GatedDeltaRule": (_delta_rule, 5),
    "PagedAttention": (_attend, 3),
    "SelectiveScan": (_scan, 4),
    "ShortConvolution": (_convolve, 1),
}
