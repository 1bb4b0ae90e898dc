"""Proof that two checkpoints hold the same weights: every tensor of both is dequantized and compared, one at a time.

Digests are SHA-256 over the tensors in the order of their names: name, shape, float32 bits, the two zeros taken as one.
Whoever holds both checkpoints can make them again.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import WEIGHT_DTYPES, Checkpoint
from ingot.pipeline.checkpoint.formats.quantized import FloatArray
from ingot.progress import Progress, silent

_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class Proof:
    """What a comparison found. largest_difference is of float32 values; 0 where every bit is the same."""

    tensors: int
    elements: int
    largest_difference: float
    largest_in: str
    changed_tensors: int
    source_digest: str
    written_digest: str

    @property
    def equal(self) -> bool:
        """Whether all values are the same."""
        return self.source_digest == self.written_digest

    def as_json(self) -> dict[str, Any]:
        """For the proof's file."""
        return {"equal": self.equal, **asdict(self)}


def prove(source: Checkpoint, written: Checkpoint, names: Sequence[str], progress: Progress = silent) -> Proof:
    """Compare the named tensors. CheckpointError when one is missing or of another shape in `written`."""
    digests = hashlib.sha256(), hashlib.sha256()
    shapes = written.shapes
    elements, changed, largest, where = 0, 0, 0.0, ""
    for done, name in enumerate(sorted(names), start=1):
        if shapes.get(name) != source.shapes[name]:
            raise CheckpointError(f"{written.path}: {name!r} is {shapes.get(name)}, not {source.shapes[name]}")
        for digest in digests:
            digest.update(f"{name}\0{list(source.shapes[name])}\0".encode())
        difference = 0.0
        for here, there in zip(_chunks(source, name), _chunks(written, name), strict=True):
            for digest, values in zip(digests, (here, there), strict=True):
                digest.update(values.data)
            elements += here.size
            difference = max(difference, float(np.abs(here - there).max(initial=0.0)))
        changed += difference > 0
        largest, where = max((largest, where), (difference, name if difference else ""))
        progress("comparing weights", done, len(names))
    return Proof(len(names), elements, largest, where, changed, digests[0].hexdigest(), digests[1].hexdigest())


def _chunks(checkpoint: Checkpoint, name: str) -> Iterator[FloatArray]:
    """The tensor in pieces, as float32, zeros without a sign; what is no float as its bytes, each a number."""
    values = _flat(checkpoint, name)
    for begin in range(0, max(values.size, 1), _CHUNK_VALUES):
        yield values[begin : begin + _CHUNK_VALUES].astype(np.float32) + np.float32(0)


def _flat(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    """Decoded, or mapped from its file."""
    if name in checkpoint.encoded:
        return checkpoint.encoded[name].dequantize().reshape(-1)
    stored = checkpoint.tensor(name)
    if not stored.num_bytes:
        return np.zeros(0, np.float32)
    dtype = WEIGHT_DTYPES[stored.dtype].numpy() if stored.dtype in WEIGHT_DTYPES else np.dtype(np.uint8)
    raw = np.memmap(stored.file, np.uint8, "r", offset=stored.offset, shape=(stored.num_bytes,))
    return raw.view(dtype)
