"""State of the lowering of one program: the buffer of every value (a view, split-K partials, codes with scales) and the
fusions; and the launches that several ops need: copies, elementwise maps, stored vectors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from ingot.artifact.programs.cpu_program import Activation
from ingot.artifact.programs.launch_program import ELEMENT_BYTES, BufferArgument, WeightArgument
from ingot.errors import PassError
from ingot.passes.rewriting import row_columns
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.cuda.expert_layers import ExpertMatmuls
from ingot.pipeline.targets.cuda.latent_layers import LatentLayers
from ingot.pipeline.targets.cuda.program_builder import ProgramBuilder
from ingot.pipeline.targets.cuda.recurrence_rates import Rate
from ingot.pipeline.targets.fusions import Fusions, Rounding
from ingot.sizes import ceil_div, next_power_of_two

# Numbers of the activations in kernels/gated_activation.py; tanh is a softcap.
ACTIVATIONS: Mapping[Activation, int] = {
    "silu": 0,
    "gelu-erf": 1,
    "gelu-tanh": 2,
    "none": 3,
    "sigmoid": 4,
    "relu": 5,
    "xielu": 6,
    "clamped-swiglu": 7,
    "clamp": 8,
}
ALIGNED_BYTES = 16  # every pointer is a multiple of it, which kernels are compiled for
_MOST_ELEMENTS = 1024  # elements of a row in one program of an elementwise kernel


@dataclass(frozen=True)
class RowBuffer:
    """A value [rows, columns]: a buffer that begins at its first element, a row every `stride` elements.

    partials    split-K partial sums, `partial_stride` elements apart, that the reader adds in order; with a stride of
                0 the matmul added them, and the reader's kernel is the same
    """

    buffer: BufferArgument
    columns: int
    stride: int
    partials: int = 1
    partial_stride: int = 0

    @property
    def is_aligned(self) -> bool:
        """Whether the first element has the alignment of a pointer argument."""
        return self.buffer.offset * ELEMENT_BYTES[self.buffer.type] % ALIGNED_BYTES == 0

    def slice(self, start: int, columns: int) -> "RowBuffer":
        """Return a view of some of the columns."""
        buffer = self.buffer.model_copy(update={"offset": self.buffer.offset + start})
        return replace(self, buffer=buffer, columns=columns)

    @property
    def unaligned(self) -> tuple[BufferArgument, int]:
        """The buffer from its beginning, and the offset in elements, for kernels that take it as a number."""
        return self.buffer.model_copy(update={"offset": 0}), self.buffer.offset


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of 8-bit codes with a scale each: kind 1 e4m3fn, 2 int8 (kernels/kv_precision.py)."""

    codes: BufferArgument
    scales: BufferArgument
    columns: int
    kind: int


@dataclass(frozen=True)
class Routed:
    """A router's choice: `chosen` ids (int32, -1 for rows of padding) and weights (float32) of each row."""

    weights_value: ir.Value | None
    ids: BufferArgument
    weights: BufferArgument
    chosen: int


@dataclass
class LaunchContext:
    """The program so far, and the buffers of its values.

    rows_of     values in the activations' type, or as split-K partials
    codes_of    activations that are also stored as 8-bit codes
    experts     mixtures of experts, by their CombineExperts
    latents     latent attentions, by their PagedAttention
    routes      choices of experts, by the value of the ids
    rates       decays, betas and time steps of recurrent ops, by operand
    carries     whether the gather of embeddings takes tokens of the previous step itself
    """

    builder: ProgramBuilder
    fusions: Fusions
    rows_of: dict[ir.Value, RowBuffer] = field(default_factory=dict)
    codes_of: dict[ir.Value, QuantizedRows] = field(default_factory=dict)
    experts: Mapping[ir.Node, ExpertMatmuls] = field(default_factory=dict)
    latents: Mapping[ir.Node, LatentLayers] = field(default_factory=dict)
    routes: dict[ir.Value, Routed] = field(default_factory=dict)
    rates: Mapping[ir.Value, Rate] = field(default_factory=dict)
    carries: bool = False

    @cached_property
    def roundings(self) -> Mapping[ir.Value, tuple[ir.Node, Rounding]]:
        """Values that are rounded to 8 bits, with the nodes at which that is lowered."""
        found = self.fusions.at.items()
        return {fusion.source: (node, fusion) for node, fusion in found if isinstance(fusion, Rounding)}

    @property
    def rows(self) -> int:
        """Rows of the next launch."""
        return self.builder.rows

    def make(self, value: ir.Value) -> RowBuffer:
        """Allocate a value: in the arena, or in the runtime's logits for the graph's output."""
        columns = row_columns(value)
        if value.is_graph_output():
            buffer = self.builder.external("logits")
        else:
            buffer = self.builder.buffer(value.name or "", self.rows * columns)
        return self.put(value, RowBuffer(buffer, columns, columns))

    def make_partials(self, value: ir.Value, count: int, *, added: bool = False) -> RowBuffer:
        """Allocate a value as split-K partials in float32, or as their sum."""
        columns, stride = row_columns(value), 0 if added else self.rows * row_columns(value)
        buffer = self.builder.buffer(f"{value.name}.parts", (1 if added else count) * self.rows * columns, "fp32")
        return self.put(value, RowBuffer(buffer, columns, columns, count, stride))

    def put(self, value: ir.Value, rows: RowBuffer) -> RowBuffer:
        """Record the rows of a value."""
        self.rows_of[value] = rows
        return rows

    def read(
        self, value: ir.Value | None, reader: ir.Node, *, partials: bool = False, unaligned: bool = False
    ) -> RowBuffer:
        """Return the rows of a value; copied first if they are partials or unaligned and the reader takes neither."""
        assert value is not None
        if value not in self.rows_of:
            made_by = "a constant" if is_stored(value) else f"{value.name!r}"
            raise PassError(f"{reader.name!r} ({reader.op_type}) reads {made_by}, and its CUDA kernel takes rows")
        rows = self.rows_of[value]
        if (rows.partials > 1 and not partials) or not (rows.is_aligned or unaligned):
            rows = self.put(value, self.copied(rows, f"{value.name}.whole", reader))
        return rows

    def copied(self, rows: RowBuffer, name: str, node: ir.Node) -> RowBuffer:
        """Copy the rows, partials added, to a buffer of their own."""
        out = RowBuffer(self.builder.buffer(name, self.rows * rows.columns), rows.columns, rows.columns)
        self.map(node, rows, out)
        return out

    def map(
        self,
        node: ir.Node,
        x: RowBuffer,
        out: RowBuffer,
        activation: Activation = "none",
        alpha: float = 1.0,
        softcap: float = 0.0,
        numbers: tuple[float, ...] = (),
    ) -> None:
        """Launch out = softcap(act(alpha * x)), element by element."""
        source, offset = x.unaligned
        grid, shape = self.blocks(x.columns)
        self.builder.launch(
            "map_rows",
            node,
            grid,
            {**shape, "PARTS": x.partials, "KIND": ACTIVATIONS[activation], "HAS_SOFTCAP": softcap > 0},
            x=source,
            numbers=self.activation_numbers(node, numbers),
            out=out.buffer,
            x_offset=offset,
            x_stride=x.stride,
            part_stride=x.partial_stride,
            out_stride=out.stride,
            alpha=alpha,
            softcap=softcap,
        )

    def blocks(self, columns: int) -> tuple[tuple[int, int], dict[str, int]]:
        """Return grid and constants of a kernel that processes rows in blocks of columns."""
        block = min(_MOST_ELEMENTS, next_power_of_two(columns, 16))
        return (self.rows, ceil_div(columns, block)), {"COLUMNS": columns, "BLOCK": block}

    def vector(self, value: ir.Value | None) -> WeightArgument:
        """Return a stored vector in the activations' type."""
        assert value is not None
        return self.builder.weight(value.name or "", self.builder.activation_type, lambda: float32_values(value))

    def activation_numbers(self, node: ir.Node, numbers: tuple[float, ...]) -> WeightArgument | None:
        """Return the numbers of an activation as a weight [4]; None for an activation without any."""
        if not numbers:
            return None
        padded = np.zeros(4, np.float32)
        padded[: len(numbers)] = numbers
        return self.builder.weight(f"{node.name}.numbers", "fp32", lambda: padded)

    def numbers(self, value: ir.Value) -> WeightArgument:
        """Return stored integers."""
        assert value.const_value is not None
        tensor = value.const_value
        return self.builder.weight(value.name or "", "i64", lambda: np.asarray(tensor.numpy()).astype(np.int64))
