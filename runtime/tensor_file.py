"""A safetensors file, mapped: bytes of its tensors without a copy (format: github.com/huggingface/safetensors)."""

import json
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.errors import ArtifactError


@dataclass(frozen=True)
class TensorPlace:
    """A tensor's type in the format's words, and its bytes from `begin` to `end` of the file."""

    dtype: str
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.end - self.begin


class TensorFile:
    """The tensors of a file by name, in the file's order. The mapping goes with the last view of it.

    ArtifactError for a file that is none, or whose tensors reach beyond it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("rb") as stream:
            try:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # an empty file
                raise _no_tensors(file, error) from error
        self.places = self._read_places()

    def view(self, name: str, begin: int = 0, size: int | None = None) -> NDArray[np.uint8]:
        """Bytes of a tensor, or `size` of them from `begin` on; ArtifactError for one that is not there."""
        place = self.place(name)
        return np.frombuffer(self._map, np.uint8, place.bytes - begin if size is None else size, place.begin + begin)

    def place(self, name: str) -> TensorPlace:
        """Where a tensor lies; ArtifactError for one that is not there."""
        if name not in self.places:
            raise ArtifactError(f"{self.file}: holds no tensor {name!r}; build the artifact again")
        return self.places[name]

    def _read_places(self) -> dict[str, TensorPlace]:
        length = int.from_bytes(self._map[:8], "little")
        try:
            header = json.loads(self._map[8 : 8 + length])
            header.pop("__metadata__", None)
            begin = 8 + length
            places = {
                name: TensorPlace(entry["dtype"], begin + entry["data_offsets"][0], begin + entry["data_offsets"][1])
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _no_tensors(self.file, error) from error
        for name, place in places.items():
            if not begin <= place.begin <= place.end <= len(self._map):
                raise ArtifactError(f"{self.file}: {name!r} reaches beyond the file; build the artifact again")
        return dict(sorted(places.items(), key=lambda item: item[1].begin))


def _no_tensors(file: Path, error: Exception) -> ArtifactError:
    return ArtifactError(f"{file}: is no safetensors file ({error}); build the artifact again")
