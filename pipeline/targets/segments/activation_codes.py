"""Activations as 8-bit codes whose scale is a constant: x / n = codes * p.

n [T, 1] is the divisor that makes a row fill the range of the codes, computed in the segment; with a static scale it is
one number. p is a power of two (2^-7 for int8, 2^-9 for float8), so multiplying by it rounds nothing in any type.
The codes are those that the IR's scales give; this form exists because TensorRT's QuantizeLinear takes no computed
scales.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ingot.passes.numerics.activation_rounding import LARGEST, ActivationScheme, Kind
from ingot.passes.quantization.activation_nodes import DTYPES, activation_scheme
from ingot.pipeline.targets.segments.segment_builder import SegmentBuilder, dims
from ingot.pipeline.targets.segments.stages import unquantized

Read = Callable[[ir.Value], ir.Value]

_UNITS: dict[Kind, float] = {"int": 2.0**-7, "float": 2.0**-9}  # p: codes fill most of -1 .. 1
_LEAST_PEAK = {ir.DataType.FLOAT16: 2.0**-14}  # the smallest normal number, for a row of zeros
_LEAST_FLOAT = 1e-30


@dataclass(frozen=True)
class ActivationCodes:
    """codes * p [T, in], the output of their DequantizeLinear. norm is n [T, 1], or None where n is static_norm."""

    value: ir.Value
    norm: ir.Value | None
    static_norm: float


def quantized_rows(b: SegmentBuilder, dequantize: ir.Node, read: Read) -> ir.Value:
    """Round activations [T, in] to 8 bits and back, for a matmul that computes in the activations' type."""
    result = dequantize.outputs[0]
    if result not in b.values:
        codes = activation_codes(b, dequantize, read)
        factor = b.number(codes.static_norm) if codes.norm is None else codes.norm
        b.values[result] = b.emit("Mul", f"{dequantize.name}.back", [codes.value, factor], dims(result))
    return b.values[result]


def activation_codes(b: SegmentBuilder, dequantize: ir.Node, read: Read) -> ActivationCodes:
    """Return the codes of the activations that a DequantizeLinear of the IR makes; made once for all their readers."""
    scheme = activation_scheme(dequantize.outputs[0].consumers()[0])
    assert scheme is not None
    path, shape, (source, scale) = dequantize.name or "", dims(dequantize.outputs[0]), dequantize.inputs[:2]
    assert source is not None
    assert scale is not None
    static = 0.0 if scheme.scale is None else scheme.scale / _UNITS[scheme.kind]
    if source not in b.values:
        ratio = _ratio(b, path, read(unquantized(dequantize)), scale, scheme, static)
        unit, dtype = b.number(_UNITS[scheme.kind]), DTYPES[scheme.kind]
        codes = b.emit("QuantizeLinear", f"{path}.quantize", [ratio, unit], shape, dtype, output_dtype=dtype)
        b.values[source] = b.emit("DequantizeLinear", path, [codes, unit], shape)
    return ActivationCodes(b.values[source], b.values.get(scale), static)


def _ratio(
    b: SegmentBuilder, path: str, x: ir.Value, scale: ir.Value, scheme: ActivationScheme, static: float
) -> ir.Value:
    """x / n. A computed n is recorded as the segment's value of the IR's scale."""
    shape = dims(x)
    if scheme.dynamic:
        b.values[scale] = _norm(b, path, x, scheme.kind)
        return b.emit("Div", f"{path}.ratio", [x, b.values[scale]], shape)
    inverse = np.array([1 / static], np.float32)
    factor = b.weight(f"{path}.inverse", b.dtype, (1,), lambda: inverse)
    return b.emit("Mul", f"{path}.ratio", [x, factor], shape)


def _norm(b: SegmentBuilder, path: str, x: ir.Value, kind: Kind) -> ir.Value:
    """n [T, 1]: the largest magnitude of each row over the value of the largest code."""
    b.number_formats.add("fp8" if kind == "float" else "int8")
    column = [dims(x)[0], 1]
    magnitude = b.emit("Abs", f"{path}.abs", [x], dims(x))
    peak = b.row_maximum(f"{path}.peak", magnitude)
    least = b.number(_LEAST_PEAK.get(b.dtype, _LEAST_FLOAT), shape=(1, 1))
    bounded = b.emit("Max", f"{path}.bounded", [peak, least], column)
    return b.emit("Mul", f"{path}.norm", [bounded, b.number(1 / (LARGEST[kind] * _UNITS[kind]))], column)
