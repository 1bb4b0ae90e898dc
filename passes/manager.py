"""Runs passes in order: verifies the IR between any two, times and counts each, marks new nodes with their maker.

Observing never changes the program: there is one path, and `callback` is called after each pass with the model as it
is and the record of the pass that made it so. Printing and saving the IR are such callbacks (see printing.py).

The IR's invariants, checked before the first pass and after each.

Every value read is a graph input, an initializer, or made by an earlier node; names are unique and not empty; ops,
attributes and operand counts are those of their opset; inputs, outputs and initializers have dtype and shape.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

import onnx
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.base import Pass
from ingot.passes.printing import model_to_text

INGOT_OPS = {"PagedAttention"}


@dataclass(frozen=True)
class Signature:
    """What the outside knows of a program: name, dtype and rank of its inputs and outputs, in order."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, model: ir.Model) -> "Signature":
        """The signature of this model."""
        return cls(
            *(tuple(_describe(value) for value in values) for values in (model.graph.inputs, model.graph.outputs))
        )


def verify(model: ir.Model) -> None:
    """Raise PassError with the first broken invariant, naming node and value."""
    graph = model.graph
    for value in (*graph.inputs, *graph.outputs):
        _require(value.dtype is not None and value.shape is not None, f"{value.name!r} has no dtype or shape")
    for name, value in graph.initializers.items():
        _verify_initializer(name, value)
    made = _verify_nodes(graph)
    for value in graph.outputs:
        _require(value in made, f"graph output {value.name!r} is made by no node of the graph")


def verify_signature(model: ir.Model, before: Signature, *, may_extend: bool) -> None:
    """Raise PassError when inputs or outputs changed; a lowering may add some behind those that were there."""
    after = Signature.of(model)
    for what, old, new in (("inputs", before.inputs, after.inputs), ("outputs", before.outputs, after.outputs)):
        kept = new[: len(old)] if may_extend else new
        _require(kept == old, f"it changed the graph's {what} from {', '.join(old)} to {', '.join(new)}")


def _verify_nodes(graph: ir.Graph) -> set[ir.Value]:
    """Check every node in order; return all values that are known at the end."""
    known = {*graph.inputs, *graph.initializers.values()}
    names = {value.name for value in known}
    _require(len(names) == len(known), "a graph input and an initializer have the same name")
    node_names: set[str] = set()
    for node in graph:
        _require(bool(node.name) and node.name not in node_names, f"node name {node.name!r} is empty or used twice")
        node_names.add(node.name or "")
        _verify_operator(graph, node)
        for read in node.inputs:
            _require(
                read is None or read in known, f"node {node.name!r} reads {_name(read)}, which nothing before it makes"
            )
        for value in node.outputs:
            if value.name:
                _require(value.name not in names, f"value name {value.name!r} is made twice, again by {node.name!r}")
                names.add(value.name)
                known.add(value)
    return known


def _verify_initializer(name: str, value: ir.Value) -> None:
    tensor = value.const_value
    _require(value.name == name, f"initializer {name!r} holds the value {value.name!r}")
    if tensor is None:
        raise PassError(f"initializer {name!r} has no tensor")
    _require(value.dtype == tensor.dtype, f"initializer {name!r} is {value.dtype}, its tensor {tensor.dtype}")
    shape = None if value.shape is None else list(value.shape)
    _require(shape == list(tensor.shape), f"initializer {name!r} has shape {shape}, its tensor {list(tensor.shape)}")


def _verify_operator(graph: ir.Graph, node: ir.Node) -> None:
    where = f"node {node.name!r} ({node.domain or 'ai.onnx'}::{node.op_type})"
    _require(node.domain in graph.opset_imports, f"{where}: the model imports no opset for that domain")
    _require(not any(_subgraphs(node)), f"{where} has a subgraph; the IR is flat")
    if node.domain == "ingot":
        _require(node.op_type in INGOT_OPS, f"{where}: no such op; ingot has {', '.join(sorted(INGOT_OPS))}")
    if node.domain != "":
        return  # the engine checks its own ops when it loads them
    version = graph.opset_imports[""]
    if not onnx.defs.has(node.op_type, version):
        raise PassError(f"{where}: no such op in opset {version}")
    schema = onnx.defs.get_schema(node.op_type, version)
    unknown = [name for name in node.attributes if name not in schema.attributes]
    _require(not unknown, f"{where}: unknown attribute {', '.join(unknown)}")
    _require(schema.min_input <= len(node.inputs) <= schema.max_input, f"{where}: {len(node.inputs)} inputs")
    _require(schema.min_output <= len(node.outputs) <= schema.max_output, f"{where}: {len(node.outputs)} outputs")


def _subgraphs(node: ir.Node) -> Iterator[bool]:
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return (attribute.type in graphs for attribute in node.attributes.values())


def _describe(value: ir.Value) -> str:
    rank = "?" if value.shape is None else len(value.shape)
    return f"{value.name} ({value.dtype.name if value.dtype else '?'}, rank {rank})"


def _name(value: ir.Value | None) -> str:
    return "nothing" if value is None else repr(value.name)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PassError(message)


PASS_KEY = "ingot.pass"  # node.metadata_props: name of the pass that made the node


@dataclass(frozen=True)
class PassRecord:
    """What one pass did. `options` is str(pass): one entry of a recipe's list."""

    name: str
    options: str
    seconds: float
    nodes_before: int
    nodes_after: int
    weight_bytes_before: int
    weight_bytes_after: int
    modified: bool


Result = TypeVar("Result")
Callback = Callable[[ir.Model, PassRecord], None]

_history: ContextVar[tuple[str, ...]] = ContextVar("ingot.passes.manager", default=())


def passes_so_far() -> tuple[str, ...]:
    """str(pass) of the pass that runs now, and of all that ran before it on the same model; () outside of a manager."""
    return _history.get()


@dataclass(frozen=True)
class PassManager:
    """A list of passes, run in order on one model, in place."""

    passes: Sequence[Pass]
    callback: Callback | None = None

    def run(self, model: ir.Model) -> list[PassRecord]:
        """Run every pass; PassError, with the pass's name and what ran before it, stops at the first failure."""
        records: list[PassRecord] = []
        _guarded("import", [], partial(verify, model))
        outside = _history.get()
        try:
            for pass_ in self.passes:
                _history.set((*_history.get(), str(pass_)))
                record = _guarded(pass_.name, records, partial(_run_one, pass_, model))
                records.append(record)
                if self.callback is not None:
                    self.callback(model, record)
        finally:
            _history.set(outside)
        return records


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers, counted from dtype and shape: no weight is read."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def timing_table(records: Sequence[PassRecord]) -> list[tuple[str, ...]]:
    """Rows for `--time-passes`: a header, one row per pass, a total. Times in milliseconds, weights in MB."""
    rows: list[tuple[str, ...]] = [("pass", "ms", "nodes", "weights MB", "modified")]
    for record in records:
        nodes = f"{record.nodes_before} -> {record.nodes_after}"
        weights = f"{record.weight_bytes_before / 1e6:.1f} -> {record.weight_bytes_after / 1e6:.1f}"
        modified = "yes" if record.modified else "no"
        rows.append((record.name, f"{record.seconds * 1e3:.1f}", nodes, weights, modified))
    rows.append(("total", f"{sum(record.seconds for record in records) * 1e3:.1f}", "", "", ""))
    return rows


def _run_one(pass_: Pass, model: ir.Model) -> PassRecord:
    text, known = model_to_text(model), set(model.graph)
    signature, bytes_before = Signature.of(model), weight_bytes(model)
    start = perf_counter()
    result = pass_(model)
    seconds = perf_counter() - start
    _tag_new_nodes(model, known, pass_.name)
    verify(model)
    verify_signature(model, signature, may_extend=pass_.kind == "lowering")
    if not result.modified and model_to_text(model) != text:
        raise PassError("it changed the model and reports modified=False")
    return PassRecord(
        name=pass_.name,
        options=str(pass_),
        seconds=seconds,
        nodes_before=len(known),
        nodes_after=len(model.graph),
        weight_bytes_before=bytes_before,
        weight_bytes_after=weight_bytes(model),
        modified=result.modified,
    )


def _tag_new_nodes(model: ir.Model, known: set[ir.Node], name: str) -> None:
    for node in model.graph:
        if node not in known:
            node.metadata_props[PASS_KEY] = name


def _guarded(name: str, ran: Sequence[PassRecord], work: Callable[[], Result]) -> Result:
    """Do the work; any failure becomes a PassError with the name of the pass and the passes that ran before it."""
    try:
        return work()
    except Exception as error:
        message = str(error).removeprefix(f"{name}: ")
        kind = "" if isinstance(error, PassError) else f"{type(error).__name__}: "
        before = ", ".join(record.name for record in ran) or "none"
        raise PassError(f"{name}: {kind}{message} (passes that ran before: {before})") from error
