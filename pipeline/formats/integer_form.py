"""QuantizedWeight -> the one form of quantized weight that the IR holds, without changing a value.

DequantizeLinear takes codes of 2, 3, 4 or 8 bits, signed and centred at zero or unsigned with zero points of the same
type, in contiguous blocks. Shifting codes and zero points together changes no difference, and a group may be cut into
smaller blocks that repeat its scale, so much of what formats store fits: any constant zero point is taken into the
codes, groups of 96 become blocks of 32, fp4 numbers are halves of 8-bit integers. What does not fit says why.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.passes.lowering.nbits_packing import ENGINE_BLOCKS
from ingot.pipeline.formats.exact import as_integers
from ingot.pipeline.formats.quantized import FloatArray, QuantizedWeight


@dataclass(frozen=True)
class IntegerForm:
    """codes [out, in] int8 | uint8, scale [out, blocks] (per channel: [out]), zero_point as scale or None.

    block_size is 0 per channel. Signed codes have no zero points, unsigned ones do.
    """

    codes: NDArray[Any]
    scale: FloatArray
    zero_point: NDArray[np.uint8] | None
    bits: int
    block_size: int


def integer_form(weight: QuantizedWeight | FloatArray) -> IntegerForm | str:
    """The same weight as the IR holds it, or the reason why it cannot."""
    if not isinstance(weight, QuantizedWeight):
        return "it is not quantized"
    integers = as_integers(weight)
    if isinstance(integers, str):
        return f"{integers}; the engine's are integers with whole zero points"
    if integers.g_idx is not None:
        return "its groups are in activation order"
    return _in_blocks(integers)


def _in_blocks(weight: QuantizedWeight) -> IntegerForm | str:
    block_size = _block_size(weight)
    if block_size is None:
        return f"groups of {weight.group_size} columns are no whole blocks of {min(ENGINE_BLOCKS)}"
    shifted = _signed(weight) or _unsigned(weight)
    if shifted is None:
        return "its zero points lie outside of 8 bits"
    codes, zero_points, bits = shifted
    return IntegerForm(
        codes=codes,
        scale=_per_block(weight.scales, weight, block_size),
        zero_point=None if zero_points is None else _per_block(zero_points, weight, block_size),
        bits=bits,
        block_size=block_size,
    )


def _block_size(weight: QuantizedWeight) -> int | None:
    """0 per channel, the largest engine block that divides a group, or None."""
    if weight.scales.shape[1] == 1:
        return 0
    return next((block for block in reversed(ENGINE_BLOCKS) if weight.group_size % block == 0), None)


def _signed(weight: QuantizedWeight) -> tuple[NDArray[Any], None, int] | None:
    """Codes with one zero point for all taken into them."""
    zero = 0 if weight.zero_points is None else int(weight.zero_points.flat[0])
    if weight.zero_points is not None and (weight.zero_points != zero).any():
        return None
    codes = weight.codes.astype(np.int16) - np.int16(zero)
    lowest, highest = int(codes.min()), int(codes.max())
    for bits in _widths(weight):
        if -(1 << (bits - 1)) <= lowest and highest < 1 << (bits - 1):
            return codes.astype(np.int8), None, bits
    return None


def _unsigned(weight: QuantizedWeight) -> tuple[NDArray[Any], NDArray[np.uint8], int] | None:
    """Codes and zero points, shifted together where they are signed."""
    points = np.zeros_like(weight.scales, np.int16) if weight.zero_points is None else weight.zero_points
    lowest = min(int(weight.codes.min()), int(points.min()))
    highest = max(int(weight.codes.max()), int(points.max()))
    for bits in _widths(weight):
        shift = 0 if lowest >= 0 else 1 << (bits - 1)
        if lowest + shift >= 0 and highest + shift < 1 << bits:
            codes = weight.codes.astype(np.int16) + np.int16(shift)
            return codes.astype(np.uint8), (points + np.int16(shift)).astype(np.uint8), bits
    return None


def _widths(weight: QuantizedWeight) -> list[int]:
    """Widths to try: those of the IR, from what the format stores up; 2 and 3 where it says so."""
    return [bits for bits in (2, 3, 4, 8) if bits >= (weight.bits or 4)]


def _per_block(values: NDArray[Any], weight: QuantizedWeight, block_size: int) -> NDArray[Any]:
    """[out, groups] -> [out, blocks], or [out] per channel."""
    if block_size == 0:
        return np.ascontiguousarray(values[:, 0])
    columns = weight.codes.shape[1]
    blocks = np.repeat(values, weight.group_size // block_size, axis=1)
    return np.ascontiguousarray(blocks[:, : -(-columns // block_size)])
