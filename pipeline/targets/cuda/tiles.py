"""The tile of each matmul: from a table that `ingot tune` measured on a GPU, else a safe choice.

A table is a JSON file:

    {"sm": 90, "device": "NVIDIA H100 80GB HBM3", "choices": {
        "matmul_nbits bits=4 group=128 rows=16 n=6144 columns=4096": {"rows": 16, "columns": 64, "splits": 4}}}

The kernel walks the columns in steps of `depth`; packed codes in whole spans. A weight of 4 bits has three kernels, and
the tile says which (`direct`, `wide`). The split of the columns decides the order in which a row's sum is added up.
Safe tiles for few rows share it, so that a row has the same bits in all buckets of few rows, but for the buckets of
wide tiles; a measured table with different `splits` per bucket gives that up. Batch-invariant programs have one tile
for all buckets (`invariant_tile`), and no table.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ingot.artifact.programs.launch_program import Library
from ingot.errors import UsageError
from ingot.sizes import ceil_div, next_power_of_two

SPAN_BYTES = 64
FEW_ROWS = 64  # up to here a matmul is bound by reading weights
_FEW_ROWS_PROGRAMS = 384  # several per multiprocessor of a large GPU, so that enough loads are in flight
_DIRECT_PROGRAMS = 768  # direct tiles are smaller (measured on an H100)
_RING_STAGES = 4  # 17 KiB: five programs fit the smallest multiprocessor, and keep 64 KiB in flight
_MANY_ROWS_PROGRAMS = 128  # nearly every multiprocessor has one
_MOST_SPLITS = 8
WIDE_SM = 90  # kernels/matmul_int4_wide.py compiles for it alone
_WIDE_COLUMNS, _WIDE_DEPTH, _WIDE_WARPS = 256, 128, 12
_WIDE_FROM = 9  # rows: fewer are read seldom enough by each warp of a direct tile
_WIDE_PROGRAMS = 132  # one per multiprocessor of an H100: registers leave no room for two
_FEWEST_WIDE = 96  # programs: with fewer, direct tiles keep more loads in flight
_WIDE, _WIDEST_SM = 128, 90  # widest tile that fits the shared memory of every SM; the SM that fits wider ones

_DIRECT_SHAPES = "matmul_nbits bits=4 "  # prefix of the keys that may have direct tiles
_GROUP = re.compile(r" group=(\d+)")
_LIBRARY_SHAPES = "matmul bits=16 "  # prefix of the keys that may choose a library
MatmulKernel = Literal["matmul", "matmul_nbits"]
PackedKernel = Literal["matmul_nbits", "matmul_int4", "matmul_int4_wide"]


def span_columns(bits: int) -> int:
    """Columns of a span of packed codes (kernels/matmul_nbits.py)."""
    return 8 * SPAN_BYTES // bits


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tile(_Frozen):
    """One choice: rows and columns of a program's output, its step along the sum, and split-K parts of the sum.

    direct     codes go from memory to tensor cores, num_stages - 1 spans ahead: kernels/matmul_int4.py, for 4 bits and
               16-bit activations
    wide       so they do by wgmma, of SM 90 alone, and rows through shared memory: kernels/matmul_int4_wide.py
    library    its kernel is used instead where it computes the whole epilogue (lower/linear.py)
    """

    rows: int = Field(ge=8, le=256)
    columns: int = Field(ge=16, le=2048)
    depth: int = Field(default=64, ge=16, le=512)
    splits: int = Field(default=1, ge=1, le=1024)
    num_warps: int = Field(default=4, ge=1, le=32)
    num_stages: int = Field(default=3, ge=1, le=16)
    direct: bool = False
    wide: bool = False
    library: Library | None = None

    @model_validator(mode="after")
    def _fits_its_kernel(self) -> "Tile":
        has_sizes = (self.columns, self.depth, self.num_warps) == (_WIDE_COLUMNS, _WIDE_DEPTH, _WIDE_WARPS)
        if self.wide and (self.direct or self.rows not in (16, 32, 64) or not has_sizes):
            raise ValueError(
                f"a wide tile of {self.rows} rows and {self.columns} columns for {self.num_warps} warps; it has 16, 32 "
                f"or 64 rows, {_WIDE_COLUMNS} columns, a depth of {_WIDE_DEPTH}, {_WIDE_WARPS} warps, and is not direct"
            )
        if self.rows < 16 and not self.direct:
            raise ValueError(f"a tile of {self.rows} rows; only direct tiles have fewer than 16")
        sizes = (self.rows, self.columns, self.num_warps)
        if self.direct and (any(size & (size - 1) for size in sizes) or self.columns % (16 * self.num_warps)):
            raise ValueError(
                f"a direct tile of {self.rows} rows and {self.columns} columns for {self.num_warps} warps; each is a "
                "power of two, and a warp has a multiple of 16 columns"
            )
        return self

    @classmethod
    def of_wide(cls, rows: int, splits: int = 1, num_stages: int = 4) -> "Tile":
        """Return a wide tile for so many rows, or for parts of them."""
        most = min(next_power_of_two(rows, 16), FEW_ROWS)
        return cls(
            rows=most,
            columns=_WIDE_COLUMNS,
            depth=_WIDE_DEPTH,
            splits=splits,
            num_warps=_WIDE_WARPS,
            num_stages=num_stages,
            wide=True,
        )


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
    def fits_direct(self) -> bool:
        """Whether it has direct tiles: kernels/matmul_int4.py multiplies by it."""
        return self.kernel == "matmul_nbits" and self.bits == 4 and not self.is_float32

    @property
    def fits_wide(self) -> bool:
        """Report whether wide tiles fit: a span of codes has one scale."""
        return self.fits_direct and self.group % span_columns(4) == 0

    @property
    def fits_ring(self) -> bool:
        """Report if direct tiles may load through a ring, by copies of 16 bytes: of zero points, too."""
        return self.fits_direct and self.n % 16 == 0

    @property
    def key(self) -> str:
        """The shape's key in a table."""
        form = f"{self.kernel} bits={self.bits} group={self.group}{' float32' if self.is_float32 else ''}"
        return f"{form} rows={self.rows} n={self.n} columns={self.columns}"


class TileTable(_Frozen):
    """Choices by shape and the GPU that they were measured on; without choices `sm` is that of safe tiles.

    specialized    safe tiles may be those of a kernel for the SM alone
    """

    sm: int | None = None
    device: str | None = None
    specialized: bool = True
    choices: dict[str, Tile] = Field(default_factory=dict)

    @field_validator("choices")
    @classmethod
    def _direct_tiles_are_of_four_bits(cls, choices: dict[str, Tile]) -> dict[str, Tile]:
        for key, tile in choices.items():
            if (tile.direct or tile.wide) and not key.startswith(_DIRECT_SHAPES):
                kind = "wide" if tile.wide else "direct"
                raise ValueError(f"{kind} tiles multiply only by weights of 4 bits, and {key!r} has one")
        return choices

    @model_validator(mode="after")
    def _wide_tiles_have_their_kernel(self) -> "TileTable":
        for key, tile in self.choices.items():
            group = _GROUP.search(key)
            if tile.wide and (self.sm != WIDE_SM or group is None or int(group[1]) % span_columns(4)):
                raise ValueError(
                    f"{key!r} has a wide tile, for SM {WIDE_SM} and groups of a multiple of {span_columns(4)}; this is "
                    f"a table of SM {self.sm}"
                )
        return self

    @field_validator("choices")
    @classmethod
    def _libraries_have_the_kernel(cls, choices: dict[str, Tile]) -> dict[str, Tile]:
        for key, tile in choices.items():
            if tile.library and not key.startswith(_LIBRARY_SHAPES):
                raise ValueError(f"{tile.library} multiplies only by plain weights, and is chosen for {key!r}")
        return choices

    def choose(self, shape: MatmulShape) -> Tile:
        """Return the table's choice, or the safe one."""
        return self.choices.get(shape.key) or self._wide(shape) or safe_tile(shape, self.sm)

    def choose_invariant(self, shape: MatmulShape) -> Tile:
        """Return the tile of batch-invariant programs, which depends on the weight alone: `shape.rows` is not read."""
        shape = shape.model_copy(update={"rows": FEW_ROWS})
        return self._wide(shape) or invariant_tile(shape)

    def _wide(self, shape: MatmulShape) -> Tile | None:
        return _wide_tile(shape) if self.specialized and self.sm == WIDE_SM and shape.fits_wide else None


def safe_tile(shape: MatmulShape, sm: int | None = None) -> Tile:
    """Return a tile that fits shared memory and registers of the SM; of every SM if it is None."""
    if shape.is_float32:
        return _float32_tile(shape)
    if shape.fits_direct:
        return _direct_tile(shape)
    depth = 64 if shape.bits == 16 or (shape.kernel == "matmul_nbits" and shape.rows > FEW_ROWS) else 128
    if shape.rows > FEW_ROWS:
        is_plain = shape.kernel == "matmul" and shape.bits == 16
        tiles = [tile for tile in _MANY if tile[1] <= _WIDE or (is_plain and sm == _WIDEST_SM)]
        rows, columns, warps = next(
            (tile for tile in tiles if _programs(shape, *tile) >= _MANY_ROWS_PROGRAMS), tiles[-1]
        )
        stages = 4 if is_plain and sm is not None and columns == _WIDE else 3
        return Tile(rows=rows, columns=columns, depth=depth, num_warps=warps, num_stages=stages)
    rows = 16 if shape.rows <= 16 else 32  # SM 90 has other instructions for 64 rows than for fewer
    if shape.kernel == "matmul_nbits" and shape.n >= _WIDE * _FEW_ROWS_PROGRAMS:
        return Tile(rows=rows, columns=_WIDE, depth=depth, num_stages=3)
    return Tile(rows=rows, columns=64, depth=depth, splits=_splits(shape, depth), num_stages=4)


def invariant_tile(shape: MatmulShape) -> Tile:
    """Return the tile of batch-invariant programs, which depends on the weight alone: `shape.rows` is not read.

    64 rows: the fewest for which SM 90 multiplies with its own instructions, so that a prompt does not pay much; a
    decode step of one row, which waits for weights, has time for the others. Fits every SM (docs/kernels.md).
    """
    if shape.is_float32:
        tile = Tile(rows=64, columns=64, depth=_float32_depth(shape), num_stages=2)
    elif shape.fits_direct:
        tile = _direct_tile(shape.model_copy(update={"rows": FEW_ROWS}))
    else:
        is_wide = shape.kernel == "matmul_nbits" or shape.bits == 16
        tile = Tile(rows=64, columns=_WIDE, depth=64 if is_wide else 128, num_stages=3)
    return tile.model_copy(update={"splits": _filling_splits(shape, tile.columns, tile.depth, _FEW_ROWS_PROGRAMS)})


def grouped_tile(shape: MatmulShape, *, invariant: bool) -> Tile:
    """Return the tile of a matmul grouped by experts, for `shape.rows` rows of each on average.

    It has twice as many rows, so that most experts need one tile, and no split-K: experts fill a GPU. From 64 rows on,
    and in batch-invariant programs, it is the one that depends on the weight alone.
    """
    rows = min(next_power_of_two(2 * shape.rows, 8), FEW_ROWS)
    if invariant or rows == FEW_ROWS:
        tile = invariant_tile(shape)
    else:
        tile = safe_tile(shape.model_copy(update={"rows": rows}))
    return tile.model_copy(update={"splits": 1})


def packed_constants(shape: MatmulShape, tile: Tile) -> tuple[PackedKernel, dict[str, int]]:
    """Return the kernel of a packed weight in a tile, and the constants of this kernel alone.

    A step of matmul_nbits has one scale and whole spans; with a group that is not a multiple of it, one span.
    """
    if tile.wide:
        return "matmul_int4_wide", {"STAGES": tile.num_stages}
    if tile.direct:
        ahead = max(tile.num_stages - 1, 1)
        return "matmul_int4", {"AHEAD": ahead if shape.fits_ring else min(ahead, 2), "WARPS": tile.num_warps}
    spans, at_once = ceil_div(shape.columns, span_columns(shape.bits)), tile.depth // span_columns(shape.bits)
    if shape.bits == 4 or at_once < 1 or spans % at_once or shape.group % tile.depth:
        at_once = 1
    return "matmul_nbits", {"BITS": shape.bits, "SPANS_AT_ONCE": at_once}


def _direct_tile(shape: MatmulShape) -> Tile:
    """A tile of kernels/matmul_int4.py: as many rows as there are, to 64, whose sums fill the registers.

    From 64 rows on a warp has twice as many columns, because it reads all rows for them, and no registers to spare. For
    fewer the sum is split among programs until they fill the GPU, and they load three spans ahead, through a ring.
    """
    rows = min(max(next_power_of_two(shape.rows), 8), FEW_ROWS)
    splits = _filling_splits(shape, 64, 128, _DIRECT_PROGRAMS) if shape.rows <= FEW_ROWS else 1
    columns = 128 if rows == FEW_ROWS else 64
    stages = _RING_STAGES if rows < FEW_ROWS else 2
    return Tile(rows=rows, columns=columns, depth=128, splits=splits, num_stages=stages, direct=True)


def _wide_tile(shape: MatmulShape) -> Tile | None:
    """A tile of kernels/matmul_int4_wide.py for a shape that fits it; None where direct tiles are as fast.

    That is for few rows, and where there are too few programs to keep memory busy.
    """
    tile = Tile.of_wide(shape.rows)
    row_tiles = ceil_div(shape.rows, tile.rows)
    splits = _filling_splits(shape, tile.columns, tile.depth, _WIDE_PROGRAMS // row_tiles)
    programs = row_tiles * ceil_div(shape.n, tile.columns) * splits
    is_worthwhile = shape.rows >= _WIDE_FROM and programs >= _FEWEST_WIDE
    return tile.model_copy(update={"splits": splits}) if is_worthwhile else None


def _float32_tile(shape: MatmulShape) -> Tile:
    """A tile for exactness, not for speed: it uses no tensor cores."""
    few, depth = shape.rows <= FEW_ROWS, _float32_depth(shape)
    splits = _splits(shape, depth) if few else 1
    return Tile(rows=16 if few else 64, columns=64, depth=depth, splits=splits, num_stages=2)


def _float32_depth(shape: MatmulShape) -> int:
    return span_columns(shape.bits) if shape.kernel == "matmul_nbits" else 32


def _filling_splits(shape: MatmulShape, columns: int, depth: int, programs: int) -> int:
    """Parts of the sum by which tiles of so many columns become at most this many programs."""
    filling = max(1, programs // ceil_div(shape.n, columns))
    return min(_MOST_SPLITS, ceil_div(shape.columns, depth), filling)


def _splits(shape: MatmulShape, depth: int) -> int:
    return min(_MOST_SPLITS, ceil_div(shape.columns, depth), ceil_div(_FEW_ROWS_PROGRAMS, ceil_div(shape.n, 64)))


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
