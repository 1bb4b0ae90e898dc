"""Proof that two checkpoints hold the same weights: every tensor of both is dequantized and compared, one at a time.

Digests are SHA-256 over the tensors in the order of their names: name, shape, float32 bits, the two zeros taken as one.
Whoever holds both checkpoints can make them again.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint import WEIGHT_DTYPES, Checkpoint
from ingot.pipeline.formats.format_writer import stored_tensor
from ingot.pipeline.formats.quantized import FloatArray
from ingot.progress import Progress, silent


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
        here, there = _values(source, name), _values(written, name)
        for digest, values in zip(digests, (here, there), strict=True):
            digest.update(f"{name}\0{list(values.shape)}\0".encode())
            digest.update(values.data)
        elements += here.size
        difference = float(np.abs(here - there).max(initial=0.0))
        changed += difference > 0
        largest, where = max((largest, where), (difference, name if difference else ""))
        progress("comparing weights", done, len(names))
    return Proof(len(names), elements, largest, where, changed, digests[0].hexdigest(), digests[1].hexdigest())


def _values(checkpoint: Checkpoint, name: str) -> FloatArray:
    """As float32, zeros without a sign; what is no float as its bytes, each a number."""
    if name in checkpoint.encoded:
        values: FloatArray = checkpoint.encoded[name].dequantize()
    else:
        stored = checkpoint.tensor(name)
        raw = np.asarray(stored_tensor(stored).numpy())
        values = (raw if stored.dtype in WEIGHT_DTYPES else raw.reshape(-1).view(np.uint8)).astype(np.float32)
    return np.ascontiguousarray(values + np.float32(0))
