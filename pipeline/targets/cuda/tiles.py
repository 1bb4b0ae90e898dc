"""Which tiles a product is cut into: measured on a card by `ingot tune`, else a safe choice.

A table is a JSON file:

    {"sm": 90, "device": "NVIDIA H100 80GB HBM3", "choices": {
        "matmul_nbits bits=4 group=128 rows=16 n=6144 columns=4096": {"rows": 16, "columns": 64, "splits": 4}}}

Columns are walked in steps of `depth`, which for packed codes is whole spans. How they are split decides in which order
a row's sum is added up: safe choices for few rows share that, so that a row has the same bits in all buckets of few
rows; a measured table that gives buckets other `splits` gives it up.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ingot.artifact.launch_program import Library
from ingot.errors import UsageError

FEW_ROWS = 64  # up to here the card waits for weights, not for multiplications
SPAN = 64  # columns that the packed codes of kernels/matmul_nbits.py come in
_PROGRAMS = 384  # of few rows: several on each multiprocessor of a large card, so that enough loads are on their way
_FULL = 128  # of many rows: one on nearly each
_MOST_SPLITS = 8
_WIDE, _WIDEST_SM = 128, 90  # columns of a tile that all cards have the shared memory for; who has more

_LIBRARY_SHAPES = "matmul bits=16 "  # how keys begin that a library may be chosen for
Product = Literal["matmul", "matmul_nbits"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tile(_Frozen):
    """One choice: a program's rows and columns of the output, its step along the sum, parts of the sum.

    library    whose kernel is used instead wherever it computes all that is asked (lower_matmul.py)
    """

    rows: int = Field(ge=16)
    columns: int = Field(ge=16)
    depth: int = Field(default=64, ge=16)
    splits: int = Field(default=1, ge=1)
    num_warps: int = Field(default=4, ge=1)
    num_stages: int = Field(default=3, ge=1)
    library: Library | None = None


class ProductShape(_Frozen):
    """y [rows, n] = x [rows, columns] @ W^T, W in `bits` bits and blocks of `group` columns (0: none).

    is_float32    x, and what multiplies it, have 32 bits
    """

    kernel: Product
    rows: int
    n: int
    columns: int
    bits: int = 16
    group: int = 0
    is_float32: bool = False

    @property
    def key(self) -> str:
        """The shape as a table names it."""
        form = f"{self.kernel} bits={self.bits} group={self.group}{' float32' if self.is_float32 else ''}"
        return f"{form} rows={self.rows} n={self.n} columns={self.columns}"


class TileTable(_Frozen):
    """Choices by shape, and the card they were measured on. Without choices: sm is what safe ones are made for."""

    sm: int | None = None
    device: str | None = None
    choices: dict[str, Tile] = Field(default_factory=dict)

    @field_validator("choices")
    @classmethod
    def _libraries_have_the_kernel(cls, choices: dict[str, Tile]) -> dict[str, Tile]:
        for key, tile in choices.items():
            if tile.library and not key.startswith(_LIBRARY_SHAPES):
                raise ValueError(f"{tile.library} multiplies by plain weights only, and is chosen for {key!r}")
        return choices

    def choose(self, shape: ProductShape) -> Tile:
        """The table's choice, or the safe one."""
        return self.choices.get(shape.key) or safe_tile(shape, self.sm)


def safe_tile(shape: ProductShape, sm: int | None = None) -> Tile:
    """A choice that every card of the SM has shared memory and registers for; of all SMs where it is None."""
    depth = SPAN if shape.bits == 16 or (shape.kernel == "matmul_nbits" and shape.rows > FEW_ROWS) else 2 * SPAN
    if shape.is_float32:
        return _float32_tile(shape)
    if shape.rows > FEW_ROWS:
        is_plain = shape.kernel == "matmul" and shape.bits == 16
        tiles = [tile for tile in _MANY if tile[1] <= _WIDE or (is_plain and sm == _WIDEST_SM)]
        rows, columns, warps = next((tile for tile in tiles if _programs(shape, *tile) >= _FULL), tiles[-1])
        stages = 4 if is_plain and sm is not None and columns == _WIDE else 3
        return Tile(rows=rows, columns=columns, depth=depth, num_warps=warps, num_stages=stages)
    rows = 16 if shape.rows <= 16 else 32  # SM 90 multiplies 64 rows by other instructions than fewer
    return Tile(rows=rows, columns=64, depth=depth, splits=_splits(shape, depth), num_stages=4)


def _float32_tile(shape: ProductShape) -> Tile:
    """For exactness, not for speed: no tensor core takes part."""
    few, depth = shape.rows <= FEW_ROWS, SPAN if shape.kernel == "matmul_nbits" else SPAN // 2
    splits = _splits(shape, depth) if few else 1
    return Tile(rows=16 if few else 64, columns=64, depth=depth, splits=splits, num_stages=2)


def _splits(shape: ProductShape, depth: int) -> int:
    return min(_MOST_SPLITS, -(-shape.columns // depth), -(-_PROGRAMS // -(-shape.n // 64)))


_MANY = ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4))  # rows, columns, warps


def _programs(shape: ProductShape, rows: int, columns: int, _warps: int) -> int:
    return -(-shape.rows // rows) * -(-shape.n // columns)


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
