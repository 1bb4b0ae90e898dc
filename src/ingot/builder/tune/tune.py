"""`ingot tune`: every product of a program measured on the card in many tiles, the best kept in a table.

    program ─► products (distinct shapes) ─► candidates ─► compiled ─► measured in turn over weights that no cache holds

Products of one weight for few rows are chosen together: the same parts of the sum, in the same order, so that a row has
the same bits in every bucket of few rows; with `free_order` each bucket takes its own best. Where a product is left in
parts, reading them is added to its time. The table is written after each weight, so that an interrupted run is no loss.

The program that is tuned: an artifact's, or what a recipe would build, without its weights.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from statistics import median

from ingot.artifact import MANIFEST, ModelFacts, open_artifact
from ingot.artifact.launch_program import CudaProgram, Kernel, read_cuda_program
from ingot.builder.tune.candidates import Product, candidates, cut_of, library_tiles, products_of, with_tile
from ingot.builder.tune.measure import ROUNDS, ProductTimer
from ingot.errors import EngineError, UsageError
from ingot.pipeline.compile import open_source, run_passes
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.cubins import Cubin, compile_kernels
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, ProductShape, Tile, TileTable, read_tile_table
from ingot.pipeline.targets.cuda.writer import lower_by_recipe
from ingot.pipeline.targets.table import get_target
from ingot.progress import detail, note, report_progress
from ingot.runtime.cuda.cublaslt import CublasLt
from ingot.runtime.cuda.device import Device, Stream
from ingot.runtime.cuda.programs import MatmulBinder, OpenMatmuls
from ingot.runtime.cuda.stopwatch import Stopwatch, laps

_ADVICE = "only programs for a card (targets cuda-smXX) have tiles to tune"


@dataclass(frozen=True)
class TuneSource:
    """Where a program comes from: an artifact that holds it, or a recipe that it would be built by."""

    sms: tuple[int, ...]
    program: Callable[[], CudaProgram]

    @classmethod
    def of(cls, source: str, overrides: tuple[str, ...] = ()) -> "TuneSource":
        """An artifact's folder, or a recipe by name or file.

        UsageError for what has no products of ours, and for overrides of an artifact. The recipe's passes run when
        its program is asked for.
        """
        if not (Path(source) / MANIFEST).is_file():
            recipe = load_recipe(source, overrides)
            target = get_target(recipe.target)
            if not target.name.startswith("cuda-"):
                raise UsageError(f"recipe {recipe.name} is for the target {target.name}; {_ADVICE}")
            return cls(target.sms, partial(_of_recipe, recipe))
        if overrides:
            raise UsageError(f"{source} is an artifact, which is built already; --set is for recipes")
        artifact = open_artifact(source, verify=False)
        if artifact.manifest.program.launches is None:
            raise UsageError(f"{source}: is for the target {artifact.manifest.target}; {_ADVICE}")
        program = read_cuda_program(artifact.file(artifact.manifest.program.launches))
        return cls(program.sms, lambda: program)


def _of_recipe(recipe: Recipe) -> CudaProgram:
    """Passes and lowering as in a build; nothing is compiled or written."""
    target = get_target(recipe.target)
    model, _records = run_passes(recipe, open_source(recipe))
    facts = ModelFacts.model_validate_json(model.metadata_props["ingot.model"])
    return lower_by_recipe(model, recipe, TileTable(sm=target.sms[0])).cuda_program(facts, target.sms, {})


Compile = Callable[[Mapping[str, Kernel], int], Mapping[str, Cubin]]
Times = Mapping[Tile, float]  # seconds, the safe tile's first
WORK = "measuring tiles"
_COPIED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Choice:
    """What was chosen for a shape, beside the safe tile, in seconds."""

    key: str
    tile: Tile
    seconds: float
    safe_seconds: float

    @property
    def gain(self) -> float:
        """How many times as fast as the safe tile."""
        return self.safe_seconds / self.seconds


@dataclass
class Tuning:
    """The table, what this run added to it, and how many shapes it held before."""

    table: TileTable
    choices: list[Choice] = field(default_factory=list)
    held: int = 0


@dataclass(frozen=True)
class Tuner:
    """Measures on a device; `compile_` makes cubins for an SM."""

    device: Device
    stopwatch: Stopwatch
    compile_: Compile = compile_kernels
    free_order: bool = False
    open_matmuls: OpenMatmuls = CublasLt

    def tune(self, program: CudaProgram, output: Path) -> Tuning:
        """Measure what `output` does not hold yet, weight by weight, and write it there.

        UsageError for a program or a table of another card; BuildError where Triton is missing.
        """
        require_card(program.sms, self.device)
        tuning = Tuning(self._begun(output))
        families = [family for family in families_of(products_of(program)) if _is_new(family, tuning.table)]
        tuning.held = len(products_of(program)) - sum(map(len, families))
        self.device.activate()
        stream = self.device.make_stream()
        bytes_per_second = self._bandwidth(stream)
        with self._library(stream) as library:
            for number, family in enumerate(families):
                report_progress(WORK, number, len(families))
                times = [self._measure(product, stream, bytes_per_second, library) for product in family]
                made = choose([product.shape for product in family], times, free_order=self.free_order)
                tuning.choices += made
                tuning.table = _with(tuning.table, made)
                _write(tuning.table, output)
                for choice in made:
                    detail(WORK, f"{choice.key}: {choice.gain:.2f} times as fast")
        report_progress(WORK, len(families), len(families))
        return tuning

    def _begun(self, output: Path) -> TileTable:
        """The table so far. UsageError for one of another card."""
        if not output.exists():
            return TileTable(sm=self.device.sm, device=self.device.name)
        table = read_tile_table(output, (self.device.sm,))
        if table.device != self.device.name:
            raise UsageError(
                f"{output}: was measured on {table.device}, and this is {self.device.name}; name another file: a table "
                "holds the times of one card"
            )
        return table

    def _bandwidth(self, stream: Stream) -> float:
        """Bytes that the card reads a second, or writes: both in a copy."""
        device, size = self.device, _COPIED_BYTES
        one, other = (device.allocate(size, "a copy") for _ in range(2))
        seconds = laps(self.stopwatch, stream, lambda stream: device.copy(other, one, size, stream), ROUNDS)
        device.free(one)
        device.free(other)
        return 2 * size / median(seconds)

    @contextmanager
    def _library(self, stream: Stream) -> Iterator[MatmulBinder | None]:
        """The library that products may be left to; None, which is told, where it is not there."""
        try:
            opened = self.open_matmuls(self.device, stream)
        except EngineError as error:
            note(f"products are not measured in a library: {error}")
            yield None
            return
        try:
            yield opened
        finally:
            opened.close()

    def _measure(
        self, product: Product, stream: Stream, bytes_per_second: float, library: MatmulBinder | None
    ) -> Times:
        """Seconds of every candidate that the card can hold; the safe tile's first.

        A library adds up in an order of its own for every number of rows: for few rows it takes part with `free_order`.
        """
        tiles = candidates(product.shape, self.device.sm)
        kernels = {str(number): with_tile(product, tile)[0] for number, tile in enumerate(tiles)}
        cubins = self.compile_(kernels, self.device.sm)
        timer = ProductTimer(self.device, self.stopwatch, stream, product, bytes_per_second)
        try:
            times = {tile: timer.time(tile, cubins[str(number)]) for number, tile in enumerate(tiles)}
            if library is not None and (product.shape.rows > FEW_ROWS or self.free_order):
                times |= {tile: timer.time_library(library) for tile in library_tiles(product, self.device.sm)}
        finally:
            timer.close()
        return {tile: seconds for tile, seconds in times.items() if seconds is not None}


def require_card(sms: Sequence[int], device: Device) -> None:
    """UsageError for a card of an SM that the program is not for."""
    if device.sm not in sms:
        built = ", ".join(map(str, sms))
        raise UsageError(
            f"the program is for SM {built}, and {device.name} has SM {device.sm}; tune it on a card of SM {built}, or "
            f"build for cuda-sm{device.sm}"
        )


def families_of(products: Iterable[Product]) -> list[list[Product]]:
    """Products of one weight for few rows together, all others by themselves."""
    found: dict[tuple[object, ...], list[Product]] = {}
    for product in products:
        shape = product.shape
        few = shape.rows <= FEW_ROWS
        weight = (shape.kernel, shape.n, shape.columns, shape.bits, shape.group)
        found.setdefault(weight if few else (*weight, shape.rows), []).append(product)
    return list(found.values())


def choose(shapes: Sequence[ProductShape], times: Sequence[Times], *, free_order: bool) -> list[Choice]:
    """The best tiles of a family: of one order of sums, the one that costs the rows together least, relatively."""
    orders = [{_order(shape, tile) for tile in one} for shape, one in zip(shapes, times, strict=True)]
    common = set[tuple[int, ...]]() if free_order else set.intersection(*orders)

    def cost(order: tuple[int, ...]) -> float:
        return prod(
            min(s for t, s in one.items() if _order(shape, t) == order) / min(one.values())
            for shape, one in zip(shapes, times, strict=True)
        )

    best = min(sorted(common), key=cost) if common else None
    made = []
    for shape, one in zip(shapes, times, strict=True):
        allowed = {tile: seconds for tile, seconds in one.items() if best in (None, _order(shape, tile))}
        tile = min(allowed, key=lambda tile: allowed[tile])
        made.append(Choice(shape.key, tile, allowed[tile], next(iter(one.values()))))
    return made


def _order(shape: ProductShape, tile: Tile) -> tuple[int, ...]:
    """What the order of a row's sums depends on."""
    return (cut_of(shape, tile).splits, tile.depth, tile.columns, tile.num_warps, int(tile.library is not None))


def _is_new(family: Sequence[Product], table: TileTable) -> bool:
    return any(product.shape.key not in table.choices for product in family)


def _with(table: TileTable, made: Sequence[Choice]) -> TileTable:
    return table.model_copy(update={"choices": {**table.choices, **{choice.key: choice.tile for choice in made}}})


def _write(table: TileTable, output: Path) -> None:
    """Whole or not at all, whenever the run is cut off."""
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}-{os.getpid()}")
    beside.write_text(table.model_dump_json(indent=1) + "\n", encoding="utf-8")
    beside.replace(output)
