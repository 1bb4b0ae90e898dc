"""Quantization of a weight matrix: bits, block size, symmetry, clip, type of the scales.

Scales are float32 or float16 numbers; arrays of scales are float32 in either case. float16 has 11 significant bits from
2^-14 to 65504. Below, its numbers are multiples of 2^-24: one bit less with each halving, 7 bits at 2^-18. So rounding
changes a scale by at most 1 part in 2048, and less than 1 % down to 2^-18. That costs little where codes are chosen
with the rounded scales.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ingot.passes.numerics.arrays import Float32Array

ScaleDtype = Literal["float32", "float16"]

# Between them float16 holds a scale within 1 %.
LEAST_SCALE, MOST_SCALE = np.float32(2.0**-18), np.float32(2.0**16 - 2.0**5)
_SEARCH_MARGIN = np.float32(2)  # a clip makes a scale smaller, a fit to the codes may make it larger
FLOAT16_RANGE = "8e-6 to 3e4 within 1 %"  # the range without _SEARCH_MARGIN at both ends


def to_float16(scales: Float32Array) -> Float32Array:
    """Return the nearest float16 numbers, as float32; infinite above 65504."""
    with np.errstate(over="ignore"):
        return scales.astype(np.float16).astype(np.float32)


def is_float16(values: Float32Array) -> bool:
    """Return whether every number is exact in float16."""
    return bool(np.array_equal(to_float16(values), values))


def survives_float16(values: Float32Array) -> bool:
    """Return whether rounding to float16 makes no number infinite, and none zero that was not."""
    rounded = to_float16(values)
    return bool(np.isfinite(rounded).all() and np.array_equal(rounded == 0, values == 0))


def scale_dtype_of(scales: Float32Array) -> ScaleDtype:
    """Return the narrowest type that holds every scale."""
    return "float16" if is_float16(scales) else "float32"


def may_be_float16(scales: Float32Array) -> bool:
    """Return whether float16 holds scales of about this size, before a search that may halve or double them."""
    return bool((scales >= LEAST_SCALE * _SEARCH_MARGIN).all() and (scales <= MOST_SCALE / _SEARCH_MARGIN).all())


WeightBits = Literal[2, 3, 4, 8]
BlockSize = Literal[0, 16, 32, 64, 128, 256, "channel"]  # values of options; 0 and "channel" are the same


@dataclass(frozen=True)
class Scheme:
    """Quantization of one weight. block_size 0: per channel. Symmetric: signed codes, no zero point.

    scale_dtype    float16: codes are chosen with scales that float16 holds exactly, unless some are out of its range
    """

    bits: WeightBits
    block_size: int
    symmetric: bool
    clip: bool = True
    scale_dtype: ScaleDtype = "float32"

    @classmethod
    def of(
        cls,
        bits: WeightBits,
        block_size: BlockSize,
        symmetric: bool,
        clip: bool = True,
        scale_dtype: ScaleDtype = "float32",
    ) -> "Scheme":
        """Make a scheme from options, where the block size may be "channel"."""
        return cls(bits, 0 if block_size == "channel" else block_size, symmetric, clip, scale_dtype)

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code: -8..7 or 0..15 with 4 bits, and so on."""
        levels = 1 << self.bits
        return (-levels // 2, levels // 2 - 1) if self.symmetric else (0, levels - 1)

    def block_columns(self, columns: int) -> int:
        """Columns that share a scale, in a row of `columns`."""
        return self.block_size or columns

    def num_blocks(self, columns: int) -> int:
        """Scales per row; the last block may be partial."""
        return -(-columns // self.block_columns(columns))
