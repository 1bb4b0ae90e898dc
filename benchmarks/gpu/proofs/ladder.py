"""Safer variants of packed kernels, compiled beforehand, for those that the part "shapes" finds wrong.

    one stage       loads are not pipelined
    fewer warps     half as many threads a program
    SM 80 tiles     the tile that a matmul of many rows has on the smallest GPUs
    not direct      a weight of 4 bits through shared memory, by Triton's kernel
    all warps alike prefill_attention's work by ragged_attention, which all SMs run (gpu.specialized_attention=false),
                    and matmul_int4_wide's by matmul_int4 (gpu.specialized_matmuls=false)

Which rung is right tells where the fault is, and what a build can use meanwhile (gpu.tiles takes such tiles).
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.gpu.device import Bench
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.packing import LADDER_FILE, PackedKernels
from benchmarks.gpu.proofs.shapes import OpenedLaunches, Place, places
from ingot.artifact.programs.launch_program import Constant, Kernel
from ingot.builder.tune.candidates import Matmul, shape_of, with_tile
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, Tile, safe_tile

_SMALLEST_SM = 80
_DIRECT = ("matmul_int4", "grouped_matmul_int4")  # their warps and loads ahead are constants
_KEYS = 64  # of a tile of ragged_attention on SM 90
_SECONDS = 30.0
Rung = tuple[Kernel, tuple[int, int, int]]  # and its grid


def ladder(bench: Bench) -> list[Task]:
    """Every rung of every launch that failed in the part "shapes"."""
    failed = {task for _, task in bench.failed}
    opened, packed = OpenedLaunches(bench), PackedKernels(bench.programs / LADDER_FILE)
    return [
        Task(f"{name}: {place.name}", partial(_tried, opened, packed, place, name), _SECONDS)
        for place in (places(bench.programs) if failed else [])
        if place.name in failed
        for name in rungs(place)
    ]


def rungs(place: Place) -> dict[str, Rung]:
    """The variants of a launch's kernel, by name."""
    kernel, grid = place.kernel, place.launch.grid
    if kernel.name == "prefill_attention":
        return {"all warps alike": (all_warps_alike(kernel), grid)}
    shape = shape_of(kernel, place.launch)
    if kernel.name == "matmul_int4_wide":
        assert shape is not None
        if kernel.constants["FOLDS"]:
            # A program that adds the partials itself stores one, and a launch in another tile all of them.
            return {}
        tile = safe_tile(shape).model_copy(update={"splits": int(kernel.constants["SPLITS"])})
        return {"all warps alike": with_tile(Matmul(shape, kernel, place.launch), tile)}
    found: dict[str, Rung] = {}
    is_direct = kernel.name in _DIRECT
    if kernel.num_stages > 1 and kernel.constants.get("AHEAD") != 1:
        ahead: dict[str, Constant] = {"AHEAD": 1} if is_direct else {}
        found["one stage"] = (_changed(kernel, ahead, num_stages=1), grid)
    if kernel.num_warps > 1:
        warps: dict[str, Constant] = {"WARPS": kernel.num_warps // 2} if is_direct else {}
        found["fewer warps"] = (_changed(kernel, warps, num_warps=kernel.num_warps // 2), grid)
    if is_direct and shape is not None and not kernel.constants["FOLDS"]:
        splits = int(kernel.constants["SPLITS"])
        tile = Tile(rows=16 if shape.rows <= 16 else 32, columns=64, depth=128, splits=splits)
        found["not direct"] = with_tile(Matmul(shape, kernel, place.launch), tile)
    if not is_direct and shape is not None and shape.rows > FEW_ROWS and not kernel.constants["FOLDS"]:
        narrow = with_tile(Matmul(shape, kernel, place.launch), safe_tile(shape, _SMALLEST_SM))
        if narrow != (kernel, grid):
            found["SM 80 tiles"] = narrow
    return found


def all_warps_alike(kernel: Kernel) -> Kernel:
    """The kernel that takes the same arguments and grid, and has no warps that only copy."""
    queries = min(int(kernel.constants["QUERIES"]), int(kernel.constants["TILE_QUERIES"]))
    constants = {**kernel.constants, "TILE": _KEYS, "QUERIES": queries}
    return kernel.model_copy(update={"name": "ragged_attention", "constants": constants, "num_warps": 8})


def _changed(kernel: Kernel, constants: Mapping[str, Constant], **options: int) -> Kernel:
    return kernel.model_copy(update={"constants": {**kernel.constants, **constants}, **options})


def rung_kernels(folder: Path) -> dict[str, Kernel]:
    """The kernels of all rungs of all packed programs, by key."""
    return {key_of(kernel): kernel for place in places(folder) for kernel, _ in rungs(place).values()}


def key_of(kernel: Kernel) -> str:
    """A kernel's key in the packed file."""
    return f"{kernel.name}-{hashlib.sha256(kernel.model_dump_json().encode()).hexdigest()[:16]}"


def _tried(opened: OpenedLaunches, packed: PackedKernels, place: Place, name: str) -> Iterator[Record]:
    """Whether the variant is right; `right`, not `within`: that the packed kernel is wrong is counted already."""
    bound, program = opened.bound(place)
    kernel, grid = rungs(place)[name]
    key = key_of(kernel)
    loaded = opened.device.load_kernel(packed.code(key), *packed.kernels[key])
    for record in opened.compare(bound, place, program, (loaded, grid)):
        right = record.pop("within")
        yield {"figure": "rung", "rung": name, **record, "right": right}
