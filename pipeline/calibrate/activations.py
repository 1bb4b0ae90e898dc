"""Activations of the calibration set between two stages: in memory up to a limit, on disk beyond it.

Each value is held in chunks, a few whole sequences each. What goes to disk goes into one file without a name, which the
system removes whatever becomes of the process; it is mapped only while somebody looks at it.

Copies of the activations between two levels, so that a resumed build need not run all that stands before.

A copy is a folder with one .npy file per chunk of a value and index.json, which has the CRC-32 of each. Only the newest
is kept. None is made when it would be larger than allowed, or would take half of what is left on the disk.
"""

import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]
MEMORY_BYTES = 2 << 30


@dataclass(frozen=True)
class _Spilled:
    """Where an array lies in the file."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


class _SpillFile:
    """Arrays in one temporary file; the place of one that was dropped is given to the next of its size."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="ingot-calibrate-")  # noqa: SIM115 (`close` closes it)
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def write(self, array: AnyArray) -> _Spilled:
        """Append the array, or put it into a free place."""
        places = self._free.get(array.nbytes)
        offset = places.pop() if places else self._end
        self._end = max(self._end, offset + array.nbytes)
        self._file.seek(offset)
        self._file.write(np.ascontiguousarray(array).data)
        self._file.flush()
        return _Spilled(offset, array.dtype, array.shape, array.nbytes)

    def read(self, spilled: _Spilled) -> AnyArray:
        """The array, mapped; valid until it is dropped."""
        return np.memmap(self._file, spilled.dtype, "r+", spilled.offset, spilled.shape)

    def drop(self, spilled: _Spilled) -> None:
        """Its place is free."""
        self._free.setdefault(spilled.nbytes, []).append(spilled.offset)

    def close(self) -> None:
        """Give the disk back."""
        self._file.close()


class Activations:
    """Value name -> its chunks. What goes over `memory_bytes` is written to a file that `close` removes."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._chunks: dict[str, dict[int, AnyArray | _Spilled]] = {}
        self._file: _SpillFile | None = None
        self.held_bytes = 0  # in memory
        self.spilled_bytes = 0  # on disk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put(self, name: str, chunk: int, array: AnyArray) -> None:
        """Keep a chunk of a value, in place of the one that is there."""
        chunks = self._chunks.setdefault(name, {})
        if chunk in chunks:
            self._drop(chunks.pop(chunk))
        if array.nbytes + self.held_bytes > self._memory_bytes:
            self._file = self._file or _SpillFile()
            chunks[chunk] = self._file.write(array)
            self.spilled_bytes += array.nbytes
        else:
            chunks[chunk] = array
            self.held_bytes += array.nbytes

    def get(self, name: str, chunk: int) -> AnyArray:
        """The chunk; read only what was spilled."""
        return self._read(self._chunks[name][chunk])

    def holds(self, name: str) -> bool:
        """Whether the value is here."""
        return name in self._chunks

    def items(self) -> Iterator[tuple[str, int, AnyArray]]:
        """Name, chunk and array of everything."""
        for name, chunks in self._chunks.items():
            yield from ((name, chunk, self._read(kept)) for chunk, kept in chunks.items())

    def keep_only(self, names: set[str], chunk: int | None = None) -> None:
        """Drop every other value, or that chunk of it, and the files behind."""
        for name in [name for name in self._chunks if name not in names]:
            chunks = self._chunks[name]
            for dropped in [chunk] if chunk is not None and chunk in chunks else list(chunks) if chunk is None else []:
                self._drop(chunks.pop(dropped))
            if not chunks:
                del self._chunks[name]

    def close(self) -> None:
        """Drop everything."""
        self._chunks.clear()
        self.held_bytes = self.spilled_bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, kept: AnyArray | _Spilled) -> AnyArray:
        if not isinstance(kept, _Spilled):
            return kept
        assert self._file is not None
        return self._file.read(kept)

    def _drop(self, kept: AnyArray | _Spilled) -> None:
        if isinstance(kept, _Spilled):
            assert self._file is not None
            self._file.drop(kept)
            self.spilled_bytes -= kept.nbytes
        else:
            self.held_bytes -= kept.nbytes


SNAPSHOT_SECONDS = 60.0
SNAPSHOT_BYTES = 4 << 30

_log = logging.getLogger("ingot.pipeline")


@dataclass
class Snapshots:
    """Copies in `folder` whose names begin with `walk`; see BuildJournal for `seconds` and `most_bytes`."""

    folder: Path
    walk: str
    seconds: float
    most_bytes: int
    _last: float = field(default_factory=time.monotonic)

    def newest(self, after: int, upto: int) -> int | None:
        """The last level behind `after` and not behind `upto` before which activations were kept."""
        levels = [level for level in self._levels() if after < level <= upto]
        return max(levels, default=None)

    def load(self, level: int, store: Activations) -> bool:
        """Put the activations into the store; False, with a warning, when they are damaged."""
        folder = self._path(level)
        try:
            for name, chunk, array in _read(folder):
                store.put(name, chunk, array)
        except (OSError, ValueError, KeyError) as error:
            _log.warning("the calibration activations %s are damaged (%s); they are computed again", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            store.keep_only(set())
            return False
        return True

    def offer(self, level: int, store: Activations) -> None:
        """Keep a copy when the last one is old enough and there is room."""
        needed = store.held_bytes + store.spilled_bytes
        if time.monotonic() - self._last < self.seconds or needed > self.most_bytes or level in self._levels():
            return
        part = self.folder / f"{self.walk}.part-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if 2 * needed < shutil.disk_usage(self.folder).free:
                self._write(part, level, store)
        except OSError as error:
            _log.info("activations were not kept: %s", error)  # they can be computed again
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._last = time.monotonic()

    def _write(self, part: Path, level: int, store: Activations) -> None:
        part.mkdir()
        index = []
        for number, (name, chunk, array) in enumerate(store.items()):
            np.save(part / f"{number}.npy", array)
            index.append({"name": name, "chunk": chunk, "crc32": _checksum(array)})
        (part / "index.json").write_text(json.dumps(index), encoding="utf-8")
        older = [self._path(known) for known in self._levels()]
        part.rename(self._path(level))
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)

    def _levels(self) -> list[int]:
        """Levels that there are copies for."""
        found = self.folder.glob(f"{self.walk}.level-*.activations")
        return [int(path.stem.rpartition("-")[2]) for path in found]

    def _path(self, level: int) -> Path:
        return self.folder / f"{self.walk}.level-{level:04}.activations"


def _read(folder: Path) -> Iterator[tuple[str, int, AnyArray]]:
    """Name, chunk and array, one in memory at a time. ValueError for one that is not what was written."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    for number, entry in enumerate(index):
        array = np.load(folder / f"{number}.npy", allow_pickle=False)
        if _checksum(array) != entry["crc32"]:
            raise ValueError(f"{number}.npy has another checksum")
        yield entry["name"], entry["chunk"], array


def _checksum(array: AnyArray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data)
