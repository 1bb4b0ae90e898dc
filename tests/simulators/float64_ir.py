"""A model's IR in numpy, with 64-bit floats, before it is lowered: what its nodes mean, without an engine's rounding.

One prompt is computed at once, without a cache. Weights are what their stored forms restore to; activations that a pass
quantizes are rounded as QuantizeLinear does.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.numerics.recurrences import gated_delta_rule, selective_scan, short_convolution
from ingot.passes.recurrent_ops import delta_rule_of, scan_of
from ingot.passes.weights import float32_values, is_stored

Array = NDArray[Any]


def float64_logits(model: ir.Model, tokens: list[int]) -> NDArray[np.float64]:
    """Logits [length, vocabulary] of a prompt."""
    ids = np.array(tokens, np.int64)
    positions = np.arange(len(ids))
    values: dict[str, Array] = {"input_ids": ids, "position_ids": positions, "logits_indices": positions}
    for node in model.graph:
        if not is_stored(node.outputs[0]):
            operands = [None if operand is None else _value(operand, values) for operand in node.inputs]
            results = _NODES[node.op_type](node, *operands)
            results = results if isinstance(results, list) else [results]
            values |= zip((output.name or "" for output in node.outputs), results, strict=True)
    return values["logits"]


def _value(operand: ir.Value, values: Mapping[str, Array]) -> Array:
    name = operand.name or ""
    if name in values:
        return values[name]
    if operand.producer() is None and operand.const_value is not None and not _is_float(operand):
        return operand.const_value.numpy()
    return float32_values(operand).astype(np.float64)


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
    """Pairs of the two halves of each head; x [T, heads * dim] or [1, T, heads * dim]."""
    heads = node.attributes["num_heads"].as_int()
    assert not node.attributes.get_int("interleaved", 0)
    by_head = x.reshape(-1, heads, x.shape[-1] // heads)
    c, s = (table[positions.reshape(-1)][:, None] for table in (cos, sin))  # [T, 1, dim / 2]
    a, b = np.split(by_head, 2, axis=-1)
    return np.concatenate((a * c - b * s, b * c + a * s), axis=-1).reshape(x.shape)


def _attend(
    node: ir.Node,
    query: Array,
    key: Array,
    value: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    assert cos is None
    assert sin is None
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "num_kv_heads"))
    window = node.attributes["window"].as_int()
    assert not node.attributes["softcap"].as_float()
    q, k, v = (x.reshape(len(x), count, -1) for x, count in ((query, heads), (key, kv_heads), (value, kv_heads)))
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * node.attributes["scale"].as_float()
    distance = np.arange(len(query))[:, None] - np.arange(len(query))
    scores[:, (distance < 0) | (distance >= (window or len(query)))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    extra = 0.0 if sinks is None else np.exp(sinks[:, None, None] - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True) + extra
    attended: Array = np.einsum("hts,shd->thd", weights, v).reshape(query.shape)
    return attended


def _convolve(node: ir.Node, x: Array, weight: Array, bias: Array | None = None) -> Array:
    before = np.zeros((weight.shape[1] - 1, x.shape[1]))
    return short_convolution(x, weight, bias, node.attributes["activation"].as_string(), before)[0]


def _delta_rule(node: ir.Node, q: Array, k: Array, v: Array, decay: Array, beta: Array) -> Array:
    rule = delta_rule_of(node)
    return gated_delta_rule(q, k, v, decay, beta, rule, np.zeros(rule.state_shape))[0]


def _scan(node: ir.Node, x: Array, dt: Array, b: Array, c: Array, a: Array, d: Array) -> Array:
    scan = scan_of(node)
    return selective_scan(x, dt, b, c, a, d, scan, np.zeros(scan.state_shape))[0]


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
    "Div": lambda node, a, b: a / b,
    "GatedDeltaRule": _delta_rule,
    "Gather": lambda node, table, ids: table[ids],
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "Max": lambda node, a, b: np.maximum(a, b),
    "Mul": lambda node, a, b: a * b,
    "PagedAttention": _attend,
    "QuantizeLinear": _quantize,
    "QuickGelu": lambda node, x: x / (1 + np.exp(-x)),  # fuse-gated-activation makes it with an alpha of 1
    "RMSNormalization": _rms_norm,
    "ReduceMax": lambda node, x, axes: x.max(axis=tuple(axes)),
    "RotaryEmbedding": _rotate,
    "SelectiveScan": _scan,
    "ShortConvolution": _convolve,
    "Sigmoid": lambda node, x: 1 / (1 + np.exp(-x)),
    "Split": _split,
    "Squeeze": lambda node, x, axes: np.squeeze(x, tuple(axes)),
    "Swish": lambda node, x: x / (1 + np.exp(-x)),
    "Unsqueeze": lambda node, x, axes: np.expand_dims(x, tuple(axes)),
}
