"""Runs passes in order: verifies the IR after each, times it, and tags the nodes that it makes with its name.

`callback` is called after each pass with the model and the pass's record. Callbacks never change the program: printing
and saving the IR are callbacks like any other.
"""

from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.base import Pass
from ingot.passes.invariants import ProgramInterface, verify, verify_signature
from ingot.passes.numerics.linear_algebra import one_blas_thread
from ingot.passes.printing import model_to_text

PASS_KEY = "ingot.pass"  # node.metadata_props: name of the pass that made the node
Result = TypeVar("Result")
_history: ContextVar[tuple[str, ...]] = ContextVar("ingot.passes.manager", default=())


@dataclass(frozen=True)
class PassRecord:
    """Effects of one pass on the model."""

    pass_: Pass
    seconds: float
    nodes_before: int
    nodes_after: int
    weight_bytes_before: int
    weight_bytes_after: int
    modified: bool

    @property
    def name(self) -> str:
        """Name of the pass."""
        return self.pass_.name

    @property
    def options(self) -> str:
        """The pass as one entry of a recipe's list."""
        return str(self.pass_)


Callback = Callable[[ir.Model, PassRecord], None]


def passes_so_far() -> tuple[str, ...]:
    """str(pass) of every pass that ran on the model, the running one last; () outside of a manager."""
    return _history.get()


@dataclass(frozen=True)
class PassManager:
    """Passes to run in order on one model, in place."""

    passes: Sequence[Pass]
    callback: Callback | None = None

    def run(self, model: ir.Model) -> list[PassRecord]:
        """Run every pass. The first failure is a PassError with the pass's name and the passes that ran before it."""
        records: list[PassRecord] = []
        _guarded("import", [], partial(verify, model))
        outside = _history.get()
        try:
            for pass_ in self.passes:
                _history.set((*_history.get(), str(pass_)))
                with one_blas_thread():
                    record = _guarded(pass_.name, records, partial(_run_one, pass_, model))
                records.append(record)
                if self.callback is not None:
                    self.callback(model, record)
        finally:
            _history.set(outside)
        return records


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers, computed from dtype and shape without reading a weight."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def timing_table(records: Sequence[PassRecord]) -> list[tuple[str, ...]]:
    """Rows of `--time-passes`: a header, one row per pass, a total. Times in milliseconds, weights in MB."""
    rows: list[tuple[str, ...]] = [("pass", "ms", "nodes", "weights MB", "modified")]
    for record in records:
        nodes = f"{record.nodes_before} -> {record.nodes_after}"
        weights = f"{record.weight_bytes_before / 1e6:.1f} -> {record.weight_bytes_after / 1e6:.1f}"
        modified = "yes" if record.modified else "no"
        rows.append((record.name, f"{record.seconds * 1e3:.1f}", nodes, weights, modified))
    rows.append(("total", f"{sum(record.seconds for record in records) * 1e3:.1f}", "", "", ""))
    return rows


def print_after(names: Collection[str], write: Callable[[str], None]) -> Callable[[ir.Model, PassRecord], None]:
    """Make a callback that writes the IR after the passes of these names; "all" means every pass."""

    def callback(model: ir.Model, record: PassRecord) -> None:
        if "all" in names or record.name in names:
            write(f"== IR after {record.name} ==\n{model_to_text(model)}")

    return callback


def save_after_each(folder: Path) -> Callable[[ir.Model, PassRecord], None]:
    """Make a callback that writes the IR after each pass to a file such as 00-fold-constants.txt."""
    numbers = count()

    def callback(model: ir.Model, record: PassRecord) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{next(numbers):02}-{record.name}.txt").write_text(model_to_text(model), encoding="utf-8")

    return callback


def _run_one(pass_: Pass, model: ir.Model) -> PassRecord:
    text, known = model_to_text(model), set(model.graph)
    signature, bytes_before = ProgramInterface.of(model), weight_bytes(model)
    start = perf_counter()
    result = pass_(model)
    seconds = perf_counter() - start
    _tag_new_nodes(model, known, pass_.name)
    verify(model)
    verify_signature(model, signature, may_extend=pass_.kind == "lowering")
    if not result.modified and model_to_text(model) != text:
        raise PassError("it changed the model and reports modified=False")
    return PassRecord(
        pass_=pass_,
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
