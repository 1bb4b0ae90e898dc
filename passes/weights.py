"""The weights of a graph: where they are read, their values, and lazy changes of them.

    Gemm(x, W, b?, transB=1)       a linear layer; the head when its result reaches the graph's output
    Gather(E, input_ids)           the embedding

A layer that makes the logits of RouteExperts, one column (the gate of a shared expert), or the decay, beta or dt of a
recurrent op is a router: small, and quantized by no pass unless a pattern names it.

The operand W is an initializer, Cast(initializer) for one of 16 bits, or DequantizeLinear(initializers) for a quantized
one. A site is a node that reads a weight; a stored value is a float initializer, read directly or by Cast.

`change_stored` does not read the weight: its tensor becomes a lazy one, which computes the new values each time it is
read, in float32 and under the same name; the Cast goes. Changes of one weight nest, in the order of the calls.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError, shown
from ingot.passes.numerics.rounding import dequantize
from ingot.passes.projections import forget_projections
from ingot.passes.rewriting import add_initializer

Role = Literal["linear", "head", "embedding", "router"]
Change = Callable[[NDArray[np.float32]], NDArray[Any]]
Result = TypeVar("Result")

_FEW = 4  # numbers of a token, such as one for each residual stream
_FORMS = ("Cast", "DequantizeLinear")
_GATES = {"GatedDeltaRule": (3, 4), "SelectiveScan": (1,)}  # operands that scale a state or its change
_POINTWISE = ("Add", "Mul", "Relu", "Sigmoid", "Softplus")


@dataclass(frozen=True)
class WeightSite:
    """A node that reads a weight.

    index    operand by which the node reads it
    weight   the initializer
    """

    node: ir.Node
    index: int
    weight: ir.Value
    is_quantized: bool
    role: Role

    @property
    def operand(self) -> ir.Value:
        """The value that the node reads: the weight itself, or the result of its Cast or DequantizeLinear."""
        operand = self.node.inputs[self.index]
        assert operand is not None
        return operand

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a pattern may match: the node's path, the tensor's name, and that without ".weight".

        A tied head only has its path: the tensor's name is the embedding's.
        """
        path, weight = self.node.name or "", (self.weight.name or "").removesuffix(".q")
        if self.role == "head" and weight.removesuffix(".weight") != path:
            return (path,)
        return tuple(dict.fromkeys((path, weight, weight.removesuffix(".weight"))))

    def matches(self, patterns: Iterable[str]) -> bool:
        """Whether one of the patterns (fnmatch) matches one of the names."""
        return any(fnmatchcase(name, pattern) for name in self.names for pattern in patterns)


def weight_sites(model: ir.Model) -> list[WeightSite]:
    """All sites of the graph, in order."""
    heads = _head_nodes(model.graph)
    found = []
    for node in model.graph:
        for index in _weight_operand(node):
            weight, is_quantized = _source(node.inputs[index])
            if weight is not None:
                found.append(WeightSite(node, index, weight, is_quantized, _role(node, heads)))
    return found


def require_matches(sites: Iterable[WeightSite], option: str, patterns: Iterable[str]) -> None:
    """PassError, with the nearest names, for a pattern that matches no site."""
    names = [name for site in sites for name in site.names]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise PassError(f"{option} {shown(pattern)} matches no weight; the nearest are {', '.join(near)}")


def is_router(node: ir.Node) -> bool:
    """Whether the node is a linear layer that chooses experts, or makes or reads a few numbers alone.

    These are gates: of a shared expert, of a recurrence, and the coefficients of residual streams (AltUp).
    """
    if node.op_type != "Gemm":
        return False
    if _makes_gates(node.outputs[0]):
        return True
    widths = [value.shape[-1] for value in (node.inputs[0], node.outputs[0]) if value and value.shape]
    is_gate = any(isinstance(width, int) and width <= _FEW for width in widths)
    return is_gate or any(reader.op_type == "RouteExperts" for reader in node.outputs[0].consumers())


def _makes_gates(value: ir.Value) -> bool:
    """Whether nothing but pointwise nodes is between the value and gates of recurrent ops."""
    uses = list(value.uses())
    return bool(uses) and all(
        use.idx in _GATES.get(use.node.op_type, ())
        or (use.node.op_type in _POINTWISE and _makes_gates(use.node.outputs[0]))
        for use in uses
    )


def is_embedding(node: ir.Node) -> bool:
    """Whether the node is the embedding, Gather(E, input_ids)."""
    indices = node.inputs[1] if node.op_type == "Gather" else None
    return indices is not None and indices.is_graph_input() and indices.name == "input_ids"


def is_stored(value: ir.Value) -> bool:
    """Whether the value is an initializer, or the Cast or DequantizeLinear of initializers."""
    if value.is_initializer():
        return True
    producer = value.producer()
    if producer is None or producer.op_type not in _FORMS:
        return False
    return all(operand is None or operand.is_initializer() for operand in producer.inputs)


def stored_value(operand: ir.Value | None) -> ir.Value | None:
    """The float initializer that an operand is, or is the Cast of; None for a computed or quantized operand."""
    if operand is None or not is_stored(operand):
        return None
    producer = operand.producer()
    if producer is None:
        return operand
    return producer.inputs[0] if producer.op_type == "Cast" else None


def readers(stored: ir.Value) -> list[tuple[ir.Node, int]]:
    """Nodes that read an initializer, directly or through its Cast, and the index of their operand."""
    found: list[tuple[ir.Node, int]] = []
    for use in stored.uses():
        if use.node.op_type == "Cast":
            found += [(reader.node, reader.idx) for reader in use.node.outputs[0].uses()]
        else:
            found.append((use.node, use.idx))
    return found


def float32_values(value: ir.Value) -> NDArray[np.float32]:
    """Values of a weight operand in any form, widened or dequantized: a copy that the caller may change."""
    assert is_stored(value), value.name
    producer = value.producer()
    if producer is None or producer.op_type == "Cast":
        return _read(value if producer is None else producer.inputs[0]).astype(np.float32)
    codes, scale, *rest = (_read(operand) for operand in producer.inputs if operand is not None)
    zero_point = rest[0] if rest else None
    if scale.ndim == 1:
        scale, zero_point = scale[:, None], None if zero_point is None else zero_point[:, None]
    return dequantize(codes, scale, zero_point, producer.attributes.get_int("block_size", 0) or codes.shape[1])


def apply_to_array(tensor: ir.TensorProtocol, function: Callable[[NDArray[Any]], Result]) -> Result:
    """Call the function with the tensor's values, and release its memory map afterwards.

    The result must not be a view of the array.
    """
    result = function(np.asarray(tensor.numpy()))
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()
    return result


def change_stored(
    graph: ir.Graph, stored: ir.Value, change: Change, shape: Sequence[int] | None = None, *, approximates: bool = False
) -> None:
    """Let all readers of the initializer read change(values) in float32; `shape` is the new shape where it differs.

    approximates   the new values are near the old ones, so that the layers still are the checkpoint's (projections.py)
    """
    if not approximates:
        forget_projections(node for node, _ in readers(stored))
    tensor = stored.const_value
    assert tensor is not None
    new_shape = ir.Shape(tensor.shape.numpy() if shape is None else shape)
    make = partial(_changed, tensor, change)
    stored.const_value = ir.LazyTensor(make, ir.DataType.FLOAT, new_shape, name=stored.name)
    stored.type, stored.shape = ir.TensorType(ir.DataType.FLOAT), new_shape.copy()
    _drop_casts(graph, stored)


def separate_copy(graph: ir.Graph, stored: ir.Value, name: str, of: Iterable[tuple[ir.Node, int]]) -> ir.Value:
    """Give the readers `of` a value an initializer of their own with the same values, in float32."""
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


def drop_if_unused(graph: ir.Graph, value: ir.Value) -> None:
    """Remove an unused initializer, or the node that makes an unused value and then its unused inputs."""
    if value.uses() or value.is_graph_output():
        return
    producer = value.producer()
    if producer is None:
        if value.is_initializer():
            graph.initializers.pop(value.name or "")
        return
    if producer.graph is None:
        return  # two of its readers were removed, and the first removed it
    if any(output.uses() or output.is_graph_output() for output in producer.outputs):
        return
    inputs = [operand for operand in producer.inputs if operand is not None]
    graph.remove(producer, safe=True)
    for operand in inputs:
        drop_if_unused(graph, operand)


def _weight_operand(node: ir.Node) -> Iterator[int]:
    """The index of the operand that is a weight matrix, if the node has one."""
    if node.op_type == "Gemm":
        yield 1
    elif is_embedding(node):
        yield 0


def _source(operand: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """The initializer of an operand, and whether it is quantized; None for a computed operand."""
    if operand is None or operand.is_initializer():
        return operand, False
    producer = operand.producer()
    if producer is None or producer.op_type not in _FORMS:
        return None, False
    source = producer.inputs[0]
    is_constant = source is not None and source.is_initializer()
    return (source if is_constant else None), producer.op_type == "DequantizeLinear"


def _role(node: ir.Node, heads: set[ir.Node]) -> Role:
    if node.op_type == "Gather":
        return "embedding"
    return "head" if node in heads else "router" if is_router(node) else "linear"


def _head_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Every Gemm whose result reaches the output without another Gemm (through scaling, softcap)."""
    waiting = [value.producer() for value in graph.outputs]
    heads: set[ir.Node] = set()
    seen: set[ir.Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in ("Gemm", "PagedAttention"):
            heads.add(node)
        else:
            waiting.extend(value.producer() for value in node.inputs if value is not None)
    return heads


def _read(value: ir.Value | None) -> NDArray[Any]:
    """A copy of the initializer's values; releases a memory map."""
    assert value is not None
    assert value.const_value is not None
    tensor = value.const_value
    array = np.array(tensor.numpy())
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()
    return array


def _changed(tensor: ir.TensorProtocol, change: Change) -> ir.TensorProtocol:
    values = apply_to_array(tensor, lambda array: array.astype(np.float32))
    return ir.Tensor(np.ascontiguousarray(change(values), np.float32), name=tensor.name)


def _drop_casts(graph: ir.Graph, stored: ir.Value) -> None:
    for reader in [use.node for use in stored.uses() if use.node.op_type == "Cast"]:
        cast = reader.outputs[0]
        for use in list(cast.uses()):
            use.node.replace_input_with(use.idx, stored)
        drop_if_unused(graph, cast)
