"""Write safetensors files: tensors one after another, then the header into the space reserved for it."""

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
    """Offset and length of a tensor in the file, in bytes."""

    offset: int
    length: int


class SafetensorsWriter:
    """Writes a new file; leaving the block without an exception completes it.

        with SafetensorsWriter(file, header_bytes) as writer:
            span = writer.add("w", "F32", (2, 3), lambda write: write(content))
            writer.align("padding.0")

    header_bytes    bytes reserved for the header, its length field included; spaces fill the rest
    metadata        header entries before those of the tensors

    The format allows no gaps, so `align` adds a named tensor of zeros.
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
        """Append a tensor of the format's `dtype`, such as BF16; `produce` writes its bytes in one or more calls."""
        begin = self._end
        produce(self._write)
        self._header[name] = header_entry(dtype, shape, begin - self.header_bytes, self._end - self.header_bytes)
        return Span(begin, self._end - begin)

    def align(self, name: str) -> bool:
        """Pad to the next multiple of ALIGNMENT with a tensor of zeros; return whether padding was needed."""
        gap = -self._end % ALIGNMENT
        if gap:
            self.add(name, "U8", [gap], lambda write: write(bytes(gap)))
        return gap > 0

    def _write_header(self) -> None:
        text = header_text(self._header)
        space = self.header_bytes - LENGTH_BYTES
        assert len(text) <= space, "the header is larger than the space reserved for it"
        self._stream.seek(0)
        self._write(space.to_bytes(LENGTH_BYTES, "little") + text + b" " * (space - len(text)))

    def _write(self, content: bytes | memoryview) -> None:
        """Write all bytes; a raw stream may write fewer than it is given."""
        view = memoryview(content)
        self._end += len(view)
        while len(view):
            view = view[self._stream.write(view[:_CHUNK_BYTES]) :]


def header_entry(dtype: str, shape: Iterable[int], begin: int, end: int) -> dict[str, object]:
    """Return a tensor's header entry; offsets count from the end of the header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def header_text(header: Mapping[str, object]) -> bytes:
    """Encode the header as compact JSON."""
    return json.dumps(header, separators=(",", ":")).encode()
