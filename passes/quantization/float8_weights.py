"""Weights as float8_e4m3fn: rounding them, and what the CPU makes of them.

A row [in], or the whole weight, shares one scale s; the codes are round(w / s), saturating at 448, ties to even:

    W' = DequantizeLinear(codes [out, in] float8_e4m3fn, scale [out], axis=0)

One scale for the whole weight stands once per row, too, and the DequantizeLinear says "tensor" in its metadata
"ingot.strategy". Plain rounding takes s = max|w| / 448; the search tries smaller ones, as for integers (rounding.py).
(Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.)

onnxruntime has no float8 matmul on CPUs. The artifact holds the codes, 8 bits each, and the graph says

    W' = Mul(Cast(codes, to=FLOAT), scale [out, 1])

which onnxruntime computes once, when it loads the segment: the same bits, 32-bit floats in memory, speed of float32.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.calibration import Float32Array
from ingot.passes.quantization.quantized_tensors import STRATEGY_KEY, float_value
from ingot.passes.rewriting import add_initializer
from ingot.passes.weight_sites import drop_if_unused

FLOAT8 = ir.DataType.FLOAT8E4M3FN
LARGEST = np.float32(448)

_SHRINK_FACTORS = tuple(np.float32(1.0 - 0.05 * step) for step in range(11))
_ZERO_BELOW = np.float32(1e-30)


@dataclass(frozen=True)
class Float8Weight:
    """codes [out, in] float8_e4m3fn; scale [out] float32; sums over all elements in float64."""

    codes: NDArray[Any]
    scale: Float32Array
    squared_error: float
    squared_norm: float
    clipped_share: float

    @property
    def relative_error(self) -> float:
        """||W - W'|| / ||W||, Frobenius norms; 0 for a zero weight."""
        return (self.squared_error / self.squared_norm) ** 0.5 if self.squared_norm else 0.0


def to_float8(values: Float32Array) -> NDArray[Any]:
    """Rounded to the nearest float8_e4m3fn, ties to even, saturating at 448."""
    return np.clip(values, -LARGEST, LARGEST).astype(FLOAT8.numpy())


def round_float8(weight: Float32Array, *, per_tensor: bool, clip: bool) -> Float8Weight:
    """Quantize weight [out, in]; `clip` searches the scale. ValueError when a value is NaN or infinite."""
    peak = np.abs(weight).max(axis=None if per_tensor else 1, keepdims=True)  # [1, 1] or [out, 1]
    if not np.isfinite(peak).all():
        raise ValueError("NaN or infinite")
    peak = np.where(peak < _ZERO_BELOW, LARGEST, peak)
    best, factor = np.full(peak.shape, np.inf), np.ones_like(peak)
    for trial in _SHRINK_FACTORS if clip else _SHRINK_FACTORS[:1]:
        error = _squared_error(weight, peak * trial / LARGEST, per_tensor)
        better = error < best
        best, factor = np.where(better, error, best), np.where(better, trial, factor)
    scale: Float32Array = (peak * factor / LARGEST).astype(np.float32)
    return Float8Weight(
        codes=to_float8(weight / scale),
        scale=np.ascontiguousarray(np.broadcast_to(scale[:, 0], len(weight))),
        squared_error=float(best.sum()),
        squared_norm=float(np.square(weight, dtype=np.float64).sum()),
        clipped_share=float((factor < 1).mean()),
    )


def insert_float8_weight(
    graph: ir.Graph, name: str, before: ir.Node, rounded: Float8Weight, *, per_tensor: bool
) -> ir.Value:
    """Add the initializers and a DequantizeLinear in front of a node; return what it makes, [out, in] float32."""
    base = name if f"{name}.q" not in graph.initializers else f"{before.name}.weight"
    tensors = ir.Tensor(rounded.codes, name=f"{base}.q"), ir.Tensor(rounded.scale, name=f"{base}.scale")
    inputs = [add_initializer(graph, tensor) for tensor in tensors]
    made = float_value(f"{base}.dequantized", rounded.codes.shape)
    path = f"{base.removesuffix('.weight')}.dequantize"
    node = ir.node("DequantizeLinear", inputs, {"axis": 0}, name=path, outputs=[made])
    if per_tensor:
        node.metadata_props[STRATEGY_KEY] = "tensor"
    graph.insert_before(before, node)
    return made


def widen_float8_weights(graph: ir.Graph) -> bool:
    """Replace every DequantizeLinear over stored float8 codes; whether there was one."""
    found = [node for node in graph if _is_float8_weight(node)]
    for node in found:
        _widen(graph, node)
    return bool(found)


def _squared_error(weight: Float32Array, scale: Float32Array, per_tensor: bool) -> NDArray[np.float64]:
    error = weight - to_float8(weight / scale).astype(np.float32) * scale
    total: NDArray[np.float64] = np.square(error, dtype=np.float64).sum(axis=None if per_tensor else 1, keepdims=True)
    return total


def _is_float8_weight(node: ir.Node) -> bool:
    codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
    return codes is not None and codes.is_initializer() and codes.dtype == FLOAT8


def _widen(graph: ir.Graph, node: ir.Node) -> None:
    codes, scale = node.inputs[0], node.inputs[1]
    assert codes is not None
    assert scale is not None
    assert scale.const_value is not None
    column = ir.Tensor(np.asarray(scale.const_value.numpy()).reshape(-1, 1), name=f"{scale.name}.column")
    shape = tuple(int(size) for size in (codes.shape or ir.Shape(())).numpy())
    wide = ir.node(
        "Cast",
        [codes],
        {"to": ir.DataType.FLOAT},
        name=f"{node.name}.widen",
        outputs=[float_value(f"{node.name}.widen", shape)],
    )
    inputs = [wide.outputs[0], add_initializer(graph, column)]
    scaled = ir.node("Mul", inputs, name=f"{node.name}.scale", outputs=[float_value(f"{node.name}.scale", shape)])
    old = [value for value in node.inputs if value is not None]
    new = [wide, scaled]
    ir.convenience.replace_nodes_and_values(graph, node, [node], new, [node.outputs[0]], [scaled.outputs[0]])
    for value in old:
        drop_if_unused(graph, value)
