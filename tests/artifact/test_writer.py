"""The staging folder: whose it is, where it goes, and what is read of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from ingot.artifact import ArtifactWriter, open_artifact, writer
from ingot.artifact.reader import file_sha256
from tests.artifact.test_reader import describe, seal


@pytest.fixture
def dead_process() -> int:
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_killed_build_of_another_name_is_left_alone(tmp_path: Path, dead_process: int) -> None:
    """`demo-int4` and `demo-7` are other artifacts than `demo`, however their staging folders are called."""
    others = [tmp_path / f".ingot-build-demo-{name}-{dead_process}-abc" for name in ("int4", dead_process)]
    for folder in others:
        folder.mkdir()
    (tmp_path / f".ingot-build-demo-{dead_process}-abc").mkdir()
    seal(tmp_path / "demo")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "demo"])


def test_a_name_may_hold_what_patterns_are_made_of(tmp_path: Path, dead_process: int) -> None:
    (tmp_path / f".ingot-build-a[1]*-{dead_process}-abc").mkdir()
    seal(tmp_path / "a[1]*")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a[1]*"]


@pytest.mark.parametrize("stands", [True, False])
def test_a_target_that_is_a_link_stays_one(tmp_path: Path, stands: bool) -> None:
    if stands:
        seal(tmp_path / "disk/real", weights=b"old")
    (tmp_path / "link").symlink_to("disk/real")
    open_artifact(seal(tmp_path / "link", weights=b"new"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk/real/program/weights.safetensors").read_bytes() == b"new"
    assert [entry.name for entry in (tmp_path / "disk").iterdir()] == ["real"]


def test_files_that_did_not_change_are_digested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[str] = []

    def digest(file: Path) -> str:
        digested.append(file.name)
        return file_sha256(file)

    monkeypatch.setattr(writer, "file_sha256", digest)
    with ArtifactWriter(tmp_path / "a") as staged:
        for name in ("same.txt", "longer.txt"):
            (staged.path / name).write_text(name)
        describe(staged)
        (staged.path / "longer.txt").write_text("another text")
        (staged.path / "new.txt").write_text("new")
        manifest = describe(staged)
        staged.seal()
    assert digested == ["longer.txt", "same.txt", "longer.txt", "new.txt"]
    assert {name: entry.sha256 for name, entry in manifest.files.items()} == {
        name: file_sha256(tmp_path / "a" / name) for name in ("longer.txt", "new.txt", "same.txt")
    }
    open_artifact(tmp_path / "a")
