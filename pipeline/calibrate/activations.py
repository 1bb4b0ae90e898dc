"""Activations of the calibration set between two stages: in memory up to a limit, on disk beyond it.

Each value is held in chunks, a few whole sequences each.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]
MEMORY_BYTES = 2 << 30


class Activations:
    """Value name -> its chunks. What goes over `memory_bytes` is written to files in a folder that `close` removes."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._chunks: dict[str, dict[int, AnyArray]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0
        self.held_bytes = 0  # in memory
        self.spilled_bytes = 0  # in files

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
            array = self._spill(array)
            self.spilled_bytes += array.nbytes
        else:
            self.held_bytes += array.nbytes
        chunks[chunk] = array

    def get(self, name: str, chunk: int) -> AnyArray:
        """The chunk; read only what was spilled."""
        return self._chunks[name][chunk]

    def holds(self, name: str) -> bool:
        """Whether the value is here."""
        return name in self._chunks

    def items(self) -> Iterator[tuple[str, int, AnyArray]]:
        """Name, chunk and array of everything."""
        return ((name, chunk, array) for name, chunks in self._chunks.items() for chunk, array in chunks.items())

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
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _drop(self, array: AnyArray) -> None:
        if isinstance(array, np.memmap):
            self.spilled_bytes -= array.nbytes
            Path(str(array.filename)).unlink()
        else:
            self.held_bytes -= array.nbytes

    def _spill(self, array: AnyArray) -> AnyArray:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ingot-calibrate-")
        self._files += 1
        file = np.memmap(Path(self._folder.name) / f"{self._files}.bin", array.dtype, "w+", shape=array.shape)
        file[...] = array
        file.flush()
        return file
