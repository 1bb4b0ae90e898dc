"""A held artifact can be opened again after its folder was replaced or deleted, but not after a change in place."""

import gc
import os
import shutil
from pathlib import Path

import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.open_files import HeldArtifact
from ingot.errors import ArtifactError
from tests.conftest import BuildArtifact

WEIGHTS = "program/weights.safetensors"


@pytest.fixture
def artifact(build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path) -> Artifact:
    built = build_unmeasured("int8-cpu", two_layers)
    return open_artifact(shutil.copytree(built.path, tmp_path / "artifact"))


def test_an_artifact_that_is_still_there_is_opened_in_its_folder(artifact: Artifact) -> None:
    held = HeldArtifact(artifact)
    assert held.reopened() is artifact
    (artifact.path / WEIGHTS).touch()
    assert held.reopened().path == artifact.path


def test_one_whose_folder_is_gone_or_another_is_opened_by_its_open_files(artifact: Artifact) -> None:
    held = HeldArtifact(artifact)
    content = {name: (artifact.path / name).read_bytes() for name in artifact.manifest.files}
    (artifact.path / WEIGHTS).unlink()
    (artifact.path / WEIGHTS).write_bytes(b"another")
    for _ in range(2):
        found = held.reopened()
        assert found.path != artifact.path
        assert found.manifest == artifact.manifest
        assert {name: found.file(name).read_bytes() for name in found.manifest.files} == content
        shutil.rmtree(artifact.path, ignore_errors=True)


def test_one_that_was_written_to_in_place_is_refused(artifact: Artifact) -> None:
    held = HeldArtifact(artifact)
    with (artifact.path / WEIGHTS).open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\x99")
    with pytest.raises(ArtifactError, match="its SHA-256 is not the manifest's"):
        held.reopened()


def test_open_files_and_links_go_with_the_object(artifact: Artifact) -> None:
    before = len(os.listdir("/proc/self/fd"))
    held = HeldArtifact(artifact)
    assert len(os.listdir("/proc/self/fd")) == before + len(artifact.manifest.files)
    shutil.rmtree(artifact.path)
    links = held.reopened().path
    del held
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not links.exists()


def test_without_descriptors_the_path_is_left(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        held = HeldArtifact(artifact)
    assert held.reopened() is artifact
    shutil.rmtree(artifact.path)
    with pytest.raises(ArtifactError, match="no such folder"):
        held.reopened()
