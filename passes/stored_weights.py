"""Changing a stored weight in place: its tensor becomes a lazy one that makes the new values each time it is read.

What a linear layer reads is an initializer, or a Cast of one that is held in 16 bits; the changed weight is float32,
under the same name, and the Cast goes. Several changes of one weight nest, in the order they were asked for.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.rewriting import add_initializer
from ingot.passes.weight_sites import apply_to_array, drop_if_unused
from ingot.passes.weight_values import is_stored

Change = Callable[[NDArray[np.float32]], NDArray[Any]]


def stored_value(operand: ir.Value | None) -> ir.Value | None:
    """The float initializer that an operand is or is a Cast of; None for what is computed, or quantized."""
    if operand is None or not is_stored(operand):
        return None
    producer = operand.producer()
    if producer is None:
        return operand
    return producer.inputs[0] if producer.op_type == "Cast" else None


def readers(stored: ir.Value) -> list[tuple[ir.Node, int]]:
    """Nodes that read an initializer, behind its Cast or not, and the operand that does."""
    found: list[tuple[ir.Node, int]] = []
    for use in stored.uses():
        if use.node.op_type == "Cast":
            found += [(behind.node, behind.idx) for behind in use.node.outputs[0].uses()]
        else:
            found.append((use.node, use.idx))
    return found


def change_stored(graph: ir.Graph, stored: ir.Value, change: Change, shape: Sequence[int] | None = None) -> None:
    """Let all readers of the initializer read change(values) in float32 instead; `shape` when it is another one."""
    tensor = stored.const_value
    assert tensor is not None
    new_shape = ir.Shape(tensor.shape.numpy() if shape is None else shape)
    make = partial(_changed, tensor, change)
    stored.const_value = ir.LazyTensor(make, ir.DataType.FLOAT, new_shape, name=stored.name)
    stored.type, stored.shape = ir.TensorType(ir.DataType.FLOAT), new_shape.copy()
    _drop_casts(graph, stored)


def separate_copy(graph: ir.Graph, stored: ir.Value, name: str, of: Iterable[tuple[ir.Node, int]]) -> ir.Value:
    """Give some readers an initializer of their own with the same values, in float32, under another name."""
    tensor = stored.const_value
    assert tensor is not None
    shape = ir.Shape(tensor.shape.numpy())
    lazy = ir.LazyTensor(partial(_changed, tensor, np.array), ir.DataType.FLOAT, shape, name=name)
    value = add_initializer(graph, lazy)
    for node, index in of:
        old = node.inputs[index]
        assert old is not None
        node.replace_input_with(index, value)
        drop_if_unused(graph, old)
    return value


def _changed(tensor: ir.TensorProtocol, change: Change) -> ir.TensorProtocol:
    values = apply_to_array(tensor, lambda array: array.astype(np.float32))
    return ir.Tensor(np.ascontiguousarray(change(values), np.float32), name=tensor.name)


def _drop_casts(graph: ir.Graph, stored: ir.Value) -> None:
    for reader in [use.node for use in stored.uses() if use.node.op_type == "Cast"]:
        cast = reader.outputs[0]
        for use in list(cast.uses()):
            use.node.replace_input_with(use.idx, stored)
        drop_if_unused(graph, cast)
