"""The folder of a disk store: its marker, segments and temporary files, and every operation on names in it.

Names are resolved against descriptors of the folder's own directories and symbolic links are never followed, so a
file operation cannot leave the folder, and one whose folder was deleted fails.
"""

import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ingot.errors import UsageError, shown, shown_path
from ingot.runtime.kv.disk.segment import DiskSegment, Geometry, allocate, new_name, parse_name, try_lock
from ingot.runtime.kv.disk.slot import VERSION

MARKER = "ingot-kv.json"
_FORMAT = "ingot-kv"
_SEGMENTS = "segments"
_TEMPORARY = "tmp"
_JOURNAL = "journal"
_UNLOCKED_SECONDS = 3600  # a temporary file that cannot be locked is a dead process's after this time
_UNFINISHED = re.compile(r"\.ingot-kv-[0-9a-f]+")  # markers
_IGNORED = re.compile(rf"lost\+found|\.nfs.*|{_UNFINISHED.pattern}")  # what a folder without marker may hold
_MARKER_BYTES = 4096
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: a named pipe does not block open
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LOCK_SECONDS = 0.1  # that a process waits for another which adds a segment; one that is stopped may never end
_LOCK_POLL_SECONDS = 0.001
FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDY = "delete it if it is not needed, or choose another folder"


class DiskSegmentFile(NamedTuple):
    """A segment as a listing shows it."""

    name: str
    geometry: Geometry
    num_bytes: int
    inode: int


class StoreFolder:
    """An open folder. Methods are thread-safe but for `close`; all but the constructor raise OSError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the folder, making it if it does not exist. Raises UsageError if it must not or cannot be used."""
        self.path = Path(path)
        self._open: list[int] = []
        try:
            self._prepare()
        except OSError as error:
            self.close()
            raise self.refusal(error) from error
        except UsageError:
            self.close()
            raise

    def refusal(self, error: OSError) -> UsageError:
        """The user's error for one of the system at opening."""
        reason = _REASONS.get(error.errno or 0, f"{error.strerror}; choose another folder")
        return UsageError(f"cannot keep KV blocks in {shown_path(self.path)}: {reason}")

    @property
    def is_deleted(self) -> bool:
        """The folder or part of it was deleted; descriptors lead nowhere."""
        try:
            return any(os.fstat(directory).st_nlink == 0 for directory in self._open)
        except OSError:
            return True

    def check(self) -> None:
        """Raise FileNotFoundError if the folder was deleted."""
        if self.is_deleted:
            raise FileNotFoundError(errno.ENOENT, "the folder was deleted")

    @property
    def free_bytes(self) -> int:
        """Free space of the file system for this user."""
        status = os.fstatvfs(self._root)
        return status.f_bavail * status.f_frsize

    def listing(self) -> list[DiskSegmentFile]:
        """All segments, of whichever model and process. Files with other names, and links, are left alone."""
        found: list[DiskSegmentFile] = []
        with os.scandir(self._segments) as entries:
            for entry in entries:
                parsed = parse_name(entry.name)
                with suppress(FileNotFoundError):
                    if parsed and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        found.append(DiskSegmentFile(entry.name, parsed[1], status.st_size, status.st_ino))
        return found

    def segment(self, name: str) -> DiskSegment:
        """Open a segment."""
        return DiskSegment(name, os.open(name, _OPEN, dir_fd=self._segments))

    def add_segment(self, geometry: Geometry) -> DiskSegment:
        """Make a segment, whose space on the disk is allocated, so that a full disk shows here and not at a write.

        It is made as a temporary file and locked meanwhile, so that other processes see that its maker lives.
        """
        name = new_name(geometry)
        file = os.open(name, _NEW, 0o600, dir_fd=self._temporary)
        try:
            try_lock(file)
            allocate(file, geometry.file_bytes)
            os.rename(name, name, src_dir_fd=self._temporary, dst_dir_fd=self._segments)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._temporary)
            os.close(file)
            raise
        segment = DiskSegment(name, file)
        segment.unlock()
        return segment

    def remove_segment(self, name: str) -> bool:
        """Delete a segment; False if another process was faster."""
        try:
            os.unlink(name, dir_fd=self._segments)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from adding segments, so that all together keep the limit."""
        lock = os.open(".", _DIRECTORY, dir_fd=self._segments)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while try_lock(lock) is False and time.monotonic() < deadline:
                time.sleep(_LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(lock)

    def journal(self) -> int:
        """Open the file in which processes note what they store, to append to it."""
        return os.open(_JOURNAL, _APPEND, 0o600, dir_fd=self._root)

    @contextmanager
    def scratch(self) -> Iterator[int]:
        """A file to write and read, which has no name and is gone when it is closed."""
        name = secrets.token_hex(8)
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._temporary)
        try:
            os.unlink(name, dir_fd=self._temporary)
            yield file
        finally:
            os.close(file)

    def clean(self) -> int:
        """Remove temporary files that dead processes left; returns how many."""
        count = 0
        with os.scandir(self._temporary) as entries:
            for name in [entry.name for entry in entries]:
                with suppress(OSError):
                    count += self._clean(name)
        # there is a marker: another process that still writes one uses it
        for name in filter(_UNFINISHED.fullmatch, os.listdir(self._root)):
            with suppress(OSError):
                os.unlink(name, dir_fd=self._root)
                count += 1
        return count

    def close(self) -> None:
        """Close all descriptors."""
        while self._open:
            os.close(self._open.pop())

    def _prepare(self) -> None:
        with suppress(FileExistsError):
            os.makedirs(self.path, mode=0o700)
        self._root = self._directory(os.path.realpath(self.path))
        _refuse_shared_with_all(self.path, self._root)
        if not _read_marker(self.path, self._root):
            _refuse_foreign(self.path, self._root)
            self._make_store()
        for name in (_SEGMENTS, _TEMPORARY):
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._root)
        self._segments = self._directory(_SEGMENTS, self._root)
        self._temporary = self._directory(_TEMPORARY, self._root)
        self._refuse_read_only()

    def _make_store(self) -> None:
        try:
            _write_marker(self._root)
        except FileNotFoundError:  # another process made it one, and removed this one's file
            if not _read_marker(self.path, self._root):
                raise

    def _refuse_read_only(self) -> None:
        """Raise OSError unless files can be made. On a full disk, what is stored can still be read."""
        name = secrets.token_hex(8)
        try:
            os.close(os.open(name, _NEW, 0o600, dir_fd=self._temporary))
            os.unlink(name, dir_fd=self._temporary)
        except FileNotFoundError:
            return  # another process took it for a dead one's
        except OSError as error:
            if error.errno not in FULL:
                raise

    def _directory(self, name: str, parent: int | None = None) -> int:
        self._open.append(os.open(name, _DIRECTORY, dir_fd=parent))
        return self._open[-1]

    def _clean(self, name: str) -> bool:
        status = os.stat(name, dir_fd=self._temporary, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and not self._is_dead(name, status):
            return False
        _remove(name, self._temporary)
        return True

    def _is_dead(self, name: str, status: os.stat_result) -> bool:
        """Whether the temporary file's writer is gone: its lock went with it, by whatever end."""
        file = os.open(name, _READ, dir_fd=self._temporary)
        try:
            locked = try_lock(file)
            return time.time() - status.st_mtime > _UNLOCKED_SECONDS if locked is None else locked
        finally:
            os.close(file)


def _remove(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        with suppress(OSError):  # not empty: not ours
            os.rmdir(name, dir_fd=directory)


def _read_marker(path: Path, root: int) -> bool:
    """Whether the folder is a store. Raises UsageError if it is one that this version cannot use."""
    try:
        file = os.open(MARKER, _READ, dir_fd=root)
    except FileNotFoundError:
        return False
    try:
        found = json.loads(os.read(file, _MARKER_BYTES))
        is_marker = found["format"] == _FORMAT and type(found["version"]) is int
    except (ValueError, TypeError, KeyError, RecursionError):
        is_marker = False
    finally:
        os.close(file)
    if not is_marker:
        raise UsageError(f"{shown_path(path / MARKER)} is not the marker of a KV folder; {_REMEDY}")
    if found["version"] != VERSION:
        raise UsageError(
            f"the KV folder {shown_path(path)} has format version {shown(found['version'])}; this Ingot reads and "
            f"writes version {VERSION}; choose another folder, or delete this one: it is only a cache"
        )
    return True


def _refuse_foreign(path: Path, root: int) -> None:
    others = sorted(name for name in os.listdir(root) if not _IGNORED.fullmatch(name))
    if others and not _read_marker(path, root):  # another process may just have made the folder a store
        raise UsageError(
            f"{shown_path(path)} holds other files ({shown(others[0])}) and no {MARKER}; "
            "a KV folder must be new, empty, or one that Ingot made"
        )


def _write_marker(root: int) -> None:
    name = f".ingot-kv-{secrets.token_hex(8)}"
    file = os.open(name, _NEW, 0o600, dir_fd=root)
    try:
        content = json.dumps({"format": _FORMAT, "version": VERSION}).encode() + b"\n"
        while content:  # a write may be cut short
            content = content[os.write(file, content) :]
        os.fsync(file)
        os.rename(name, MARKER, src_dir_fd=root, dst_dir_fd=root)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=root)
        raise
    finally:
        os.close(file)


def _refuse_shared_with_all(path: Path, root: int) -> None:
    mode = os.fstat(root).st_mode
    if mode & stat.S_IWOTH:
        raise UsageError(
            f"every user of the machine may write to {shown_path(path)} (mode {stat.S_IMODE(mode):o}) and so plant "
            "KV blocks; run chmod 700 on it, or choose another folder"
        )


_REASONS = {
    errno.EACCES: "no permission to read and write it; make it yours (chmod u+rwx), or choose another folder",
    errno.EPERM: "no permission to read and write it; make it yours (chmod u+rwx), or choose another folder",
    errno.EROFS: "its file system is read-only; choose another folder",
    errno.ENOSPC: "its file system is full; free some space, or choose another folder",
    errno.EDQUOT: "the quota of this user is used up; free some space, or choose another folder",
    errno.ENOTDIR: "it, or a folder above it, is not a folder; choose another path",
    errno.ELOOP: "a symbolic link is in a place of the store's own files; delete the folder, or choose another one",
    errno.ENAMETOOLONG: "the path is too long; choose another one",
}
