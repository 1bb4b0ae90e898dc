"""The tile of each matmul: from a table that `ingot tune` measured on a GPU, else a safe choice.

A table is a JSON file:

    {"sm": 90, "device": "NVIDIA H100 80GB HBM3", "choices": {
        "matmul_nbits bits=4 group=128 rows=16 n=6144 columns=4096": {"rows": 16, "columns": 64, "splits": 4}}}

The kernel walks the columns in steps of `depth`; packed codes in whole spans. The split of the columns decides the
order in which a row's sum is added up. Safe tiles for few rows share it, so that a row has the same bits in all buckets
of few rows; a measured table with different `splits` per bucket gives that up. Batch-invariant programs have one tile
for all buckets (`invariant_tile`), and no table.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ingot.artifact.launch_program import Library
from ingot.errors import UsageError
from ingot.sizes import ceil_div

FEW_ROWS = 64  # up to here a matmul is bound by reading weights
SPAN = 64  # columns per group of packed codes in kernels/matmul_nbits.py
_PROGRAMS = 384  # for few rows: several per multiprocessor of a large GPU, so that enough loads are in flight
_FULL = 128  # for many rows: one on nearly every multiprocessor
_MOST_SPLITS = 8
_WIDE, _WIDEST_SM = 128, 90  # widest tile that fits the shared memory of every SM; the SM that fits wider ones

_LIBRARY_SHAPES = "matmul bits=16 "  # prefix of the keys that may choose a library
MatmulKernel = Literal["matmul", "matmul_nbits"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tile(_Frozen):
    """One choice: rows and columns of a program's output, its step along the sum, and split-K parts of the sum.

    library    its kernel is used instead where it computes the whole epilogue (lower_linear.py)
    """

    rows: int = Field(ge=16)
    columns: int = Field(ge=16)
    depth: int = Field(default=64, ge=16)
    splits: int = Field(default=1, ge=1)
    num_warps: int = Field(default=4, ge=1)
    num_stages: int = Field(default=3, ge=1)
    library: Library | None = None


class MatmulShape(_Frozen):
    """y [rows, n] = x [rows, columns] @ W^T, W in `bits` bits and blocks of `group` columns (0: none).

    is_float32    x and W have 32 bits
    """

    kernel: MatmulKernel
    rows: int
    n: int
    columns: int
    bits: int = 16
    group: int = 0
    is_float32: bool = False

    @property
    def key(self) -> str:
        """The shape's key in a table."""
        form = f"{self.kernel} bits={self.bits} group={self.group}{' float32' if self.is_float32 else ''}"
        return f"{form} rows={self.rows} n={self.n} columns={self.columns}"


class TileTable(_Frozen):
    """Choices by shape and the GPU that they were measured on; without choices `sm` is that of safe tiles."""

    sm: int | None = None
    device: str | None = None
    choices: dict[str, Tile] = Field(default_factory=dict)

    @field_validator("choices")
    @classmethod
    def _libraries_have_the_kernel(cls, choices: dict[str, Tile]) -> dict[str, Tile]:
        for key, tile in choices.items():
            if tile.library and not key.startswith(_LIBRARY_SHAPES):
                raise ValueError(f"{tile.library} multiplies only by plain weights, and is chosen for {key!r}")
        return choices

    def choose(self, shape: MatmulShape) -> Tile:
        """Return the table's choice, or the safe one."""
        return self.choices.get(shape.key) or safe_tile(shape, self.sm)


def safe_tile(shape: MatmulShape, sm: int | None = None) -> Tile:
    """Return a tile that fits shared memory and registers of the SM; of every SM if it is None."""
    depth = SPAN if shape.bits == 16 or (shape.kernel == "matmul_nbits" and shape.rows > FEW_ROWS) else 2 * SPAN
    if shape.is_float32:
        return _float32_tile(shape)
    if shape.rows > FEW_ROWS:
        is_plain = shape.kernel == "matmul" and shape.bits == 16
        tiles = [tile for tile in _MANY if tile[1] <= _WIDE or (is_plain and sm == _WIDEST_SM)]
        rows, columns, warps = next((tile for tile in tiles if _programs(shape, *tile) >= _FULL), tiles[-1])
        stages = 4 if is_plain and sm is not None and columns == _WIDE else 3
        return Tile(rows=rows, columns=columns, depth=depth, num_warps=warps, num_stages=stages)
    rows = 16 if shape.rows <= 16 else 32  # SM 90 has other instructions for 64 rows than for fewer
    return Tile(rows=rows, columns=64, depth=depth, splits=_splits(shape, depth), num_stages=4)


def invariant_tile(shape: MatmulShape) -> Tile:
    """Return the tile of batch-invariant programs, which depends on the weight alone: `shape.rows` is not read.

    64 rows: the fewest for which SM 90 multiplies with its own instructions, so that a prompt does not pay much; a
    decode step of one row, which waits for weights, has time for the others. Fits every SM (docs/kernels.md).
    """
    if shape.is_float32:
        tile = Tile(rows=64, columns=64, depth=SPAN if shape.kernel == "matmul_nbits" else SPAN // 2, num_stages=2)
    else:
        is_wide = shape.kernel == "matmul_nbits" or shape.bits == 16
        tile = Tile(rows=64, columns=_WIDE, depth=SPAN if is_wide else 2 * SPAN, num_stages=3)
    filling = max(1, _PROGRAMS // ceil_div(shape.n, tile.columns))
    return tile.model_copy(update={"splits": min(_MOST_SPLITS, ceil_div(shape.columns, tile.depth), filling)})


def _float32_tile(shape: MatmulShape) -> Tile:
    """A tile for exactness, not for speed: it uses no tensor cores."""
    few, depth = shape.rows <= FEW_ROWS, SPAN if shape.kernel == "matmul_nbits" else SPAN // 2
    splits = _splits(shape, depth) if few else 1
    return Tile(rows=16 if few else 64, columns=64, depth=depth, splits=splits, num_stages=2)


def _splits(shape: MatmulShape, depth: int) -> int:
    return min(_MOST_SPLITS, ceil_div(shape.columns, depth), ceil_div(_PROGRAMS, ceil_div(shape.n, 64)))


_MANY = ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4))  # rows, columns, warps


def _programs(shape: MatmulShape, rows: int, columns: int, _warps: int) -> int:
    return ceil_div(shape.rows, rows) * ceil_div(shape.n, columns)


def read_tile_table(file: Path, sms: tuple[int, ...]) -> TileTable:
    """Read a table made by `ingot tune`. UsageError for another file, or a table of another SM."""
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
        measured = "has no `sm`" if table.sm is None else f"was measured on {table.device} (SM {table.sm})"
        raise UsageError(
            f"{file}: {measured}, and this builds for SM {wanted}; run "
            "`ingot tune` on a GPU of that SM, or leave gpu.tiles out"
        )
    return table
