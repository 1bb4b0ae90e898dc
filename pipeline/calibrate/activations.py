"""Stores the calibration set's activations between two steps: in memory up to a limit, on disk beyond it.

Each value is stored in chunks of a few whole sequences. Chunks on disk are in one unnamed temporary file, which the
system removes even if the process is killed; a chunk is mapped only while it is read.

Snapshots are copies on disk for a resumed build, so that it need not run every step from the start: a folder with one
.npy file per chunk of a value, and index.json with the CRC-32 of each. Only the newest is kept. None is written if it
would exceed a limit or half of the free disk space.
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
SNAPSHOT_SECONDS = 60.0
SNAPSHOT_BYTES = 4 << 30

_log = logging.getLogger("ingot.pipeline")


class Activations:
    """Value name -> its chunks. Chunks beyond `memory_bytes` are written to a file that `close` removes.

    held_bytes       size of the chunks in memory; spilled_bytes: of those on disk
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._chunks: dict[str, dict[int, AnyArray | _Spilled]] = {}
        self._file: _SpillFile | None = None
        self.held_bytes = 0
        self.spilled_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put(self, name: str, chunk: int, array: AnyArray) -> None:
        """Store a chunk of a value, replacing the one that is stored."""
        chunks = self._chunks.setdefault(name, {})
        if chunk in chunks:
            self._drop(chunks.pop(chunk))
        if array.nbytes and array.nbytes + self.held_bytes > self._memory_bytes:
            self._file = self._file or _SpillFile()
            chunks[chunk] = self._file.write(array)
            self.spilled_bytes += array.nbytes
        else:
            chunks[chunk] = array
            self.held_bytes += array.nbytes

    def get(self, name: str, chunk: int) -> AnyArray:
        """The chunk. One on disk is mapped to the file: do not write to it."""
        return self._read(self._chunks[name][chunk])

    def holds(self, name: str) -> bool:
        """Whether the value is stored."""
        return name in self._chunks

    def items(self) -> Iterator[tuple[str, int, AnyArray]]:
        """Name, chunk number and array of every stored chunk."""
        for name, chunks in self._chunks.items():
            yield from ((name, chunk, self._read(kept)) for chunk, kept in chunks.items())

    def keep_only(self, names: set[str], chunk: int | None = None) -> None:
        """Drop every other value, or only its chunk of this number."""
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

    def _read(self, kept: "AnyArray | _Spilled") -> AnyArray:
        if not isinstance(kept, _Spilled):
            return kept
        assert self._file is not None
        return self._file.read(kept)

    def _drop(self, kept: "AnyArray | _Spilled") -> None:
        if isinstance(kept, _Spilled):
            assert self._file is not None
            self._file.drop(kept)
            self.spilled_bytes -= kept.nbytes
        else:
            self.held_bytes -= kept.nbytes


@dataclass
class Snapshots:
    """Snapshots in `folder` whose names begin with `run`; see BuildJournal for `seconds` and `most_bytes`.

    is_writing    False: write no more, because the disk refused a record
    """

    folder: Path
    run: str
    seconds: float
    most_bytes: int
    is_writing: bool = True
    _last: float = field(default_factory=time.monotonic)

    def newest(self, after: int, upto: int) -> int | None:
        """The last step in after < step <= upto for which there is a snapshot."""
        steps = [step for step in self._steps() if after < step <= upto]
        return max(steps, default=None)

    def load(self, step: int, store: Activations) -> bool:
        """Load the activations that the step reads into the store; False, with a warning, when they are damaged."""
        folder = self._path(step)
        try:
            for name, chunk, array in _read(folder):
                store.put(name, chunk, array)
        except (OSError, ValueError, KeyError) as error:
            _log.warning("the calibration activations %s are damaged (%s); they are recomputed", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            store.keep_only(set())
            return False
        return True

    def offer(self, step: int, store: Activations) -> None:
        """Write a snapshot of what the step reads, if the last one is old enough and there is space."""
        if not self.is_writing:
            return
        needed = store.held_bytes + store.spilled_bytes
        if time.monotonic() - self._last < self.seconds or needed > self.most_bytes or step in self._steps():
            return
        part = self.folder / f"{self.run}.part-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if 2 * needed < shutil.disk_usage(self.folder).free:
                self._write(part, step, store)
        except OSError as error:
            _log.info("no snapshot of activations was written: %s", error)  # they can be recomputed
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._last = time.monotonic()

    def _write(self, part: Path, step: int, store: Activations) -> None:
        part.mkdir()
        index = []
        for number, (name, chunk, array) in enumerate(store.items()):
            np.save(part / f"{number}.npy", array)
            index.append({"name": name, "chunk": chunk, "crc32": _checksum(array)})
        (part / "index.json").write_text(json.dumps(index), encoding="utf-8")
        older = [self._path(other) for other in self._steps()]
        part.rename(self._path(step))
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)

    def _steps(self) -> list[int]:
        """Steps that have a snapshot."""
        found = self.folder.glob(f"{self.run}.step-*.activations")
        return [int(path.stem.rpartition("-")[2]) for path in found]

    def _path(self, step: int) -> Path:
        return self.folder / f"{self.run}.step-{step:04}.activations"


@dataclass(frozen=True)
class _Spilled:
    """The place of an array in the file."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


class _SpillFile:
    """Arrays in one temporary file; the place of a dropped array is reused by the next of its size."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="ingot-calibrate-")  # noqa: SIM115 (`close` closes it)
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def write(self, array: AnyArray) -> _Spilled:
        """Write the array to a free place of its size, or append it."""
        places = self._free.get(array.nbytes)
        offset = places.pop() if places else self._end
        self._end = max(self._end, offset + array.nbytes)
        self._file.seek(offset)
        self._file.write(np.ascontiguousarray(array).data)
        self._file.flush()
        return _Spilled(offset, array.dtype, array.shape, array.nbytes)

    def read(self, spilled: _Spilled) -> AnyArray:
        """Map the array; valid until it is dropped."""
        return np.memmap(self._file, spilled.dtype, "r+", spilled.offset, spilled.shape)

    def drop(self, spilled: _Spilled) -> None:
        """Free the place of the array."""
        self._free.setdefault(spilled.nbytes, []).append(spilled.offset)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


def _read(folder: Path) -> Iterator[tuple[str, int, AnyArray]]:
    """Name, chunk number and array, one in memory at a time. ValueError for a wrong checksum."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    for number, entry in enumerate(index):
        array = np.load(folder / f"{number}.npy", allow_pickle=False)
        if _checksum(array) != entry["crc32"]:
            raise ValueError(f"{number}.npy has a wrong checksum")
        yield entry["name"], entry["chunk"], array


def _checksum(array: AnyArray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data)
