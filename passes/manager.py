"""Runs passes in order: verifies the IR between any two, times and counts each, marks new nodes with their maker.

Observing never changes the program: there is one path, and `callback` is called after each pass with the model as it
is and the record of the pass that made it so. Printing and saving the IR are such callbacks (see printing.py).
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.base import Pass
from ingot.passes.printing import model_to_text
from ingot.passes.verify import Signature, verify, verify_signature

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
