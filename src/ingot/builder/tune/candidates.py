"""The matmuls of a program, the tiles worth measuring for each, and its launch in another tile.

Few rows are bound by reading weights: narrow tiles, and the sum split among programs. Many rows are compute-bound:
large tiles, deep pipelines.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from ingot.artifact.programs.launch_program import (
    Argument,
    Constant,
    CudaProgram,
    Kernel,
    Launch,
    Library,
    NumberArgument,
)
from ingot.errors import UsageError
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.tiles import (
    FEW_ROWS,
    WIDE_SM,
    MatmulShape,
    Tile,
    packed_constants,
    safe_tile,
    span_columns,
)
from ingot.sizes import ceil_div, next_power_of_two

# Programs of a matmul of few rows: fewer leave multiprocessors idle, more are overhead.
_FEWEST_PROGRAMS, _MOST_PROGRAMS = 96, 1100
_SPLITS = (1, 2, 4, 8, 16)
_WORK_OF_EIGHT = 128 * 128  # elements of a step's weights that keep eight warps busy


@dataclass(frozen=True)
class Matmul:
    """A matmul of a program: its shape, its kernel and its launch."""

    shape: MatmulShape
    kernel: Kernel
    launch: Launch

    @property
    def arguments(self) -> dict[str, Argument]:
        """Arguments of the launch by name."""
        return dict(zip(SIGNATURES[self.kernel.name].arguments, self.launch.arguments, strict=True))

    @property
    def numbers(self) -> dict[str, int | float]:
        """Arguments that are numbers, by name."""
        return {name: argument.value for name, argument in self.arguments.items() if argument.kind == "number"}

    @property
    def is_logits(self) -> bool:
        """Whether the result is the program's logits."""
        return "logits" in self.launch.buffers


def matmuls_of(program: CudaProgram) -> list[Matmul]:
    """Return the distinct matmuls of a program, those of few rows first.

    UsageError for a program with matmuls of a library: they have no tile to compare with.
    """
    found: dict[str, Matmul] = {}
    if any(one.library_matmuls for one in program.programs):
        raise UsageError(
            "the program was built with a table that leaves matmuls to a library, and has no tiles for them; tune the "
            "recipe, or an artifact that was built without gpu.tiles"
        )
    if program.batch_invariant:
        raise UsageError(
            "the program is batch-invariant: it has one tile per weight, for any number of rows, and nothing to "
            "choose; tune without gpu.batch_invariant"
        )
    for one in program.programs:
        for launch in one.launches:
            if isinstance(launch, Launch):
                kernel = program.kernels[launch.kernel]
                shape = shape_of(kernel, launch)
                if shape is not None and kernel.constants.get("SPANS") not in (None, spans_of(shape)):
                    raise UsageError(
                        f"{launch.node}: the codes of its {shape.bits}-bit weight are stored in the order of an older "
                        "Ingot, whose kernels this one does not have; build the artifact again, or tune the recipe"
                    )
                if shape is not None:
                    found.setdefault(shape.key, _alone(Matmul(shape, kernel, launch)))
    return sorted(found.values(), key=lambda matmul: (matmul.shape.rows, matmul.shape.n * matmul.shape.columns))


def _alone(made: Matmul) -> Matmul:
    """The matmul alone, with rows that follow each other.

    Of one that computes a gated activation of its result, too; of one whose result is a slice of longer rows.
    """
    constants = {name: value for name, value in made.kernel.constants.items() if name != "GATE"}
    arguments = list(made.launch.arguments)
    arguments[SIGNATURES[made.kernel.name].index("out_stride")] = NumberArgument(value=made.shape.n)
    launch = made.launch.model_copy(update={"arguments": tuple(arguments)})
    return Matmul(made.shape, made.kernel.model_copy(update={"constants": constants}), launch)


def shape_of(kernel: Kernel, launch: Launch) -> MatmulShape | None:
    """Return the shape that a launch's tile was chosen for; None for other kernels than matmuls."""
    if not kernel.name.startswith("matmul"):
        return None
    signature = SIGNATURES[kernel.name]
    rows = launch.arguments[signature.index("rows")]
    assert rows.kind == "number"
    is_plain = kernel.name == "matmul"
    bits = (8 if kernel.constants["KIND"] else 16) if is_plain else int(kernel.constants.get("BITS", 4))
    return MatmulShape(
        kernel="matmul" if is_plain else "matmul_nbits",
        rows=int(rows.value),
        n=int(kernel.constants["N"]),
        columns=int(kernel.constants["COLUMNS"]),
        bits=bits,
        group=0 if is_plain else int(kernel.constants["GROUP"]),
        is_float32=kernel.types[signature.index("bias")] == "*fp32",
    )


def spans_of(shape: MatmulShape) -> int:
    """Spans of a row of packed codes."""
    return ceil_div(shape.columns, span_columns(shape.bits))


def candidates(shape: MatmulShape, sm: int) -> list[Tile]:
    """Return distinct tiles to measure, the safe one first. One that does not fit the GPU fails to load."""
    made = _few(shape) if shape.rows <= FEW_ROWS else _many(shape)
    direct = _direct(shape) if shape.fits_direct else ()
    wide = _wide(shape) if sm == WIDE_SM and shape.fits_wide else ()
    return list(dict.fromkeys([safe_tile(shape, sm), *wide, *direct, *made]))


def _wide(shape: MatmulShape) -> Iterator[Tile]:
    """Tiles of kernels/matmul_int4_wide.py, whose programs fill a GPU once or twice."""
    for splits, stages in itertools.product(_SPLITS if shape.rows <= FEW_ROWS else (1, 2), (3, 4, 6)):
        tile = Tile.of_wide(shape.rows, splits, stages)
        if _is_sensible(shape, tile):
            yield tile


def _direct(shape: MatmulShape) -> Iterator[Tile]:
    """Tiles of kernels/matmul_int4.py: a warp has 16 or 32 columns."""
    most = min(max(next_power_of_two(shape.rows), 8), 64)
    stages_of = (2, 3, 4, 8) if shape.fits_ring else (2, 3)
    for rows, warps, wide, stages in itertools.product((most, max(most // 2, 8)), (2, 4), (16, 32), stages_of):
        for splits in _SPLITS if shape.rows <= FEW_ROWS else (1,):
            tile = Tile(
                rows=rows,
                columns=warps * wide,
                depth=128,
                splits=splits,
                num_warps=warps,
                num_stages=stages,
                direct=True,
            )
            if _is_sensible(shape, tile):
                yield tile


def _is_sensible(shape: MatmulShape, tile: Tile) -> bool:
    """Whether a split of the sum is possible, and gives a number of programs that suits a GPU."""
    programs = ceil_div(shape.n, tile.columns) * tile.splits
    fits = tile.splits == 1 or _FEWEST_PROGRAMS <= programs <= _MOST_PROGRAMS
    return fits and cut_of(shape, tile).splits == tile.splits


def _few(shape: MatmulShape) -> Iterator[Tile]:
    rows = 16 if shape.rows <= 16 else 32  # SM 90 multiplies 64 rows by other instructions than fewer
    for columns, depth, splits, warps in itertools.product((32, 64, 128), _depths(shape), _SPLITS, (4, 8)):
        tile = Tile(rows=rows, columns=columns, depth=depth, splits=splits, num_warps=warps)
        has_enough = warps == 4 or columns * depth >= _WORK_OF_EIGHT
        if has_enough and _is_sensible(shape, tile):
            for stages in (3, 5):
                yield tile.model_copy(update={"num_stages": stages})


def _many(shape: MatmulShape) -> Iterator[Tile]:
    sizes = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (64, 256, 8))
    for (rows, columns, warps), depth, stages in itertools.product(sizes, _depths(shape), (3, 4)):
        yield Tile(rows=rows, columns=columns, depth=depth, num_warps=warps, num_stages=stages)


def _depths(shape: MatmulShape) -> tuple[int, ...]:
    """Steps along the sum that the kernel can take."""
    given = (32, 64, 128) if shape.kernel == "matmul" and shape.rows > FEW_ROWS else (64, 128)
    return tuple(depth for depth in given if _step(shape, Tile(rows=16, columns=64, depth=depth)) == depth)


def _step(shape: MatmulShape, tile: Tile) -> int:
    """Columns of a step: of packed codes whole spans."""
    if shape.kernel == "matmul":
        return tile.depth
    return span_columns(shape.bits) * packed_constants(shape, tile)[1].get("SPANS_AT_ONCE", 1)


@dataclass(frozen=True)
class Tiling:
    """Division of a matmul by a tile, as in the lowering."""

    splits: int
    grid: tuple[int, int, int]
    constants: dict[str, Constant]


def cut_of(shape: MatmulShape, tile: Tile) -> Tiling:
    """Return the split of the sum, the grid, and the constants that depend on the tile."""
    splits = min(tile.splits, ceil_div(shape.columns, _step(shape, tile)))
    row_tiles, tiles = ceil_div(shape.rows, tile.rows), ceil_div(shape.n, tile.columns)
    constants: dict[str, Constant] = {"TILE_ROWS": tile.rows, "TILE": tile.columns, "SPLITS": splits}
    if shape.kernel == "matmul":
        return Tiling(splits, (row_tiles * tiles, splits, 1), constants | {"TILE_COLUMNS": tile.depth})
    return Tiling(splits, (row_tiles, tiles, splits), constants | packed_constants(shape, tile)[1])


def library_tiles(made: Matmul, sm: int) -> list[Tile]:
    """Return a choice per library that computes the whole epilogue; its tile is the safe one, as a fallback."""
    kernel = made.kernel
    is_wide = made.is_logits and not made.shape.is_float32
    lacks = kernel.constants["HAS_SOFTCAP"] or (is_wide and kernel.constants["HAS_BIAS"])
    if made.shape.kernel != "matmul" or made.shape.bits != 16 or lacks:
        return []
    return [safe_tile(made.shape, sm).model_copy(update={"library": library}) for library in get_args(Library)]


def with_tile(made: Matmul, tile: Tile) -> tuple[Kernel, tuple[int, int, int]]:
    """Return kernel and grid of the matmul in another tile; split-K partials are float32, as in the lowering."""
    cut, kernel = cut_of(made.shape, tile), made.kernel
    types = list(kernel.types)
    types[SIGNATURES[kernel.name].index("out")] = _out_type(made, cut.splits)
    constants = {**kernel.constants, **cut.constants}
    name: str = made.shape.kernel
    if name == "matmul_nbits":
        name = packed_constants(made.shape, tile)[0]
        for own in ("AHEAD", "WARPS", "STAGES", "BITS", "SPANS_AT_ONCE", "SCALE_WEIGHTS"):
            if own not in cut.constants:
                constants.pop(own, None)
        if name == "matmul_nbits":
            constants["SCALE_WEIGHTS"] = made.shape.rows > FEW_ROWS
    changed: dict[str, object] = {"name": name, "constants": constants, "types": tuple(types)}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return kernel.model_copy(update=changed | options), cut.grid


def _out_type(made: Matmul, splits: int) -> str:
    """Type of the result: float32 for logits and partials, else that of the activations and the bias."""
    is_wide = splits > 1 or made.is_logits
    return "*fp32" if is_wide else made.kernel.types[SIGNATURES[made.kernel.name].index("bias")]
