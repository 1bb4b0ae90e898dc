"""State of the lowering to a CPU launch program: operations, buffers, weights, and places of the IR's values.

Each value that an operation makes has a buffer of its own name, written once; fuse_operations.py lets operations share
buffers afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.programs.cpu_program import Arithmetic, Operation
from ingot.artifact.programs.operation_row import Matrix, RowsOf, View
from ingot.errors import PassError
from ingot.passes.rewriting import row_columns
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.cpu.matrices import OTHER, StoredMatrix
from ingot.pipeline.targets.fusions import Fusions, Rounding

LOGITS = "logits"
Vector = Callable[[], NDArray[np.float32]]


@dataclass(frozen=True)
class Rows:
    """A value [rows, columns] in a buffer: rows of logits may be those of a buffer that has a row for each token."""

    view: View
    columns: int
    rows: RowsOf = "tokens"

    def slice(self, start: int, columns: int) -> "Rows":
        """Return some of the columns."""
        view = View(buffer=self.view.buffer, column=self.view.column + start)
        return replace(self, view=view, columns=columns)


@dataclass(frozen=True)
class DraftBuffer:
    """A buffer before it has a place in the arena."""

    columns: int
    rows: RowsOf


@dataclass
class Draft:
    """The program so far.

    vectors      float tensors, made when they are written
    projections  linear layer -> the checkpoint's modules that are its rows, and the rows of each
    given, kept  buffers that hold values before the first operation, and after the last
    apart        buffers that another device fills or reads: their values are those of the IR, for every token
    """

    operations: list[Operation] = field(default_factory=list)
    buffers: dict[str, DraftBuffer] = field(default_factory=dict)
    stored: dict[str, StoredMatrix] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)
    projections: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)

    @property
    def matrices(self) -> dict[str, Matrix]:
        """The descriptions of the matrices."""
        return {name: stored.matrix for name, stored in self.stored.items()}

    def add_matrix(self, stored: StoredMatrix) -> str:
        """Add a matrix once, and return its name: a table and a head of one weight are two if one is quantized."""
        name = stored.name
        while not self.stored.setdefault(name, stored).is_same(stored):
            name += OTHER
        return name

    def add_vector(self, name: str, make: Vector) -> str:
        """Add a float tensor once, and return its name."""
        self.vectors.setdefault(name, make)
        return name


@dataclass
class LoweringContext:
    """The draft, and the places of the IR's values.

    attention  what its operands are rounded to
    rounded    results of rounded activations: Linear rounds the source itself
    routes     ids of experts -> the node that chooses them; dispatched: -> where the operations of these experts begin
    """

    fusions: Fusions
    attention: Arithmetic = "float32"
    draft: Draft = field(default_factory=Draft)
    places: dict[ir.Value, Rows] = field(default_factory=dict)
    rounded: dict[ir.Value, Rounding] = field(default_factory=dict)
    routes: dict[ir.Value, ir.Node] = field(default_factory=dict)
    dispatched: dict[ir.Value, int] = field(default_factory=dict)

    def emit(self, operation: Operation) -> None:
        """Append an operation."""
        self.draft.operations.append(operation)

    def make(self, value: ir.Value, rows: RowsOf) -> Rows:
        """Make the buffer of a value."""
        name, columns = LOGITS if value.is_graph_output() else value.name or "", row_columns(value)
        assert name not in self.draft.buffers, name
        self.draft.buffers[name] = DraftBuffer(columns, rows)
        return self.put(value, Rows(View(buffer=name), columns, rows))

    def take(self, value: ir.Value) -> None:
        """Make the buffer of a graph input of floats, which the caller fills."""
        assert value.name
        self.draft.given.add(value.name)
        self.make(value, "tokens")

    def put(self, value: ir.Value, rows: Rows) -> Rows:
        """Record the place of a value."""
        self.places[value] = rows
        return rows

    def read(self, value: ir.Value | None, reader: ir.Node) -> Rows:
        """Return the place of a value. PassError for a constant, and for rounded activations."""
        assert value is not None
        found = self.places.get(value)
        if found is None:
            kind = "a constant" if is_stored(value) else "rounded activations" if value in self.rounded else "a value"
            raise refusal(reader, f"reads {kind} ({value.name!r}), and its operation takes rows of floats")
        return found

    def vector(self, value: ir.Value | None, reader: ir.Node) -> str:
        """Return the name of a stored vector. PassError for a computed one."""
        assert value is not None
        if not is_stored(value):
            raise refusal(reader, f"reads {value.name!r}, which is computed; put fold-constants before the lowering")
        return self.draft.add_vector(value.name or "", lambda: float32_values(value).reshape(-1))

    def table(self, value: ir.Value | None) -> str:
        """Return the name of a rotary table."""
        assert value is not None
        return self.draft.add_vector(value.name or "", lambda: float32_values(value))


def refusal(node: ir.Node, reason: str) -> PassError:
    """The error of a node that has no operation."""
    return PassError(f"{node.name!r} ({node.op_type}) {reason}")


def float_attribute(node: ir.Node, name: str, default: float = 0.0) -> float:
    """Return an attribute as a float."""
    return float(node.attributes.get_float(name, default) or 0.0)


def int_attribute(node: ir.Node, name: str) -> int:
    """Return an attribute; 0 if it is missing."""
    return node.attributes.get_int(name, 0) or 0
