"""Where a graph reads its weight matrices: every linear layer, the head, the embedding table.

    Gemm(x, W, b?, transB=1)       a linear layer; the head when its result reaches the graph's output
    Gather(W, input_ids)           the embedding

W is an initializer, Cast(initializer), or DequantizeLinear(initializers): see DESIGN.md section 3.

Changing a stored weight in place: its tensor becomes a lazy one that makes the new values each time it is read.

What a linear layer reads is an initializer, or a Cast of one that is held in 16 bits; the changed weight is float32,
under the same name, and the Cast goes. Several changes of one weight nest, in the order they were asked for.

The numbers behind a weight operand, whatever form the IR holds them in: float32, 16 bits widened, or quantized.
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

from ingot.errors import PassError
from ingot.passes.numerics.rounding import dequantize
from ingot.passes.rewriting import add_initializer

_FORMS = ("Cast", "DequantizeLinear")


def is_stored(value: ir.Value) -> bool:
    """Whether the value is an initializer, or one behind a Cast or DequantizeLinear."""
    if value.is_initializer():
        return True
    producer = value.producer()
    if producer is None or producer.op_type not in _FORMS:
        return False
    return all(operand is None or operand.is_initializer() for operand in producer.inputs)


def float32_values(value: ir.Value) -> NDArray[np.float32]:
    """A stored value in float32: a copy that the caller may change."""
    assert is_stored(value), value.name
    producer = value.producer()
    if producer is None or producer.op_type == "Cast":
        return _read(value if producer is None else producer.inputs[0]).astype(np.float32)
    codes, scale, *rest = (_read(operand) for operand in producer.inputs if operand is not None)
    zero_point = rest[0] if rest else None
    if scale.ndim == 1:
        scale, zero_point = scale[:, None], None if zero_point is None else zero_point[:, None]
    return dequantize(codes, scale, zero_point, producer.attributes.get_int("block_size", 0) or codes.shape[1])


def _read(value: ir.Value | None) -> NDArray[Any]:
    """The initializer's values; a memory map is given back after a copy."""
    assert value is not None
    assert value.const_value is not None
    tensor = value.const_value
    array = np.array(tensor.numpy())
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()
    return array


Role = Literal["linear", "head", "embedding"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class WeightSite:
    """One node that reads a weight. `weight` is the initializer; `index` the node's operand that leads to it."""

    node: ir.Node
    index: int
    weight: ir.Value
    is_quantized: bool
    role: Role

    @property
    def operand(self) -> ir.Value:
        """What the node reads: the weight itself, or what Cast or DequantizeLinear make of it."""
        operand = self.node.inputs[self.index]
        assert operand is not None
        return operand

    @property
    def names(self) -> tuple[str, ...]:
        """Names a pattern may match: the node's path, the tensor's name, and that without ".weight".

        A head answers to its tensor's name only where that is its own: a tied one's is the embedding's.
        """
        path, weight = self.node.name or "", (self.weight.name or "").removesuffix(".q")
        if self.role == "head" and weight.removesuffix(".weight") != path:
            return (path,)
        return tuple(dict.fromkeys((path, weight, weight.removesuffix(".weight"))))

    def matches(self, patterns: Iterable[str]) -> bool:
        """Whether one of fnmatch's patterns matches one of the names."""
        return any(fnmatchcase(name, pattern) for name in self.names for pattern in patterns)


def require_matches(sites: Iterable[WeightSite], option: str, patterns: Iterable[str]) -> None:
    """PassError for a pattern that matches none of the sites, with the nearest names."""
    names = [name for site in sites for name in site.names]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise PassError(f"{option} {pattern!r} matches no weight; the nearest are {', '.join(near)}")


def weight_sites(model: ir.Model) -> list[WeightSite]:
    """All sites in graph order."""
    heads = _head_nodes(model.graph)
    found = []
    for node in model.graph:
        for index in _weight_operand(node):
            weight, is_quantized = _source(node.inputs[index])
            if weight is not None:
                found.append(WeightSite(node, index, weight, is_quantized, _role(node, heads)))
    return found


def apply_to_array(tensor: ir.TensorProtocol, function: Callable[[NDArray[Any]], Result]) -> Result:
    """Call the function with the tensor's values, and give the memory map back afterwards.

    The result must not be a view of the array.
    """
    result = function(np.asarray(tensor.numpy()))
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()
    return result


def drop_if_unused(graph: ir.Graph, value: ir.Value) -> None:
    """Remove an initializer nobody reads, or the node that makes a value nobody reads, and then its inputs alike."""
    if value.uses() or value.is_graph_output():
        return
    producer = value.producer()
    if producer is None:
        if value.is_initializer():
            graph.initializers.pop(value.name or "")
        return
    if producer.graph is None:
        return  # two of its readers were removed, and it went with the first
    if any(output.uses() or output.is_graph_output() for output in producer.outputs):
        return
    inputs = [operand for operand in producer.inputs if operand is not None]
    graph.remove(producer, safe=True)
    for operand in inputs:
        drop_if_unused(graph, operand)


def _weight_operand(node: ir.Node) -> Iterator[int]:
    """The operand that is a weight matrix, if the node has one."""
    if node.op_type == "Gemm":
        yield 1
    elif node.op_type == "Gather" and _is_input(node.inputs[1], "input_ids"):
        yield 0


def _is_input(value: ir.Value | None, name: str) -> bool:
    return value is not None and value.is_graph_input() and value.name == name


def _source(operand: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """The initializer behind an operand, and whether it is quantized; None when the operand is computed."""
    if operand is None or operand.is_initializer():
        return operand, False
    producer = operand.producer()
    if producer is None or producer.op_type not in ("Cast", "DequantizeLinear"):
        return None, False
    source = producer.inputs[0]
    is_constant = source is not None and source.is_initializer()
    return (source if is_constant else None), producer.op_type == "DequantizeLinear"


def _role(node: ir.Node, heads: set[ir.Node]) -> Role:
    if node.op_type == "Gather":
        return "embedding"
    return "head" if node in heads else "linear"


def _head_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Every Gemm that reaches the output through nodes that are no Gemm (scaling, softcap)."""
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
