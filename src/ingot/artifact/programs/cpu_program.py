"""A CPU launch program: the operations of a decoder step in order, over one arena of memory.

A program is plain data: it holds for any number of rows up to the engine's limit, because every buffer of the arena has
a row per token and its place is planned per row. Packed weights have one layout for all instruction sets
(runtime/cpu/native/launch.h), so an artifact runs on every CPU with the same bits.

An operation is declared here once: its fields, and in their annotations the role of each. What it reads and writes, the
tensors that a file must hold, the structure that the C walk reads (runtime/cpu/native/structures.py) and the table of
`ingot inspect` follow from them.

    program/operations.json       CpuProgram
    program/weights.safetensors   packed matrices as uint8 [tiles, tile bytes]; norms, biases and rotary tables as F32
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ingot.artifact.json_text import read_program
from ingot.artifact.kv_geometry import KVGeometry
from ingot.artifact.programs.operation_row import (
    Frozen,
    Matrices,
    Matrix,
    MatrixName,
    Norm,
    Reads,
    Row,
    RowsOf,
    Span,
    Table,
    Vector,
    View,
    Writes,
)
from ingot.artifact.programs.projections import Projection
from ingot.artifact.programs.recurrent import ConvolutionFacts, DeltaRuleFacts, ScanFacts

OPERATIONS_FILE = "program/operations.json"
WEIGHTS_FILE = "program/weights.safetensors"
MAX_PROGRAM_BYTES = 2**28

Rounding = Literal["none", "block", "token", "static"]
Activation = Literal[
    "none",
    "silu",
    "gelu-erf",
    "gelu-tanh",
    "relu",
    "sigmoid",
    "tanh",
    "xielu",
    "clamped-swiglu",
    "softplus",
    "clamp",
    "relu2",
]
NUMBERS: Mapping[Activation, tuple[str, ...]] = {
    "xielu": ("a", "b", "beta", "eps"),
    "clamped-swiglu": ("alpha", "limit"),
    "clamp": ("least", "most"),
}
"""Activations with numbers of their own; relu2 is the square of relu.

xielu             a x^2 + beta x above 0, else b (exp(min(x, eps)) - 1 - x) + beta x
clamp             x, at least `least` and at most `most`
clamped-swiglu    of a gate alone: g sigmoid(alpha g) (u + 1), g at most limit, u between -limit and limit
"""
Score = Literal["softmax", "sigmoid", "sparsemixer"]
Store = Literal["store", "add", "gate"]
Function = Literal["copy", "add", "multiply", "gate"]
Ids = Literal["input_ids", "position_ids"]
Arithmetic = Literal["float32", "bfloat16", "bfloat16-amx"]
"""What attention rounds queries, keys, probabilities and values to before it multiplies them; sums are float32.

bfloat16 and bfloat16-amx add up in different orders: that of AVX512-BF16 and that of AMX.
"""


class Buffer(Frozen):
    """A value in the arena: `columns` floats per row, at `offset` floats of a token's share of the arena.

    A row takes round_up(columns, 16) floats. Buffers whose lifetimes do not overlap may share a place. With N rows of
    capacity the buffer begins at float `offset * N` of the arena. `logits` is not in the arena: offset -1.
    """

    rows: RowsOf = "tokens"
    columns: int = Field(ge=1)
    offset: int = Field(ge=-1)


class Embed(Row):
    """output = scale * table[id], or output += it. ids: of the tokens, or their positions."""

    kind: Literal["embed"] = "embed"
    node: str
    table: MatrixName
    output: Annotated[View, Writes("table.k")]
    ids: Ids = "input_ids"
    scale: float = 1.0
    adds: bool = False

    def facts(self, matrices: Matrices) -> Iterator[str]:
        """Return what `ingot inspect` prints."""
        yield str(matrices[self.table])
        yield "by position" if self.ids == "position_ids" else "by token"


class Linear(Row):
    """y = alpha * (x' @ W^T) + bias, then cap * tanh(y / cap) if cap; then stored. x' is the normed and rounded input.

    rows      logits: the input's rows are gathered by logits_indices first, where its buffer has rows of tokens
    store     store: output = activation(y); add: output += activation(y); gate: activation(gate) * up, of a matrix of
              pairs
    bias      [n] in the order of the matrix's rows: of pairs all of the gate's, then all of the up projection's
    numbers   of the activation (NUMBERS)
    """

    kind: Literal["linear"] = "linear"
    node: str
    matrix: MatrixName
    input: Annotated[View, Reads("matrix.k")]
    output: Annotated[View, Writes("matrix.n")]
    bias: Annotated[str | None, Vector("matrix.n")] = None
    norm: Annotated[Norm | None, Vector("matrix.k")] = None
    rounding: Rounding = "none"
    static_scale: float | None = None
    store: Store = "store"
    activation: Activation = "none"
    numbers: tuple[float, ...] = ()
    rows: RowsOf = "tokens"
    alpha: float = 1.0
    cap: float = 0.0

    @property
    def is_added(self) -> bool:
        """Return whether the result is added to the output."""
        return self.store == "add"

    @property
    def may_overwrite(self) -> bool:
        """Return whether the output may be columns that it reads: those that it adds to, and not its input."""
        return self.is_added and self.input != self.output

    def span_written(self, matrices: Matrices) -> Span:
        """Return the span that it writes: gate and up projection are half of the matrix each."""
        whole = super().span_written(matrices)
        return replace(whole, columns=whole.columns // 2) if self.store == "gate" else whole

    def facts(self, matrices: Matrices) -> Iterator[str]:
        """Return what `ingot inspect` prints."""
        matrix = matrices[self.matrix]
        yield f"{matrix.k} -> {matrix.n} {matrix}"
        yield from (f"{self.norm.kind} norm",) if self.norm else ()
        yield from (f"int8 by {self.rounding}",) if self.rounding != "none" else ()
        yield from ("bias",) if self.bias else ()
        yield from (self.activation,) if self.activation != "none" else ()
        yield from (self.store,) if self.store != "store" else ()
        yield from (f"softcap {self.cap:g}",) if self.cap else ()


class Normalize(Row):
    """output = norm(input) in `groups` groups of `columns`, plus residual. The output may be the input or the residual.

    rows      logits: rows of input and residual are gathered by logits_indices, where their buffer has rows of tokens
    """

    is_in_place: ClassVar[bool] = True

    kind: Literal["normalize"] = "normalize"
    node: str
    input: Annotated[View, Reads("columns", "groups")]
    output: Annotated[View, Writes("columns", "groups")]
    norm: Annotated[Norm, Vector("columns")]
    columns: int = Field(ge=1)
    groups: int = Field(default=1, ge=1)
    residual: Annotated[View | None, Reads("columns", "groups")] = None
    rows: RowsOf = "tokens"

    def facts(self, matrices: Matrices) -> Iterator[str]:
        """Return what `ingot inspect` prints."""
        yield f"{self.norm.kind} norm of {self.groups} x {self.columns}"


class Combine(Row):
    """output = cap(scale * f(a, b)); b is a view, a number or `vector`. f: a, a + b, a * b, or activation(a) * b.

    vector    tensor [columns], the b of all rows
    broadcast b is a view of one column, for all columns of a
    numbers   of the activation (NUMBERS)
    rows      logits: rows of a and b are gathered by logits_indices, where their buffer has rows of tokens
    """

    is_in_place: ClassVar[bool] = True

    kind: Literal["combine"] = "combine"
    node: str
    function: Function
    a: Annotated[View, Reads("columns")]
    b: Annotated[View | float | None, Reads("columns_of_b")] = None
    vector: Annotated[str | None, Vector("columns")] = None
    output: Annotated[View, Writes("columns")]
    columns: int = Field(ge=1)
    broadcast: bool = False
    activation: Activation = "none"
    numbers: tuple[float, ...] = ()
    rows: RowsOf = "tokens"
    scale: float = 1.0
    cap: float = 0.0

    @property
    def columns_of_b(self) -> int:
        """Columns of the second operand, where it is a view."""
        return 1 if self.broadcast else self.columns

    def facts(self, matrices: Matrices) -> Iterator[str]:
        """Return what `ingot inspect` prints."""
        yield self.function
        yield from (self.activation,) if self.activation != "none" else ()


class ExpertLayer(Row):
    """A linear layer of one expert: alpha * (x' @ W^T) + bias, capped, with `activation` of the gate; see Linear."""

    node: str
    matrix: MatrixName
    bias: Annotated[str | None, Vector("matrix.n")] = None
    rounding: Rounding = "none"
    static_scale: float | None = None
    activation: Activation = "none"
    numbers: tuple[float, ...] = ()
    alpha: float = 1.0
    cap: float = 0.0


class Experts(Row):
    """output = sum of weight * down(activation(gate(x')) * up(x')) over a token's experts; x' is the normed input.

    Without gates it is down(activation(up(x'))).

    up, down  a layer for each expert: gate and up projection in a matrix of pairs or up alone, and down projection
    logits    the router's, a column for each expert
    bias      tensor [experts], added to the scores for the choice
    chosen, score, groups, chosen_groups, group_best, normalise, least_sum, scale, margin
              see ingot.passes.numerics.experts.Routing
    adds      the sum is added to the output
    rows      logits: rows of logits and input are gathered, as in Linear
    """

    kind: Literal["experts"] = "experts"
    node: str
    logits: Annotated[View, Reads("count")]
    input: Annotated[View, Reads("up_matrix.k")]
    output: Annotated[View, Writes("down_matrix.n")]
    up: tuple[ExpertLayer, ...] = Field(min_length=1)
    down: tuple[ExpertLayer, ...] = Field(min_length=1)
    bias: Annotated[str | None, Vector("count")] = None
    norm: Annotated[Norm | None, Vector("up_matrix.k")] = None
    chosen: int = Field(ge=1)
    score: Score = "softmax"
    groups: int = Field(default=1, ge=1)
    chosen_groups: int = Field(default=1, ge=1)
    group_best: int = Field(default=2, ge=1, le=2)
    normalise: bool = False
    least_sum: float = 0.0
    scale: float = 1.0
    margin: float = 0.0
    adds: bool = False
    rows: RowsOf = "tokens"

    @property
    def layers(self) -> tuple[ExpertLayer, ...]:
        """The linear layers of all experts."""
        return (*self.up, *self.down)

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self.up)

    @property
    def up_matrix(self) -> str:
        """The first expert's matrix of gate and up projection."""
        return self.up[0].matrix

    @property
    def down_matrix(self) -> str:
        """The first expert's matrix of the down projection."""
        return self.down[0].matrix

    def facts(self, matrices: Matrices) -> Iterator[str]:
        """Return what `ingot inspect` prints."""
        up, down = matrices[self.up_matrix], matrices[self.down_matrix]
        yield f"{self.chosen} of {self.count} experts by {self.score}"
        yield f"{up.k} -> {down.k} -> {down.n} {down}"
        yield from (f"{self.norm.kind} norm",) if self.norm else ()
        yield from ("add",) if self.adds else ()


class Rotate(Row):
    """output = `heads` heads of the input, each rotated by its token's position. The output may be the input.

    cos, sin    tensors [positions, rotary_dim / 2]: elements d and d + rotary_dim / 2 are a pair
    """

    is_in_place: ClassVar[bool] = True

    kind: Literal["rotate"] = "rotate"
    node: str
    input: Annotated[View, Reads("heads", "head_dim")]
    output: Annotated[View, Writes("heads", "head_dim")]
    cos: Annotated[str, Table("rotary_pairs")]
    sin: Annotated[str, Table("rotary_pairs")]
    heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    rotary_dim: int = Field(ge=2, multiple_of=2)

    @property
    def rotary_pairs(self) -> int:
        """Pairs of elements of a head that are rotated."""
        return self.rotary_dim // 2

    def facts(self, matrices: Matrices) -> Iterator[str]:
        """Return what `ingot inspect` prints."""
        yield f"{self.rotary_dim} of {self.heads} x {self.head_dim}"


class Attend(Row):
    """Paged attention of one layer: keys and values enter the pool, output [T, num_heads * output_dim].

    key, value   None for a layer that attends to another layer's keys and values. value alone is None in latent
                 attention: a value is the last value_dim dims of its key
    value_dim    dims of a value; 0: those of a key
    rotary       tensors cos and sin [positions, rotary_dim / 2]
    sinks        tensor [num_heads]: a score of each head that takes part in its softmax and has no value
    """

    kind: Literal["attend"] = "attend"
    node: str
    layer: int = Field(ge=0)
    query: Annotated[View, Reads("num_heads", "head_dim")]
    key: Annotated[View | None, Reads("num_kv_heads", "head_dim")] = None
    value: Annotated[View | None, Reads("num_kv_heads", "output_dim")] = None
    output: Annotated[View, Writes("num_heads", "output_dim")]
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    value_dim: int = Field(default=0, ge=0)
    scale: float
    softcap: float = 0.0
    window: int = Field(default=0, ge=0)
    cos: Annotated[str | None, Table("rotary_pairs")] = None
    sin: Annotated[str | None, Table("rotary_pairs")] = None
    rotary_dim: int = Field(default=0, ge=0)
    sinks: Annotated[str | None, Vector("num_heads")] = None
    arithmetic: Arithmetic = "float32"

    @property
    def output_dim(self) -> int:
        """Dims of a value, and of each head's result."""
        return self.value_dim or self.head_dim

    @property
    def rotary_pairs(self) -> int:
        """Pairs of elements of a head that are rotated."""
        return self.rotary_dim // 2

    def facts(self, matrices: Matrices) -> Iterator[str]:
        """Return what `ingot inspect` prints."""
        yield f"layer {self.layer}: {self.num_heads} x {self.head_dim} heads over {self.num_kv_heads}"
        yield from (f"values of {self.value_dim}",) if self.value_dim else ()
        yield from (f"window {self.window}",) if self.window else ()
        yield from ("sinks",) if self.sinks else ()


class Convolve(ConvolutionFacts, Row):
    """Short convolution of a recurrent layer; tensors weight [taps, channels], bias [channels]."""

    kind: Literal["convolve"] = "convolve"
    node: str
    input: Annotated[View, Reads("widths.input")]
    output: Annotated[View, Writes("widths.output")]
    weight: Annotated[str, Vector("taps", "channels")]
    bias: Annotated[str | None, Vector("channels")] = None


class ApplyDeltaRule(DeltaRuleFacts, Row):
    """Gated delta rule of a recurrent layer."""

    kind: Literal["delta-rule"] = "delta-rule"
    node: str
    query: Annotated[View, Reads("widths.query")]
    key: Annotated[View, Reads("widths.key")]
    value: Annotated[View, Reads("widths.value")]
    decay: Annotated[View, Reads("widths.decay")]
    beta: Annotated[View, Reads("widths.beta")]
    output: Annotated[View, Writes("widths.output")]


class Scan(ScanFacts, Row):
    """Selective scan of a recurrent layer; tensors a and d [num_heads]."""

    kind: Literal["scan"] = "scan"
    node: str
    input: Annotated[View, Reads("widths.input")]
    dt: Annotated[View, Reads("widths.dt")]
    b: Annotated[View, Reads("widths.b")]
    c: Annotated[View, Reads("widths.c")]
    output: Annotated[View, Writes("widths.output")]
    a: Annotated[str, Vector("num_heads")]
    d: Annotated[str, Vector("num_heads")]


Recurrent = Convolve | ApplyDeltaRule | Scan
"""Operations that read and replace side state, token after token."""
Operation = Annotated[
    Embed | Linear | Normalize | Combine | Rotate | Attend | Experts | Convolve | ApplyDeltaRule | Scan,
    Field(discriminator="kind"),
]


class CpuProgram(Frozen):
    """program/operations.json.

    arena_floats   floats of the arena for each token of a step
    head_start     index of the operation after the last that every step runs: a step without logits ends there
    projections    the checkpoint's linear layers that are rows of a Linear operation; `node` is the operation's
    """

    kv: KVGeometry
    vocab_size: int = Field(ge=1)
    context_tokens: int = Field(ge=1)
    arena_floats: int = Field(ge=0)
    buffers: dict[str, Buffer]
    matrices: dict[str, Matrix]
    operations: tuple[Operation, ...] = Field(min_length=1)
    head_start: int = Field(ge=0)
    projections: tuple[Projection, ...] = ()

    def tensors(self) -> Iterator[str]:
        """Names of the float tensors that the operations read, each once."""
        yield from dict.fromkeys(name for operation in self.operations for name, _, _ in operation.tensors())


def layers_of(operation: Operation) -> tuple[Linear | ExpertLayer, ...]:
    """The linear layers that an operation computes."""
    match operation:
        case Linear():
            return (operation,)
        case Experts():
            return operation.layers
    return ()


def read_cpu_program(file: Path) -> CpuProgram:
    """Read program/operations.json; ArtifactError with the file and its problem."""
    return read_program(file, CpuProgram, MAX_PROGRAM_BYTES)
