"""Run `ingot tune` over the packed programs: a table of tiles for the next build.

    PYTHONPATH=src python3 -m benchmarks.gpu --parts tune --output $OUT              # writes $OUT/tiles-sm90.json
    python -m benchmarks.gpu.programs --what programs --tiles tiles-sm90.json        # then run the benchmark again

`python -m benchmarks.gpu.programs --what tune` compiles the candidates of the weights that cost most beforehand; others
need Triton's compiler on the GPU's machine. The largest model comes first, and in it the weights by their cost.
"""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.gpu.device import Bench
from benchmarks.gpu.parts import OutOfTimeError, Record, Task
from benchmarks.gpu.programs.packing import TUNE_FILE, PackedKernels, read_program
from benchmarks.gpu.proofs.ladder import key_of
from benchmarks.gpu.times.steps import program_files
from ingot.artifact.programs.launch_program import Kernel
from ingot.builder.tune.candidates import candidates, with_tile
from ingot.builder.tune.tune import Compile, Tuner, ranked_families
from ingot.pipeline.targets.cuda.cubins import Cubin, compile_kernels
from ingot.pipeline.targets.cuda.tiles import read_tile_table
from ingot.progress import progress_to

_SECONDS_A_WEIGHT, _MOST_SECONDS = 30.0, 480.0


def tune(bench: Bench) -> list[Task]:
    """One table for all programs; each continues with the table of the previous one."""
    files = [] if bench.machine.is_dry else program_files(bench.programs)
    return [Task(file.stem, partial(_tuned, bench, file), _MOST_SECONDS, _SECONDS_A_WEIGHT) for file in files]


def candidate_kernels(folder: Path, sm: int, families: int) -> dict[str, Kernel]:
    """The candidates of this many weights of each packed model, those that cost most first, by key."""
    found: dict[str, Kernel] = {}
    for file in program_files(folder):
        for family in ranked_families(read_program(file))[:families]:
            for matmul in family:
                kernels = (with_tile(matmul, tile)[0] for tile in candidates(matmul.shape, sm))
                found |= {key_of(kernel): kernel for kernel in kernels}
    return found


def packed_or_compiled(file: Path) -> Compile:
    """Compile only the kernels that the file does not hold."""
    if not file.exists():
        return compile_kernels
    packed = PackedKernels(file)

    def compile_(kernels: Mapping[str, Kernel], sm: int) -> dict[str, Cubin]:
        names = {key: key_of(kernel) for key, kernel in kernels.items()}
        known = {key: name for key, name in names.items() if name in packed.kernels}
        made = compile_kernels({key: kernels[key] for key in kernels if key not in known}, sm)
        return made | {key: Cubin(packed.code(name).tobytes(), packed.kernels[name][1]) for key, name in known.items()}

    return compile_


def _tuned(bench: Bench, file: Path) -> Iterator[Record]:
    device = bench.machine.open()
    output = bench.output / f"tiles-sm{device.sm}.json"
    tuner = Tuner(device, bench.machine.stopwatch(device), packed_or_compiled(bench.programs / TUNE_FILE))
    begin = time.monotonic()

    def watch(name: str, done: int, total: int) -> None:
        if done < total and not bench.room(_SECONDS_A_WEIGHT):
            held = len(read_tile_table(output, (device.sm,)).choices) if output.exists() else 0
            raise OutOfTimeError(f"no time left; {output.name} has {held} shapes: resume to measure the others")

    try:
        with progress_to(watch):
            choices = tuner.tune(read_program(file), output).choices
    finally:
        device.close()
    for choice in choices:
        times = {"seconds": choice.seconds, "safe_seconds": choice.safe_seconds, "gain": choice.gain}
        facts: Record = {"figure": "tune", "program": file.stem, "shape": choice.key}
        yield {**facts, **times, "tile": choice.tile.model_dump()}
    yield {"figure": "tuned", "program": file.stem, "shapes": len(choices), "took": time.monotonic() - begin}
