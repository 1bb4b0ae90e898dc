"""Builds the ONNX model of one segment: standard ops in the compute dtype, weights as inputs or constants.

Everything is named so that layers of one shape give the same model, and so one plan: what crosses is x0, x1 ... and y0,
y1 ..., and a layer's number is counted from the segment's first (layers.7 and layers.8 are layers.0 and layers.1).

Constants that the IR computes from weights (a norm's weight plus one): folded when the weights are written.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.tensorrt.sms import Form

_FOLDED: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
}


def is_constant(value: ir.Value) -> bool:
    """Whether a value is an initializer, or computed from initializers alone."""
    if value.is_initializer() or is_stored(value):
        return True
    producer = value.producer()
    if producer is None:
        return False
    return producer.op_type in _FOLDED and all(v is not None and is_constant(v) for v in producer.inputs)


def folded(value: ir.Value) -> NDArray[np.float32]:
    """What a constant comes to, in float32."""
    producer = value.producer()
    if producer is None or producer.op_type not in _FOLDED:
        return float32_values(value)
    left, right = (folded(operand) for operand in producer.inputs if operand is not None)
    return np.asarray(_FOLDED[producer.op_type](left, right), np.float32)


OPSETS = {"": 24}
IR_VERSION = 11
Compute = Literal["fp32", "fp16", "bf16"]
COMPUTE: Mapping[Compute, ir.DataType] = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
}
TYPES: Mapping[ir.DataType, str] = {
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.INT8: "i8",
    ir.DataType.UINT8: "u8",
    ir.DataType.FLOAT8E4M3FN: "fp8e4nv",
    ir.DataType.INT64: "i64",
}
Dims = Sequence[int | str]
_LAYER = re.compile(r"(?<![\w.])((?:model\.)?layers\.)(\d+)(?=\.)")


@dataclass(frozen=True)
class PlanWeight:
    """A weight that is an input of a plan: its name in the program, and how it is made when it is written."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    make: Callable[[], NDArray[Any]] = field(repr=False)


@dataclass
class SegmentBuilder:
    """The segment so far. `values` leads from the IR's values to the segment's."""

    compute: Compute
    first_layer: int
    graph: ir.Graph
    values: dict[ir.Value, ir.Value] = field(default_factory=dict)
    weights: dict[str, PlanWeight] = field(default_factory=dict)
    crossing: dict[str, ir.Value] = field(default_factory=dict)
    forms: set[Form] = field(default_factory=set)

    @classmethod
    def of(cls, nodes: Iterable[ir.Node], compute: Compute) -> "SegmentBuilder":
        """An empty segment for these nodes of the IR."""
        layers = [int(found.group(2)) for node in nodes if (found := _LAYER.search(node.name or ""))]
        graph = ir.Graph([], [], nodes=[], opset_imports=dict(OPSETS), name="segment")
        return cls(compute, min(layers, default=0), graph)

    @property
    def dtype(self) -> ir.DataType:
        """Of activations."""
        return COMPUTE[self.compute]

    def name(self, original: str) -> str:
        """The name with its layer counted from the segment's first."""
        return original_names(original, -self.first_layer)

    def cross(self, value: ir.Value) -> ir.Value:
        """An input for what another stage makes; the runtime's int64 inputs keep their names."""
        is_given = value.is_graph_input()
        name = (value.name or "") if is_given else f"x{len(self.crossing)}"
        dtype = value.dtype if is_given else self.dtype
        assert dtype is not None
        made = self._input(name, dtype, dims(value))
        self.crossing[name] = value
        return made

    def weight(self, name: str, dtype: ir.DataType, shape: Sequence[int], make: Callable[[], NDArray[Any]]) -> ir.Value:
        """An input for a weight of the program; the same name again is the same input."""
        local = self.name(name)
        known = next((value for value in self.graph.inputs if value.name == local), None)
        if known is not None:
            return known
        self.weights[local] = PlanWeight(name, dtype, tuple(shape), make)
        return self._input(local, dtype, tuple(shape))

    def constant(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """A constant of the plan; the same name again is the same constant."""
        local = self.name(name)
        if local not in self.graph.initializers:
            tensor.name = local
            shape = ir.Shape(tensor.shape.numpy())
            value = ir.Value(name=local, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
            self.graph.register_initializer(value)
        return self.graph.initializers[local]

    def number(self, value: float, dtype: ir.DataType | None = None, shape: tuple[int, ...] = ()) -> ir.Value:
        """A float constant of the compute dtype, filled with one number."""
        kind = dtype or self.dtype
        array = np.full(shape, value, kind.numpy())
        name = ".".join(["number", repr(value), TYPES[kind], *map(str, shape)])
        return self.constant(name, ir.Tensor(array, dtype=kind))

    def integers(self, *numbers: int) -> ir.Value:
        """An int64 vector."""
        name = "integers." + ".".join(map(str, numbers))
        return self.constant(name, ir.Tensor(np.array(numbers, np.int64)))

    def emit(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[ir.Value | None],
        shape: Dims,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Append a node with one output; it has the node's name."""
        return self.append(op_type, name, inputs, [(name, shape, dtype or self.dtype)], attributes)[0]

    def append(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[str, Dims, ir.DataType]],
        attributes: Mapping[str, Any],
        domain: str = "",
    ) -> list[ir.Value]:
        """Append a node; its outputs by name, shape and type."""
        made = [
            ir.Value(name=self.name(output), type=ir.TensorType(dtype), shape=ir.Shape(shape))
            for output, shape, dtype in outputs
        ]
        self.graph.append(ir.node(op_type, inputs, attributes, domain=domain, outputs=made, name=self.name(name)))
        return made

    def finish(self, outputs: Iterable[ir.Value]) -> ir.Model:
        """The model, with these of its values as outputs y0, y1 ..."""
        for index, value in enumerate(outputs):
            value.name = f"y{index}"
            self.graph.outputs.append(value)
        return ir.Model(self.graph, ir_version=IR_VERSION, producer_name="ingot")

    def _input(self, name: str, dtype: ir.DataType, shape: Dims) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value


def dims(value: ir.Value) -> list[int | str]:
    """The value's shape as plain ints and names."""
    assert value.shape is not None, value.name
    return [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]


def original_names(text: str, first_layer: int) -> str:
    """A text of the segment (a name, a message) with the IR's numbers of layers."""
    return _LAYER.sub(lambda found: f"{found.group(1)}{int(found.group(2)) + first_layer}", text)
