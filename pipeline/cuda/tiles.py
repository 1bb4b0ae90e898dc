"""Which tiles a product is cut into: measured on a card by `ingot tune`, else a safe choice.

A table is a JSON file:

    {"sm": 90, "device": "NVIDIA H100 80GB HBM3", "choices": {
        "matmul_nbits bits=4 group=128 rows=16 n=6144 columns=4096": {"rows": 16, "columns": 64, "splits": 4}}}

`depth` is meant for kernels that walk their columns in steps of a chosen size; those of packed codes walk whole spans.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.errors import UsageError

FEW_ROWS = 64  # up to here the card waits for weights, not for multiplications
SPAN = 64  # columns that the packed codes of kernels/matmul_nbits.py come in
_PROGRAMS = 256  # so many programs fill a large card twice
_MOST_SPLITS = 8

Product = Literal["matmul", "matmul_nbits"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tile(_Frozen):
    """One choice: a program's rows and columns of the output, its step along the sum, parts of the sum."""

    rows: int = Field(ge=16)
    columns: int = Field(ge=16)
    depth: int = Field(default=64, ge=16)
    splits: int = Field(default=1, ge=1)
    num_warps: int = Field(default=4, ge=1)
    num_stages: int = Field(default=3, ge=1)


class ProductShape(_Frozen):
    """y [rows, n] = x [rows, columns] @ W^T, W in `bits` bits and blocks of `group` columns (0: none)."""

    kernel: Product
    rows: int
    n: int
    columns: int
    bits: int = 16
    group: int = 0

    @property
    def key(self) -> str:
        """The shape as a table names it."""
        return f"{self.kernel} bits={self.bits} group={self.group} rows={self.rows} n={self.n} columns={self.columns}"


class TileTable(_Frozen):
    """Choices by shape, and the card they were measured on."""

    sm: int | None = None
    device: str | None = None
    choices: dict[str, Tile] = Field(default_factory=dict)

    def choose(self, shape: ProductShape) -> Tile:
        """The table's choice, or the safe one."""
        return self.choices.get(shape.key) or safe_tile(shape)


def safe_tile(shape: ProductShape) -> Tile:
    """A choice that runs on every card: little shared memory, and enough programs to keep a large one busy."""
    few = shape.rows <= FEW_ROWS
    splits = 1
    if few and shape.kernel == "matmul_nbits":
        splits = min(_MOST_SPLITS, -(-shape.columns // SPAN), -(-_PROGRAMS // -(-shape.n // 64)))
    return Tile(rows=16 if few else 64, columns=64, splits=splits)


def read_tile_table(file: Path, sms: tuple[int, ...]) -> TileTable:
    """A table made by `ingot tune`. UsageError when it is none, or was measured on cards of another SM."""
    try:
        table = TileTable.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}); make a table with `ingot tune`") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(f"{file}: {place}: {first['msg']}; make a table with `ingot tune`") from error
    if table.sm not in sms:
        wanted = ", ".join(map(str, sms))
        raise UsageError(
            f"{file}: was measured on {table.device} (SM {table.sm}), and this builds for SM {wanted}; run "
            "`ingot tune` on such a card, or leave gpu.tiles out"
        )
    return table
