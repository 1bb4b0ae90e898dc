"""A launch program: kernels with their arguments in order, for one number of rows, over one arena of memory.

Everything is data. A buffer is a place in the arena that its liveness gave it, or one that the runtime provides by
name (EXTERNAL); a weight is a tensor of the artifact by name; a kernel is a key into the table of cubins. What changes
from step to step stands in external buffers alone, so that a program can be captured into a CUDA graph as it is.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# Bytes of an element, by Triton's names of types.
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

# What the runtime provides, with the type of its elements; None: as the program's `kv_type` says.
EXTERNAL: Mapping[str, str | None] = {
    "input_ids": "i64",
    "position_ids": "i64",
    "slots": "i64",
    "logits_indices": "i64",
    "tables": "i32",
    "lengths": "i32",
    "query_starts": "i32",
    "tile_sequences": "i32",
    "tile_starts": "i32",
    "kv_pool": None,
    "kv_scales": "fp16",
    "logits": "fp32",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BufferArgument(_Frozen):
    """A pointer into a buffer, `offset` elements of `type` from its beginning."""

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
    """A pointer that the kernel's constants keep it from following."""

    kind: Literal["null"] = "null"
    type: str


Argument = Annotated[BufferArgument | WeightArgument | NumberArgument | NullArgument, Field(discriminator="kind")]


class Launch(_Frozen):
    """One kernel, its grid and its arguments in the catalogue's order. `node` is the IR's node that it computes."""

    kernel: str = Field(description="name in the catalogue")
    constants: dict[str, int | float | bool | str]
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    node: str

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that it reads or writes."""
        return tuple(argument.name for argument in self.arguments if isinstance(argument, BufferArgument))


class Place(_Frozen):
    """Where a buffer lies in the arena, in bytes."""

    offset: int = Field(ge=0)
    bytes: int = Field(gt=0)


class LaunchProgram(_Frozen):
    """The launches of one bucket.

    rows        tokens of a step, padding included; as many rows of logits, and as many sequences
    attention   decode: one token a sequence; ragged: any number
    """

    rows: int = Field(ge=1)
    attention: Literal["decode", "ragged"]
    activation_type: Literal["fp32", "fp16", "bf16"]
    kv_type: str
    arena_bytes: int = Field(ge=0)
    places: dict[str, Place]
    launches: tuple[Launch, ...]
