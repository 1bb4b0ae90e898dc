"""A segment of the IR -> its ONNX model for TensorRT: standard ops in 16 bits, weights in the forms that it fuses.

Linear layers are those of linear.py. Other ops stay what they are, in the compute dtype, but for the fused ops that
TensorRT has no form for:

    com.microsoft::SkipSimplifiedLayerNormalization(x, skip, gamma)     Add, RMSNormalization
    com.microsoft::QuickGelu(x; alpha)                                  Mul(x, Sigmoid(Mul(x, alpha)))

Logits are widened behind the head; what follows it (softcap, scaling) is computed in float32. Nodes that no token
reaches are computed within each segment that reads them; those of weights alone (a norm's weight plus one) when the
weights are written.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.quantization.activation_quantization import ACTIVATIONS_KEY
from ingot.passes.rewriting import require_plain_gemm
from ingot.pipeline.targets.segments.activation_codes import quantized_rows
from ingot.pipeline.targets.segments.builder import Compute, SegmentBuilder, dims, folded, is_constant
from ingot.pipeline.targets.segments.linear import lower_linear
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.stages import SegmentStage, depends_on_tokens, is_kernel
from ingot.pipeline.targets.segments.weight_forms import stored_array


def lower_segment(stage: SegmentStage, compute: Compute) -> Segment:
    """Lower one segment. PassError names a node that has no form."""
    return SegmentLowering(stage, compute).run()


class SegmentLowering:
    """One walk from the outputs to what they need. Another engine overrides what it has other forms for."""

    engine: ClassVar[str] = "TensorRT"
    domains: ClassVar[tuple[str, ...]] = ("",)  # of the operators that it knows

    def __init__(self, stage: SegmentStage, compute: Compute) -> None:
        self.stage = stage
        self.inside = set(stage.nodes)
        self.b = SegmentBuilder.of(stage.nodes, compute)

    def run(self) -> Segment:
        """All nodes of the stage."""
        b = self.b
        for node in self.stage.nodes:
            self._lower(node)
        made = [self._widened(value) if value.is_graph_output() else b.values[value] for value in self.stage.outputs]
        if b.compute != "fp32":
            b.forms.add(b.compute)
        outputs = {f"y{index}": value for index, value in enumerate(self.stage.outputs)}
        return Segment(b.finish(made), dict(b.crossing), outputs, dict(b.weights), frozenset(b.forms), b.first_layer)

    def read(self, value: ir.Value) -> ir.Value:
        """The segment's value; made, or an input, where it is not there yet."""
        b = self.b
        if value not in b.values:
            producer = value.producer()
            if producer is None or (producer not in self.inside and depends_on_tokens(value)):
                b.values[value] = b.cross(value)
            else:
                self._lower(producer)
        return b.values[value]

    def _lower(self, node: ir.Node) -> None:
        if not any(output in self.b.values for output in node.outputs):
            self.handler(node)(node)

    def handler(self, node: ir.Node) -> Callable[[ir.Node], None]:
        """What lowers the node."""
        if node.op_type == "DequantizeLinear" and ACTIVATIONS_KEY in node.metadata_props:
            return self._rounded
        return partial(_HANDLERS.get(node.op_type, SegmentLowering.generic), self)

    def _linear(self, node: ir.Node) -> None:
        require_plain_gemm(node)
        y = self.linear(node)
        self.b.values[node.outputs[0]] = self._as_float32(y) if _is_head(node) else y

    def linear(self, node: ir.Node) -> ir.Value:
        """y = x @ W^T + b in the compute dtype."""
        assert not is_kernel(node)
        return lower_linear(self.b, node, self.read)

    def _rounded(self, node: ir.Node) -> None:
        self.b.values[node.outputs[0]] = quantized_rows(self.b, node, self.read)

    def _cast(self, node: ir.Node) -> None:
        """Between floats of other widths: all are of the compute dtype."""
        source = node.inputs[0]
        assert source is not None
        if not node.outputs[0].dtype or not node.outputs[0].dtype.is_floating_point():
            self.generic(node)
            return
        self.b.values[node.outputs[0]] = self.read(source)

    def _skip_norm(self, node: ir.Node) -> None:
        b, path, shape = self.b, node.name or "", dims(node.outputs[0])
        x, skip, gamma = node.inputs[:3]
        assert x is not None
        assert skip is not None
        total = b.emit("Add", f"{path}.sum", [self.read(x), self.read(skip)], shape)
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        inputs = [total, self._constant(gamma, b.dtype)]
        b.values[node.outputs[0]] = b.emit("RMSNormalization", path, inputs, shape, axis=-1, epsilon=epsilon)
        if len(node.outputs) > 3:
            b.values[node.outputs[3]] = total

    def _norm(self, node: ir.Node) -> None:
        """Over heads, the weight is multiplied behind the norm: a vector would be reshaped by a launch of its own."""
        b, path, shape, source = self.b, node.name or "", dims(node.outputs[0]), node.inputs[0]
        if len(shape) == 2 or source is None:
            self.generic(node)
            return
        width, weight = int(shape[-1]), node.inputs[1]
        assert weight is not None
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        inputs = [self.read(source), b.number(1.0, shape=(width,))]
        normed = b.emit("RMSNormalization", path, inputs, shape, **attributes)
        row = (*([1] * (len(shape) - 1)), width)
        name = f"{weight.name}.row"
        scale = b.weight(name, b.dtype, row, lambda: folded(weight).reshape(row))
        b.values[node.outputs[0]] = b.emit("Mul", f"{path}.weighted", [normed, scale], shape)

    def _quick_gelu(self, node: ir.Node) -> None:
        self.sigmoid_gate(node, 1.702)

    def sigmoid_gate(self, node: ir.Node, default_alpha: float) -> None:
        """x * sigmoid(alpha * x)."""
        b, path, shape, source = self.b, node.name or "", dims(node.outputs[0]), node.inputs[0]
        assert source is not None
        x, alpha = self.read(source), node.attributes.get_float("alpha", default_alpha)
        assert alpha is not None
        scaled = x if alpha == 1.0 else b.emit("Mul", f"{path}.scaled", [x, b.number(alpha)], shape)
        sigmoid = b.emit("Sigmoid", f"{path}.sigmoid", [scaled], shape)
        b.values[node.outputs[0]] = b.emit("Mul", path, [x, sigmoid], shape)

    def generic(self, node: ir.Node) -> None:
        """The same op; floats among its constants take the dtype of what tokens made."""
        if node.domain not in self.domains:
            raise PassError(
                f"{node.name!r} ({node.domain}::{node.op_type}) has no form in {self.engine}; leave its pass out"
            )
        b = self.b
        read = {value: self.read(value) for value in node.inputs if value is not None and not is_constant(value)}
        floats = [value.dtype for value in read.values() if value.dtype is not None and value.dtype.is_floating_point()]
        dtype = floats[0] if floats else b.dtype
        inputs = [None if v is None else read[v] if v in read else self._constant(v, dtype) for v in node.inputs]
        attributes = list(node.attributes.values())
        outputs = [self._like(value, dtype) for value in node.outputs]
        name = b.name(node.name or "")
        b.graph.append(ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=name))
        b.values.update(zip(node.outputs, outputs, strict=True))

    def _like(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        is_float = value.dtype is None or value.dtype.is_floating_point()
        kind = dtype if is_float else value.dtype
        assert kind is not None
        return ir.Value(name=self.b.name(value.name or ""), type=ir.TensorType(kind), shape=ir.Shape(dims(value)))

    def _constant(self, value: ir.Value | None, dtype: ir.DataType) -> ir.Value:
        """A constant operand: integers and single numbers as they are, other floats as a weight."""
        assert value is not None
        b, name = self.b, value.name or ""
        if value.is_initializer() and (value.dtype is None or not value.dtype.is_floating_point()):
            return b.constant(name, ir.Tensor(stored_array(value)))
        shape = tuple(int(size) for size in dims(value))
        if shape == ():
            return b.number(float(folded(value)), dtype)
        return b.weight(name, dtype, shape, partial(folded, value))

    def _widened(self, value: ir.Value) -> ir.Value:
        """The graph's output, in float32."""
        made = self.b.values[value]
        return made if made.dtype == ir.DataType.FLOAT else self._as_float32(made)

    def _as_float32(self, value: ir.Value) -> ir.Value:
        if value.dtype == ir.DataType.FLOAT:
            return value
        name = f"{value.name}.float32"
        return self.b.emit("Cast", name, [value], dims(value), ir.DataType.FLOAT, to=ir.DataType.FLOAT)


_HANDLERS: Mapping[str, Callable[[SegmentLowering, ir.Node], None]] = {
    "Gemm": SegmentLowering._linear,
    "Cast": SegmentLowering._cast,
    "SkipSimplifiedLayerNormalization": SegmentLowering._skip_norm,
    "RMSNormalization": SegmentLowering._norm,
    "QuickGelu": SegmentLowering._quick_gelu,
}


def _is_head(node: ir.Node) -> bool:
    """Whether no other matmul stands between a linear layer and the graph's output."""
    waiting = [node.outputs[0]]
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            return True
        for reader in value.consumers():
            if reader.op_type not in ("Gemm", "PagedAttention", "Gather"):
                waiting += reader.outputs
    return False
