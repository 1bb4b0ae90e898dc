"""Packed artifacts share large files, and are what they were when they are unpacked."""

from pathlib import Path

import pytest
from benchmarks.gpu.programs import packing
from benchmarks.gpu.programs.packing import pack_artifact, remove_unused, unpack_artifact

from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES

LLAMA = FIXTURES / "checkpoints" / "llama"


def test_large_files_are_stored_once_and_removed_with_the_last_artifact_that_has_them(
    build_unmeasured: BuildArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = build_unmeasured("fp32-cpu", LLAMA)
    monkeypatch.setattr(packing, "LARGE_BYTES", 20_000)
    large = {entry.sha256 for entry in artifact.manifest.files.values() if entry.bytes >= 20_000}
    assert large
    packed = tmp_path / "packed"
    for name in ("one.zip", "other.zip"):
        pack_artifact(artifact, packed / name)
    assert {file.stem for file in (packed / "shared").iterdir()} == large
    found = unpack_artifact(packed / "other.zip", tmp_path / "found")
    for name in artifact.manifest.files:
        assert (found.path / name).read_bytes() == (artifact.path / name).read_bytes()

    (packed / "one.zip").unlink()
    remove_unused(packed)
    assert {file.stem for file in (packed / "shared").iterdir()} == large
    (packed / "other.zip").unlink()
    remove_unused(packed)
    assert [*(packed / "shared").iterdir()] == []
