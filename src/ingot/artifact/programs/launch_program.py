"""A launch program: kernels with their arguments in order, for one number of rows, over one arena of memory.

A program is plain data. A buffer is a range of the arena, which buffers with disjoint lifetimes share, or is provided
by the runtime (EXTERNAL). A weight is a tensor of the artifact; a kernel is a key into the table of cubins. Only the
contents of external buffers change between steps, so that a program can be captured into a CUDA graph.

    program/launches.json                CudaProgram
    program/cubins-sm90.safetensors      one uint8 tensor per kernel, by its key
    program/weights.safetensors          the weights, by name
    program/tiles.json                   the measured choice of tiles, if the build used one
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ingot.artifact.json_text import read_program
from ingot.artifact.kv_geometry import KVGeometry, KVType
from ingot.artifact.programs.projections import Projection

# Bytes per element by Triton type name.
ELEMENT_BYTES: Mapping[str, int] = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8e4nv": 1,
    "i8": 1,
    "u8": 1,
    "i32": 4,
    "i64": 8,
}

# Triton type name -> safetensors type name.
STORED_TYPES: Mapping[str, str] = {
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "fp8e4nv": "F8_E4M3",
    "i8": "I8",
    "u8": "U8",
    "i32": "I32",
    "i64": "I64",
}

KV_ELEMENTS: Mapping[KVType, str] = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp8": "fp8e4nv",
    "int8": "i8",
    "int4": "u8",
}

# Buffers that the runtime provides, with their element types; None: that of the KV pool, and of the activations for
# adapters. Shapes: LaunchProgram, and kernels/low_rank.py for adapters.
EXTERNAL: Mapping[str, str | None] = {
    "input_ids": "i64",
    "position_ids": "i64",
    "slots": "i64",
    "carried": "i32",
    "logits_indices": "i64",
    "tables": "i32",
    "lengths": "i32",
    "query_starts": "i32",
    "tile_sequences": "i32",
    "tile_starts": "i32",
    "kv_pool": None,
    "kv_scales": "fp16",
    "state_pool": "fp32",
    "state_slots": "i32",
    "counters": "i32",
    "logits": "fp32",
    "tokens": "i64",
    "temperatures": "fp32",
    "top_ks": "i32",
    "top_ps": "fp32",
    "uniforms": "fp32",
    "adapter_pool": None,
    "adapter_table": "i64",
    "adapter_spans": "i32",
    "adapter_results": "fp32",
    "adapter_units": "i32",
    "adapter_rows": "i32",
    "head_adapter_units": "i32",
    "head_adapter_rows": "i32",
}

Constant = int | float | bool | str
ActivationType = Literal["fp32", "fp16", "bf16"]
SamplerKind = Literal["greedy", "draw"]
Library = Literal["cublaslt"]
DEPENDENT_FROM = 90  # the first SM with programmatic dependent launches
MAX_PROGRAM_BYTES = 2**30
LAUNCHES_FILE = "program/launches.json"
TILES_FILE = "program/tiles.json"
WEIGHTS_FILE = "program/weights.safetensors"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BufferArgument(_Frozen):
    """A pointer to element `offset` of a buffer, in elements of `type`."""

    kind: Literal["buffer"] = "buffer"
    name: str
    type: str
    offset: int = Field(default=0, ge=0)


class WeightArgument(_Frozen):
    """A pointer to a tensor of the program's weights."""

    kind: Literal["weight"] = "weight"
    name: str
    type: str


class NumberArgument(_Frozen):
    """A 32-bit integer or float."""

    kind: Literal["number"] = "number"
    value: int | float


class NullArgument(_Frozen):
    """A null pointer for an operand that the kernel's constants turn off."""

    kind: Literal["null"] = "null"
    type: str


Argument = Annotated[BufferArgument | WeightArgument | NumberArgument | NullArgument, Field(discriminator="kind")]


class Launch(_Frozen):
    """A kernel launch: grid, and arguments in the order of the signature. `node` is the IR node that it computes."""

    kind: Literal["kernel"] = "kernel"
    kernel: str = Field(description="key into the program's kernels")
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    node: str

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that are read or written."""
        return tuple(argument.name for argument in self.arguments if isinstance(argument, BufferArgument))


class SegmentCall(_Frozen):
    """A whole segment, run by another engine on the same stream and in the same arena."""

    kind: Literal["segment"] = "segment"
    engine: Literal["tensorrt", "onnxruntime"] = "tensorrt"
    file: str = Field(description="path below the artifact's folder, with forward slashes")
    profile: int = Field(default=0, ge=0, description="optimization profile of a TensorRT plan")
    inputs: dict[str, Annotated[BufferArgument | WeightArgument, Field(discriminator="kind")]]
    outputs: dict[str, BufferArgument]
    shapes: dict[str, tuple[int, ...]] = Field(description="shape of every input")
    captured: bool = Field(default=True, description="whether the program is captured, if its engine can be")
    node: str

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph captures the call; onnxruntime's cannot be, because it allocates memory."""
        return self.captured and self.engine != "onnxruntime"

    @property
    def context(self) -> tuple[object, ...]:
        """Key of the execution context of TensorRT that calls share: see runtime/cuda/plans.py."""
        return (self.file, self.profile, *sorted(self.shapes.items())) if self.captured else (self.file,)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that are read or written."""
        given = (*self.inputs.values(), *self.outputs.values())
        return tuple(argument.name for argument in given if isinstance(argument, BufferArgument))


class LibraryMatmul(_Frozen):
    """y = alpha * x @ W^T + bias by a library kernel, on the same stream and in the same arena.

    x       [rows, columns], rows `x_stride` elements apart
    weight  [n, columns], contiguous rows of x's type
    bias    [n], of the result's type
    out     [rows, n], rows `out_stride` elements apart; of x's type, or float32; for float8, any type of floats
    x_scales, weight_scales    [rows] and [n] float32, of float8: factors of the rows of x and of weight
    """

    kind: Literal["product"] = "product"
    library: Library = "cublaslt"
    rows: int = Field(ge=1)
    n: int = Field(ge=1)
    columns: int = Field(ge=1)
    x: BufferArgument
    weight: Annotated[BufferArgument | WeightArgument, Field(discriminator="kind")]
    bias: WeightArgument | None = None
    x_scales: BufferArgument | None = None
    weight_scales: WeightArgument | None = None
    out: BufferArgument
    x_stride: int = Field(ge=1)
    out_stride: int = Field(ge=1)
    alpha: float = 1.0
    node: str

    @property
    def operands(self) -> dict[str, BufferArgument | WeightArgument]:
        """The operands, without those that are absent."""
        scales = {"x_scales": self.x_scales, "weight_scales": self.weight_scales}
        given = {"x": self.x, "weight": self.weight, "bias": self.bias, **scales, "out": self.out}
        return {name: operand for name, operand in given.items() if operand is not None}

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that are read or written."""
        return tuple(operand.name for operand in self.operands.values() if isinstance(operand, BufferArgument))


class HostValue(_Frozen):
    """A value on both sides of a copy: `columns` columns of a buffer of the host's arena, and rows of the GPU's arena.

    rows    [rows, columns] of floats, contiguous
    """

    buffer: str
    column: int = Field(default=0, ge=0)
    columns: int = Field(ge=1)
    rows: BufferArgument


class HostCopy(_Frozen):
    """A copy of a step's rows between the GPU and a stage of the host.

    stage       index of the stage in program/stages.json
    direction   send: the values go to the host. receive: the host runs the stage, and the values come from there
    """

    kind: Literal["host"] = "host"
    stage: int = Field(ge=0)
    direction: Literal["send", "receive"]
    values: tuple[HostValue, ...] = Field(min_length=1)
    node: str

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the GPU's buffers that are read or written."""
        return tuple(value.rows.name for value in self.values)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all values on the GPU."""
        return sum(value.columns * ELEMENT_BYTES[value.rows.type] for value in self.values)


class WeightCopy(_Frozen):
    """A copy of a layer's weights from pinned host memory to the arena, which runs next to other launches.

    stage     index of the host's stage in program/stages.json whose experts the GPU computes in this bucket
    action    begin: the copy begins when all launches before have ended. wait: the launches after it read the weights
    tensor    of program/streamed_weights.safetensors: the layer's weights one after another
    weights   where they are copied to: bytes
    """

    kind: Literal["weights"] = "weights"
    stage: int = Field(ge=0)
    action: Literal["begin", "wait"]
    tensor: str
    weights: BufferArgument
    bytes: int = Field(ge=1)
    node: str

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that are read or written."""
        return (self.weights.name,)


Step = Annotated[Launch | SegmentCall | LibraryMatmul | HostCopy | WeightCopy, Field(discriminator="kind")]


class ArenaRange(_Frozen):
    """A buffer's byte range in the arena."""

    offset: int = Field(ge=0)
    bytes: int = Field(gt=0)


class AdapterUnits(_Frozen):
    """Sizes of a bucket that computes LoRA adapters (kernels/low_rank.py).

    rows     most rows of a unit
    parts    most partial sums of a row of A x
    """

    rows: int = Field(ge=1)
    parts: int = Field(ge=1)

    def most(self, rows: int, sequences: int) -> int:
        """Return the most units of so many rows of so many sequences, each with an adapter of its own or none."""
        return min(rows, rows // self.rows + sequences)


class LaunchProgram(_Frozen, populate_by_name=True, serialize_by_alias=True):
    """The launches of one bucket, with its own memory plan of the arena.

    rows           T: tokens of a step, padding included: input_ids, position_ids, slots, carried [T]. Padding has
                   slot -1 and carried -1
    sequences      S: tables [S, ceil(context_tokens / block_tokens)], lengths [S] (0 for padding), query_starts [S + 1]
                   and state_slots [S] (-1 for padding)
    logits_rows    R: logits_indices [R], -1 for padding; logits [R, vocab]; tokens, temperatures, ... [R]
    attention      decode: one token per sequence, T = S; ragged: any number, in tiles of TILE_QUERIES queries:
                   tile_sequences [tiles] (-1 for padding), tile_starts [tiles], a tile's first query in its sequence
    head_start     index of the first launch of the language-model head. Its inputs stay in the arena: running it again
                   with other logits_indices computes more than R rows of logits
    samplers       kernels that sample tokens from the logits on the device; `tails` in the file
    adapter_units  of a bucket that computes LoRA adapters; None: it computes none
    """

    rows: int = Field(ge=1)
    sequences: int = Field(ge=1)
    logits_rows: int = Field(ge=1)
    attention: Literal["decode", "ragged"]
    tiles: int = Field(ge=0)
    arena_bytes: int = Field(ge=0)
    places: dict[str, ArenaRange]
    launches: tuple[Step, ...]
    head_start: int = Field(ge=0)
    samplers: dict[SamplerKind, tuple[Launch, ...]] = Field(
        default_factory=dict, validation_alias="tails", serialization_alias="tails"
    )
    adapter_units: AdapterUnits | None = None

    @property
    def name(self) -> str:
        """The bucket's name, such as decode-8."""
        return f"{self.attention}-{self.rows}"

    @property
    def segment_calls(self) -> tuple[SegmentCall, ...]:
        """Segments that another engine runs."""
        return tuple(step for step in self.launches if isinstance(step, SegmentCall))

    @property
    def library_matmuls(self) -> tuple[LibraryMatmul, ...]:
        """Matmuls that a library computes."""
        return tuple(step for step in self.launches if isinstance(step, LibraryMatmul))

    @property
    def host_copies(self) -> tuple[HostCopy, ...]:
        """Copies to and from stages of the host. A CUDA graph captures the launches between two of them."""
        return tuple(step for step in self.launches if isinstance(step, HostCopy))

    @property
    def weight_copies(self) -> tuple[WeightCopy, ...]:
        """Copies of weights from pinned host memory. They divide the launches, too."""
        return tuple(step for step in self.launches if isinstance(step, WeightCopy))

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can capture the launches."""
        return all(call.is_capturable for call in self.segment_calls)


class Kernel(_Frozen):
    """A kernel and its compile-time parameters.

    name         name of the kernel's function
    constants    its constexpr arguments
    types        types of the other arguments in order; a pointer is *fp16
    aligned      indices of arguments that are multiples of 16, besides all pointers
    """

    name: str
    constants: dict[str, Constant]
    types: tuple[str, ...]
    aligned: tuple[int, ...]
    num_warps: int = Field(ge=1)
    num_stages: int = Field(ge=1)

    @property
    def is_dependent(self) -> bool:
        """Whether it waits for the launch before (kernels/common.py), so that it may start before that one ends."""
        return self.constants.get("DEPENDENT") is True


class CubinFacts(_Frozen):
    """Symbol of a compiled kernel, and the dynamic shared memory of a block; a block has 32 * num_warps threads."""

    symbol: str
    shared_bytes: int = Field(ge=0)


class AdaptedLayer(_Frozen):
    """A linear layer [outputs, columns] that adapters can change."""

    node: str
    outputs: int = Field(ge=1)
    columns: int = Field(ge=1)


class AdapterPrograms(_Frozen):
    """Programs for steps in which a sequence has a LoRA adapter, one for each bucket of the usual ones.

    projections    the checkpoint's linear layers that are rows of a layer; `node` is the layer's
    layers         in the order of the kernels' tables
    tile, ranks    rows of B with common ranks, and the multiple of which all ranks are (kernels/low_rank.py)
    """

    projections: tuple[Projection, ...]
    layers: tuple[AdaptedLayer, ...]
    tile: int = Field(ge=1)
    ranks: int = Field(ge=1)
    programs: tuple[LaunchProgram, ...] = Field(min_length=1)


class CudaProgram(_Frozen):
    """program/launches.json: the programs of all buckets, and the kernels that they share.

    tuned_on           name of the GPU on which the tiles were measured; None: safe tiles
    batch_invariant    a row's logits have the same bits in every batch: all buckets run the same kernels for a node
    dependent          launches are programmatic dependent ones (CUDA Programming Guide): every kernel waits by itself
    counters           elements of the runtime's buffer `counters`: zero when loaded, and after every launch again. The
                       programs of a launch count in it who is last
    adapters           programs that compute LoRA adapters, from the same kernels and weights; None: it has none
    """

    sms: tuple[int, ...] = Field(min_length=1)
    activation_type: ActivationType
    kv: KVGeometry
    vocab_size: int = Field(ge=1)
    context_tokens: int = Field(ge=1)
    tile_queries: int = Field(ge=1)
    kernels: dict[str, Kernel]
    cubins: dict[int, dict[str, CubinFacts]] = Field(description="by SM, by kernel")
    programs: tuple[LaunchProgram, ...] = Field(min_length=1)
    tuned_on: str | None = None
    batch_invariant: bool = False
    dependent: bool = False
    counters: int = Field(default=0, ge=0)
    adapters: AdapterPrograms | None = None

    @property
    def all_programs(self) -> tuple[LaunchProgram, ...]:
        """Programs with and without adapters."""
        return (*self.programs, *(self.adapters.programs if self.adapters else ()))

    @property
    def table_columns(self) -> int:
        """Columns of `tables`: blocks of the longest sequence."""
        return -(-self.context_tokens // self.kv.block_tokens)


def read_cuda_program(file: Path) -> CudaProgram:
    """Read program/launches.json; ArtifactError with the file and its problem."""
    return read_program(file, CudaProgram, MAX_PROGRAM_BYTES)


def cubins_file(sm: int) -> str:
    """Path of an SM's cubins below the artifact's folder."""
    return f"program/cubins-sm{sm}.safetensors"
