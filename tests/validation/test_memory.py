"""Memory probes: parsing, alternation, the paired ratio and failures."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import EngineError
from ingot.validation.memory import MemoryProbe, measure_memory, memory_metrics, probe_in_child
from ingot.validation.memory_probe import ProcessMemory
from ingot.validation.options import MemoryOptions


def _probe(peak: int) -> MemoryProbe:
    taken = ProcessMemory(peak_bytes=peak, resident_bytes=peak, private_bytes=peak // 2, mapped_bytes=peak // 2)
    return MemoryProbe(taken, taken, taken)


def test_probes_alternate_and_the_ratio_is_paired() -> None:
    probed: list[str] = []

    def prober(artifact: Path, options: MemoryOptions) -> MemoryProbe:
        probed.append(artifact.name)
        return _probe({"candidate": 300, "baseline": 600}[artifact.name])

    result = measure_memory(Path("candidate"), Path("baseline"), MemoryOptions(probes=2), prober=prober)
    [measured] = memory_metrics(result)
    assert probed == ["candidate", "baseline"] * 2
    assert measured.estimate.value == pytest.approx(0.5)
    assert (measured.baseline, measured.candidate) == (600, 300)


def test_a_failed_probe_is_an_engine_error_with_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nMemoryError: too much\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(EngineError, match="probe ended with code 1: MemoryError: too much"):
        probe_in_child(tmp_path, MemoryOptions())
