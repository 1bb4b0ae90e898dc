"""Copies of the activations between two levels, so that a resumed build need not run all that stands before.

A copy is a folder with one .npy file per chunk of a value and index.json, which has the CRC-32 of each. Only the newest
is kept. None is made when it would be larger than allowed, or would take half of what is left on the disk.
"""

import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ingot.pipeline.calibrate.activations import Activations, AnyArray

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
