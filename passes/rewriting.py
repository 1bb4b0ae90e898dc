"""Common parts of rewrites: refusals, new nodes and constants, questions about nodes and values.

A rewrite is three functions: find (the pattern), check (a Refusal or None), replace. Only their arguments pass between
them. A refusal names the node and the reason; with the option `strict` the pass raises it as an error.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError

_log = logging.getLogger("ingot.passes")
_ATTENTION_OPERANDS = 6


@dataclass(frozen=True)
class Refusal:
    """A node that resembles the pattern, and the reason why it is left alone."""

    node: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.node!r} {self.reason}"


def settle(name: str, refusals: Sequence[Refusal], *, strict: bool, is_present: bool) -> None:
    """Log the refusals; with `strict`, raise the first as a PassError.

    is_present    whether the model has the fused form now; with `strict` a model without it is a PassError
    """
    for refusal in refusals:
        _log.info("%s: left alone: %s", name, refusal)
    if not strict:
        return
    if refusals:
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        raise PassError(f"{name}: strict, and a fusion did not happen: {refusals[0]}{more}")
    if not is_present:
        raise PassError(f"{name}: strict, and nothing in the model resembles its pattern; see docs/passes.md")


def make_node(
    op_type: str,
    name: str,
    inputs: Sequence[ir.Value | None],
    like: Sequence[ir.Value | None],
    domain: str = "",
    **attributes: Any,
) -> ir.Node:
    """Make a node whose outputs have the dtypes and shapes of the values in `like`; None omits an output.

    The outputs are named after the node until `replace_nodes` gives them the names of the values that they replace.
    """
    outputs = [ir.Value(name="") if value is None else _like(value, f"{name}.{i}") for i, value in enumerate(like)]
    return ir.node(op_type, inputs, attributes, domain=domain, outputs=outputs, name=name)


def replace_nodes(
    graph: ir.Graph, anchor: ir.Node, old: Sequence[ir.Node], new: Sequence[ir.Node], values: dict[ir.Value, ir.Value]
) -> None:
    """Replace the old nodes by new ones after `anchor`; `values` (old -> new) keep their readers and names."""
    ir.convenience.replace_nodes_and_values(graph, anchor, old, new, list(values), list(values.values()))


def add_constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """Return the initializer of that name, added if it is missing; PassError if it has other values."""
    present = graph.initializers.get(name)
    if present is not None and present.const_value is not None:
        if np.array_equal(present.const_value.numpy(), array):
            return present
        raise PassError(f"the initializer {name!r} already has other values")
    return add_initializer(graph, ir.tensor(array, name=name))


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add an initializer that holds the tensor, under the tensor's name, which must be free."""
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def small_constant(value: ir.Value | None, max_elements: int = 16) -> list[Any] | None:
    """The values of an initializer of at most `max_elements`, as a flat list; None for any other value."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    return value.const_value.numpy().reshape(-1).tolist() if value.const_value.size <= max_elements else None


def sole_consumer(value: ir.Value) -> ir.Node | None:
    """The node that reads the value; None when several do, or none, or the value is a graph output."""
    consumers = value.consumers()
    return consumers[0] if len(consumers) == 1 and not value.is_graph_output() else None


def static_columns(value: ir.Value) -> int | None:
    """Size of the last axis; None when it is not fixed."""
    if value.shape is None or len(value.shape) == 0:
        return None
    size = value.shape[-1]
    return size if isinstance(size, int) else None


def row_columns(value: ir.Value | None) -> int:
    """Elements of a row: the size of the last axis; of [T, heads, dim] heads * dim."""
    assert value is not None
    columns = static_columns(value)
    assert columns is not None, value.name
    if value.shape is not None and len(value.shape) == 3 and isinstance(value.shape[1], int):
        return columns * value.shape[1]
    return columns


def keeps_rows(node: ir.Node) -> bool:
    """Whether a Reshape, Squeeze or Unsqueeze keeps all elements in their rows, so that its result is a view.

    Such are Reshapes between [T, heads * dim] and [T, heads, dim], and a batch axis of one, added or removed.
    """
    sizes = small_constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return sizes == [0] or (node.op_type == "Reshape" and sizes is not None and sizes[0] in (0, -1))


def attentions(graph: ir.Graph) -> list[ir.Node]:
    """Every ingot::PagedAttention of the graph, in order."""
    return [node for node in graph if (node.domain, node.op_type) == ("ingot", "PagedAttention")]


def attention_sinks(attention: ir.Node) -> ir.Value | None:
    """The sinks [num_heads] of a PagedAttention: float32; None without them."""
    return attention_operands(attention)[5]


def attention_operands(attention: ir.Node) -> tuple[ir.Value | None, ...]:
    """All six operands of a PagedAttention(query, key?, value?, cos?, sin?, sinks?), None for those that it lacks."""
    return (*attention.inputs, *[None] * _ATTENTION_OPERANDS)[:_ATTENTION_OPERANDS]


def head_counts(attention: ir.Node) -> tuple[int, int, int]:
    """num_heads, num_kv_heads and head_dim of a PagedAttention."""
    names = ("num_heads", "num_kv_heads", "head_dim")
    heads, kv_heads, dim = (attention.attributes[name].as_int() for name in names)
    return heads, kv_heads, dim


def value_dim(attention: ir.Node) -> int:
    """Dims of a value of a PagedAttention, and of each head's result; without the attribute those of a key."""
    return attention.attributes.get_int("value_dim", 0) or attention.attributes["head_dim"].as_int()


def is_latent(attention: ir.Node) -> bool:
    """Whether a PagedAttention has no values of its own: a value is the last value_dim dims of its key."""
    _, key, value, *_ = attention_operands(attention)
    return key is not None and value is None


def require_plain_gemm(node: ir.Node) -> None:
    """Raise PassError for a Gemm other than x @ W.T + b, the form of the IR's linear layers."""
    if node.op_type != "Gemm":
        return
    attributes = node.attributes
    plain = {
        "transA": attributes.get_int("transA", 0) == 0,
        "transB": attributes.get_int("transB", 0) == 1,
        "alpha": attributes.get_float("alpha", 1.0) == 1.0,
        "beta": attributes.get_float("beta", 1.0) == 1.0,
    }
    for attribute, holds in plain.items():
        if not holds:
            raise PassError(
                f"{node.name!r} is not x @ W.T + b: its {attribute} differs from that of the IR's linear layers"
            )


def required_input(node: ir.Node, index: int = 0) -> ir.Value:
    """Return a required operand of the node."""
    value = node.inputs[index]
    assert value is not None, node.name
    return value


def _like(value: ir.Value, name: str) -> ir.Value:
    """A new value with copies of the dtype and shape, which are mutable."""
    shape = None if value.shape is None else value.shape.copy()
    return ir.Value(name=name, type=None if value.dtype is None else ir.TensorType(value.dtype), shape=shape)
