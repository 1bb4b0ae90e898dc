"""What is known while one program is lowered: where every value lies, and what is fused.

Where the values of the graph lie while a program is lowered: views of buffers, parts of sums, codes with scales.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ingot.artifact.launch_program import ELEMENT_BYTES, BufferArgument, WeightArgument
from ingot.errors import PassError
from ingot.passes.rewriting import static_columns
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.cuda.fusions import IDENTITY, Fusions
from ingot.pipeline.targets.cuda.program_builder import ProgramBuilder, next_power_of_two

ALIGNED_BYTES = 16  # what Triton is told that every pointer is a multiple of


@dataclass(frozen=True)
class Rows:
    """A value [rows, columns]: a buffer that begins at its first element, a row every `stride` elements.

    parts    of a sum, `part_stride` elements apart, that whoever reads the rows adds in order
    """

    buffer: BufferArgument
    columns: int
    stride: int
    parts: int = 1
    part_stride: int = 0

    @property
    def is_aligned(self) -> bool:
        """Whether a kernel may be given a pointer to the first element."""
        return self.buffer.offset * ELEMENT_BYTES[self.buffer.type] % ALIGNED_BYTES == 0

    def slice(self, start: int, columns: int) -> "Rows":
        """Some of the columns, where they are."""
        buffer = self.buffer.model_copy(update={"offset": self.buffer.offset + start})
        return replace(self, buffer=buffer, columns=columns)

    @property
    def unaligned(self) -> tuple[BufferArgument, int]:
        """The whole buffer, and how many elements into it the rows begin: for kernels that take that as a number."""
        return self.buffer.model_copy(update={"offset": 0}), self.buffer.offset


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of 8-bit codes and a scale of each: kind 1 e4m3fn, 2 int8 (kernels/kv_precision.py)."""

    codes: BufferArgument
    scales: BufferArgument
    columns: int
    kind: int


_MOST_ELEMENTS = 1024  # of a row that one program of an elementwise kernel takes


@dataclass
class Scope:
    """The program so far, and the values that it makes."""

    builder: ProgramBuilder
    fusions: Fusions
    places: dict[ir.Value, Rows] = field(default_factory=dict)
    rounded: dict[ir.Value, QuantizedRows] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of what is computed next."""
        return self.builder.rows

    def make(self, value: ir.Value) -> Rows:
        """Room for what a node makes: the runtime's for the graph's output."""
        columns = columns_of(value)
        if value.is_graph_output():
            buffer = self.builder.external("logits")
        else:
            buffer = self.builder.buffer(value.name or "", self.rows * columns)
        return self.put(value, Rows(buffer, columns, columns))

    def make_parts(self, value: ir.Value, parts: int) -> Rows:
        """Room for so many parts of a sum, in float32."""
        columns = columns_of(value)
        buffer = self.builder.buffer(f"{value.name}.parts", parts * self.rows * columns, "fp32")
        return self.put(value, Rows(buffer, columns, columns, parts, self.rows * columns))

    def put(self, value: ir.Value, rows: Rows) -> Rows:
        """Say where a value lies."""
        self.places[value] = rows
        return rows

    def read(self, value: ir.Value | None, reader: ir.Node, *, parts: bool = False, unaligned: bool = False) -> Rows:
        """Where a value lies; copied first where the reader takes no parts, or no rows that begin anywhere."""
        assert value is not None
        if value not in self.places:
            made_by = "a constant" if is_stored(value) else f"{value.name!r}"
            raise PassError(f"{reader.name!r} ({reader.op_type}) reads {made_by} where its CUDA kernel reads rows")
        rows = self.places[value]
        if (rows.parts > 1 and not parts) or not (rows.is_aligned or unaligned):
            rows = self.put(value, self.copied(rows, f"{value.name}.whole", reader))
        return rows

    def copied(self, rows: Rows, name: str, node: ir.Node) -> Rows:
        """The rows in a buffer of their own, whole."""
        out = Rows(self.builder.buffer(name, self.rows * rows.columns), rows.columns, rows.columns)
        self.map(node, rows, out)
        return out

    def map(
        self, node: ir.Node, x: Rows, out: Rows, kind: int = IDENTITY, alpha: float = 1.0, softcap: float = 0.0
    ) -> None:
        """out = softcap of act(alpha * x), element by element."""
        source, offset = x.unaligned
        grid, shape = self.blocks(x.columns)
        self.builder.launch(
            "map_rows",
            node,
            grid,
            {**shape, "PARTS": x.parts, "KIND": kind, "HAS_SOFTCAP": softcap > 0},
            x=source,
            out=out.buffer,
            x_offset=offset,
            x_stride=x.stride,
            part_stride=x.part_stride,
            out_stride=out.stride,
            alpha=alpha,
            softcap=softcap,
        )

    def blocks(self, columns: int) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid and constants of a kernel that goes over rows block by block."""
        block = min(_MOST_ELEMENTS, next_power_of_two(columns, 16))
        return (self.rows, -(-columns // block)), {"COLUMNS": columns, "BLOCK": block}

    def vector(self, value: ir.Value | None) -> WeightArgument:
        """A stored vector in the activations' type."""
        assert value is not None
        return self.builder.weight(value.name or "", self.builder.activation_type, lambda: float32_values(value))

    def numbers(self, value: ir.Value) -> WeightArgument:
        """Stored whole numbers."""
        assert value.const_value is not None
        tensor = value.const_value
        return self.builder.weight(value.name or "", "i64", lambda: np.asarray(tensor.numpy()).astype(np.int64))


def columns_of(value: ir.Value | None) -> int:
    """Size of the last axis; of [T, heads, dim], both."""
    assert value is not None
    columns = static_columns(value)
    assert columns is not None, value.name
    if value.shape is not None and len(value.shape) == 3 and isinstance(value.shape[1], int):
        return columns * value.shape[1]
    return columns
