"""Dependent launches on and off: the same program, its steps timed both ways, and their results compared bit for bit.

Kernels of such programs wait by themselves for the launch before them, and may start before it ends. Whether the
runtime lets them is a setting that is read when a kernel is loaded, so each program is loaded twice.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu.device import Bench
from benchmarks.gpu.figures import Spread
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.models import DEPENDENT
from benchmarks.gpu.times.steps import open_program, program_files, step_batch
from ingot.runtime.forward_batch import FloatArray

_SETTING = "INGOT_DEPENDENT_LAUNCHES"
_SECONDS_A_PROGRAM, _MOST_SECONDS = 25.0, 90.0
_COMPARED = 3  # steps, one after the other: a kernel that overtakes may do so only sometimes


def dependent(bench: Bench) -> list[Task]:
    """Every program of dependent launches."""
    files = (file for file in program_files(bench.programs, invariant=True) if file.stem.endswith(DEPENDENT))
    return [Task(file.stem, partial(_compared, bench, file), _MOST_SECONDS, _SECONDS_A_PROGRAM) for file in files]


def _compared(bench: Bench, file: Path) -> Iterator[Record]:
    """Yield for each bucket whether its logits are equal, and the times of a step."""
    usual, overlapping = (_steps(bench, file, allowed) for allowed in (False, True))
    for bucket, (expected, before, facts) in usual.items():
        found, after, _ = overlapping[bucket]
        wrong = int(sum((one.view(np.int32) != expected[0].view(np.int32)).sum() for one in (*expected, *found)))
        record = {"figure": "dependent launches", "program": file.stem, "bucket": bucket, **facts}
        seconds = {"seconds": after.record(), "seconds_of_usual_launches": before.record()}
        gain = 1.0 - after.median / before.median
        yield {**record, "other_bits": wrong, "within": wrong == 0, **seconds, "gain": gain}


def _steps(bench: Bench, file: Path, allowed: bool) -> dict[str, tuple[list[FloatArray], Spread, Record]]:
    """By bucket: logits of several equal steps, and the time of one."""
    made = {}
    with _setting(allowed):
        executor = open_program(bench, file)
        try:
            stopwatch = bench.machine.stopwatch(executor.loaded.device)
            for bound in executor.loaded.programs:
                batch, facts = step_batch(executor, bound)
                logits = [executor.forward(batch).copy() for _ in range(_COMPARED)]
                executor.send(bound, batch)
                seconds = bench.timed(stopwatch, executor.loaded.stream, executor.step(bound, "greedy"))
                made[bound.program.name] = (logits, seconds, facts)
        finally:
            executor.close()
    return made


@contextmanager
def _setting(allowed: bool) -> Iterator[None]:
    """Allow dependent launches, or not."""
    before = os.environ.get(_SETTING)
    os.environ[_SETTING] = "1" if allowed else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SETTING]
        else:
            os.environ[_SETTING] = before
