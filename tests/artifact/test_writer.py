"""Sealing: the staging folder, what it replaces, and what a killed build leaves."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.artifact import (
    ArtifactWriter,
    Program,
    open_artifact,
    writer,
)
from ingot.artifact.reader import file_sha256
from ingot.errors import BuildError
from tests.artifact.tiny_artifact import describe, seal


@pytest.fixture
def dead_process() -> int:
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_killed_build_of_another_name_is_left_alone(tmp_path: Path, dead_process: int) -> None:
    """Staging folders of `demo-int4` and `demo-7` begin like those of `demo`, but belong to other artifacts."""
    others = [tmp_path / f".ingot-build-demo-{name}-{dead_process}-abc" for name in ("int4", dead_process)]
    for folder in others:
        folder.mkdir()
    (tmp_path / f".ingot-build-demo-{dead_process}-abc").mkdir()
    seal(tmp_path / "demo")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "demo"])


def test_a_name_may_contain_characters_of_patterns(tmp_path: Path, dead_process: int) -> None:
    (tmp_path / f".ingot-build-a[1]*-{dead_process}-abc").mkdir()
    seal(tmp_path / "a[1]*")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a[1]*"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_target_that_is_a_link_stays_one(tmp_path: Path, exists: bool) -> None:
    if exists:
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
        describe(staged, Program())
        (staged.path / "longer.txt").write_text("another text")
        (staged.path / "new.txt").write_text("new")
        manifest = describe(staged, Program())
        staged.seal()
    assert digested == ["longer.txt", "same.txt", "longer.txt", "new.txt"]
    assert {name: entry.sha256 for name, entry in manifest.files.items()} == {
        name: file_sha256(tmp_path / "a" / name) for name in ("longer.txt", "new.txt", "same.txt")
    }
    open_artifact(tmp_path / "a")


def test_an_error_before_the_seal_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ArtifactWriter(tmp_path / "a") as writer:
        (writer.path / "file").write_bytes(b"x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_after_a_killed_build_its_folders_are_removed_and_the_older_artifact_is_restored(tmp_path: Path) -> None:
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


def test_the_staging_folder_of_a_running_build_is_kept(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as first, ArtifactWriter(tmp_path / "a") as second:
        assert first.path.exists()
        assert second.path.exists()
        assert str(os.getpid()) in first.path.name


def test_sealing_replaces_an_older_artifact(tmp_path: Path) -> None:
    seal(tmp_path / "a", weights=b"old")
    seal(tmp_path / "a", weights=b"new!")
    assert open_artifact(tmp_path / "a").file("program/weights.safetensors").read_bytes() == b"new!"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_is_not_an_artifact_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(BuildError, match="exists and is not an artifact"):
        ArtifactWriter(tmp_path / "thesis")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            errno.ENOSPC,
            r"no disk space for the weights \(No space left on device\): 7 bytes are needed, ",
        ),
        (errno.EDQUOT, r"no disk space for the weights \(Disk quota exceeded\)"),
        (
            errno.EFBIG,
            r"7 bytes are needed for the weights, more than this process .*ulimit -f",
        ),
    ],
)
def test_a_full_disk_and_a_limit_of_file_sizes_are_two_messages(tmp_path: Path, number: int, message: str) -> None:
    with pytest.raises(BuildError, match=message), writer.explain_full_disk(tmp_path / "a", "the weights", 7):
        raise OSError(number, os.strerror(number))


def test_another_error_of_writing_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), writer.explain_full_disk(tmp_path / "a", "the weights", 7):
        raise PermissionError
