"""Finding NaN and Inf in a stored tensor by its bits, one chunk at a time, without making floats of it."""

from dataclasses import dataclass

import numpy as np

from ingot.errors import CheckpointError
from ingot.pipeline.safetensors_file import StoredTensor

CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class _Format:
    """A float format: the bits' type, and where exponent and mantissa stand. All exponent bits set: NaN or Inf."""

    bits: np.dtype[np.unsignedinteger]
    exponent: int
    magnitude: int


_FORMATS = {
    "F32": _Format(np.dtype("<u4"), 0x7F80_0000, 0x7FFF_FFFF),
    "F16": _Format(np.dtype("<u2"), 0x7C00, 0x7FFF),
    "BF16": _Format(np.dtype("<u2"), 0x7F80, 0x7FFF),
}


@dataclass(frozen=True)
class NonFinite:
    """How many elements of a tensor are NaN and how many are plus or minus infinity."""

    nan: int = 0
    inf: int = 0


def count_non_finite(stored: StoredTensor) -> NonFinite:
    """Count NaN and Inf; other formats than F32, F16 and BF16 count as finite. Holds CHUNK_BYTES at a time."""
    kind = _FORMATS.get(stored.dtype)
    if kind is None:
        return NonFinite()
    nan = inf = 0
    with stored.file.open("rb") as stream:
        stream.seek(stored.offset)
        for begin in range(0, stored.num_bytes, CHUNK_BYTES):
            raw = stream.read(min(CHUNK_BYTES, stored.num_bytes - begin))
            if len(raw) % kind.bits.itemsize:
                raise CheckpointError(f"{stored.file}: ends inside {stored.name!r}; the file changed while it was read")
            magnitude = np.frombuffer(raw, kind.bits) & kind.bits.type(kind.magnitude)
            if magnitude.size and magnitude.max() >= kind.exponent:
                nan += int(np.count_nonzero(magnitude > kind.exponent))
                inf += int(np.count_nonzero(magnitude == kind.exponent))
    return NonFinite(nan, inf)
