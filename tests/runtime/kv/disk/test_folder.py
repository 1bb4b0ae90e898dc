"""Which folders a disk store opens, and what it leaves alone in them."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ingot.errors import UsageError
from ingot.runtime.kv.disk.folder import MARKER, DiskSegmentFile, StoreFolder
from ingot.runtime.kv.disk.segment import DiskSegment, Geometry, new_name
from tests.each_case import each_case

GEOMETRY = Geometry(8192, 3)
NOBODY = 65534


@contextmanager
def opened(path: Path) -> Iterator[StoreFolder]:
    folder = StoreFolder(path)
    try:
        yield folder
    finally:
        folder.close()


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that another user can reach, which pytest's own are not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@contextmanager
def another_user() -> Iterator[None]:
    """Run as a user without rights, where the tests run as root."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """A small file system in memory; needs root."""
    path.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path]).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_new_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "kv"
    with opened(path) as folder:
        folder.add_segment(GEOMETRY)
        os.close(folder.journal())
    assert path.stat().st_mode & 0o777 == 0o700
    assert json.loads((path / MARKER).read_text()) == {"format": "ingot-kv", "version": 2}
    assert sorted(entry.name for entry in path.iterdir()) == [MARKER, "journal", "segments", "tmp"]
    assert all(entry.stat().st_mode & 0o077 == 0 for entry in path.rglob("*"))


def test_segments_are_found_when_it_is_opened_again(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        name = folder.add_segment(GEOMETRY).name
    with opened(tmp_path) as folder:
        segment = folder.segment(name)
        assert folder.listing() == [DiskSegmentFile(name, GEOMETRY, 4096 + 3 * 8192, segment.inode)]
        assert segment.geometry == GEOMETRY


def test_the_space_of_a_segment_is_allocated_when_it_is_added(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        segment = folder.add_segment(Geometry(8192, 100))
        assert os.fstat(segment.file).st_blocks * 512 >= segment.geometry.file_bytes


def test_a_fresh_file_system_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    with opened(tmp_path):
        assert (tmp_path / MARKER).exists()


def test_the_path_may_lead_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with opened(tmp_path / "link") as folder:
        folder.add_segment(GEOMETRY)
    assert (tmp_path / "real" / MARKER).exists()


def refused(path: Path) -> str:
    before = sorted(str(entry) for entry in path.rglob("*")) if os.path.isdir(path) else None
    with pytest.raises(UsageError) as caught:
        StoreFolder(path)
    if before is not None:
        assert sorted(str(entry) for entry in path.rglob("*")) == before
    return str(caught.value)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert "holds other files ('thesis.txt') and no ingot-kv.json" in refused(tmp_path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refused(tmp_path / "file")
    assert "is not a folder" in refused(tmp_path / "file" / "below")


@each_case("text", ["", "{", "[]", '{"format": "other", "version": 1}', '{"format": "ingot-kv"}', "\xff"])
def test_a_marker_that_is_not_one_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text, "latin-1")
    assert "is not the marker of a KV folder" in refused(tmp_path)


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / MARKER).write_text('{"format": "ingot-kv", "version": 1}')
    assert "has format version 1; this Ingot reads and writes version 2; choose another folder, or delete" in refused(
        tmp_path
    )


def test_a_folder_that_every_user_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "plant KV blocks; run chmod 700" in refused(tmp_path)


def test_a_folder_without_permission_is_refused(public: Path) -> None:
    with opened(public / "kv"):
        pass
    (public / "kv").chmod(0)
    with another_user():
        assert "no permission" in refused(public / "kv")
        assert "no permission" in refused(public / "kv" / "below")
        if not os.getuid():
            assert "no permission" in refused(public / "new")
    (public / "kv").chmod(0o700)


def test_symbolic_links_in_the_place_of_its_folders_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "kv"):
        pass
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kv" / "segments").rmdir()
    (tmp_path / "kv" / "segments").symlink_to(tmp_path / "elsewhere")
    assert "cannot keep KV blocks in" in refused(tmp_path / "kv")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with mounted(path, "size=1m,mode=0700"):
        with opened(path):
            pass
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        assert "its file system is read-only" in refused(path)


def test_a_full_file_system_is_refused_unless_it_is_a_store_already(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with mounted(path, "nr_inodes=2,mode=0700"):
        (path / "lost+found").mkdir()
        assert "its file system is full" in refused(path)
    with mounted(tmp_path / "other", "nr_inodes=5,mode=0700"):
        with opened(tmp_path / "other"):
            (tmp_path / "other" / "more").touch()
        with opened(tmp_path / "other") as folder, pytest.raises(OSError, match="No space left"):
            folder.add_segment(GEOMETRY)


def test_a_refused_folder_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    before = len(os.listdir("/proc/self/fd"))
    refused(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_segment_is_not_visible_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as folder:
        fallocate, seen = os.posix_fallocate, list[object]()

        def allocate(file: int, offset: int, size: int) -> None:
            seen.extend(folder.listing())
            fallocate(file, offset, size)

        monkeypatch.setattr(os, "posix_fallocate", allocate)
        folder.add_segment(GEOMETRY)
        assert seen == []
        assert len(folder.listing()) == 1


@pytest.mark.parametrize("function", ["posix_fallocate", "rename"])
def test_a_segment_that_cannot_be_added_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path) as folder:
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, function, fail)
        with pytest.raises(KeyboardInterrupt):
            folder.add_segment(GEOMETRY)
        assert folder.listing() == []
        assert not list((tmp_path / "tmp").iterdir())
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_system_that_allocates_nothing_gets_a_sparse_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with opened(tmp_path) as folder:
        assert os.fstat(folder.add_segment(GEOMETRY).file).st_size == GEOMETRY.file_bytes


def test_temporary_files_of_the_dead_are_removed_and_those_of_the_living_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        for name in ("dead", "alive"):
            (tmp_path / "tmp" / name).write_text("half")
        with (tmp_path / "tmp" / "alive").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert folder.clean() == 1
        assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["alive"]


def test_without_locks_only_old_temporary_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    with opened(tmp_path) as folder:
        monkeypatch.setattr(fcntl, "flock", no_locks)
        old, new = tmp_path / "tmp" / "old", tmp_path / "tmp" / "new"
        old.touch()
        new.touch()
        os.utime(old, (0, 0))
        assert folder.clean() == 1
        assert new.exists()
        assert folder.add_segment(GEOMETRY).lock()


def test_files_with_other_names_and_links_are_not_listed(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        (tmp_path / "segments" / "notes.txt").write_text("mine")
        (tmp_path / "segments" / new_name(GEOMETRY)).symlink_to(tmp_path / MARKER)
        (tmp_path / "segments" / new_name(GEOMETRY)).mkdir()
        os.mkfifo(tmp_path / "segments" / new_name(GEOMETRY))
        assert folder.listing() == []


def test_a_link_is_not_opened(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        name = new_name(GEOMETRY)
        (tmp_path / "segments" / name).symlink_to(tmp_path / MARKER)
        with pytest.raises(OSError, match="symbolic links"):
            folder.segment(name)


def test_removing_twice_is_harmless(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        segment = folder.add_segment(GEOMETRY)
        assert not segment.is_removed
        assert folder.remove_segment(segment.name)
        assert not folder.remove_segment(segment.name)
        assert segment.is_removed


def test_one_process_at_a_time_adds_segments_and_one_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    with opened(tmp_path) as folder, opened(tmp_path) as other, folder.locked(), other.locked():
        assert isinstance(other.add_segment(GEOMETRY), DiskSegment)


def test_a_deleted_folder_is_noticed(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as folder:
        folder.check()
        shutil.rmtree(tmp_path / "kv")
        assert folder.is_deleted
        with pytest.raises(FileNotFoundError, match="the folder was deleted"):
            folder.check()
        with pytest.raises(FileNotFoundError):
            folder.add_segment(GEOMETRY)
