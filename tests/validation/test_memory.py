"""Memory probes: parsing, alternation, the paired ratio and failures."""

import json
import subprocess
from dataclasses import asdict
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


def test_a_probe_is_read_from_the_last_line_of_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stages = {
        name: asdict(getattr(_probe(peak), name)) for name, peak in (("imported", 2), ("loaded", 4), ("generated", 8))
    }
    given: list[str] = []

    def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        given[:] = command
        return subprocess.CompletedProcess(command, 0, f"a note\n{json.dumps(stages)}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    probe = probe_in_child(tmp_path, MemoryOptions(prompt_tokens=7, output_tokens=5))
    assert [each.peak_bytes for each in (probe.imported, probe.loaded, probe.generated)] == [2, 4, 8]
    assert given[-3:] == [str(tmp_path), "7", "5"]
