"""Sealing and opening: an artifact is whole, verified and reproducible, or it is refused by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import (
    SCHEMA_VERSION,
    ArtifactWriter,
    KVGeometry,
    Manifest,
    ModelFacts,
    Program,
    SegmentStep,
    ValueFacts,
    open_artifact,
)
from ingot.errors import ArtifactError, BuildError

MODEL = ModelFacts(family="llama", num_layers=1, hidden_size=8, vocab_size=16, context_tokens=32, num_parameters=100)
KV = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8)
PROGRAM = Program(
    steps=(SegmentStep(file="program/segment-000.onnx", inputs=("input_ids",), outputs=("logits",)),),
    values={"logits": ValueFacts(dtype="float32", rows="logits", columns=16)},
)


GATE = {"name": "g", "verdict": "PASS", "bound": "max"}


def seal(target: Path, weights: bytes = b"weights", evidence: str = "fine") -> Path:
    with ArtifactWriter(target) as writer:
        for name, data in {
            "program/segment-000.onnx": b"graph",
            "program/weights.safetensors": weights,
            "evidence/report.md": evidence.encode(),
        }.items():
            (writer.path / name).parent.mkdir(exist_ok=True)
            (writer.path / name).write_bytes(data)
        describe(writer)
        return writer.seal()


def describe(writer: ArtifactWriter) -> Manifest:
    return writer.describe(name="t", model=MODEL, kv=KV, target="cpu", program=PROGRAM, versions={"ingot": "1"})


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "manifest.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def test_a_sealed_artifact_opens_with_what_was_written(tmp_path: Path) -> None:
    artifact = open_artifact(seal(tmp_path / "a"))
    assert artifact.manifest.model == MODEL
    assert artifact.manifest.program == PROGRAM
    assert artifact.file("program/segment-000.onnx").read_bytes() == b"graph"
    assert artifact.total_bytes == len(b"graph" + b"weights" + b"fine")


def test_equal_contents_have_equal_identity_and_evidence_does_not_count(tmp_path: Path) -> None:
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
    with pytest.raises(ArtifactError, match=r"the file program/weights\.safetensors is missing"):
        open_artifact(tmp_path / "a")


def test_a_truncated_file_is_refused_even_without_digests(tmp_path: Path) -> None:
    (seal(tmp_path / "a") / "program/weights.safetensors").write_bytes(b"wei")
    with pytest.raises(ArtifactError, match="has 3 bytes, the manifest says 7"):
        open_artifact(tmp_path / "a", verify=False)


@pytest.mark.parametrize("escape", ["../outside", "/etc/passwd", "program/../../outside", "program\\..\\x"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, escape: str) -> None:
    folder = seal(tmp_path / "a")
    (tmp_path / "outside").write_bytes(b"weights")
    edit_manifest(folder, lambda raw: raw["files"].update({escape: raw["files"]["program/weights.safetensors"]}))
    with pytest.raises(ArtifactError, match="leaves the artifact's folder"):
        open_artifact(folder)


def test_a_symlink_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    weights = folder / "program/weights.safetensors"
    weights.rename(tmp_path / "outside")
    weights.symlink_to(tmp_path / "outside")
    with pytest.raises(ArtifactError, match="leaves the artifact's folder"):
        open_artifact(folder)


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


def test_a_flipped_bit_of_the_manifest_is_refused_wherever_it_is(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    file = folder / "manifest.json"
    good = file.read_bytes()
    for bit in range(0, 8 * len(good), 61):  # every bit takes too long; 61 visits every bit of a byte
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
        {"gates": [dict.fromkeys(("measured", "low", "high", "limit"), 1.0) | GATE]},
    ],
)
def test_an_edited_name_version_or_verdict_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = seal(tmp_path / "a")
    edit_manifest(folder, lambda raw: raw.update(change))
    with pytest.raises(ArtifactError, match="its own digest does not match it"):
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


def test_leaving_without_a_seal_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ArtifactWriter(tmp_path / "a") as writer:
        (writer.path / "file").write_bytes(b"x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_cleared_and_what_it_moved_aside_comes_back(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above the kernel's largest process number
    seal(tmp_path / "a").rename(tmp_path / "moved")
    aside = tmp_path / f".ingot-build-a-{dead}-1"
    aside.mkdir()
    (tmp_path / "moved").rename(aside / "replaced")
    (tmp_path / f".ingot-build-a-{dead}-2").mkdir()
    with ArtifactWriter(tmp_path / "a"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    open_artifact(tmp_path / "a")


def test_a_living_build_beside_is_left_alone(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as first, ArtifactWriter(tmp_path / "a") as second:
        assert first.path.exists()
        assert second.path.exists()
        assert str(os.getpid()) in first.path.name


def test_sealing_replaces_an_artifact_whole(tmp_path: Path) -> None:
    seal(tmp_path / "a", weights=b"old")
    seal(tmp_path / "a", weights=b"new!")
    assert open_artifact(tmp_path / "a").file("program/weights.safetensors").read_bytes() == b"new!"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_is_no_artifact_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(BuildError, match="exists and is not an artifact"):
        ArtifactWriter(tmp_path / "thesis")
