"""Runs some nodes of an IR in onnxruntime. Weights are inputs like activations, so that no session copies them.

An operand of the nodes becomes one of these, by its source:

    a small initializer that is not a matrix                    a constant of the session
    any other initializer, also through Cast, Dequantize        an input in float32 (`weights`)
    a node that does not depend on token ids                    computed inside the session
    anything else                                               an input (`activations`)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.lowering.expand_experts import ExpertExpansion, is_expert_op
from ingot.passes.lowering.rotary_rows import put_tokens_on_batch_axis
from ingot.passes.recurrent_ops import is_recurrent
from ingot.passes.weights import is_stored
from ingot.pipeline.calibrate.recurrent_layers import expand_recurrent
from ingot.pipeline.calibrate.sequences import FixedLayout, RaggedLayout, expand_attention
from ingot.runtime.cpu.segment_runner import session_options, use_thread_pool

AnyArray = NDArray[Any]
_SMALL_ELEMENTS = 4096


class GraphRunner:
    """A session over `nodes` (in graph order) that computes `outputs`.

    weights        stored values that are inputs, in float32
    activations    names of the other inputs

    `sequence_tokens` is the length of all sequences; None if lengths differ (sequences.py has the inputs for that).
    """

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        outputs: Sequence[ir.Value],
        shared: frozenset[ir.Node],
        sequence_tokens: int | None,
        num_threads: int | None = None,
        fed: frozenset[ir.Value] = frozenset(),
    ) -> None:
        use_thread_pool(num_threads)
        copy = GraphCopy(shared, sequence_tokens, fed)
        for node in nodes:
            copy.node(node)
        self.weights, self.activations = tuple(copy.weights), tuple(copy.activations)
        self._session = make_session(copy.model(outputs, nodes[0].graph), f"{nodes[0].name!r} ... {nodes[-1].name!r}")

    def run(self, activations: Mapping[str, AnyArray], weights: Mapping[ir.Value, AnyArray]) -> list[AnyArray]:
        """Compute the outputs, in order. Activations that the nodes do not read are ignored."""
        feeds = {name: activations[name] for name in self.activations}
        feeds |= {value.name or "": weights[value] for value in self.weights}
        results: list[AnyArray] = self._session.run(None, feeds)
        return results


def make_session(model: ir.Model, what: str) -> onnxruntime.InferenceSession:
    """A session of the model; PassError when onnxruntime refuses it."""
    try:
        proto = ir.to_proto(model).SerializeToString()
        return onnxruntime.InferenceSession(proto, session_options(), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise PassError(f"onnxruntime cannot run {what}: {error}") from error


class GraphCopy:
    """Copies nodes and their operands in the order given. `fed`: stored values that become inputs, however small."""

    def __init__(
        self,
        shared: frozenset[ir.Node],
        sequence_tokens: int | None,
        fed: frozenset[ir.Value] = frozenset(),
    ) -> None:
        self.weights: list[ir.Value] = []
        self.activations: list[str] = []
        self._shared = shared
        self._fed = fed
        self._layout = (
            RaggedLayout(0, self.add, self.constant, self._read)
            if sequence_tokens is None
            else FixedLayout(sequence_tokens, self.add, self.constant)
        )
        self._experts = ExpertExpansion(lambda node: self.nodes.append(node), self.constant)
        self._read_values: dict[str, ir.Value] = {}
        self.values: dict[ir.Value, ir.Value] = {}
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.initializers: list[ir.Value] = []

    def model(self, outputs: Sequence[ir.Value], source: ir.Graph | ir.Function | None) -> ir.Model:
        """A model of the copies."""
        assert source is not None
        opsets = {domain: version for domain, version in source.opset_imports.items() if domain != "ingot"}
        graph = ir.Graph(
            self.inputs, [], nodes=self.nodes, initializers=self.initializers, opset_imports=opsets, name="stage"
        )
        graph.outputs.extend(self.values[value] for value in outputs)
        put_tokens_on_batch_axis(graph)  # onnxruntime limits a row's tokens to the positions of the table
        return ir.Model(graph, ir_version=11, producer_name="ingot")

    def node(self, node: ir.Node) -> None:
        """Copy a node and the constants it reads."""
        inputs = [None if value is None else self._value(value) for value in node.inputs]
        if (node.domain, node.op_type) == ("ingot", "PagedAttention"):
            attended = expand_attention(node, inputs, self._layout, self.add, self.constant)
            self.values[node.outputs[0]] = attended
            return
        if is_recurrent(node):
            self.values[node.outputs[0]] = expand_recurrent(node, inputs, self._layout, self.add, self.constant)
            return
        if is_expert_op(node):
            self.values.update(zip(node.outputs, self._experts.expand(node, inputs), strict=True))
            return
        self.values.update((value, _copy(value, value.dtype)) for value in node.outputs)
        outputs = [self.values[value] for value in node.outputs]
        attributes = list(node.attributes.values())
        self.nodes.append(ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=node.name))

    def _value(self, value: ir.Value) -> ir.Value:
        if value not in self.values:
            self.values[value] = self._outside(value)
        return self.values[value]

    def _outside(self, value: ir.Value) -> ir.Value:
        """The copy of a value that no copied node computes."""
        producer = value.producer()
        if is_stored(value):
            return self._stored(value)
        if producer is not None and producer in self._shared:
            self.node(producer)
            return self.values[value]
        self.activations.append(value.name or "")
        return self.input(value, value.dtype)

    def _stored(self, value: ir.Value) -> ir.Value:
        tensor = value.const_value
        if tensor is not None and _is_constant(tensor) and value not in self._fed:
            copy = _copy(value, value.dtype)
            copy.const_value = ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=tensor.name)
            self.initializers.append(copy)
            return copy
        self.weights.append(value)
        return self.input(value, ir.DataType.FLOAT)

    def input(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """Add an input of the session with this value's name and shape."""
        copy = _copy(value, dtype)
        self.inputs.append(copy)
        return copy

    def _read(self, name: str, dtype: ir.DataType) -> ir.Value:
        """Add an input that comes from the chunk and is not in the model."""
        if name not in self._read_values:
            self.activations.append(name)
            self._read_values[name] = self.input(ir.Value(name=name), dtype)
        return self._read_values[name]

    def add(
        self, op_type: str, inputs: Sequence[ir.Value | None], domain: str = "", num_outputs: int = 1, **attributes: Any
    ) -> ir.Value:
        """Add a node; return its first output."""
        name = f"expanded.{len(self.nodes)}"
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=num_outputs, name=name)
        for index, output in enumerate(node.outputs):
            output.name = f"{name}.{index}" if index else name
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, array: np.ndarray[tuple[int, ...], np.dtype[Any]]) -> ir.Value:
        """Add a constant of the session."""
        tensor = ir.tensor(array, name=f"expanded.constant.{len(self.initializers)}")
        copy = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), const_value=tensor)
        copy.shape = ir.Shape(array.shape)
        self.initializers.append(copy)
        return copy


def _is_constant(tensor: ir.TensorProtocol) -> bool:
    """Whether it is small and not a matrix, which a pass may replace."""
    is_matrix = tensor.dtype.is_floating_point() and len(tensor.shape) == 2
    return tensor.dtype == ir.DataType.INT64 or (tensor.size <= _SMALL_ELEMENTS and not is_matrix)


def _copy(value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    """A new value with the same name and shape."""
    shape = None if value.shape is None else value.shape.copy()
    return ir.Value(name=value.name, type=None if dtype is None else ir.TensorType(dtype), shape=shape)
