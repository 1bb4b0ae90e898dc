"""Measure whether the GPU waits for Python: events around every step of the engine, and the host's time for one.

GPU      [step 7]····[step 8]··[step 9]          gap: from the end of one step to the start of the next
host     queue 8     queue 9   queue 10          waited: step 7 had ended when step 8 was queued

At the largest decode batch, which is a goal, and, as "gap of few rows", at 8 and 1: their steps are short.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.gpu.device import Bench
from benchmarks.gpu.figures import Spread
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.times.steps import open_program, program_files
from ingot.runtime.asking.outputs import require_success
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cuda.driver.device import Device, Graph, Stream
from ingot.runtime.cuda.driver.stopwatch import Mark, Stopwatch
from ingot.runtime.engine.engine import Engine

_SECONDS = 25.0
_PROMPT_TOKENS, _NEW_TOKENS = 32, 96
_FEW_ROWS = (8, 1)


@dataclass(frozen=True)
class Replay:
    """One step on the GPU: its graph, its events, and whether the GPU was idle when it was queued."""

    graph: Graph
    begin: Mark
    end: Mark
    waited: bool


class WatchedDevice:
    """A device that records events around replays and forwards everything else."""

    def __init__(self, device: Device, stopwatch: Stopwatch) -> None:
        self._device, self._stopwatch = device, stopwatch
        self.replays: list[Replay] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Queue a graph between two events."""
        waited = bool(self.replays) and self._stopwatch.reached(self.replays[-1].end)
        begin = self._stopwatch.mark(stream)
        self._device.replay(graph, stream)
        self.replays.append(Replay(graph, begin, self._stopwatch.mark(stream), waited))


def gap(bench: Bench) -> list[Task]:
    """The 4-bit programs, which have the shortest steps."""
    files = (file for file in program_files(bench.programs) if "int4-kv-16" in file.stem)
    return [Task(file.stem, partial(_recorded, bench, file), least=_SECONDS) for file in files]


def _recorded(bench: Bench, file: Path) -> Iterator[Record]:
    device = bench.machine.open()
    stopwatch = bench.machine.stopwatch(device)
    watched = WatchedDevice(device, stopwatch)
    executor = open_program(bench, file, cast(Device, watched))
    most = executor.max_sequences
    with Engine(executor, prefix_cache=False) as engine:
        for rows in (most, *(few for few in _FEW_ROWS if few < most)):
            watched.replays.clear()
            before = time.process_time()
            _generate(engine, rows, executor.model.vocab_size, bench.machine.is_dry)
            spent = (time.process_time() - before) / len(watched.replays)
            facts: Record = {"program": file.stem, "rows": rows, "host_seconds_a_step": spent}
            figure = "gap" if rows == most else "gap of few rows"
            yield {"figure": figure, **facts, **_record(_steady(watched.replays), stopwatch)}


def _generate(engine: Engine, rows: int, vocabulary: int, is_dry: bool) -> None:
    random = np.random.default_rng(0)
    prompt, new = (2, 4) if is_dry else (_PROMPT_TOKENS, _NEW_TOKENS)
    for _ in range(rows):
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        engine.add(random.integers(1, vocabulary, prompt), params)
    while engine.has_unfinished():
        require_success(engine.step())


def _steady(replays: list[Replay]) -> list[Replay]:
    """The longest run of decode steps of one graph with all sequences, without its first, which may capture."""
    runs: list[list[Replay]] = [[]]
    for replay in replays:
        if runs[-1] and runs[-1][-1].graph is not replay.graph:
            runs.append([])
        runs[-1].append(replay)
    return max(runs, key=len)[1:]


def _record(steps: list[Replay], stopwatch: Stopwatch) -> Record:
    busy = [stopwatch.seconds(step.begin, step.end) for step in steps]
    gaps = [stopwatch.seconds(before.end, after.begin) for before, after in itertools.pairwise(steps)]
    wall = stopwatch.seconds(steps[0].begin, steps[-1].end)
    return {
        "steps": len(steps),
        "steps_waited_for_python": sum(step.waited for step in steps),
        "busy_share": sum(busy) / wall,
        "step_seconds": Spread.of(busy).record(),
        "gap_seconds": Spread.of(gaps).record(),
        "largest_gap_seconds": max(gaps),
    }
