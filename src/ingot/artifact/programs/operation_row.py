"""The fields of a CPU program's operations: matrices, views of buffers and norms, and their roles.

A role in a field's annotation is the use that the operation has for it, with its size:

    input: Annotated[View, Reads("heads", "head_dim")]     columns
    output: Annotated[View, Writes("heads", "head_dim")]
    matrix: MatrixName
    bias: Annotated[str | None, Vector("matrix.n")]        shape of the tensor
    cos: Annotated[str, Table("rotary_pairs")]             the same, with a row for each position

The columns that an operation reads and writes, the tensors of its weights and its structure in C follow from the roles.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ingot.sizes import next_power_of_two, round_up

LANES = 16  # output rows of a tile
CHANNEL_BLOCK = 128  # most columns that share a scale of the activations, where a weight has one scale per row
LEAST_BLOCK = 16
Form = Literal["float32", "float16", "bfloat16", "float8", "int2", "int3", "int4", "int8"]
RowsOf = Literal["tokens", "logits"]
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


class Frozen(BaseModel):
    """A part of a program: its fields are all that a file may have, and do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Matrix(Frozen):
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
        """Return whether it has integer codes."""
        return self.form.startswith("int")

    def __str__(self) -> str:
        """Its form in words."""
        if not self.is_integer:
            return self.form
        of_weight = "per row" if self.per_row else f"in blocks of {self.block}"
        return f"{self.form} {of_weight}{' with zero points' if self.has_zeros else ''}"

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


class View(Frozen):
    """Columns `column` .. of a buffer's rows."""

    buffer: str
    column: int = Field(default=0, ge=0)


class Norm(Frozen):
    """RMS norm, or layer norm, over all columns of a row or group; weight and bias name tensors [columns]."""

    kind: Literal["rms", "layer"] = "rms"
    weight: str
    bias: str | None = None
    epsilon: float


Matrices = Mapping[str, Matrix]


@dataclass(frozen=True)
class Span:
    """`columns` columns of a buffer from `column` on."""

    buffer: str
    column: int
    columns: int

    @classmethod
    def of(cls, view: View, columns: int) -> "Span":
        """The columns of a view."""
        return cls(view.buffer, view.column, columns)

    def is_within(self, other: "Span") -> bool:
        """Return whether all its columns are columns of the other."""
        last, others = self.column + self.columns, other.column + other.columns
        return self.buffer == other.buffer and other.column <= self.column and last <= others

    def overlaps(self, other: "Span") -> bool:
        """Return whether both have a column in common."""
        is_apart = self.column + self.columns <= other.column or other.column + other.columns <= self.column
        return self.buffer == other.buffer and not is_apart


class Role:
    """The use of an operation's field, with its sizes.

    A size is the name of another field, "matrix.k" of the matrix that the field `matrix` names, or "widths.query" of
    the widths of a recurrent layer.
    """

    def __init__(self, *sizes: str) -> None:
        self.sizes = sizes


class Reads(Role):
    """A view that the operation reads; with as many columns as its sizes multiply to."""


class Writes(Role):
    """The view that the operation writes."""


class Vector(Role):
    """The name of a float tensor [sizes], or a norm whose tensors have that shape."""


class Table(Vector):
    """The name of a float tensor [positions, sizes], with a row for each position at least."""


class Packed(Role):
    """The name of a matrix."""


MatrixName = Annotated[str, Packed()]


class Row(Frozen):
    """An operation, or a layer of one, with the facts that follow from the roles of its fields."""

    is_in_place: ClassVar[bool] = False

    @classmethod
    @cache
    def roles(cls) -> Mapping[str, Role]:
        """The fields that have a role."""
        found = ((name, one) for name, info in cls.model_fields.items() for one in info.metadata)
        return {name: one for name, one in found if isinstance(one, Role)}

    def named(self, kind: type[Role]) -> Iterator[tuple[Any, Role]]:
        """Return the values of the fields with a role of this kind, with the role; none for a field without a value."""
        for name, role in self.roles().items():
            if isinstance(role, kind) and (value := getattr(self, name)) is not None:
                yield value, role

    def shape(self, role: Role, matrices: Matrices) -> tuple[int, ...]:
        """Return the sizes of a role as numbers."""
        return tuple(self._size(name, matrices) for name in role.sizes)

    def _size(self, name: str, matrices: Matrices) -> int:
        field, _, side = name.partition(".")
        value = getattr(self, field)
        if side:
            value = getattr(matrices[value], side) if isinstance(value, str) else value[side]
        size: int = value
        return size

    @property
    def layers(self) -> "tuple[Row, ...]":
        """The layers that are rows of their own within it."""
        return ()

    @property
    def views(self) -> tuple[View, ...]:
        """All that it reads and writes."""
        return tuple(view for kind in (Reads, Writes) for view, _ in self.named(kind) if isinstance(view, View))

    @property
    def computed_rows(self) -> RowsOf:
        """The rows that it computes."""
        rows: RowsOf = getattr(self, "rows", "tokens")
        return rows

    @property
    def is_added(self) -> bool:
        """Return whether the result is added to the output."""
        return bool(getattr(self, "adds", False))

    @property
    def may_overwrite(self) -> bool:
        """Return whether the output may be columns that it reads."""
        return self.is_in_place or self.is_added

    def facts(self, matrices: Matrices) -> Iterator[str]:
        """Return what `ingot inspect` prints."""
        yield from ()

    def matrix_names(self) -> Iterator[str]:
        """Return the names of the matrices that it reads."""
        for row in (self, *self.layers):
            yield from (name for name, _ in row.named(Packed))

    def tensors(self) -> Iterator[tuple[str, "Row", Role]]:
        """Return the names of the float tensors that it reads, each with the row and role that have its shape."""
        for row in (self, *self.layers):
            for value, role in row.named(Vector):
                names = (value.weight, value.bias) if isinstance(value, Norm) else (value,)
                yield from ((name, row, role) for name in names if name is not None)

    def spans_read(self, matrices: Matrices) -> Iterator[Span]:
        """Return the spans that it reads, the output included where it adds to it."""
        for view, role in self.named(Reads):
            if isinstance(view, View):
                yield Span.of(view, prod(self.shape(role, matrices)))
        if self.is_added:
            yield self.span_written(matrices)

    def span_written(self, matrices: Matrices) -> Span:
        """Return the span that it writes."""
        ((view, role),) = self.named(Writes)
        return Span.of(view, prod(self.shape(role, matrices)))
