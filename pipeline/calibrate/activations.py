"""Activations of the calibration set between two stages: in memory up to a limit, on disk beyond it.

Each value is held in chunks, a few whole sequences each.
"""

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]


class Activations:
    """Value name -> its chunks. What goes over `memory_bytes` is written to files in a folder that `close` removes."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._chunks: dict[str, dict[int, AnyArray]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def held_bytes(self) -> int:
        """Bytes in memory; mapped files do not count."""
        return sum(a.nbytes for chunks in self._chunks.values() for a in chunks.values() if not _is_mapped(a))

    @property
    def spilled_bytes(self) -> int:
        """Bytes on disk."""
        return sum(a.nbytes for chunks in self._chunks.values() for a in chunks.values() if _is_mapped(a))

    def put(self, name: str, chunk: int, array: AnyArray) -> None:
        """Keep a chunk of a value."""
        if array.nbytes + self.held_bytes > self._memory_bytes:
            array = self._spill(array)
        self._chunks.setdefault(name, {})[chunk] = array

    def get(self, name: str, chunk: int) -> AnyArray:
        """The chunk; read only what was spilled."""
        return self._chunks[name][chunk]

    def keep_only(self, names: set[str]) -> None:
        """Drop every other value, and the files behind it."""
        for name in [name for name in self._chunks if name not in names]:
            for array in self._chunks.pop(name).values():
                if isinstance(array, np.memmap) and array.filename is not None:
                    Path(array.filename).unlink()

    def close(self) -> None:
        """Drop everything."""
        self._chunks.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _spill(self, array: AnyArray) -> AnyArray:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ingot-calibrate-")
        self._files += 1
        file = np.memmap(Path(self._folder.name) / f"{self._files}.bin", array.dtype, "w+", shape=array.shape)
        file[...] = array
        file.flush()
        return file


def _is_mapped(array: AnyArray) -> bool:
    return isinstance(array, np.memmap)
