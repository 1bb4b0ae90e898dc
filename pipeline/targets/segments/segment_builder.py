"""Builds the ONNX model of one segment: standard ops in the activations' type, weights as inputs or constants.

Names make layers of one shape give the same model, and so share one file: values that cross the segment's border are
x0, x1 ... and y0, y1 ..., and layers are numbered from the segment's first (layers.7 and layers.8 become layers.0 and
layers.1).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import ActivationType
from ingot.errors import PassError
from ingot.passes.weights import apply_to_array, float32_values, is_stored

NumberFormat = Literal["fp16", "bf16", "int8", "fp8", "int4"]
Dims = Sequence[int | str]

IR_VERSION = 11
ELEMENT_TYPES: Mapping[ir.DataType, str] = {
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.INT8: "i8",
    ir.DataType.UINT8: "u8",
    ir.DataType.FLOAT8E4M3FN: "fp8e4nv",
    ir.DataType.INT64: "i64",
}
_FLOATS: Mapping[ActivationType, ir.DataType] = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
}
_FOLDED: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
}
_LAYER = re.compile(r"(?<![\w.])((?:model\.)?layers\.)(\d+)(?=\.)")


@dataclass(frozen=True)
class SegmentWeight:
    """A weight that is an input of a segment: its name in the program, and the function that makes it when written."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    make: Callable[[], NDArray[Any]] = field(repr=False)


@dataclass
class SegmentBuilder:
    """The segment so far. `values` maps values of the IR to values of the segment.

    crossing          inputs that other stages make -> their values in the IR
    number_formats    what the GPU must be able to compute
    """

    activation_type: ActivationType
    first_layer: int
    graph: ir.Graph
    values: dict[ir.Value, ir.Value] = field(default_factory=dict)
    weights: dict[str, SegmentWeight] = field(default_factory=dict)
    crossing: dict[str, ir.Value] = field(default_factory=dict)
    number_formats: set[NumberFormat] = field(default_factory=set)

    opsets: ClassVar[Mapping[str, int]] = {"": 24}  # domains of the ops that the engine runs

    @classmethod
    def of(cls, nodes: Iterable[ir.Node], activation_type: ActivationType) -> Self:
        """Return an empty segment for these nodes of the IR."""
        layers = [int(found.group(2)) for node in nodes if (found := _LAYER.search(node.name or ""))]
        graph = ir.Graph([], [], nodes=[], opset_imports=dict(cls.opsets), name="segment")
        return cls(activation_type, min(layers, default=0), graph)

    @property
    def dtype(self) -> ir.DataType:
        """Type of the activations."""
        return _FLOATS[self.activation_type]

    def name(self, original: str) -> str:
        """Number the layer in a name from the segment's first."""
        return renumber_layers(original, -self.first_layer)

    def cross(self, value: ir.Value) -> ir.Value:
        """Add an input for a value that another stage makes; the runtime's int64 inputs keep their names."""
        is_runtime_input = value.is_graph_input()
        name = (value.name or "") if is_runtime_input else f"x{len(self.crossing)}"
        dtype = value.dtype if is_runtime_input else self.dtype
        assert dtype is not None
        self.crossing[name] = value
        return self._input(name, dtype, dims(value))

    def weight(self, name: str, dtype: ir.DataType, shape: Sequence[int], make: Callable[[], NDArray[Any]]) -> ir.Value:
        """Return the input for a weight of the program, one for each name."""
        local = self.name(name)
        known = next((value for value in self.graph.inputs if value.name == local), None)
        if known is not None:
            return known
        self.weights[local] = SegmentWeight(name, dtype, tuple(shape), make)
        return self._input(local, dtype, tuple(shape))

    def constant(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Return a constant of the model, one for each name."""
        local = self.name(name)
        if local not in self.graph.initializers:
            tensor.name = local
            shape = ir.Shape(tensor.shape.numpy())
            value = ir.Value(name=local, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
            self.graph.register_initializer(value)
        return self.graph.initializers[local]

    def number(self, value: float, dtype: ir.DataType | None = None, shape: tuple[int, ...] = ()) -> ir.Value:
        """Return a float constant filled with one number, by default in the activations' type."""
        kind = dtype or self.dtype
        array = np.full(shape, value, kind.numpy())
        name = ".".join(["number", repr(value), ELEMENT_TYPES[kind], *map(str, shape)])
        return self.constant(name, ir.Tensor(array, dtype=kind))

    def integers(self, *numbers: int) -> ir.Value:
        """Return an int64 vector."""
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
        """Append a node with one output, which gets the node's name."""
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
        """Append a node whose outputs are given as name, shape and type."""
        made = [
            ir.Value(name=self.name(output), type=ir.TensorType(dtype), shape=ir.Shape(shape))
            for output, shape, dtype in outputs
        ]
        self.graph.append(ir.node(op_type, inputs, attributes, domain=domain, outputs=made, name=self.name(name)))
        return made

    def row_maximum(self, name: str, x: ir.Value) -> ir.Value:
        """Return the largest element of each row, [T, 1]."""
        return self.emit("ReduceMax", name, [x, self.integers(1)], [dims(x)[0], 1], keepdims=1)

    def linear(self, node: ir.Node, x: ir.Value) -> ir.Value:
        """y = x @ W^T + b with W stored in the activations' type, whatever its type in the IR."""
        operand = node.inputs[1]
        assert operand is not None
        weight = self.weight(
            operand.name or "", self.dtype, _stored_dims(node, operand), partial(float32_values, operand)
        )
        return self.emit("Gemm", node.name or "", [x, weight, *self.bias(node)], dims(node.outputs[0]), transB=1)

    def bias(self, node: ir.Node) -> list[ir.Value]:
        """The bias as [1, out], if there is one: TensorRT reshapes a vector by a launch of its own."""
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is None:
            return []
        (out,) = _stored_dims(node, bias)
        return [self.weight(f"{bias.name}.row", self.dtype, (1, out), lambda: float32_values(bias).reshape(1, out))]

    def finish(self, outputs: Iterable[ir.Value]) -> ir.Model:
        """Return the model with these of its values as outputs y0, y1 ..."""
        for index, value in enumerate(outputs):
            value.name = f"y{index}"
            self.graph.outputs.append(value)
        return ir.Model(self.graph, ir_version=IR_VERSION, producer_name="ingot")

    def _input(self, name: str, dtype: ir.DataType, shape: Dims) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value


def dims(value: ir.Value) -> list[int | str]:
    """Return a value's shape as ints and symbols."""
    assert value.shape is not None, value.name
    return [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]


def renumber_layers(text: str, offset: int) -> str:
    """Add the offset to the layer numbers in a name or a message."""
    return _LAYER.sub(lambda found: f"{found.group(1)}{int(found.group(2)) + offset}", text)


def stored_array(value: ir.Value) -> NDArray[Any]:
    """Return a copy of an initializer's values and release its memory map."""
    assert value.const_value is not None, value.name
    return apply_to_array(value.const_value, np.array)


def is_constant(value: ir.Value) -> bool:
    """Report whether a value is an initializer, or computed from initializers alone (a norm's weight plus one)."""
    if value.is_initializer() or is_stored(value):
        return True
    producer = value.producer()
    if producer is None:
        return False
    return producer.op_type in _FOLDED and all(v is not None and is_constant(v) for v in producer.inputs)


def folded(value: ir.Value) -> NDArray[np.float32]:
    """Compute a constant in float32."""
    producer = value.producer()
    if producer is None or producer.op_type not in _FOLDED:
        return float32_values(value)
    left, right = (folded(operand) for operand in producer.inputs if operand is not None)
    return np.asarray(_FOLDED[producer.op_type](left, right), np.float32)


def _stored_dims(node: ir.Node, operand: ir.Value) -> tuple[int, ...]:
    if not is_stored(operand) or operand.shape is None:
        raise PassError(
            f"{node.name!r} multiplies by {operand.name!r}, which is computed; segments take stored weights"
        )
    return tuple(int(size) for size in operand.shape.numpy())
