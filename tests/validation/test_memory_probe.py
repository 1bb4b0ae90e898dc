"""A process reads its own memory from /proc/self/status."""

from pathlib import Path

from ingot.validation.memory import probe_in_child
from ingot.validation.memory_probe import ProcessMemory, parse_status, process_memory
from ingot.validation.options import MemoryOptions
from tests.conftest import BuildArtifact

STATUS = """Name:\tpython
VmHWM:\t  200 kB
VmRSS:\t  150 kB
RssAnon:\t  100 kB
RssFile:\t   50 kB
""".splitlines()


def test_a_process_of_its_own_measures_an_artifact_stage_by_stage(
    build_unmeasured: BuildArtifact, two_layers: Path
) -> None:
    artifact = build_unmeasured("int4-cpu", two_layers)
    probe = probe_in_child(artifact.path, MemoryOptions(prompt_tokens=8, output_tokens=2))
    assert 0 < probe.imported.peak_bytes < probe.loaded.peak_bytes <= probe.generated.peak_bytes


def test_status_lines_become_bytes() -> None:
    assert parse_status(STATUS) == ProcessMemory(204_800, 153_600, 102_400, 51_200)


def test_the_peak_is_at_least_the_resident_memory() -> None:
    memory = process_memory()
    assert memory.peak_bytes >= memory.resident_bytes > 1_000_000
