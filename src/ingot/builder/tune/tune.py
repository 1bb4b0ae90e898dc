"""Measures every matmul of a program in many tiles on the GPU, and keeps the best in a table.

    program ─► matmuls (distinct shapes) ─► candidate tiles ─► cubins ─► times ─► table

Tiles for few rows are chosen together for all matmuls of one weight, with one order of sums, so that a row has the same
bits in every bucket of few rows; with `free_order` each bucket gets its own fastest tile. Weights whose matmuls take
most of a step are measured first. The time to read split-K
partials is added to a matmul's time; copies of the weight take turns so that no cache holds it. The table is written
after each weight, so that an interrupted run resumes.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from statistics import median

from ingot.artifact import MANIFEST, open_artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import CudaProgram, Kernel, Launch
from ingot.builder.tune.candidates import (
    Matmul,
    candidates,
    cut_of,
    library_tiles,
    matmuls_of,
    shape_of,
    with_tile,
)
from ingot.builder.tune.measure import ROUNDS, MatmulTimer
from ingot.errors import EngineError, UsageError, shown
from ingot.passes.model_facts import MODEL
from ingot.pipeline.compile import open_source, run_passes
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.cubins import Cubin, compile_kernels
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, MatmulShape, Tile, TileTable, read_tile_table
from ingot.pipeline.targets.cuda.writer import lower_by_recipe
from ingot.pipeline.targets.table import get_target
from ingot.progress import detail, note, report_progress
from ingot.runtime.cuda.cublaslt import CublasLt
from ingot.runtime.cuda.driver.device import Device, Stream
from ingot.runtime.cuda.driver.stopwatch import Stopwatch, laps
from ingot.runtime.cuda.programs import MatmulBinder, OpenMatmuls

_ADVICE = "only programs of the targets cuda-smXX have tiles to tune"
WORK = "measuring tiles"
_COPIED_BYTES = 256 * 2**20
_OPERATIONS_A_BYTE = 300.0  # 16-bit tensor cores of an H100 over its memory's bandwidth


@dataclass(frozen=True)
class TuneSource:
    """Source of a program: an artifact that contains it, or a recipe that builds it."""

    sms: tuple[int, ...]
    program: Callable[[], CudaProgram]

    @classmethod
    def of(cls, source: str, overrides: tuple[str, ...] = ()) -> "TuneSource":
        """Open an artifact's folder, or load a recipe by name or file; its passes run when `program` is called.

        UsageError for a target whose matmuls are not Ingot's kernels, and for overrides of an artifact.
        """
        if not (Path(source) / MANIFEST).is_file():
            recipe = load_recipe(source, overrides)
            target = get_target(recipe.target)
            if not target.has_tiles:
                raise UsageError(f"recipe {recipe.name} is for the target {target.name}; {_ADVICE}")
            return cls(target.sms, partial(_of_recipe, recipe))
        if overrides:
            raise UsageError(f"{source} is an artifact, which is built already; --set is for recipes")
        artifact = open_artifact(source, verify=False)
        if artifact.manifest.engine != "cuda" or artifact.manifest.program.launches is None:
            raise UsageError(f"{source}: is for the target {shown(artifact.manifest.target)}; {_ADVICE}")
        program = read_launches(artifact)
        return cls(program.sms, lambda: program)


def _of_recipe(recipe: Recipe) -> CudaProgram:
    """Run passes and lowering as in a build, without compiling or writing anything."""
    target = get_target(recipe.target)
    model = run_passes(recipe, open_source(recipe)).model
    facts = MODEL.of(model)
    return lower_by_recipe(model, recipe, TileTable(sm=target.sms[0])).cuda_program(facts, target.sms, {})


Compile = Callable[[Mapping[str, Kernel], int], Mapping[str, Cubin]]
Times = Mapping[Tile, float]  # seconds, of the safe tile first


@dataclass(frozen=True)
class Choice:
    """The tile chosen for a shape, and its time and the safe tile's in seconds."""

    key: str
    tile: Tile
    seconds: float
    safe_seconds: float

    @property
    def gain(self) -> float:
        """Time of the safe tile over that of this one."""
        return self.safe_seconds / self.seconds


@dataclass
class Tuning:
    """The table, the choices that this run added, and the number of shapes that it had before."""

    table: TileTable
    choices: list[Choice] = field(default_factory=list)
    held: int = 0


@dataclass(frozen=True)
class Tuner:
    """Measures on a device; `compile_` compiles cubins for an SM."""

    device: Device
    stopwatch: Stopwatch
    compile_: Compile = compile_kernels
    free_order: bool = False
    open_matmuls: OpenMatmuls = CublasLt

    def tune(self, program: CudaProgram, output: Path) -> Tuning:
        """Measure the shapes that the table in `output` lacks, weight by weight, and write it.

        UsageError for a program or a table of another GPU; BuildError if Triton is missing.
        """
        require_gpu(program.sms, self.device)
        tuning = Tuning(self._begun(output))
        families = [family for family in ranked_families(program) if _is_new(family, tuning.table)]
        tuning.held = len(matmuls_of(program)) - sum(map(len, families))
        self.device.activate()
        stream = self.device.make_stream()
        bytes_per_second = self._bandwidth(stream)
        with self._library(stream) as library:
            for number, family in enumerate(families):
                report_progress(WORK, number, len(families))
                times = [self._measure(matmul, stream, bytes_per_second, library) for matmul in family]
                made = choose([matmul.shape for matmul in family], times, free_order=self.free_order)
                tuning.choices += made
                tuning.table = _with(tuning.table, made)
                _write(tuning.table, output)
                for choice in made:
                    detail(WORK, f"{choice.key}: {choice.gain:.2f} times as fast")
        report_progress(WORK, len(families), len(families))
        return tuning

    def _begun(self, output: Path) -> TileTable:
        """Read the table so far. UsageError for a table of another GPU."""
        if not output.exists():
            return TileTable(sm=self.device.sm, device=self.device.name)
        table = read_tile_table(output, (self.device.sm,))
        if table.device != self.device.name:
            raise UsageError(
                f"{output}: was measured on {table.device}, and this is {self.device.name}; name another file: a table "
                "is for one GPU"
            )
        return table

    def _bandwidth(self, stream: Stream) -> float:
        """Measure the bytes that the GPU reads or writes in a second, by a copy, which does both."""
        device, size = self.device, _COPIED_BYTES
        one, other = (device.allocate(size, "a copy") for _ in range(2))
        seconds = laps(self.stopwatch, stream, lambda stream: device.copy(other, one, size, stream), ROUNDS)
        device.free(one)
        device.free(other)
        return 2 * size / median(seconds)

    @contextmanager
    def _library(self, stream: Stream) -> Iterator[MatmulBinder | None]:
        """Open the library that can compute matmuls; None, with a note, if it is not installed."""
        try:
            opened = self.open_matmuls(self.device, stream)
        except EngineError as error:
            note(f"no library is measured: {error}")
            yield None
            return
        try:
            yield opened
        finally:
            opened.close()

    def _measure(self, matmul: Matmul, stream: Stream, bytes_per_second: float, library: MatmulBinder | None) -> Times:
        """Return seconds of every candidate that fits the GPU, of the safe tile first.

        A library has its own order of sums for every number of rows: for few rows it is measured only with
        `free_order`.
        """
        tiles = candidates(matmul.shape, self.device.sm)
        kernels = {str(number): with_tile(matmul, tile)[0] for number, tile in enumerate(tiles)}
        cubins = self.compile_(kernels, self.device.sm)
        timer = MatmulTimer(self.device, self.stopwatch, stream, matmul, bytes_per_second)
        try:
            times = {tile: timer.time(tile, cubins[str(number)]) for number, tile in enumerate(tiles)}
            if library is not None and (matmul.shape.rows > FEW_ROWS or self.free_order):
                times |= {tile: timer.time_library(library) for tile in library_tiles(matmul, self.device.sm)}
        finally:
            timer.close()
        return {tile: seconds for tile, seconds in times.items() if seconds is not None}


def require_gpu(sms: Sequence[int], device: Device) -> None:
    """Raise UsageError for a GPU of an SM that the program is not for."""
    if device.sm not in sms:
        built = ", ".join(map(str, sms))
        raise UsageError(
            f"the program is for SM {built}, and {device.name} has SM {device.sm}; tune it on a GPU of SM {built}, or "
            f"build for cuda-sm{device.sm}"
        )


def families_of(matmuls: Iterable[Matmul]) -> list[list[Matmul]]:
    """Group matmuls of few rows by their weight; every other matmul is a group of its own."""
    found: dict[tuple[object, ...], list[Matmul]] = {}
    for matmul in matmuls:
        shape = matmul.shape
        few = shape.rows <= FEW_ROWS
        # A program has wide tiles from some number of rows on, so those buckets never share an order with the others.
        is_wide = matmul.kernel.name == "matmul_int4_wide"
        weight = (shape.kernel, shape.n, shape.columns, shape.bits, shape.group, is_wide)
        found.setdefault(weight if few else (*weight, shape.rows), []).append(matmul)
    return list(found.values())


def ranked_families(program: CudaProgram) -> list[list[Matmul]]:
    """The families of a program's matmuls, those first that its steps spend most time in: there a tile gains most."""
    matmuls = matmuls_of(program)
    launches = Counter(
        shape.key
        for one in program.programs
        for step in one.launches
        if isinstance(step, Launch) and (shape := shape_of(program.kernels[step.kernel], step)) is not None
    )

    def cost(family: Sequence[Matmul]) -> float:
        return sum(least_cost(matmul.shape) * launches[matmul.shape.key] for matmul in family)

    return sorted(families_of(matmuls), key=cost, reverse=True)


def least_cost(shape: MatmulShape) -> float:
    """A matmul's lower bound as bytes read: the weight's own, or its operations at a large GPU's rate."""
    weight = shape.n * shape.columns
    return max(weight * shape.bits / 8, 2.0 * shape.rows * weight / _OPERATIONS_A_BYTE)


def choose(shapes: Sequence[MatmulShape], times: Sequence[Times], *, free_order: bool) -> list[Choice]:
    """Choose the tiles of a family: those of the order of sums with the lowest mean of relative times."""
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


def _order(shape: MatmulShape, tile: Tile) -> tuple[int, ...]:
    """Everything that the order of a row's sums depends on: in a direct or wide tile only the split."""
    if tile.direct or tile.wide:
        return (cut_of(shape, tile).splits, int(tile.wide))
    return (cut_of(shape, tile).splits, tile.depth, tile.columns, tile.num_warps, int(tile.library is not None))


def _is_new(family: Sequence[Matmul], table: TileTable) -> bool:
    return any(matmul.shape.key not in table.choices for matmul in family)


def _with(table: TileTable, made: Sequence[Choice]) -> TileTable:
    return table.model_copy(update={"choices": {**table.choices, **{choice.key: choice.tile for choice in made}}})


def _write(table: TileTable, output: Path) -> None:
    """Write the table atomically, so that an interrupted run leaves a complete one."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}-{os.getpid()}")
    temporary.write_text(table.model_dump_json(indent=1) + "\n", encoding="utf-8")
    temporary.replace(output)
