"""A small builder over onnx_ir: one call per node, its output's shape on the same line."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.checkpoint import Checkpoint

OPSETS = {"": 24, "com.microsoft": 1, "ingot": 1}
IR_VERSION = 11
MADE_BY = "import"
Dims = Sequence[int | str]


def dims(value: ir.Value) -> list[int | str]:
    """The value's shape as plain ints and names."""
    assert value.shape is not None
    return [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]


class GraphBuilder:
    """Builds one graph; names of nodes and of their values are the same readable path.

    Shapes are lists of ints and names of symbolic dimensions: ["T", 64].
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.checkpoint = checkpoint
        self.graph = ir.Graph([], [], nodes=[], opset_imports=OPSETS, name=name)
        self._widened: dict[str, ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Dims) -> ir.Value:
        """A graph input."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value) -> None:
        """Make the value a graph output."""
        self.graph.outputs.append(value)

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """An initializer that holds the array; the same name again gives the same value."""
        if name not in self.graph.initializers:
            self._initializer(ir.tensor(array, name=name))
        return self.graph.initializers[name]

    def scalar(self, number: float) -> ir.Value:
        """A float32 constant of rank 0."""
        return self.constant(f"scalar.{number!r}", np.array(number, np.float32))

    def integers(self, *numbers: int) -> ir.Value:
        """An int64 constant of rank 1: axes, shapes, splits."""
        return self.constant("integers." + ".".join(map(str, numbers)), np.array(numbers, np.int64))

    def weight(self, name: str) -> ir.Value:
        """The checkpoint's tensor as float32: the initializer itself, or its Cast where it is stored in 16 bits."""
        if name not in self.graph.initializers:
            self._initializer(self.checkpoint.external(name))
        stored = self.graph.initializers[name]
        if stored.dtype == ir.DataType.FLOAT:
            return stored
        if name not in self._widened:
            cast = f"{name}.float32"
            self._widened[name] = self.op("Cast", cast, [stored], dims(stored), to=ir.DataType.FLOAT)
        return self._widened[name]

    def op(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[ir.Value],
        shape: Dims,
        domain: str = "",
        **attributes: int | float | str,
    ) -> ir.Value:
        """Append a node with one float32 output of the given shape; the output is named as the node."""
        return self.multi_op(op_type, name, inputs, {name: shape}, domain, **attributes)[0]

    def multi_op(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[ir.Value],
        outputs: dict[str, Dims],
        domain: str = "",
        **attributes: int | float | str,
    ) -> Sequence[ir.Value]:
        """Append a node with several float32 outputs, name -> shape."""
        values = [
            ir.Value(name=output, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
            for output, shape in outputs.items()
        ]
        node = ir.node(op_type, list(inputs), attributes, domain=domain, outputs=values, name=name)
        node.metadata_props["ingot.pass"] = MADE_BY
        self.graph.append(node)
        return node.outputs

    def _initializer(self, tensor: ir.TensorProtocol) -> None:
        value = ir.Value(
            name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
        )
        self.graph.initializers.add(value)
