"""Quantized activations as standard ONNX nodes, which onnxruntime, calibration and the reference run unchanged.

A linear layer that computes with quantized activations reads x' instead of x, made by one of

    static, one scale for the tensor, found on calibration data

        codes  = QuantizeLinear(x, scale [], zero_point [])                       int8 or float8_e4m3fn, saturating
        x'     = DequantizeLinear(codes, scale, zero_point)

    dynamic, one scale per token (row), computed when the model runs

        peak   = ReduceMax(Abs(x), axes=[1], keepdims=0)                          [T]
        scale  = Div(Max(peak, LEAST_PEAK), largest)                              [T]; largest: 127 or 448
        codes  = QuantizeLinear(x, scale, axis=0, output_dtype)
        x'     = DequantizeLinear(codes, scale, axis=0)

Zero points are 0: codes are symmetric. Layers that read one x share one x'. The last DequantizeLinear, and every layer
that reads it, has the scheme in its metadata "ingot.activations", as JSON:

    bits 8, kind "int" | "float", dynamic, strategy "token" | "tensor", and, where static, scale

Dynamic scales are per token because a row's result must not depend on its batch mates; ONNX's DynamicQuantizeLinear,
one scale for the whole batch, would break that. A row of zeros stays zero. float8 keeps NaN; int8 has no code for it,
and ONNX leaves the result undefined. Calibration refuses NaN by name.

`activation_scheme(gemm)` reads the form back; `round_activations` (numerics/activation_rounding.py) computes the same
bits in numpy.

Outlier channels, which keep their precision (Dettmers et al., LLM.int8, arXiv:2208.07339), are computed by a second
matmul:

    Matched         y = Gemm(x, W, b?, transB=1)

    Replacement     y = Gemm(Mul(x, kept), W', b?, transB=1) + MatMul(Gather(x, channels, axis=1), W_channels)

    channels        [n] int64, the outliers              kept          [in], 0 at the outliers, else 1
    W_channels      [n, out] float32: W[:, channels]^T   W'            W with zeros there, where it is not yet quantized

The second matmul is a MatMul and not a Gemm, so that passes over linear layers leave it alone.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from ingot.passes.numerics.activation_rounding import LARGEST, LEAST_PEAK, ActivationScheme, Channels, Kind
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.projections import forget_projections
from ingot.passes.quantization.weight_nodes import FLOAT8, float_value
from ingot.passes.rewriting import add_initializer
from ingot.passes.weights import apply_to_array, float32_values, stored_value

ACTIVATIONS_KEY = "ingot.activations"  # metadata_props of the DequantizeLinear that makes x' and of the layers
OUTLIERS_KEY = "ingot.outliers"  # metadata_props of the second matmul: name of the layer that it belongs to
DTYPES: dict[Kind, ir.DataType] = {"int": ir.DataType.INT8, "float": FLOAT8}


def dequantizer(gemm: ir.Node) -> ir.Node | None:
    """The DequantizeLinear that makes a linear layer's activations; None where they are not quantized."""
    source = gemm.inputs[0] if gemm.inputs else None
    producer = None if source is None else source.producer()
    if producer is None or producer.op_type != "DequantizeLinear":  # a layer's own metadata has the key, too
        return None
    return producer if ACTIVATIONS_KEY in producer.metadata_props else None


def activation_scheme(gemm: ir.Node) -> ActivationScheme | None:
    """Return the quantization of a linear layer's activations; None for floats."""
    node = dequantizer(gemm)
    if node is None:
        return None
    facts = json.loads(node.metadata_props[ACTIVATIONS_KEY])
    return ActivationScheme(facts["kind"], facts.get("scale"))


def activation_facts(gemm: ir.Node) -> dict[str, object]:
    """The activations' entry in the statistics of a layer's weight; empty where they are not quantized."""
    scheme = activation_scheme(gemm)
    return {} if scheme is None else {"activations": scheme.facts}


def insert_activation_quantization(
    graph: ir.Graph, source: ir.Value, readers: Sequence[ir.Node], scheme: ActivationScheme
) -> list[ir.Node]:
    """Let the readers (in graph order, each with `source` as its first input) read x' of `source` [T, in].

    Returns the new nodes, inserted right before the first reader; the last makes x'.
    """
    path = f"{readers[0].name}.input"
    nodes = list(_dynamic(graph, path, source, scheme) if scheme.dynamic else _static(graph, path, source, scheme))
    graph.insert_before(readers[0], nodes)
    for reader in readers:
        reader.replace_input_with(0, nodes[-1].outputs[0])
    for node in (nodes[-1], *readers):
        node.metadata_props[ACTIVATIONS_KEY] = json.dumps(scheme.facts)
    return nodes


def split_outliers(graph: ir.Graph, source: ir.Value, readers: Sequence[ir.Node], channels: Channels) -> ir.Value:
    """Give the readers (linear layers over `source` [T, in]) a second matmul; return Mul(x, kept), which they read."""
    path, (rows, width) = f"{readers[0].name}.input", _shape(source)
    index = constant(graph, f"{path}.outliers", channels, ir.DataType.INT64)
    kept = np.ones(int(width), np.float32)
    kept[channels] = 0
    taken = _node("Gather", f"{path}.outlier_columns", [source, index], (rows, len(channels)), axis=1)
    kept_columns = constant(graph, f"{path}.kept_columns", kept, ir.DataType.FLOAT)
    masked = _node("Mul", f"{path}.kept", [source, kept_columns], (rows, width))
    graph.insert_before(readers[0], [taken, masked])
    for reader in readers:
        _add_outlier_matmul(graph, reader, taken.outputs[0], channels)
        reader.replace_input_with(0, masked.outputs[0])
    return masked.outputs[0]


def split_layers(graph: ir.Graph) -> list[str]:
    """Names of the layers that have a second matmul."""
    return [node.metadata_props[OUTLIERS_KEY] for node in graph if OUTLIERS_KEY in node.metadata_props]


def constant(graph: ir.Graph, name: str, array: object, dtype: ir.DataType) -> ir.Value:
    """The initializer of that name, made on first use."""
    present = graph.initializers.get(name)
    return present or add_initializer(graph, ir.Tensor(np.asarray(array, dtype.numpy()), name=name))


def _dynamic(graph: ir.Graph, path: str, x: ir.Value, scheme: ActivationScheme) -> Iterator[ir.Node]:
    rows = _shape(x)[:1]
    axes = constant(graph, "activations.axes", [1], ir.DataType.INT64)
    least = constant(graph, "activations.least_peak", LEAST_PEAK, ir.DataType.FLOAT)
    largest = constant(graph, f"activations.largest.{scheme.kind}", LARGEST[scheme.kind], ir.DataType.FLOAT)
    magnitude = _node("Abs", f"{path}.abs", [x], _shape(x))
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
    yield _node("DequantizeLinear", f"{path}.dequantize", [codes.outputs[0], scale.outputs[0]], _shape(x), axis=0)


def _static(graph: ir.Graph, path: str, x: ir.Value, scheme: ActivationScheme) -> Iterator[ir.Node]:
    scale = constant(graph, f"{path}.scale", scheme.scale, ir.DataType.FLOAT)
    zero = constant(graph, f"activations.zero.{scheme.kind}", 0, DTYPES[scheme.kind])
    codes = _codes(path, [x, scale, zero], x, scheme)
    yield codes
    yield _node("DequantizeLinear", f"{path}.dequantize", [codes.outputs[0], scale, zero], _shape(x))


def _codes(path: str, inputs: list[ir.Value], x: ir.Value, scheme: ActivationScheme, **attributes: int) -> ir.Node:
    """The QuantizeLinear; the lowering keeps the names of nodes and values."""
    node = _node("QuantizeLinear", f"{path}.quantize", inputs, _shape(x), **attributes)
    node.outputs[0].dtype = DTYPES[scheme.kind]
    return node


def _node(op_type: str, name: str, inputs: list[ir.Value], shape: tuple[int | str, ...], **attributes: int) -> ir.Node:
    return ir.node(op_type, inputs, attributes, name=name, outputs=[float_value(name, shape)])


def _shape(x: ir.Value) -> tuple[int | str, ...]:
    """Shape of x, with its symbols' names."""
    assert x.shape is not None, x.name
    return tuple(size if isinstance(size, int) else str(size) for size in x.shape)


def _add_outlier_matmul(graph: ir.Graph, gemm: ir.Node, columns: ir.Value, channels: Channels) -> None:
    weight, result, path = gemm.inputs[1], gemm.outputs[0], f"{gemm.name}.outliers"
    # From now on it reads x without the outliers.
    forget_projections([gemm])
    assert weight is not None
    kept: Float32Array = np.ascontiguousarray(float32_values(weight)[:, channels].T)
    operand = add_initializer(graph, ir.Tensor(kept, name=f"{path}.weight"))
    matmul = _node("MatMul", path, [columns, operand], _shape(result))
    matmul.metadata_props[OUTLIERS_KEY] = gemm.name or ""
    total = _node("Add", f"{path}.add", [result, matmul.outputs[0]], _shape(result))
    result.replace_all_uses_with(total.outputs[0])
    total.replace_input_with(0, result)
    graph.insert_after(gemm, [matmul, total])
    stored = stored_value(weight)
    if stored is not None and len(stored.uses()) == len(weight.uses()) == 1:
        _clear_columns(stored, channels)


def _clear_columns(stored: ir.Value, channels: Channels) -> None:
    """Set the weight's columns to zero, lazily, in its own dtype."""
    assert stored.const_value is not None
    tensor, dtype = stored.const_value, stored.const_value.dtype
    make = partial(_cleared, tensor, channels)
    stored.const_value = ir.LazyTensor(make, dtype, ir.Shape(tensor.shape.numpy()), name=stored.name)


def _cleared(tensor: ir.TensorProtocol, channels: Channels) -> ir.TensorProtocol:
    array = apply_to_array(tensor, np.array)
    array[:, channels] = 0
    return ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)
