"""Other forms of a quantized weight with exactly the same values.

    zero points   codes and zero points of a group shift together: only their difference counts
    width         codes of fewer bits are stored in more
    groups        a scale of many columns is repeated for smaller groups
    minima        q * d + m is (q - z) * d if m is a whole multiple -z of d (GGUF's Q4_1)
    fp4           e2m1 numbers are halves of integers: e2m1 * s is (2 * e2m1) * (s / 2)

All of it is integer arithmetic, and dequantized float32 values keep their bits (except the sign of a zero). A form that
does not exist is refused with the reason.

dequantize_operands gives the form that the IR holds. DequantizeLinear takes codes of 2, 3, 4 or 8 bits in contiguous
blocks: signed ones without zero points, or unsigned ones with zero points of the same type.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingot.passes.lowering.nbits_packing import ENGINE_BLOCKS
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight

GroupArray = NDArray[np.int16]  # [out, groups]
# Zero points: all in the middle of the range (symmetric), from 0 up, or from 1 up (GPTQ's version 1 stores them - 1).
Zeros = Literal["middle", "from zero", "from one"]
MAX_BITS = 8


@dataclass(frozen=True)
class Differences:
    """Lowest and highest code - zero_point of each group, [out, groups]: every form of the weight keeps them."""

    lowest: GroupArray
    highest: GroupArray

    def bits(self, zeros: Zeros) -> int | None:
        """Return the fewest bits that hold the codes with such zero points; None: more than MAX_BITS."""
        return next((bits for bits in range(2, MAX_BITS + 1) if self._fit(bits, zeros)), None)

    def zero_points(self, bits: int, zeros: Zeros, preferred: GroupArray) -> GroupArray:
        """Return zero points of that width: the preferred ones, or the nearest that are possible."""
        least, most = self._bounds(bits, zeros)
        return np.clip(preferred, least, most).astype(np.int16)

    def _fit(self, bits: int, zeros: Zeros) -> bool:
        least, most = self._bounds(bits, zeros)
        return bool((least <= most).all())

    def _bounds(self, bits: int, zeros: Zeros) -> tuple[GroupArray, GroupArray]:
        """Return least and largest zero point of each group with which all its codes are in [0, 2 ** bits)."""
        codes, middle = 1 << bits, 1 << (bits - 1)
        first, last = {"middle": (middle, middle), "from zero": (0, codes - 1), "from one": (1, codes)}[zeros]
        least = np.maximum(-self.lowest.astype(np.int32), first)
        most = np.minimum(codes - 1 - self.highest.astype(np.int32), last)
        return least.astype(np.int16), most.astype(np.int16)


def differences(weight: DecodedWeight) -> Differences:
    """Return the differences of a weight with integer codes and without offsets."""
    groups, codes = weight.groups_of_columns, weight.codes
    if weight.g_idx is not None:
        order = np.argsort(groups, kind="stable")
        groups, codes = groups[order], codes[:, order]
    starts = np.searchsorted(groups, np.arange(weight.scales.shape[1]))
    points = np.int16(0) if weight.zero_points is None else weight.zero_points
    lowest = np.minimum.reduceat(codes, starts, axis=1).astype(np.int16) - points
    highest = np.maximum.reduceat(codes, starts, axis=1).astype(np.int16) - points
    return Differences(lowest, highest)


def as_integers(weight: DecodedWeight) -> DecodedWeight | str:
    """Return the weight with integer codes and zero points, without offsets; or the reason why no such form exists."""
    if weight.kind == "float":
        return _doubled(weight)
    if weight.g_idx is not None and len(np.unique(weight.g_idx)) < weight.scales.shape[1]:
        return "its order of columns leaves groups without a column"
    return weight if weight.offsets is None else _with_whole_minima(weight)


def unsigned(weight: DecodedWeight, bits: int, zeros: Zeros, found: Differences | None = None) -> DecodedWeight:
    """Return codes in [0, 2 ** bits) with such zero points, the weight's own ones if possible.

    The caller has checked Differences.bits.
    """
    found = found or differences(weight)
    points = found.zero_points(bits, zeros, _natural(weight, bits))
    old = np.zeros_like(points) if weight.zero_points is None else weight.zero_points
    shift = (points - old)[:, weight.groups_of_columns]
    codes = (weight.codes.astype(np.int16) + shift).astype(np.uint8)
    return replace(weight, codes=codes, zero_points=points, bits=bits)


def signed(weight: DecodedWeight, bits: int, zeros: Zeros, found: Differences | None = None) -> DecodedWeight:
    """Return codes in [-2 ** (bits - 1), 2 ** (bits - 1)); with "middle", without zero points."""
    shifted, half = unsigned(weight, bits, zeros, found), np.int16(1 << (bits - 1))
    assert shifted.zero_points is not None
    codes = (shifted.codes.astype(np.int16) - half).astype(np.int8)
    points = None if zeros == "middle" else shifted.zero_points - half
    return replace(shifted, codes=codes, zero_points=points)


def regrouped(weight: DecodedWeight, group_size: int) -> DecodedWeight:
    """Return the weight in groups of a size that divides its own: scales and zero points repeat."""
    if group_size == weight.group_size:
        return weight
    assert weight.g_idx is None
    starts = np.arange(0, weight.codes.shape[1], group_size) // weight.group_size

    def repeated(values: Any) -> Any:
        return None if values is None else np.ascontiguousarray(values[:, starts])

    return replace(
        weight,
        scales=repeated(weight.scales),
        zero_points=repeated(weight.zero_points),
        offsets=repeated(weight.offsets),
        group_size=group_size,
    )


def _natural(weight: DecodedWeight, bits: int) -> GroupArray:
    """Return the weight's own zero points, shifted by half the range if its codes are signed."""
    shift = (1 << (bits - 1)) if weight.codes.dtype == np.int8 else 0
    points = np.zeros(weight.scales.shape, np.int16) if weight.zero_points is None else weight.zero_points
    return points + np.int16(shift)


def _doubled(weight: DecodedWeight) -> DecodedWeight | str:
    twice, half = weight.codes * np.float32(2), weight.scales * np.float32(0.5)
    codes = np.rint(twice)
    if not np.array_equal(codes, twice) or np.abs(codes).max() > 127:
        return "its codes are floats (fp8)"
    if not np.array_equal(half * np.float32(2), weight.scales):
        return "half of its smallest scale is not exact in float32"
    return replace(weight, codes=codes.astype(np.int8), scales=half, bits=MAX_BITS)


def _with_whole_minima(weight: DecodedWeight) -> DecodedWeight | str:
    assert weight.offsets is not None
    with np.errstate(divide="ignore", invalid="ignore"):
        points = np.nan_to_num(np.rint(-weight.offsets / weight.scales), nan=0.0, posinf=0.0, neginf=0.0)
    points = np.clip(points, -(1 << 10), 1 << 10).astype(np.int16)
    found = replace(weight, zero_points=points, offsets=None)
    if not np.array_equal(found.dequantize(), weight.dequantize()):
        return "its minima are not whole multiples of its scales"
    return found


@dataclass(frozen=True)
class DequantizeOperands:
    """Operands of the DequantizeLinear that gives the weight.

    codes [out, in] int8 without zero points, or uint8 with zero points; scale [out, blocks], or [out] per channel;
    zero_point as scale; block_size 0: per channel.
    """

    codes: NDArray[Any]
    scale: FloatArray
    zero_point: NDArray[np.uint8] | None
    bits: int
    block_size: int


def dequantize_operands(weight: DecodedWeight | FloatArray) -> DequantizeOperands | str:
    """Return the operands that give the same weight, or the reason why the IR cannot hold it."""
    if not isinstance(weight, DecodedWeight):
        return "it is not quantized"
    integers = as_integers(weight)
    if isinstance(integers, str):
        return f"{integers}; the engine computes with integers and whole zero points"
    if integers.g_idx is not None:
        return "its groups are in activation order"
    return _in_blocks(integers)


def _in_blocks(weight: DecodedWeight) -> DequantizeOperands | str:
    block_size = _block_size(weight)
    if block_size is None:
        return f"groups of {weight.group_size} columns are not whole blocks of {min(ENGINE_BLOCKS)}"
    shifted = _signed(weight) or _unsigned(weight)
    if shifted is None:
        return "its zero points are outside of 8 bits"
    codes, zero_points, bits = shifted
    return DequantizeOperands(
        codes=codes,
        scale=_per_block(weight.scales, weight, block_size),
        zero_point=None if zero_points is None else _per_block(zero_points, weight, block_size),
        bits=bits,
        block_size=block_size,
    )


def _block_size(weight: DecodedWeight) -> int | None:
    """Return the largest block of the engine that divides a group; 0 per channel; None if no block divides it."""
    if weight.scales.shape[1] == 1:
        return 0
    return next((block for block in reversed(ENGINE_BLOCKS) if weight.group_size % block == 0), None)


def _signed(weight: DecodedWeight) -> tuple[NDArray[Any], None, int] | None:
    """Return codes less their zero point, if all groups have the same one."""
    zero = 0 if weight.zero_points is None else int(weight.zero_points.flat[0])
    if weight.zero_points is not None and (weight.zero_points != zero).any():
        return None
    codes = weight.codes.astype(np.int16) - np.int16(zero)
    lowest, highest = int(codes.min()), int(codes.max())
    for bits in _widths(weight):
        if -(1 << (bits - 1)) <= lowest and highest < 1 << (bits - 1):
            return codes.astype(np.int8), None, bits
    return None


def _unsigned(weight: DecodedWeight) -> tuple[NDArray[Any], NDArray[np.uint8], int] | None:
    """Return unsigned codes and zero points, shifted together if they are signed."""
    points = np.zeros_like(weight.scales, np.int16) if weight.zero_points is None else weight.zero_points
    lowest = min(int(weight.codes.min()), int(points.min()))
    highest = max(int(weight.codes.max()), int(points.max()))
    for bits in _widths(weight):
        shift = 0 if lowest >= 0 else 1 << (bits - 1)
        if lowest + shift >= 0 and highest + shift < 1 << bits:
            codes = weight.codes.astype(np.int16) + np.int16(shift)
            return codes.astype(np.uint8), (points + np.int16(shift)).astype(np.uint8), bits
    return None


def _widths(weight: DecodedWeight) -> list[int]:
    """Return the IR's widths from the stored one up; a weight that records no width starts at 4."""
    return [bits for bits in (2, 3, 4, 8) if bits >= (weight.bits or 4)]


def _per_block(values: NDArray[Any], weight: DecodedWeight, block_size: int) -> NDArray[Any]:
    """Return [out, groups] as [out, blocks], or as [out] per channel."""
    if block_size == 0:
        return np.ascontiguousarray(values[:, 0])
    columns = weight.codes.shape[1]
    blocks = np.repeat(values, weight.group_size // block_size, axis=1)
    return np.ascontiguousarray(blocks[:, : -(-columns // block_size)])
