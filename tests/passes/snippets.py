"""Small graphs for tests of passes, written node by node, and a way to run them in onnxruntime."""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tests.sessions import Level, plain_session

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
Array = NDArray[Any]


class Snippet:
    """Builds a graph. Every method returns the value that it adds; a node's output has the node's name."""

    def __init__(self) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": 24, "com.microsoft": 1, "ingot": 1}, name="snippet")
        self.model = ir.Model(self.graph, ir_version=11)

    def input(self, name: str, *shape: int | str) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def weight(self, name: str, array: Array) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        shape = ir.Shape(array.shape)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
        self.graph.initializers.add(value)
        return value

    def node(
        self,
        op_type: str,
        name: str,
        inputs: list[ir.Value],
        *shape: int | str,
        dtype: ir.DataType = FLOAT,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        output = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.append(ir.node(op_type, inputs, attributes, domain=domain, outputs=[output], name=name))
        return output

    def output(self, *values: ir.Value) -> ir.Model:
        self.graph.outputs.extend(values)
        return self.model


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    """Normal values from a fixed seed."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def run(model: ir.Model, **feeds: Array) -> list[Array]:
    """All outputs, computed by onnxruntime without its own optimizer."""
    return [np.asarray(result) for result in plain_session(model, Level.ORT_DISABLE_ALL).run(None, feeds)]


def add_stand_in_attention(model: ir.Model) -> None:
    """Let onnxruntime run ingot::PagedAttention(q, k, v) as q + [k, v], where k and v together have q's width."""
    query, key, value = (ir.Value(name=name) for name in "qkv")
    joined = ir.node("Concat", [key, value], {"axis": -1}, name="joined")
    added = ir.node("Add", [query, joined.outputs[0]], name="added")
    body = ir.Graph([query, key, value], [added.outputs[0]], nodes=[joined, added], opset_imports={"": 24})
    names = ("layer", "num_heads", "num_kv_heads", "head_dim", "scale", "softcap", "window")
    kinds = {"scale": ir.AttributeType.FLOAT, "softcap": ir.AttributeType.FLOAT}
    attributes = [ir.Attr(name, kinds.get(name, ir.AttributeType.INT), None) for name in names]
    function = ir.Function("ingot", "PagedAttention", graph=body, attributes=attributes)
    model.functions[function.identifier()] = function


def op_types(model: ir.Model) -> list[str]:
    """The graph's ops, in order."""
    return [node.op_type for node in model.graph]
