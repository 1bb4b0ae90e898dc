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
from ingot.runtime.kv.disk.block_file import file_name
from ingot.runtime.kv.disk.folder import MARKER, StoreFolder
from tests.runtime.kv.disk.stored_blocks import content_of

KEY = content_of(1).hash
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


def add(folder: StoreFolder, key: bytes = KEY, data: bytes = b"data") -> None:
    with folder.adding(key) as file:
        os.write(file, data)


def test_a_new_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "kv"
    with opened(path) as folder:
        add(folder)
    assert path.stat().st_mode & 0o777 == 0o700
    assert json.loads((path / MARKER).read_text()) == {"format": "ingot-kv", "version": 1}
    assert sorted(entry.name for entry in path.iterdir()) == [*"0123456789abcdef", MARKER, "tmp"]
    assert all(entry.stat().st_mode & 0o077 == 0 for entry in path.rglob("*"))


def test_files_are_found_when_it_is_opened_again(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        add(folder)
    with opened(tmp_path) as folder:
        assert [(file.key, file.num_bytes) for file in folder.listing()] == [(KEY, 4)]
        found = folder.exists(KEY)
        assert found
        assert found.num_bytes == 4


def test_a_fresh_file_system_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    with opened(tmp_path):
        assert (tmp_path / MARKER).exists()


def test_the_path_may_lead_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with opened(tmp_path / "link") as folder:
        add(folder)
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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other", "version": 1}', '{"format": "ingot-kv"}', "\xff"])
def test_a_marker_that_is_not_one_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text, "latin-1")
    assert "is not the marker of a KV folder" in refused(tmp_path)


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / MARKER).write_text('{"format": "ingot-kv", "version": 2}')
    assert "has format version 2; this Ingot reads and writes version 1" in refused(tmp_path)


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
    (tmp_path / "kv" / "3").rmdir()
    (tmp_path / "kv" / "3").symlink_to(tmp_path / "elsewhere")
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
    with mounted(tmp_path / "other", "nr_inodes=20,mode=0700"):
        with opened(tmp_path / "other"):
            (tmp_path / "other" / "more").touch()
        with opened(tmp_path / "other") as folder, pytest.raises(OSError, match="No space left"):
            add(folder)


def test_a_refused_folder_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    before = len(os.listdir("/proc/self/fd"))
    refused(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_is_not_visible_before_it_is_whole(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        with folder.adding(KEY) as file:
            os.write(file, b"half")
            assert folder.exists(KEY) is None
            assert list(folder.listing()) == []
        assert folder.exists(KEY)


def test_a_failed_addition_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        with pytest.raises(KeyboardInterrupt), folder.adding(KEY):
            raise KeyboardInterrupt
        assert folder.exists(KEY) is None
        assert not list((tmp_path / "tmp").iterdir())


def test_temporary_files_of_the_dead_are_removed_and_those_of_the_living_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        (tmp_path / "tmp" / "dead").write_text("half")
        with folder.adding(KEY), opened(tmp_path) as another:
            assert another.clean() == 1
            assert len(list((tmp_path / "tmp").iterdir())) == 1
        assert folder.exists(KEY)


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
        add(folder)
        assert folder.exists(KEY)


def test_files_with_other_names_are_neither_listed_nor_touched(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        name = file_name(KEY)
        wrong = "f" if name[0] != "f" else "e"
        for path in (tmp_path / name[0] / "notes.txt", tmp_path / wrong / name):
            path.write_text("mine")
        (tmp_path / name[0] / name).symlink_to(tmp_path / MARKER)
        assert list(folder.listing()) == []
        assert folder.exists(KEY) is None
        with pytest.raises(OSError, match="symbolic links"), folder.reading(KEY):
            pass


def test_a_damaged_file_that_was_replaced_meanwhile_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        add(folder, data=b"bad")
        with folder.reading(KEY) as file:
            judged = os.fstat(file)
            add(folder, data=b"good")
        folder.remove_damaged(KEY, judged)
        assert (tmp_path / file_name(KEY)[0] / file_name(KEY)).read_bytes() == b"good"
        with folder.reading(KEY) as file:
            folder.remove_damaged(KEY, os.fstat(file))
        assert folder.exists(KEY) is None
        assert not list((tmp_path / "tmp").iterdir())


def test_a_named_pipe_does_not_block_a_reader(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        os.mkfifo(tmp_path / file_name(KEY)[0] / file_name(KEY))
        with folder.reading(KEY):
            assert folder.exists(KEY) is None


def test_removing_twice_is_harmless(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        add(folder)
        assert folder.remove(KEY)
        assert not folder.remove(KEY)


def test_a_deleted_folder_is_noticed(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as folder:
        assert not folder.is_deleted
        shutil.rmtree(tmp_path / "kv")
        assert folder.is_deleted
        with pytest.raises(FileNotFoundError):
            add(folder)
