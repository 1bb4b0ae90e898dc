"""Quantization of a weight matrix: bits, block size, symmetry, clip, type of the scales."""

from dataclasses import dataclass
from typing import Literal

from ingot.passes.numerics.scale_dtype import ScaleDtype

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
