"""Lowers a segment of the IR to its ONNX model: the part that all engines share.

Ops keep their type and compute in the activations' type, except fused ops that become standard ones:

    com.microsoft::SkipSimplifiedLayerNormalization(x, skip, gamma)     Add, RMSNormalization
    com.microsoft::SkipLayerNormalization(x, skip, gamma, beta?)        Add, LayerNormalization
    com.microsoft::QuickGelu(x; alpha)                                  Mul(x, Sigmoid(Mul(x, alpha)))

Logits are cast to float32 after the head; softcap and scaling of logits run in float32. Nodes that do not depend on
tokens are computed within each segment that reads them; constants that the IR computes from weights (a norm's weight
plus one) are folded when the weights are written.

A subclass for an engine adds its `linear` and handlers for the ops that the engine takes in another form.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import onnx_ir as ir

from ingot.artifact.programs.launch_program import ActivationType
from ingot.errors import PassError
from ingot.passes.quantization.activation_nodes import ACTIVATIONS_KEY
from ingot.passes.rewriting import require_plain_gemm
from ingot.pipeline.targets.segments.activation_codes import quantized_rows
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_builder import SegmentBuilder, dims, folded, is_constant, stored_array
from ingot.pipeline.targets.segments.stages import SegmentStage, depends_on_tokens

Handler = Callable[[Any, ir.Node], None]


class SegmentLowering(ABC):
    """Lowers the nodes of one stage, each after the nodes that it reads.

    engine      name in error messages
    builder     class of `b`, with the operator domains of the engine
    handlers    methods by op_type; other ops are copied by `generic`
    """

    engine: ClassVar[str]
    builder: ClassVar[type[SegmentBuilder]] = SegmentBuilder

    def __init__(self, stage: SegmentStage, activation_type: ActivationType) -> None:
        self.stage = stage
        self.inside = set(stage.nodes)
        self.b = self.builder.of(stage.nodes, activation_type)

    @abstractmethod
    def linear(self, node: ir.Node) -> ir.Value:
        """y = x @ W^T + b in the activations' type."""

    def run(self) -> Segment:
        """Lower the whole stage. PassError names a node that the engine has no form for."""
        b = self.b
        for node in self.stage.nodes:
            self._lower(node)
        made = [
            self._as_float32(b.values[value]) if value.is_graph_output() else b.values[value]
            for value in self.stage.outputs
        ]
        if b.activation_type != "fp32":
            b.number_formats.add(b.activation_type)
        outputs = {f"y{index}": value for index, value in enumerate(self.stage.outputs)}
        formats = frozenset(b.number_formats)
        return Segment(b.finish(made), dict(b.crossing), outputs, dict(b.weights), formats, b.first_layer)

    def read(self, value: ir.Value) -> ir.Value:
        """Return the segment's value for a value of the IR; computes it or adds an input on first use."""
        b = self.b
        if value not in b.values:
            producer = value.producer()
            if producer is None or (producer not in self.inside and depends_on_tokens(value)):
                b.values[value] = b.cross(value)
            else:
                self._lower(producer)
        return b.values[value]

    def generic(self, node: ir.Node) -> None:
        """Copy a node. Its float constants take the type of its other float inputs."""
        b = self.b
        if node.domain not in b.opsets:
            raise PassError(
                f"{node.name!r} ({node.domain}::{node.op_type}) has no form in {self.engine}; leave its pass out"
            )
        read = {value: self.read(value) for value in node.inputs if value is not None and not is_constant(value)}
        floats = [value.dtype for value in read.values() if value.dtype is not None and value.dtype.is_floating_point()]
        dtype = floats[0] if floats else b.dtype
        inputs = [None if v is None else read[v] if v in read else self._constant(v, dtype) for v in node.inputs]
        attributes = list(node.attributes.values())
        outputs = [self._like(value, dtype) for value in node.outputs]
        name = b.name(node.name or "")
        b.graph.append(ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=name))
        b.values.update(zip(node.outputs, outputs, strict=True))

    def sigmoid_gate(self, node: ir.Node, default_alpha: float) -> None:
        """x * sigmoid(alpha * x)."""
        b, path, shape, source = self.b, node.name or "", dims(node.outputs[0]), node.inputs[0]
        assert source is not None
        x, alpha = self.read(source), node.attributes.get_float("alpha", default_alpha)
        assert alpha is not None
        scaled = x if alpha == 1.0 else b.emit("Mul", f"{path}.scaled", [x, b.number(alpha)], shape)
        sigmoid = b.emit("Sigmoid", f"{path}.sigmoid", [scaled], shape)
        b.values[node.outputs[0]] = b.emit("Mul", path, [x, sigmoid], shape)

    def _lower(self, node: ir.Node) -> None:
        if any(output in self.b.values for output in node.outputs):
            return
        if node.op_type == "DequantizeLinear" and ACTIVATIONS_KEY in node.metadata_props:
            self.b.values[node.outputs[0]] = quantized_rows(self.b, node, self.read)
        else:
            self.handlers.get(node.op_type, SegmentLowering.generic)(self, node)

    def _gemm(self, node: ir.Node) -> None:
        require_plain_gemm(node)
        y = self.linear(node)
        self.b.values[node.outputs[0]] = self._as_float32(y) if _is_head(node) else y

    def _cast(self, node: ir.Node) -> None:
        """Drop casts between float types: all floats of a segment have the activations' type."""
        source = node.inputs[0]
        assert source is not None
        if not node.outputs[0].dtype or not node.outputs[0].dtype.is_floating_point():
            self.generic(node)
            return
        self.b.values[node.outputs[0]] = self.read(source)

    def _skip_norm(self, node: ir.Node) -> None:
        b, path, shape = self.b, node.name or "", dims(node.outputs[0])
        x, skip, *weights = node.inputs
        assert x is not None
        assert skip is not None
        total = b.emit("Add", f"{path}.sum", [self.read(x), self.read(skip)], shape)
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        inputs = [total, *(self._constant(weight, b.dtype) for weight in weights if weight is not None)]
        op_type = "LayerNormalization" if node.op_type == "SkipLayerNormalization" else "RMSNormalization"
        b.values[node.outputs[0]] = b.emit(op_type, path, inputs, shape, axis=-1, epsilon=epsilon)
        if len(node.outputs) > 3:
            b.values[node.outputs[3]] = total

    def _quick_gelu(self, node: ir.Node) -> None:
        self.sigmoid_gate(node, 1.702)

    handlers: ClassVar[Mapping[str, Handler]] = {
        "Gemm": _gemm,
        "Cast": _cast,
        "SkipLayerNormalization": _skip_norm,
        "SkipSimplifiedLayerNormalization": _skip_norm,
        "QuickGelu": _quick_gelu,
    }

    def _like(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        is_float = value.dtype is None or value.dtype.is_floating_point()
        kind = dtype if is_float else value.dtype
        assert kind is not None
        return ir.Value(name=self.b.name(value.name or ""), type=ir.TensorType(kind), shape=ir.Shape(dims(value)))

    def _constant(self, value: ir.Value | None, dtype: ir.DataType) -> ir.Value:
        """A constant operand: integers and single numbers as constants, other floats as a weight."""
        assert value is not None
        b, name = self.b, value.name or ""
        if value.is_initializer() and (value.dtype is None or not value.dtype.is_floating_point()):
            return b.constant(name, ir.Tensor(stored_array(value)))
        shape = tuple(int(size) for size in dims(value))
        if shape == ():
            return b.number(float(folded(value)), dtype)
        return b.weight(name, dtype, shape, partial(folded, value))

    def _as_float32(self, value: ir.Value) -> ir.Value:
        if value.dtype == ir.DataType.FLOAT:
            return value
        name = f"{value.name}.float32"
        return self.b.emit("Cast", name, [value], dims(value), ir.DataType.FLOAT, to=ir.DataType.FLOAT)


def _is_head(node: ir.Node) -> bool:
    """Report whether a linear layer is the last matmul before the graph's output."""
    waiting = [node.outputs[0]]
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            return True
        for reader in value.consumers():
            if reader.op_type not in ("Gemm", "PagedAttention", "Gather"):
                waiting += reader.outputs
    return False
