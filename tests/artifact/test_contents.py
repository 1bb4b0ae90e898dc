"""An artifact's folder holds the listed files and nothing else, and nothing else is opened."""

import os
from pathlib import Path

import pytest

from ingot.artifact import ArtifactWriter, Program, open_artifact
from ingot.errors import ArtifactError
from tests.artifact.tiny_artifact import describe, reseal, seal
from tests.each_case import each_case

UNLISTED = {
    "tokenizer/chat_template.jinja": "build again",
    "evidence/chat_template.jinja": "build again",
    ".DS_Store": "a file manager made it: delete it",
    "program/Thumbs.db": "a file manager made it: delete it",
    "program/._weights.safetensors": "a file manager made it: delete it",
    "manifest.json~": "an editor left it: delete it",
    ".manifest.json.swp": "an editor left it: delete it",
    "recipe.yaml.bak": "an editor left it: delete it",
    ".gitattributes": "from git: delete it",
    "a.rejected": "a gate rejected: move it out",
    "notes.txt": "delete it, or build the artifact again",
    "program/cubins-sm90.safetensors": "delete it, or build the artifact again",
}


@each_case("verify", [True, False], ids=["verified", "no-verify"])
@each_case("name", UNLISTED)
def test_an_unlisted_file_is_refused_by_name_with_what_to_do(tmp_path: Path, name: str, verify: bool) -> None:
    folder = seal(tmp_path / "a")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    listed = name if "/" not in name or (folder / name).parent.name != "tokenizer" else "tokenizer"
    with pytest.raises(ArtifactError, match=f"holds '{listed}', which the manifest does not list; ") as caught:
        open_artifact(folder, verify)
    if listed == name:
        assert UNLISTED[name] in str(caught.value)


@pytest.mark.parametrize("verify", [True, False])
def test_an_unlisted_folder_is_refused_even_if_it_is_empty(tmp_path: Path, verify: bool) -> None:
    folder = seal(tmp_path / "a")
    (folder / "program/more").mkdir()
    with pytest.raises(ArtifactError, match="holds 'program/more', which the manifest does not list"):
        open_artifact(folder, verify)


def test_an_unlisted_link_is_refused(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    (folder / "evidence/link").symlink_to("report.md")
    with pytest.raises(ArtifactError, match="holds 'evidence/link', which the manifest does not list"):
        open_artifact(folder)


def test_many_unlisted_files_are_counted(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    for number in range(9):
        (folder / f"file-{number}").touch()
    with pytest.raises(ArtifactError, match="holds 'file-0', 'file-1', 'file-2' and 6 more, which the manifest"):
        open_artifact(folder)


def test_a_pipe_in_the_place_of_a_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    (folder / "evidence/report.md").unlink()
    os.mkfifo(folder / "evidence/report.md")
    with pytest.raises(ArtifactError, match=r"evidence/report\.md is not a regular file"):
        open_artifact(folder)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = seal(tmp_path / "a")
    (folder / "evidence/report.md").unlink()
    (folder / "evidence/report.md").mkdir()
    with pytest.raises(ArtifactError, match=r"evidence/report\.md is a folder, but the manifest needs a file"):
        open_artifact(folder)


@each_case(
    "name",
    [
        "a\0b",
        "\ud800",
        "x" * 256,
        "x/" * 512 + "x",
        "a//b",
        "./a",
        "a/",
        "",
        ".",
        "manifest.json",
        "program",
        "program/weights.safetensors/x",
    ],
)
def test_a_listed_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    folder = seal(tmp_path / "a")
    reseal(folder, lambda raw: raw["files"].update({name: raw["files"]["evidence/report.md"]}))
    for verify in (True, False):
        with pytest.raises(ArtifactError, match=r"lists .*, which cannot be a file of an artifact|Invalid JSON"):
            open_artifact(folder, verify)


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_changes_after_it_was_verified_is_refused_when_it_is_used(tmp_path: Path, verify: bool) -> None:
    opened = open_artifact(seal(tmp_path / "a"), verify)
    file = opened.file("program/weights.safetensors")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(b"w31ghts")
    os.utime(file, ns=times)
    with pytest.raises(ArtifactError, match="was replaced or written to after it was verified"):
        opened.file("program/weights.safetensors")
    assert opened.file("program/segment-000.onnx").read_bytes() == b"graph"


def test_a_file_that_is_replaced_by_a_link_after_it_was_verified_is_refused(tmp_path: Path) -> None:
    opened = open_artifact(seal(tmp_path / "a"))
    file = opened.file("evidence/report.md")
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(ArtifactError, match="was replaced or written to"):
        opened.files_below("evidence")


def test_the_evidence_of_a_rejected_build_is_not_taken_for_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "a.rejected/evidence").mkdir(parents=True)
    with pytest.raises(
        ArtifactError, match=r"it is the evidence of a build that a gate rejected; see evidence/report\.md"
    ):
        open_artifact(tmp_path / "a.rejected")


def test_files_below_a_folder_are_found_by_their_names_in_it(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as writer:
        for name in ("tokenizer/tokenizer.json", "tokenizer-2/other", "tokenizer.json"):
            (writer.path / name).parent.mkdir(exist_ok=True)
            (writer.path / name).touch()
        describe(writer, Program())
        artifact = open_artifact(writer.seal())
    assert artifact.files_below("tokenizer") == {"tokenizer.json": tmp_path / "a/tokenizer/tokenizer.json"}
