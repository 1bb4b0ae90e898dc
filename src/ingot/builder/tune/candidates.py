"""What `ingot tune` measures: tiles worth trying for a product, and a launch of it cut into another tile.

Few rows leave the card waiting for weights: narrow tiles, the sum shared out among programs. Many rows make it wait for
multiplications: large tiles, deep pipelines.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import get_args

from ingot.artifact.launch_program import Constant, CudaProgram, Kernel, Launch, Library
from ingot.errors import UsageError
from ingot.pipeline.targets.cuda.kernel_signatures import CATALOG
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, SPAN, ProductShape, Tile, safe_tile

_FEWEST_PROGRAMS, _MOST_PROGRAMS = 96, 1100  # of a product of few rows: less leaves a card idle, more is overhead
_SPLITS = (1, 2, 4, 8, 16)
_WORK_OF_EIGHT = 128 * 128  # elements of a step's weights that eight warps have enough to do with


@dataclass(frozen=True)
class Product:
    """A product of a program: its shape, the kernel as the program has it, its launch."""

    shape: ProductShape
    kernel: Kernel
    launch: Launch


def products_of(program: CudaProgram) -> list[Product]:
    """The distinct products of a program, those of few rows first.

    UsageError for a program that has products of a library: it was built with a table, and says no more of them.
    """
    found: dict[str, Product] = {}
    if any(one.library_matmuls for one in program.programs):
        raise UsageError(
            "the program was built with a table that leaves products to a library, and does not say how it would cut "
            "them itself; tune the recipe, or an artifact that was built without gpu.tiles"
        )
    for one in program.programs:
        for launch in one.launches:
            if isinstance(launch, Launch):
                kernel = program.kernels[launch.kernel]
                shape = shape_of(kernel, launch)
                if shape is not None:
                    found.setdefault(shape.key, Product(shape, kernel, launch))
    return sorted(found.values(), key=lambda product: (product.shape.rows, product.shape.n * product.shape.columns))


def shape_of(kernel: Kernel, launch: Launch) -> ProductShape | None:
    """The shape that a launch's tile was chosen for; None for a kernel that is no product."""
    if kernel.name not in ("matmul", "matmul_nbits"):
        return None
    rows = launch.arguments[list(CATALOG[kernel.name].arguments).index("rows")]
    assert rows.kind == "number"
    is_plain = kernel.name == "matmul"
    return ProductShape(
        kernel="matmul" if is_plain else "matmul_nbits",
        rows=int(rows.value),
        n=int(kernel.constants["N"]),
        columns=int(kernel.constants["COLUMNS"]),
        bits=(8 if kernel.constants["KIND"] else 16) if is_plain else int(kernel.constants["BITS"]),
        group=0 if is_plain else int(kernel.constants["GROUP"]),
        is_float32=kernel.types[list(CATALOG[kernel.name].arguments).index("bias")] == "*fp32",
    )


def candidates(shape: ProductShape, sm: int) -> list[Tile]:
    """Tiles to try, the safe one first, none twice. All are right; one that a card cannot hold shows when it loads."""
    made = _few(shape) if shape.rows <= FEW_ROWS else _many(shape)
    return list(dict.fromkeys([safe_tile(shape, sm), *made]))


def _few(shape: ProductShape) -> Iterator[Tile]:
    rows = 16 if shape.rows <= 16 else 32  # SM 90 multiplies 64 rows by other instructions than fewer
    for columns, depth, splits, warps in product((32, 64, 128), _depths(shape), _SPLITS, (4, 8)):
        tile = Tile(rows=rows, columns=columns, depth=depth, splits=splits, num_warps=warps)
        programs = ceil(shape.n / columns) * splits
        is_sensible = splits == 1 or _FEWEST_PROGRAMS <= programs <= _MOST_PROGRAMS
        has_enough = warps == 4 or columns * depth >= _WORK_OF_EIGHT
        if is_sensible and has_enough and cut_of(shape, tile).splits == splits:
            for stages in (3, 5):
                yield tile.model_copy(update={"num_stages": stages})


def _many(shape: ProductShape) -> Iterator[Tile]:
    sizes = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (64, 256, 8))
    for (rows, columns, warps), depth, stages in product(sizes, _depths(shape), (3, 4)):
        yield Tile(rows=rows, columns=columns, depth=depth, num_warps=warps, num_stages=stages)


def _depths(shape: ProductShape) -> tuple[int, ...]:
    """Steps along the sum that the product really takes."""
    given = (32, 64, 128) if shape.kernel == "matmul" and shape.rows > FEW_ROWS else (64, 128)
    return tuple(depth for depth in given if _step(shape, depth) == depth)


def _step(shape: ProductShape, depth: int) -> int:
    """Columns of a step: packed codes are walked in whole spans that share a scale."""
    if shape.kernel == "matmul":
        return depth
    spans, at_once = ceil(shape.columns / SPAN), depth // SPAN
    whole = at_once > 1 and spans % at_once == 0 and shape.group % depth == 0
    return depth if whole else SPAN


@dataclass(frozen=True)
class Cut:
    """How a tile cuts a product, as the lowering does it."""

    splits: int
    grid: tuple[int, int, int]
    constants: dict[str, Constant]


def cut_of(shape: ProductShape, tile: Tile) -> Cut:
    """Parts of the sum, the grid, and the constants that depend on the tile."""
    step = _step(shape, tile.depth)
    splits = min(tile.splits, ceil(shape.columns / step))
    row_tiles, tiles = ceil(shape.rows / tile.rows), ceil(shape.n / tile.columns)
    constants: dict[str, Constant] = {"TILE_ROWS": tile.rows, "TILE": tile.columns, "SPLITS": splits}
    if shape.kernel == "matmul":
        return Cut(splits, (row_tiles * tiles, splits, 1), constants | {"TILE_COLUMNS": tile.depth})
    return Cut(splits, (row_tiles, tiles, splits), constants | {"SPANS_AT_ONCE": step // SPAN})


def library_tiles(made: Product, sm: int) -> list[Tile]:
    """The product left to a library, where one computes all that is asked; the safe tile stands behind it."""
    kernel = made.kernel
    is_wide = "logits" in made.launch.buffers and not made.shape.is_float32
    lacks = kernel.constants["HAS_SOFTCAP"] or (is_wide and kernel.constants["HAS_BIAS"])
    if made.shape.kernel != "matmul" or made.shape.bits != 16 or lacks:
        return []
    return [safe_tile(made.shape, sm).model_copy(update={"library": library}) for library in get_args(Library)]


def with_tile(made: Product, tile: Tile) -> tuple[Kernel, tuple[int, int, int]]:
    """The kernel and the grid of the product in another tile; parts are float32, as in the lowering."""
    cut = cut_of(made.shape, tile)
    types = list(made.kernel.types)
    types[_place(made, "out")] = _out_type(made, cut.splits)
    changed: dict[str, object] = {"constants": made.kernel.constants | cut.constants, "types": tuple(types)}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return made.kernel.model_copy(update=changed | options), cut.grid


def _out_type(made: Product, splits: int) -> str:
    """Logits and parts are float32; all else is as the activations, which the bias is, too."""
    is_wide = splits > 1 or "logits" in made.launch.buffers
    return "*fp32" if is_wide else made.kernel.types[_place(made, "bias")]


def _place(made: Product, argument: str) -> int:
    return list(CATALOG[made.shape.kernel].arguments).index(argument)
