"""The IR's invariants, which the pass manager checks before the first pass and after each.

Every value read is a graph input, an initializer, or made by an earlier node; names are unique and not empty; ops,
attributes and operand counts are those of their opset; inputs, outputs and initializers have dtype and shape;
recurrent ops have the attributes and widths of passes/recurrent_ops.py, and one state of a kind in a layer.
"""

from dataclasses import dataclass
from functools import cache

import onnx
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.recurrent_ops import RECURRENT_OPS, verify_recurrent

INGOT_OPS = {
    "CombineExperts",
    "DispatchExperts",
    "PagedAttention",
    "ReceiveFromHost",
    "RouteExperts",
    "SendToHost",
    *RECURRENT_OPS,
}

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@dataclass(frozen=True)
class ProgramInterface:
    """The interface of a program: name, dtype and rank of its inputs and outputs, in order."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, model: ir.Model) -> "ProgramInterface":
        """The signature of this model."""
        inputs, outputs = model.graph.inputs, model.graph.outputs
        return cls(tuple(map(_describe, inputs)), tuple(map(_describe, outputs)))


def verify(model: ir.Model) -> None:
    """Raise PassError with the first broken invariant, naming node and value."""
    graph = model.graph
    for value in (*graph.inputs, *graph.outputs):
        _require(value.dtype is not None and value.shape is not None, f"{value.name!r} has no dtype or shape")
    for name, value in graph.initializers.items():
        _verify_initializer(name, value)
    values = _verify_nodes(graph)
    for value in graph.outputs:
        _require(value in values, f"graph output {value.name!r} is made by no node of the graph")
    verify_recurrent(graph)


def verify_signature(model: ir.Model, before: ProgramInterface, *, may_extend: bool) -> None:
    """Raise PassError when inputs or outputs changed; `may_extend` allows new ones at the end."""
    after = ProgramInterface.of(model)
    for what, old, new in (("inputs", before.inputs, after.inputs), ("outputs", before.outputs, after.outputs)):
        kept = new[: len(old)] if may_extend else new
        _require(kept == old, f"it changed the graph's {what} from {', '.join(old)} to {', '.join(new)}")


def _verify_nodes(graph: ir.Graph) -> set[ir.Value]:
    """Check every node in order; return all values of the graph."""
    known = {*graph.inputs, *graph.initializers.values()}
    names = {value.name for value in known}
    _require(len(names) == len(known), "a graph input and an initializer have the same name")
    node_names: set[str] = set()
    for node in graph:
        if not node.name or node.name in node_names:
            raise PassError(f"node name {node.name!r} is empty or used twice")
        node_names.add(node.name)
        _verify_operator(graph, node)
        for read in node.inputs:
            if read is not None and read not in known:
                raise PassError(f"node {node.name!r} reads {read.name!r}, which nothing before it makes")
        for value in node.outputs:
            if value.name:
                if value.name in names:
                    raise PassError(f"value name {value.name!r} is made twice, again by {node.name!r}")
                names.add(value.name)
                known.add(value)
    return known


def _verify_initializer(name: str, value: ir.Value) -> None:
    tensor = value.const_value
    if value.name != name:
        raise PassError(f"initializer {name!r} holds the value {value.name!r}")
    if tensor is None:
        raise PassError(f"initializer {name!r} has no tensor")
    if value.dtype != tensor.dtype:
        raise PassError(f"initializer {name!r} is {value.dtype}, its tensor {tensor.dtype}")
    shape = None if value.shape is None else list(value.shape)
    if shape != list(tensor.shape):
        raise PassError(f"initializer {name!r} has shape {shape}, its tensor {list(tensor.shape)}")


def _verify_operator(graph: ir.Graph, node: ir.Node) -> None:
    problem = _operator_problem(graph, node)
    if problem:
        raise PassError(f"node {node.name!r} ({node.domain or 'ai.onnx'}::{node.op_type}){problem}")


def _operator_problem(graph: ir.Graph, node: ir.Node) -> str:
    """Return what is wrong with the operator, or "". The engine checks its own ops when it loads them."""
    if node.domain not in graph.opset_imports:
        return ": the model imports no opset for that domain"
    if any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
        return " has a subgraph; the IR is flat"
    if node.domain == "ingot" and node.op_type not in INGOT_OPS:
        return f": no such op; ingot has {', '.join(sorted(INGOT_OPS))}"
    if node.domain != "":
        return ""
    schema = _schema(node.op_type, graph.opset_imports[""])
    if schema is None:
        return f": no such op in opset {graph.opset_imports['']}"
    return _schema_problem(node, schema)


@cache
def _schema(op_type: str, version: int) -> onnx.defs.OpSchema | None:
    return onnx.defs.get_schema(op_type, version) if onnx.defs.has(op_type, version) else None


def _schema_problem(node: ir.Node, schema: onnx.defs.OpSchema) -> str:
    unknown = [name for name in node.attributes if name not in schema.attributes]
    if unknown:
        return f": unknown attribute {', '.join(unknown)}"
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        return f": {len(node.inputs)} inputs"
    if not schema.min_output <= len(node.outputs) <= schema.max_output:
        return f": {len(node.outputs)} outputs"
    return ""


def _describe(value: ir.Value) -> str:
    rank = "?" if value.shape is None else len(value.shape)
    return f"{value.name} ({value.dtype.name if value.dtype else '?'}, rank {rank})"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PassError(message)
