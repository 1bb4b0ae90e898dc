"""Linear layers over int8 activations and 8-bit weights as integer matmuls; a part of lower-onnxruntime-cpu.

    Matched         x' = DequantizeLinear(QuantizeLinear(x, s, ...), s)            int8, see activation_nodes.py
                    W' = DequantizeLinear(W [out, in] int8 | uint8, w [out], z?)   8 bits per channel
                    y  = Gemm(x', W', b?, transB=1)

    static          codes = QuantizeLinear(x, s, 128)                              uint8
                    y     = QGemm(codes, s, 128, W, w, z, transB=1)                com.microsoft, float32 result

    dynamic         codes = QuantizeLinear(x, s [T], Expand(128, Shape(s)), axis=0)
                    y     = Mul(QGemm(codes, 1, 128, W, w, z, transB=1), Unsqueeze(s, 1))

and Add(y, b) where there is a bias. Codes are shifted by 128 because onnxruntime multiplies uint8 by int8 fastest: with
VNNI, int8 by int8 is 30 times slower, and uint8 by uint8 loses two thirds of the gain (docs/log.md). A weight is stored
as in the IR; the engine transposes and packs it at load.

Numerics: integer sums are exact and only the scaling rounds, 1e-6 of the largest result away from the IR's. So a row's
result never depends on the other rows. On an x86 CPU without VNNI uint8 by int8 would saturate; there the executor
makes onnxruntime compute with unsigned weights, which is slower.

A layer whose weight has another form (4 bits, blocks) still reads x', computed in float32.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from ingot.passes.quantization.activation_nodes import ACTIVATIONS_KEY, activation_scheme, constant
from ingot.passes.quantization.weight_nodes import float_value
from ingot.passes.rewriting import add_initializer, require_plain_gemm
from ingot.passes.weights import drop_if_unused

ZERO_POINT = 128
_EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)


def lower_integer_matmuls(graph: ir.Graph) -> bool:
    """Replace every layer that matches; return whether there was one."""
    found: dict[ir.Node, list[ir.Node]] = {}
    for node in graph:
        producer = _quantized_input(node)
        if producer is not None and _weight(node) is not None:
            found.setdefault(producer, []).append(node)
    for dequantize, gemms in found.items():
        codes, scale = _unsigned_codes(graph, dequantize)
        for gemm in gemms:
            _lower(graph, gemm, codes, scale)
        drop_if_unused(graph, dequantize.outputs[0])
    return bool(found)


def _quantized_input(node: ir.Node) -> ir.Node | None:
    """The DequantizeLinear over int8 codes that makes a linear layer's input."""
    scheme = activation_scheme(node) if node.op_type == "Gemm" else None
    source = node.inputs[0] if scheme is not None and scheme.kind == "int" else None
    return None if source is None else source.producer()


def _weight(gemm: ir.Node) -> ir.Node | None:
    """The DequantizeLinear of a weight of 8 bits per channel."""
    operand = gemm.inputs[1]
    producer = None if operand is None else operand.producer()
    if producer is None or producer.op_type != "DequantizeLinear":
        return None
    codes, scale = producer.inputs[0], producer.inputs[1]
    assert codes is not None
    assert scale is not None
    per_channel = scale.shape is not None and len(scale.shape) == 1
    return producer if codes.is_initializer() and codes.dtype in _EIGHT_BITS and per_channel else None


def _unsigned_codes(graph: ir.Graph, dequantize: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Codes [T, in] from 0 to 255, and their scale: [] or [T]."""
    signed, scale = dequantize.inputs[0], dequantize.inputs[1]
    assert signed is not None
    assert scale is not None
    quantize = signed.producer()
    assert quantize is not None
    x, path, attributes = quantize.inputs[0], f"{quantize.name}.unsigned", {}
    nodes: list[ir.Node] = []
    if scale.is_initializer():
        zero = constant(graph, "activations.zero_point", ZERO_POINT, ir.DataType.UINT8)
    else:
        one = constant(graph, "activations.zero_points", [ZERO_POINT], ir.DataType.UINT8)
        nodes = [_node("Shape", f"{path}.shape", [scale], (1,), ir.DataType.INT64)]
        shape = tuple(str(size) for size in scale.shape or ())
        nodes += [_node("Expand", f"{path}.zero", [one, nodes[0].outputs[0]], shape, ir.DataType.UINT8)]
        zero, attributes = nodes[-1].outputs[0], {"axis": 0}
    codes = _node("QuantizeLinear", path, [x, scale, zero], _shape(signed), ir.DataType.UINT8, **attributes)
    graph.insert_before(dequantize, [*nodes, codes])
    return codes.outputs[0], scale


def _lower(graph: ir.Graph, gemm: ir.Node, codes: ir.Value, scale: ir.Value) -> None:
    require_plain_gemm(gemm)
    weight, activations = _weight(gemm), gemm.inputs[0]
    assert weight is not None
    assert activations is not None
    facts = activations.producer()
    assert facts is not None
    nodes = list(_integer_matmul(graph, gemm, weight, codes, scale))
    nodes[0].metadata_props[ACTIVATIONS_KEY] = facts.metadata_props[ACTIVATIONS_KEY]
    ir.convenience.replace_nodes_and_values(graph, gemm, [gemm], nodes, [gemm.outputs[0]], [nodes[-1].outputs[0]])
    drop_if_unused(graph, weight.outputs[0])


def _integer_matmul(
    graph: ir.Graph, gemm: ir.Node, weight: ir.Node, codes: ir.Value, scale: ir.Value
) -> Iterator[ir.Node]:
    """QGemm, the tokens' scales, the bias; the last node's output replaces the layer's."""
    path, shape = gemm.name or "", _shape(gemm.outputs[0])
    dynamic = not scale.is_initializer()
    factor = constant(graph, "activations.one", 1, ir.DataType.FLOAT) if dynamic else scale
    zero = constant(graph, "activations.zero_point", ZERO_POINT, ir.DataType.UINT8)
    matmul = ir.node(
        "QGemm",
        [codes, factor, zero, *_weight_operands(graph, weight)],
        {"transB": 1},
        domain="com.microsoft",
        name=f"{path}.integer",
        outputs=[float_value(f"{path}.integer", shape)],
    )
    yield matmul
    result = matmul.outputs[0]
    if dynamic:
        axes = constant(graph, "activations.axes", [1], ir.DataType.INT64)
        column = _node("Unsqueeze", f"{path}.token_scales", [scale, axes], (shape[0], 1))
        yield column
        scaled = _node("Mul", f"{path}.integer.scaled", [result, column.outputs[0]], shape)
        yield scaled
        result = scaled.outputs[0]
    if len(gemm.inputs) > 2 and gemm.inputs[2] is not None:
        yield _node("Add", f"{path}.integer.biased", [result, gemm.inputs[2]], shape)


def _weight_operands(graph: ir.Graph, weight: ir.Node) -> list[ir.Value]:
    """B, b_scale and b_zero_point of QGemm. Codes with other readers are copied under a name of their own."""
    codes, scale, *rest = (value for value in weight.inputs if value is not None)
    assert codes.const_value is not None
    assert codes.dtype is not None
    dtype, out = codes.dtype, int(codes.const_value.shape.numpy()[0])
    if len(weight.outputs[0].uses()) > 1 or len(codes.uses()) > 1:
        name = f"{codes.name}.rows"
        tensor = ir.Tensor(np.array(codes.const_value.numpy()), name=name)
        codes = graph.initializers.get(name) or add_initializer(graph, tensor)
    # One zero point per weight: onnxruntime cannot make weights unsigned that share one.
    return [codes, scale, rest[0] if rest else constant(graph, f"{codes.name}.zero", np.zeros(out), dtype)]


def _shape(value: ir.Value) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape or ())


def _node(
    op_type: str,
    name: str,
    inputs: Sequence[ir.Value | None],
    shape: tuple[int | str, ...],
    dtype: ir.DataType = ir.DataType.FLOAT,
    **attributes: int,
) -> ir.Node:
    output = float_value(name, shape)
    output.dtype = dtype
    return ir.node(op_type, inputs, attributes, name=name, outputs=[output])
