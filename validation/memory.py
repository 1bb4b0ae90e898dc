"""Measures the peak memory of loading an artifact and generating, in fresh processes, so that nothing else counts."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ingot.errors import EngineError
from ingot.progress import Stage
from ingot.validation.memory_probe import ProcessMemory
from ingot.validation.options import MemoryOptions
from ingot.validation.statistics import Measured, ratio_interval


@dataclass(frozen=True)
class MemoryProbe:
    """Memory of one process: before loading, after it, after generating. The peak is generated.peak_bytes."""

    imported: ProcessMemory
    loaded: ProcessMemory
    generated: ProcessMemory


@dataclass(frozen=True)
class MemoryResult:
    """Probes of both engines, paired in order."""

    candidate: tuple[MemoryProbe, ...]
    baseline: tuple[MemoryProbe, ...]


Prober = Callable[[Path, MemoryOptions], MemoryProbe]


def probe_in_child(artifact: Path, options: MemoryOptions) -> MemoryProbe:
    """Run the probe in a child process. EngineError with the last line of its stderr when it fails."""
    return MemoryProbe(**_probe(str(artifact), str(options.prompt_tokens), str(options.output_tokens)))


def probe_imports() -> int:
    """Measure the peak bytes of a process that imports the runtime and loads nothing. EngineError as probe_in_child."""
    return _probe()["imported"].peak_bytes


def _probe(*arguments: str) -> dict[str, ProcessMemory]:
    command = [sys.executable, "-P", "-m", "ingot.validation.memory_probe", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:] or ["no message"]
        what = f"{arguments[0]}: the memory probe" if arguments else "the memory probe"
        raise EngineError(f"{what} ended with code {done.returncode}: {words[0]}")
    return {name: ProcessMemory(**stage) for name, stage in json.loads(done.stdout.splitlines()[-1]).items()}


def measure_memory(
    candidate: Path,
    baseline: Path,
    options: MemoryOptions,
    prober: Prober = probe_in_child,
) -> MemoryResult:
    """Probe both alternately, `options.probes` times each."""
    stage = Stage("memory", 2 * options.probes)
    probes: tuple[list[MemoryProbe], list[MemoryProbe]] = ([], [])
    for _ in range(options.probes):
        for artifact, taken in zip((candidate, baseline), probes, strict=True):
            taken.append(prober(artifact, options))
            stage.advance()
    return MemoryResult(candidate=tuple(probes[0]), baseline=tuple(probes[1]))


def memory_metrics(result: MemoryResult) -> list[Measured]:
    """The metric peak_memory_ratio: peak of the candidate over peak of the baseline, paired by probe."""
    candidate, baseline = peaks(result.candidate), peaks(result.baseline)
    return [
        Measured(
            metric="peak_memory_ratio",
            estimate=ratio_interval(np.log(np.divide(candidate, baseline))),
            baseline=float(np.median(baseline)),
            candidate=float(np.median(candidate)),
            unit="bytes",
            sample_unit="memory probes",
            sample_size=len(candidate),
        )
    ]


class _Generated(Protocol):
    """A probe after generating."""

    @property
    def generated(self) -> ProcessMemory: ...


def peaks(probes: Sequence[_Generated]) -> list[int]:
    """Peak bytes of every probe, GPU memory included."""
    return [probe.generated.peak_bytes + probe.generated.device_bytes for probe in probes]
