"""Quantized activations in the IR: standard ONNX, which onnxruntime, calibration and the reference run as it is.

A linear layer that computes with quantized activations reads x' in place of x, made by one of

    static, one scale for the tensor, found on calibration data

        codes  = QuantizeLinear(x, scale [], zero_point [])                       int8 or float8_e4m3fn, saturating
        x'     = DequantizeLinear(codes, scale, zero_point)

    dynamic, one scale per token (row), computed where it is needed

        peak   = ReduceMax(Abs(x), axes=[1], keepdims=0)                          [T]
        scale  = Div(Max(peak, LEAST_PEAK), largest)                              [T]; largest: 127 or 448
        codes  = QuantizeLinear(x, scale, axis=0, output_dtype)
        x'     = DequantizeLinear(codes, scale, axis=0)

Zero points are 0: codes are symmetric. Layers that read one x share one x'. The last DequantizeLinear, and every layer
that reads it, says in its metadata "ingot.activations" what it is, as JSON of

    bits 8, kind "int" | "float", dynamic, strategy "token" | "tensor", and, where static, scale

Dynamic scales are per token because a row's result must not depend on its batch mates; ONNX's DynamicQuantizeLinear,
one scale for the whole batch, would break that. A row of zeros is left as it is. NaN: float8 keeps it; int8 has no code
for it, and what it becomes ONNX does not say. Calibration refuses NaN by name.

`activation_scheme(gemm)` reads the form back; `qdq` computes the same in numpy, to the last bit.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from ingot.passes.calibration import Float32Array
from ingot.passes.quantization.quantized_tensors import float_value
from ingot.passes.rewriting import add_initializer

ACTIVATIONS_KEY = "ingot.activations"  # metadata_props of the DequantizeLinear that makes x' and of what reads it
LEAST_PEAK = np.float32(1e-30)  # a row whose every value is smaller is zero, and its scale a normal number

Kind = Literal["int", "float"]

LARGEST: dict[Kind, float] = {"int": 127.0, "float": 448.0}
DTYPES: dict[Kind, ir.DataType] = {"int": ir.DataType.INT8, "float": ir.DataType.FLOAT8E4M3FN}


@dataclass(frozen=True)
class ActivationScheme:
    """How activations are quantized. scale: of a static scheme; None where each token gets its own."""

    kind: Kind = "int"
    scale: float | None = None

    @property
    def dynamic(self) -> bool:
        """Whether scales are computed per token."""
        return self.scale is None

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8

    @property
    def facts(self) -> dict[str, object]:
        """As the metadata and the statistics hold them."""
        strategy = "token" if self.dynamic else "tensor"
        facts: dict[str, object] = {"bits": self.bits, "kind": self.kind, "dynamic": self.dynamic, "strategy": strategy}
        return facts if self.scale is None else facts | {"scale": self.scale}


def dequantizer(gemm: ir.Node) -> ir.Node | None:
    """The DequantizeLinear that makes a linear layer's activations; None where they are not quantized."""
    source = gemm.inputs[0] if gemm.inputs else None
    producer = None if source is None else source.producer()
    return producer if producer is not None and ACTIVATIONS_KEY in producer.metadata_props else None


def activation_scheme(gemm: ir.Node) -> ActivationScheme | None:
    """How a linear layer's activations are quantized; None where they are not."""
    node = dequantizer(gemm)
    if node is None:
        return None
    facts = json.loads(node.metadata_props[ACTIVATIONS_KEY])
    return ActivationScheme(facts["kind"], facts.get("scale"))


def activation_facts(gemm: ir.Node) -> dict[str, object]:
    """What the statistics of a layer's weight say of its activations; nothing where these are not quantized."""
    scheme = activation_scheme(gemm)
    return {} if scheme is None else {"activations": scheme.facts}


def insert_activation_quantization(
    graph: ir.Graph, source: ir.Value, readers: Sequence[ir.Node], scheme: ActivationScheme
) -> list[ir.Node]:
    """Let the readers (in graph order, each with `source` as its first input) read x' of [T, in] `source`.

    Returns the new nodes, which stand right before the first reader; the last makes x'.
    """
    path = f"{readers[0].name}.input"
    nodes = list(_dynamic(graph, path, source, scheme) if scheme.dynamic else _static(graph, path, source, scheme))
    graph.insert_before(readers[0], nodes)
    for reader in readers:
        reader.replace_input_with(0, nodes[-1].outputs[0])
    for node in (nodes[-1], *readers):
        node.metadata_props[ACTIVATIONS_KEY] = json.dumps(scheme.facts)
    return nodes


def qdq(x: Float32Array, scheme: ActivationScheme) -> Float32Array:
    """x [rows, in] as x'. Values must be finite."""
    largest = np.float32(LARGEST[scheme.kind])
    peak = np.maximum(np.abs(x).max(axis=1, keepdims=True), LEAST_PEAK)
    scale = peak / largest if scheme.scale is None else np.float32(scheme.scale)
    codes = x / scale
    if scheme.kind == "int":
        return np.clip(np.rint(codes), -128, 127) * scale
    return np.clip(codes, -largest, largest).astype(DTYPES["float"].numpy()).astype(np.float32) * scale


def constant(graph: ir.Graph, name: str, array: object, dtype: ir.DataType) -> ir.Value:
    """An initializer of that name, made when it is first asked for."""
    known = graph.initializers.get(name)
    return known or add_initializer(graph, ir.Tensor(np.asarray(array, dtype.numpy()), name=name))


def _dynamic(graph: ir.Graph, path: str, x: ir.Value, scheme: ActivationScheme) -> Iterator[ir.Node]:
    rows = _rows(x)[:1]
    axes = constant(graph, "activations.axes", [1], ir.DataType.INT64)
    least = constant(graph, "activations.least_peak", LEAST_PEAK, ir.DataType.FLOAT)
    largest = constant(graph, f"activations.largest.{scheme.kind}", LARGEST[scheme.kind], ir.DataType.FLOAT)
    magnitude = _node("Abs", f"{path}.abs", [x], _rows(x))
    yield magnitude
    peak = _node("ReduceMax", f"{path}.peak", [magnitude.outputs[0], axes], rows, keepdims=0)
    yield peak
    bounded = _node("Max", f"{path}.bounded", [peak.outputs[0], least], rows)
    yield bounded
    scale = _node("Div", f"{path}.scale", [bounded.outputs[0], largest], rows)
    yield scale
    inputs = [x, scale.outputs[0]]
    codes = _codes(path, inputs, x, scheme, axis=0, output_dtype=DTYPES[scheme.kind])
    yield codes
    yield _node("DequantizeLinear", f"{path}.dequantize", [codes.outputs[0], scale.outputs[0]], _rows(x), axis=0)


def _static(graph: ir.Graph, path: str, x: ir.Value, scheme: ActivationScheme) -> Iterator[ir.Node]:
    scale = constant(graph, f"{path}.scale", scheme.scale, ir.DataType.FLOAT)
    zero = constant(graph, f"activations.zero.{scheme.kind}", 0, DTYPES[scheme.kind])
    codes = _codes(path, [x, scale, zero], x, scheme)
    yield codes
    yield _node("DequantizeLinear", f"{path}.dequantize", [codes.outputs[0], scale, zero], _rows(x))


def _codes(path: str, inputs: list[ir.Value], x: ir.Value, scheme: ActivationScheme, **attributes: int) -> ir.Node:
    """QuantizeLinear; nodes and values keep their names through the lowering."""
    node = _node("QuantizeLinear", f"{path}.quantize", inputs, _rows(x), **attributes)
    node.outputs[0].dtype = DTYPES[scheme.kind]
    return node


def _node(op_type: str, name: str, inputs: list[ir.Value], shape: tuple[int | str, ...], **attributes: int) -> ir.Node:
    return ir.node(op_type, inputs, attributes, name=name, outputs=[float_value(name, shape)])


def _rows(x: ir.Value) -> tuple[int | str, ...]:
    """Shape of x, with its symbols' names."""
    assert x.shape is not None, x.name
    return tuple(size if isinstance(size, int) else str(size) for size in x.shape)
