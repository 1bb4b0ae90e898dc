"""An artifact is verified when it is opened; a damaged or edited one is refused with the file."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import (
    SCHEMA_VERSION,
    open_artifact,
    reader,
)
from ingot.errors import ArtifactError, UsageError
from tests.artifact.tiny_artifact import MODEL, PROGRAM, reseal, seal
from tests.each_case import each_case

GATE = {"name": "g", "verdict": "PASS", "bound": "max"}


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "manifest.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def test_a_sealed_artifact_opens_with_its_facts_and_files(tmp_path: Path) -> None:
    artifact = open_artifact(seal(tmp_path / "a"))
    assert artifact.manifest.model == MODEL
    assert artifact.manifest.program == PROGRAM
    assert artifact.file("program/segment-000.onnx").read_bytes() == b"graph"
    assert artifact.total_bytes == len(b"graph" + b"weights" + b"fine")


def test_identity_covers_the_contents_but_not_the_evidence(tmp_path: Path) -> None:
    first, second = (open_artifact(seal(tmp_path / name, evidence=name)).manifest for name in ("first", "second"))
    assert first.identity == second.identity
    assert first.evidence != second.evidence


def test_other_weights_have_another_identity(tmp_path: Path) -> None:
    first, second = (seal(tmp_path / name, weights=name.encode()) for name in ("a", "b"))
    assert open_artifact(first).manifest.identity != open_artifact(second).manifest.identity


def test_one_flipped_bit_is_refused_with_the_file_named(tmp_path: Path) -> None:
    file = seal(tmp_path / "a") / "program/weights.safetensors"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"weights\.safetensors: its SHA-256 is not the manifest's"):
        open_artifact(tmp_path / "a")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    (seal(tmp_path / "a") / "program/weights.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"the file 'program/weights\.safetensors' is missing"):
        open_artifact(tmp_path / "a")


def test_a_file_that_the_disk_does_not_give_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    folder = seal(tmp_path / "a")
    monkeypatch.setattr(reader, "file_sha256", fail)
    with pytest.raises(ArtifactError, match=r"a/.*: cannot be read: Input/output error; copy the artifact again"):
        open_artifact(folder)


def test_a_file_that_was_deleted_since_it_was_opened_is_named(tmp_path: Path) -> None:
    artifact = open_artifact(seal(tmp_path / "a"))
    (artifact.path / "program/segment-000.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"segment-000.onnx: cannot be read: No such file .*; copy the artifact"):
        artifact.file("program/segment-000.onnx")


def test_a_truncated_file_is_refused_even_without_digests(tmp_path: Path) -> None:
    (seal(tmp_path / "a") / "program/weights.safetensors").write_bytes(b"wei")
    with pytest.raises(ArtifactError, match="has 3 bytes, the manifest says 7; the copy is incomplete"):
        open_artifact(tmp_path / "a", verify=False)


def test_a_file_that_is_too_long_is_not_called_an_incomplete_copy(tmp_path: Path) -> None:
    (seal(tmp_path / "a") / "program/weights.safetensors").write_bytes(b"weights!")
    with pytest.raises(ArtifactError, match="has 8 bytes, the manifest says 7; the file was changed or damaged"):
        open_artifact(tmp_path / "a", verify=False)


@pytest.mark.parametrize("path", [5, None])
def test_what_is_not_a_path_is_refused_as_a_mistake_of_the_caller(path: Any) -> None:
    with pytest.raises(UsageError, match=f"the artifact is {path}; it must be the path of its folder"):
        open_artifact(path)


@pytest.mark.parametrize("escape", ["../outside", "/etc/passwd", "program/../../outside", "program\\..\\x"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, escape: str) -> None:
    folder = seal(tmp_path / "a")
    (tmp_path / "outside").write_bytes(b"weights")
    edit_manifest(folder, lambda raw: raw["files"].update({escape: raw["files"]["program/weights.safetensors"]}))
    with pytest.raises(ArtifactError, match="leaves the artifact's folder"):
        open_artifact(folder)


@each_case("verify", [True, False])
@each_case("name", ["program/weights.safetensors", "program", "evidence/report.md"])
def test_a_symbolic_link_is_refused_wherever_it_points(tmp_path: Path, name: str, verify: bool) -> None:
    folder = seal(tmp_path / "a")
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ArtifactError, match=rf"{name} is a symbolic link.*cp -RL"):
        open_artifact(folder, verify)


def test_the_artifacts_own_folder_may_be_a_link(tmp_path: Path) -> None:
    seal(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    assert open_artifact(tmp_path / "link").file("evidence/report.md").read_text() == "fine"


def test_a_newer_schema_is_refused_with_both_versions(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    edit_manifest(folder, lambda raw: raw.update(schema_version=SCHEMA_VERSION + 1, new_key=1))
    with pytest.raises(ArtifactError, match=f"schema_version is {SCHEMA_VERSION + 1}, this Ingot reads up to"):
        open_artifact(folder)


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    edit_manifest(folder, lambda raw: raw["model"].update(context_tokens=64))
    with pytest.raises(ArtifactError, match="identity digest does not match"):
        open_artifact(folder)


def test_any_flipped_bit_of_the_manifest_is_refused(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    file = folder / "manifest.json"
    good = file.read_bytes()
    for bit in range(0, 8 * len(good), 61):  # every bit would take too long; steps of 61 reach each bit of a byte
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(ArtifactError):
            open_artifact(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "u"},
        {"versions": {"ingot": "2"}},
        {"gates": [dict.fromkeys(("measured", "low", "high", "limit"), 1.0) | GATE], "verdict": "passed"},
    ],
)
def test_an_edited_name_version_or_verdict_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = seal(tmp_path / "a")
    edit_manifest(folder, lambda raw: raw.update(change))
    with pytest.raises(ArtifactError, match="its own digest does not match it"):
        open_artifact(folder)


def test_a_program_that_cannot_run_is_refused_though_all_digests_are_right(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    reseal(folder, lambda raw: raw.update(engine="native"))
    message = r"manifest.json: the program has no launches, but the engine is native.*; build the artifact again"
    with pytest.raises(ArtifactError, match=message):
        open_artifact(folder)


def test_an_unknown_manifest_key_is_refused(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    edit_manifest(folder, lambda raw: raw.update(extra=1))
    with pytest.raises(ArtifactError, match="extra"):
        open_artifact(folder)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "holds no manifest.json"),
        (lambda folder: (folder.mkdir(), (folder / "manifest.json").write_text("{")), "is not JSON"),
        (
            lambda folder: (folder.mkdir(), (folder / "manifest.json").write_text("[]")),
            "manifest.json: the file: .*; build the artifact again",
        ),
    ],
)
def test_a_folder_that_is_not_an_artifact_is_refused(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / "a")
    with pytest.raises(ArtifactError, match=message):
        open_artifact(tmp_path / "a")
