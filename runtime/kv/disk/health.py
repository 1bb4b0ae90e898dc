"""What still works of a disk store: each system error turns off what cannot work any more, and is logged once.

disk full                       no new segments for 30 s, then they are tried again: blocks take the place of others
read-only, no permission        no writes
folder deleted or unmounted     off
input/output error              this block is a miss; off after 10 in a row
out of descriptors or memory    this call has no effect
"""

import errno
import logging
import threading
import time
from pathlib import Path

from ingot.errors import shown_path
from ingot.runtime.kv.disk.folder import FULL

_log = logging.getLogger(__name__)

_FULL_SECONDS = 30.0
_MOST_ERRORS = 10

_BUSY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)  # of the process; the file may be sound
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class StoreHealth:
    """State of the folder at `path`. `failure` says why the store is off; None while it works."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._full_until = 0.0
        self._read_only_reason: str | None = None
        self._errors_in_row = 0
        self._logged: set[str] = set()
        self.failure: str | None = None

    @property
    def can_write(self) -> bool:
        """Whether a write may succeed."""
        return self._read_only_reason is None

    def refusal(self, *, has_segments: bool) -> str | None:
        """Why no block can be stored now; None if one may be. A full disk with segments has room in these."""
        if not has_segments and not self.can_grow:
            return self.failure or self._read_only_reason or "the disk is full"
        return self.failure or self._read_only_reason

    @property
    def can_grow(self) -> bool:
        """Whether the disk may have space now."""
        return time.monotonic() >= self._full_until

    def note_success(self) -> None:
        """A block was read or written."""
        self._errors_in_row = 0

    def note_full(self) -> None:
        """The disk has no space."""
        self._full_until = time.monotonic() + _FULL_SECONDS
        self.warn_once("full", "is on a full disk: blocks are stored in the place of others until there is space")

    def note_error(self, error: OSError, doing: str, *, reading: bool, is_deleted: bool) -> bool:
        """Turn off what the error rules out; returns whether the file of this call may still be sound."""
        if error.errno in FULL:
            self.note_full()
        elif error.errno in _READ_ONLY and not reading:
            self._read_only_reason = f"{doing} in {shown_path(self._path)} failed: {error.strerror}"
            self.warn_once("read-only", "cannot be written any more (%s): blocks are only read", error.strerror)
        elif error.errno in _BUSY or (error.errno == errno.ENOENT and not is_deleted):
            self.warn_once("busy", "is usable, but %s failed: %s; it is tried again", doing, error.strerror)
        else:
            self._count_error(error, doing)
        return error.errno in _BUSY

    def warn_once(self, kind: str, message: str, *values: object) -> None:
        """Log the first warning of its kind."""
        with self._lock:
            is_first = kind not in self._logged
            self._logged.add(kind)
        if is_first:
            _log.warning(f"the KV folder %s {message}", shown_path(self._path), *values)

    def _count_error(self, error: OSError, doing: str) -> None:
        self._errors_in_row += 1
        if error.errno in _GONE or self._errors_in_row >= _MOST_ERRORS:
            self.failure = f"{doing} in {shown_path(self._path)} failed: {error.strerror}"
            self.warn_once("off", "is not used any more: %s failed: %s", doing, error.strerror)
        else:
            self.warn_once("error", "has an error: %s failed: %s; the block is computed again", doing, error.strerror)
