"""What rewrites share: refusals, replacing nodes, looking at constants.

A rewrite is three functions: find (the pattern), check (a Refusal or None), replace. Nothing but their arguments
travels between them. A refusal names the node at fault; with `strict` the pass makes an error of it.

What the IR's linear layers look like: Gemm(x, W, b?, transB=1), and nothing else of what Gemm can do.
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


@dataclass(frozen=True)
class Refusal:
    """Why a place that looks like the pattern was left alone: the node at fault and the reason."""

    node: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.node!r} {self.reason}"


def settle(name: str, refusals: Sequence[Refusal], *, strict: bool, is_present: bool) -> None:
    """Report what was refused: in the log, or as a PassError when the fusion was expected.

    is_present    the model has the fused form now, made by this run or before it
    """
    for refusal in refusals:
        _log.info("%s: left alone: %s", name, refusal)
    if not strict:
        return
    if refusals:
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        raise PassError(f"{name}: strict, and a fusion did not happen: {refusals[0]}{more}")
    if not is_present:
        raise PassError(f"{name}: strict, and nothing in the model looks like its pattern; see docs/passes.md")


def make_node(
    op_type: str,
    name: str,
    inputs: Sequence[ir.Value | None],
    like: Sequence[ir.Value | None],
    domain: str = "",
    **attributes: Any,
) -> ir.Node:
    """A node whose outputs have dtype and shape of the values in `like`; None stands for an output left out.

    The outputs are named as the node until `replace_nodes` gives them the names of what they replace.
    """
    outputs = [ir.Value(name="") if value is None else _like(value, f"{name}.{i}") for i, value in enumerate(like)]
    return ir.node(op_type, inputs, attributes, domain=domain, outputs=outputs, name=name)


def replace_nodes(
    graph: ir.Graph, anchor: ir.Node, old: Sequence[ir.Node], new: Sequence[ir.Node], values: dict[ir.Value, ir.Value]
) -> None:
    """Put the new nodes behind `anchor`, in the place of the old ones; `values` (old -> new) keep readers and names."""
    ir.convenience.replace_nodes_and_values(graph, anchor, old, new, list(values), list(values.values()))


def add_constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """An initializer with these values; the one of that name, when it is there already and equal."""
    present = graph.initializers.get(name)
    if present is not None and present.const_value is not None:
        if np.array_equal(present.const_value.numpy(), array):
            return present
        raise PassError(f"the initializer {name!r} exists already with other values")
    return add_initializer(graph, ir.tensor(array, name=name))


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """An initializer that holds the tensor, under the tensor's name, which must be free."""
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def small_constant(value: ir.Value | None, max_elements: int = 16) -> list[Any] | None:
    """The values of a small initializer, as a (nested) list; None for anything else."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    return value.const_value.numpy().reshape(-1).tolist() if value.const_value.size <= max_elements else None


def sole_consumer(value: ir.Value) -> ir.Node | None:
    """The one node that reads the value, when it is one and the value is no graph output."""
    consumers = value.consumers()
    return consumers[0] if len(consumers) == 1 and not value.is_graph_output() else None


def static_columns(value: ir.Value) -> int | None:
    """Size of the last axis where it is known."""
    if value.shape is None or len(value.shape) == 0:
        return None
    size = value.shape[-1]
    return size if isinstance(size, int) else None


def _like(value: ir.Value, name: str) -> ir.Value:
    """A value of the same dtype and shape, sharing neither: both are mutable."""
    shape = None if value.shape is None else value.shape.copy()
    return ir.Value(name=name, type=None if value.dtype is None else ir.TensorType(value.dtype), shape=shape)


def require_plain_gemm(node: ir.Node) -> None:
    """Raise PassError when the node is a Gemm other than x @ W.T + b."""
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
            raise PassError(f"{node.name!r} is no x @ W.T + b: its {attribute} is not what the IR's linear layers have")
