"""Attention over whole sequences in standard ONNX: what calibration runs in place of ingot::PagedAttention.

All sequences have the same length S and lie end to end, so that nothing but shapes tells them apart:

    q, k, v      [B * S, heads * D] -> [B, KV, group, S, D], [B, KV, 1, D, S], [B, KV, 1, S, D]
    attended     Softmax(softcap(q @ k * scale) + mask) @ v                       mask [S, S]: 0, or -inf where not seen
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.calibration import Float32Array

AddOp = Callable[..., ir.Value]
AddConstant = Callable[[np.ndarray[tuple[int, ...], np.dtype[np.generic]]], ir.Value]


def causal_mask(sequence_tokens: int, window: int) -> Float32Array:
    """[S, S]: 0 where a token (row) sees another: itself and those before it, or the last `window` of these."""
    at = np.arange(sequence_tokens)
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    return np.where(seen, np.float32(0), np.float32(-np.inf))


def expand_attention(
    node: ir.Node, inputs: list[ir.Value | None], sequence_tokens: int, add: AddOp, constant: AddConstant
) -> ir.Value:
    """Add the nodes; return what stands for the node's output, [B * S, heads * D]."""
    query, key, value = (*inputs, None, None)[:3]
    if None in (query, key, value) or any(extra is not None for extra in inputs[3:]):
        raise PassError(f"{node.name!r} reads more than query, key and value; run calibrated passes before its fusions")
    heads, kv_heads, dim, window = (_int(node, name) for name in ("num_heads", "num_kv_heads", "head_dim", "window"))
    group = heads // kv_heads

    def by_head(x: ir.Value | None, group: int, perm: tuple[int, ...]) -> ir.Value:
        shape = constant(np.array([-1, sequence_tokens, kv_heads, group, dim], np.int64))
        return add("Transpose", [add("Reshape", [x, shape])], perm=perm)

    def scalar(number: float | None) -> ir.Value:
        return constant(np.array(number, np.float32))

    product = add("MatMul", [by_head(query, group, (0, 2, 3, 1, 4)), by_head(key, 1, (0, 2, 3, 4, 1))])
    scores = add("Mul", [product, scalar(node.attributes.get_float("scale"))])
    if softcap := node.attributes.get_float("softcap", 0.0):
        scores = add("Mul", [add("Tanh", [add("Div", [scores, scalar(softcap)])]), scalar(softcap)])
    masked = add("Add", [scores, constant(causal_mask(sequence_tokens, window))])
    attended = add("MatMul", [add("Softmax", [masked], axis=-1), by_head(value, 1, (0, 2, 3, 1, 4))])
    by_token = add("Transpose", [attended], perm=(0, 3, 1, 2, 4))  # [B, S, KV, group, D]
    return add("Reshape", [by_token, constant(np.array([-1, heads * dim], np.int64))])


def _int(node: ir.Node, name: str) -> int:
    number = node.attributes.get_int(name, 0)
    assert number is not None
    return number
