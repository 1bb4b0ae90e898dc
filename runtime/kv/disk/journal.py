"""A file in which all processes note the slots that they fill, so that each finds at once what another stored.

A hint like the segments' tables: what is lost in it is found when the tables are read next. Each note is one append of
16 bytes; who makes the file longer than 1 MiB empties it.
"""

import os
import secrets
import struct
import threading
from contextlib import suppress
from typing import NamedTuple

from ingot.runtime.kv.disk.segment import ID_BYTES

_NOTE = struct.Struct(f"<{ID_BYTES}sI4s")  # segment, slot, writer
_MOST_BYTES = 1 << 20


class JournalNote(NamedTuple):
    """A slot that was filled."""

    segment_id: bytes
    slot: int


class Journal:
    """The open journal `file`, which it takes over unless it raises OSError.

    Methods are thread-safe but for `close`, and raise OSError.
    """

    def __init__(self, file: int) -> None:
        self._read = os.fstat(file).st_size  # what was noted before is in the tables
        self._file = file
        self._writer = secrets.token_bytes(4)
        self._lock = threading.Lock()

    def add(self, note: JournalNote) -> None:
        """Tell the other processes about a slot. A full disk does not matter."""
        with suppress(OSError):
            if os.write(self._file, _NOTE.pack(*note, self._writer)) < _NOTE.size:
                os.ftruncate(self._file, 0)  # all notes after a part of one would be misread

    def news(self) -> list[JournalNote]:
        """Records that other processes wrote since the last call, or since the journal was opened."""
        size = os.fstat(self._file).st_size
        if size == self._read:
            return []
        with self._lock:
            start = self._read if size >= self._read else 0  # it was emptied
            data = os.pread(self._file, min(size - start, _MOST_BYTES), start)
            whole = len(data) // _NOTE.size * _NOTE.size
            self._read = start + whole
            if self._read >= _MOST_BYTES:
                os.ftruncate(self._file, 0)
                self._read = 0
        notes = _NOTE.iter_unpack(data[:whole])
        return [JournalNote(segment_id, slot) for segment_id, slot, writer in notes if writer != self._writer]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
