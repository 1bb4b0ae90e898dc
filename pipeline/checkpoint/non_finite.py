"""NaN and Inf in stored tensors, found by their bits, without converting anything to floats."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import naming_file

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Format:
    """A float format: the type of its bits, and masks of the exponent and of all but the sign.

    NaN and Inf have all exponent bits set.
    """

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
    """Counts of NaN and of plus or minus infinity in a tensor."""

    nan: int = 0
    inf: int = 0


def count_non_finite(stored: StoredTensor) -> NonFinite:
    """Count NaN and Inf, reading CHUNK_BYTES at a time; tensors other than F32, F16 and BF16 count as finite."""
    kind = _FORMATS.get(stored.dtype)
    if kind is None:
        return NonFinite()
    nan = inf = 0
    for bits in _chunks(stored, kind.bits):
        np.bitwise_and(bits, kind.bits.type(kind.magnitude), out=bits)
        if bits.max() >= kind.exponent:
            nan += int(np.count_nonzero(bits > kind.exponent))
            inf += int(np.count_nonzero(bits == kind.exponent))
    return NonFinite(nan, inf)


def _chunks(
    stored: StoredTensor, bits: np.dtype[np.unsignedinteger]
) -> Iterator[np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]]:
    """The tensor's elements, chunk by chunk in one buffer: allocating each would take most of the time."""
    buffer = np.empty(CHUNK_BYTES // bits.itemsize, bits)
    with naming_file(stored.file), stored.file.open("rb", buffering=0) as stream:
        stream.seek(stored.offset)
        for begin in range(0, stored.num_bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, stored.num_bytes - begin) // bits.itemsize]
            if stream.readinto(chunk.data) != chunk.nbytes:
                raise stored.ends_early()
            yield chunk
