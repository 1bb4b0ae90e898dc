"""Run `ingot tune` over the packed programs: a table of tiles for the next build.

Not part of the default run, because it needs Triton's compiler on the GPU's machine:

    PYTHONPATH=src python3 -m benchmarks.gpu --parts hardware,tune --output $OUT     # writes $OUT/tiles-sm90.json
    python -m benchmarks.gpu.programs --what programs --tiles tiles-sm90.json        # then run the benchmark again
"""

import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.device import Bench
from benchmarks.gpu.figures import Record
from benchmarks.gpu.steps import program_files
from ingot.artifact.launch_program import LAUNCHES_FILE, CudaProgram
from ingot.builder.tune.tune import Tuner
from ingot.pipeline.targets.cuda.tiles import read_tile_table
from ingot.progress import progress_to

_SECONDS_A_WEIGHT = 30.0


class _OutOfTimeError(Exception):
    """Raised when the next weight would not finish in time."""


def tune(bench: Bench) -> Iterator[Record]:
    """Make one table for all programs; each continues with the table of the previous one."""
    if bench.machine.is_dry:
        return
    device = bench.machine.open()
    output = bench.output / f"tiles-sm{device.sm}.json"
    tuner = Tuner(device, bench.machine.stopwatch(device))

    def watch(name: str, done: int, total: int) -> None:
        if done < total and not bench.room(_SECONDS_A_WEIGHT):
            raise _OutOfTimeError

    for file in program_files(bench.programs):
        begin = time.monotonic()
        try:
            with progress_to(watch):
                choices = tuner.tune(_program(file), output).choices
        except _OutOfTimeError:
            held = len(read_tile_table(output, (device.sm,)).choices) if output.exists() else 0
            yield {"figure": "tune", "program": file.stem, "skipped": "no time left", "shapes_held": held}
            break
        for choice in choices:
            times = {"seconds": choice.seconds, "safe_seconds": choice.safe_seconds, "gain": choice.gain}
            facts: Record = {"figure": "tune", "program": file.stem, "shape": choice.key}
            yield {**facts, **times, "tile": choice.tile.model_dump()}
        yield {"figure": "tuned", "program": file.stem, "shapes": len(choices), "took": time.monotonic() - begin}
    device.close()


def _program(file: Path) -> CudaProgram:
    with zipfile.ZipFile(file) as archive:
        return CudaProgram.model_validate_json(archive.read(LAUNCHES_FILE))
