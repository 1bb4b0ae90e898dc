"""A CPU launch program: the operations of a decoder step in order, over one arena of memory.

A program is plain data: it holds for any number of rows up to the engine's limit, because every buffer of the arena has
a row per token and its place is planned per row. Packed weights have one layout for all instruction sets
(runtime/cpu/native/launch.h), so an artifact runs on every CPU with the same bits.

    program/operations.json       CpuProgram
    program/weights.safetensors   packed matrices as uint8 [tiles, tile bytes]; norms, biases and rotary tables as F32
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ingot.artifact.json_text import read_program
from ingot.artifact.kv_geometry import KVGeometry
from ingot.artifact.programs.projections import Projection
from ingot.artifact.programs.recurrent import ConvolutionFacts, DeltaRuleFacts, ScanFacts
from ingot.sizes import next_power_of_two, round_up

LANES = 16  # output rows of a tile
CHANNEL_BLOCK = 128  # most columns that share a scale of the activations, where a weight has one scale per row
LEAST_BLOCK = 16
OPERATIONS_FILE = "program/operations.json"
WEIGHTS_FILE = "program/weights.safetensors"
MAX_PROGRAM_BYTES = 2**28

Form = Literal["float32", "float16", "bfloat16", "float8", "int2", "int3", "int4", "int8"]
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
RowsOf = Literal["tokens", "logits"]
Score = Literal["softmax", "sigmoid"]
Arithmetic = Literal["float32", "bfloat16"]
"""What attention rounds queries, keys, probabilities and values to before it multiplies them; sums are float32."""

BITS: Mapping[Form, int] = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8": 8,
    "int2": 2,
    "int3": 3,
    "int4": 4,
    "int8": 8,
}
_INTEGERS: Mapping[int, Form] = {2: "int2", 3: "int3", 4: "int4", 8: "int8"}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Matrix(_Frozen):
    """A packed weight [n, k]; launch.h describes the layout.

    block         columns that share a scale of the activations, and of the weight unless `per_row`; 0 for floats
    per_row       one scale per output row
    scale_bytes   2: float16, 4: float32; 0 for floats without scales
    has_zeros     zero points; else every zero point is 2^(bits - 1)
    pairs         its rows are those of a gate and of an up projection, n / 2 each, in tiles that take turns
    """

    n: int = Field(ge=1)
    k: int = Field(ge=1)
    form: Form
    block: int = Field(default=0, ge=0)
    per_row: bool = False
    scale_bytes: Literal[0, 2, 4] = 0
    has_zeros: bool = False
    pairs: bool = False

    @classmethod
    def of_integers(cls, n: int, k: int, bits: int, block: int, scale_bytes: Literal[2, 4]) -> "Matrix":
        """A matrix of 2, 3, 4 or 8 bits without zero points, in blocks; block 0: a scale per row."""
        form = _INTEGERS[bits]
        if block:
            return cls(n=n, k=k, form=form, block=block, scale_bytes=scale_bytes)
        unpadded = (size for size in (CHANNEL_BLOCK, CHANNEL_BLOCK // 2, CHANNEL_BLOCK // 4) if k % size == 0)
        block = next(unpadded, min(CHANNEL_BLOCK, next_power_of_two(k, LEAST_BLOCK)))
        return cls(n=n, k=k, form=form, block=block, per_row=True, scale_bytes=scale_bytes)

    @property
    def is_integer(self) -> bool:
        """Whether it has integer codes."""
        return self.form.startswith("int")

    @property
    def padded_k(self) -> int:
        """Columns with padding: whole blocks and whole groups of 32. Floats are not padded."""
        if not self.is_integer:
            return self.k
        padded = round_up(self.k, self.block)
        while padded % 32:
            padded += self.block
        return padded

    @property
    def scale_blocks(self) -> int:
        """Scales of one output row."""
        return 0 if not self.scale_bytes else 1 if self.per_row else self.padded_k // self.block

    @property
    def codes_offset(self) -> int:
        """Bytes before a tile's codes."""
        return round_up(self.scale_blocks * LANES * (self.scale_bytes + self.has_zeros), 64)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile, a multiple of 64."""
        return round_up(self.codes_offset + self.padded_k * LANES * BITS[self.form] // 8, 64)

    @property
    def num_tiles(self) -> int:
        """Tiles of the matrix: of each half, if it has two."""
        return 2 * -(-self.n // 2 // LANES) if self.pairs else -(-self.n // LANES)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tiles."""
        return self.num_tiles * self.tile_bytes


class Buffer(_Frozen):
    """A value in the arena: `columns` floats per row, at `offset` floats of a token's share of the arena.

    A row takes round_up(columns, 16) floats. Buffers whose lifetimes do not overlap may share a place. With N rows of
    capacity the buffer begins at float `offset * N` of the arena. `logits` is not in the arena: offset -1.
    """

    rows: RowsOf = "tokens"
    columns: int = Field(ge=1)
    offset: int = Field(ge=-1)


class View(_Frozen):
    """Columns `column` .. of a buffer's rows."""

    buffer: str
    column: int = Field(default=0, ge=0)


class Norm(_Frozen):
    """RMS norm, or layer norm, over all columns of a row or group; weight and bias name tensors [columns]."""

    kind: Literal["rms", "layer"] = "rms"
    weight: str
    bias: str | None = None
    epsilon: float


class Embed(_Frozen):
    """output = scale * table[id], or output += it. ids: of the tokens, or their positions."""

    kind: Literal["embed"] = "embed"
    node: str
    table: str
    output: View
    ids: Literal["input_ids", "position_ids"] = "input_ids"
    scale: float = 1.0
    adds: bool = False


class Linear(_Frozen):
    """y = alpha * (x' @ W^T) + bias, then cap * tanh(y / cap) if cap; then stored. x' is the normed and rounded input.

    rows      logits: the input's rows are gathered by logits_indices first, where its buffer has rows of tokens
    store     store: output = activation(y); add: output += activation(y); gate: activation(gate) * up, of a matrix of
              pairs
    bias      [n] in the order of the matrix's rows: of pairs all of the gate's, then all of the up projection's
    numbers   of the activation (NUMBERS)
    """

    kind: Literal["linear"] = "linear"
    node: str
    matrix: str
    input: View
    output: View
    bias: str | None = None
    norm: Norm | None = None
    rounding: Rounding = "none"
    static_scale: float | None = None
    store: Literal["store", "add", "gate"] = "store"
    activation: Activation = "none"
    numbers: tuple[float, ...] = ()
    rows: RowsOf = "tokens"
    alpha: float = 1.0
    cap: float = 0.0


class Normalize(_Frozen):
    """output = norm(input) in `groups` groups of `columns`, plus residual. The output may be the input or the residual.

    rows      logits: rows of input and residual are gathered by logits_indices, where their buffer has rows of tokens
    """

    kind: Literal["normalize"] = "normalize"
    node: str
    input: View
    output: View
    norm: Norm
    columns: int = Field(ge=1)
    groups: int = Field(default=1, ge=1)
    residual: View | None = None
    rows: RowsOf = "tokens"


class Combine(_Frozen):
    """output = cap(scale * f(a, b)); b is a view, a number or `vector`. f: a, a + b, a * b, or activation(a) * b.

    vector    tensor [columns], the b of all rows
    broadcast b is a view of one column, for all columns of a
    numbers   of the activation (NUMBERS)
    rows      logits: rows of a and b are gathered by logits_indices, where their buffer has rows of tokens
    """

    kind: Literal["combine"] = "combine"
    node: str
    function: Literal["copy", "add", "multiply", "gate"]
    a: View
    b: View | float | None = None
    vector: str | None = None
    output: View
    columns: int = Field(ge=1)
    broadcast: bool = False
    activation: Activation = "none"
    numbers: tuple[float, ...] = ()
    rows: RowsOf = "tokens"
    scale: float = 1.0
    cap: float = 0.0


class ExpertLayer(_Frozen):
    """A linear layer of one expert: alpha * (x' @ W^T) + bias, capped, with `activation` of the gate; see Linear."""

    node: str
    matrix: str
    bias: str | None = None
    rounding: Rounding = "none"
    static_scale: float | None = None
    activation: Activation = "none"
    numbers: tuple[float, ...] = ()
    alpha: float = 1.0
    cap: float = 0.0


class Experts(_Frozen):
    """output = sum of weight * down(activation(gate(x')) * up(x')) over a token's experts; x' is the normed input.

    Without gates it is down(activation(up(x'))).

    up, down  a layer for each expert: gate and up projection in a matrix of pairs or up alone, and down projection
    logits    the router's, a column for each expert
    bias      tensor [experts], added to the scores for the choice
    chosen, score, groups, chosen_groups, group_best, normalise, least_sum, scale
              see ingot.passes.numerics.experts.Routing
    adds      the sum is added to the output
    rows      logits: rows of logits and input are gathered, as in Linear
    """

    kind: Literal["experts"] = "experts"
    node: str
    logits: View
    input: View
    output: View
    up: tuple[ExpertLayer, ...] = Field(min_length=1)
    down: tuple[ExpertLayer, ...] = Field(min_length=1)
    bias: str | None = None
    norm: Norm | None = None
    chosen: int = Field(ge=1)
    score: Score = "softmax"
    groups: int = Field(default=1, ge=1)
    chosen_groups: int = Field(default=1, ge=1)
    group_best: int = Field(default=2, ge=1, le=2)
    normalise: bool = False
    least_sum: float = 0.0
    scale: float = 1.0
    adds: bool = False
    rows: RowsOf = "tokens"

    @property
    def layers(self) -> tuple[ExpertLayer, ...]:
        """The linear layers of all experts."""
        return (*self.up, *self.down)


class Rotate(_Frozen):
    """output = `heads` heads of the input, each rotated by its token's position. The output may be the input.

    cos, sin    tensors [positions, rotary_dim / 2]: elements d and d + rotary_dim / 2 are a pair
    """

    kind: Literal["rotate"] = "rotate"
    node: str
    input: View
    output: View
    cos: str
    sin: str
    heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    rotary_dim: int = Field(ge=2, multiple_of=2)


class Attend(_Frozen):
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
    query: View
    key: View | None = None
    value: View | None = None
    output: View
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    value_dim: int = Field(default=0, ge=0)
    scale: float
    softcap: float = 0.0
    window: int = Field(default=0, ge=0)
    cos: str | None = None
    sin: str | None = None
    rotary_dim: int = Field(default=0, ge=0)
    sinks: str | None = None
    arithmetic: Arithmetic = "float32"

    @property
    def output_dim(self) -> int:
        """Dims of a value, and of each head's result."""
        return self.value_dim or self.head_dim


class Convolve(ConvolutionFacts):
    """Short convolution of a recurrent layer; tensors weight [taps, channels], bias [channels]."""

    kind: Literal["convolve"] = "convolve"
    node: str
    input: View
    output: View
    weight: str
    bias: str | None = None


class ApplyDeltaRule(DeltaRuleFacts):
    """Gated delta rule of a recurrent layer."""

    kind: Literal["delta-rule"] = "delta-rule"
    node: str
    query: View
    key: View
    value: View
    decay: View
    beta: View
    output: View


class Scan(ScanFacts):
    """Selective scan of a recurrent layer; tensors a and d [num_heads]."""

    kind: Literal["scan"] = "scan"
    node: str
    input: View
    dt: View
    b: View
    c: View
    output: View
    a: str
    d: str


Recurrent = Convolve | ApplyDeltaRule | Scan
"""Operations that read and replace side state, token after token."""
Operation = Annotated[
    Embed | Linear | Normalize | Combine | Rotate | Attend | Experts | Convolve | ApplyDeltaRule | Scan,
    Field(discriminator="kind"),
]


class CpuProgram(_Frozen):
    """program/operations.json.

    arena_floats   floats of the arena for each token of a step
    head_start     index of the operation after the last Attend or recurrent one: a step without logits ends there
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
        seen: set[str] = set()
        for operation in self.operations:
            for name in filter(None, _tensors_of(operation)):
                if name not in seen:
                    seen.add(name)
                    yield name


def _tensors_of(operation: Operation) -> tuple[str | None, ...]:
    match operation:
        case Linear(norm=norm, bias=bias):
            return (bias, norm.weight, norm.bias) if norm else (bias,)
        case Normalize(norm=norm):
            return (norm.weight, norm.bias)
        case Rotate(cos=cos, sin=sin):
            return (cos, sin)
        case Attend(cos=cos, sin=sin, sinks=sinks):
            return (cos, sin, sinks)
        case Combine(vector=vector):
            return (vector,)
        case Convolve(weight=weight, bias=bias):
            return (weight, bias)
        case Scan(a=a, d=d):
            return (a, d)
        case Experts(norm=norm, bias=bias):
            norms = (norm.weight, norm.bias) if norm else ()
            return (bias, *norms, *(layer.bias for layer in operation.layers))
    return ()


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
