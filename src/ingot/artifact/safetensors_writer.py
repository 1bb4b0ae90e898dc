"""Writer of safetensors files: tensors one after the other, the header last, in the room that was left for it."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ingot.artifact.safetensors import LENGTH_BYTES

ALIGNMENT = 64
_CHUNK_BYTES = 1 << 24

Write = Callable[[bytes | memoryview], None]


@dataclass(frozen=True)
class Span:
    """Where a tensor's bytes are in the file."""

    offset: int
    length: int


class SafetensorsWriter:
    """A new file; leaving the block without an exception completes it.

        with SafetensorsWriter(file, header_bytes) as writer:
            span = writer.add("w", "F32", (2, 3), lambda write: write(content))
            writer.align("padding.0")

    header_bytes    room for the header, length included; what its JSON does not need is filled with spaces
    metadata        entries before those of the tensors

    The format allows no holes, so `align` fills a gap with a named entry of zeros.
    """

    def __init__(self, file: Path, header_bytes: int, metadata: Mapping[str, object] | None = None) -> None:
        self.header_bytes = header_bytes
        self._header: dict[str, object] = dict(metadata or {})
        self._end = header_bytes
        self._stream = file.open("wb", buffering=0)
        self._stream.seek(header_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stream:
            if kind is None:
                self._write_header()

    def add(self, name: str, dtype: str, shape: Iterable[int], produce: Callable[[Write], None]) -> Span:
        """Append a tensor whose bytes `produce` writes, in one piece or several; `dtype` in the format's words."""
        begin = self._end
        produce(self._write)
        self._header[name] = header_entry(dtype, shape, begin - self.header_bytes, self._end - self.header_bytes)
        return Span(begin, self._end - begin)

    def align(self, name: str) -> bool:
        """Fill up to the next multiple of ALIGNMENT with an entry of zeros; return whether there was a gap."""
        gap = -self._end % ALIGNMENT
        if gap:
            self.add(name, "U8", [gap], lambda write: write(bytes(gap)))
        return gap > 0

    def _write_header(self) -> None:
        text = header_text(self._header)
        room = self.header_bytes - LENGTH_BYTES
        assert len(text) <= room, "the header outgrew the room that was left for it"
        self._stream.seek(0)
        self._write(room.to_bytes(LENGTH_BYTES, "little") + text + b" " * (room - len(text)))

    def _write(self, content: bytes | memoryview) -> None:
        """Write all of it: a raw stream may take less than it is given."""
        view = memoryview(content)
        self._end += len(view)
        while len(view):
            view = view[self._stream.write(view[:_CHUNK_BYTES]) :]


def header_entry(dtype: str, shape: Iterable[int], begin: int, end: int) -> dict[str, object]:
    """One tensor in the header; offsets count from the end of the header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def header_text(header: Mapping[str, object]) -> bytes:
    """The header as compact JSON."""
    return json.dumps(header, separators=(",", ":")).encode()
