"""Attention in bfloat16 in numpy, operation by operation: the bits that the kernel must make (without softcap).

paged_attention_bfloat16.h and paged_attention_amx.h describe the arithmetic. numpy rounds every operation by itself, as
the kernel does, and multiplications of two numbers in bfloat16 are exact.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.kv_geometry import key_type, value_type
from ingot.artifact.programs.cpu_program import Arithmetic
from ingot.runtime.forward_batch import FloatArray, Int64Array
from tests.runtime.cpu.native.attention_cases import Case, Sequence, stored

TILE, SPLIT, LANES = 64, 512, 16
Multiplied = Callable[[FloatArray, FloatArray], FloatArray]
_MASKED = np.float32(-1e30)
_SHIFT = np.float32(1.5 * 2**23)
_POLYNOMIAL = (0.009582852944731712, 0.055906426161527634, 0.24024099111557007, 0.6931241750717163, 1.0)


def bfloat16(x: FloatArray) -> FloatArray:
    """Numbers rounded to bfloat16, nearest with ties to even; 0 for those below 2^-56."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    return np.where(np.abs(x) < 2.0**-56, np.float32(0), nearest)


def exp2_negative(x: FloatArray) -> FloatArray:
    """2^x for x <= 0 in float32, by the kernel's polynomial."""
    shifted = x + _SHIFT
    r = x - (shifted - _SHIFT)
    y = np.full_like(x, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        y = y * r + np.float32(coefficient)
    powers = (y.view(np.int32) + (shifted.view(np.int32) << 23)).view(np.float32)
    return np.where(x > -54, powers, np.float32(0))


def exp2(x: NDArray[np.float64]) -> FloatArray:
    """2^x of any x, computed in float64 by the kernel's polynomial, in float32."""
    whole = np.rint(x)
    y = np.zeros_like(x)
    for k in range(8, -1, -1):
        y = y * (x - whole) + math.log(2) ** k / math.factorial(k)
    powers = np.ldexp(y, np.clip(whole, -1000, 1000).astype(np.int64))
    return np.select([x >= 128, x > -150], [np.inf, powers], 0).astype(np.float32)


def _in_order(count: int) -> list[int]:
    """1, 0, 3, 2, ...: the upper half of each pair comes first."""
    return [i ^ 1 for i in range(count + count % 2) if i ^ 1 < count]


def _multiplied_and_added(a: FloatArray, b: FloatArray) -> FloatArray:
    """The sum of a[..., i, :, None] * b[..., i, None, :] over i, one after the other."""
    total = np.zeros((*a.shape[:-2], a.shape[-1], b.shape[-1]), np.float32)
    for i in _in_order(a.shape[-2]):
        total += a[..., i, :, None] * b[..., i, None, :]
    return total


def _multiplied_and_added_by_amx(a: FloatArray, b: FloatArray) -> FloatArray:
    """The same, 32 of i at a time: those of even i by themselves, and those of odd i."""
    total = np.zeros((*a.shape[:-2], a.shape[-1], b.shape[-1]), np.float32)
    for piece in range(0, a.shape[-2], 2 * LANES):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for i in range(piece, min(piece + 2 * LANES, a.shape[-2])):
            (odd if i % 2 else even)[:] += a[..., i, :, None] * b[..., i, None, :]
        total += even + odd
    return total


def reference(case: Case, sequence: Sequence, arithmetic: Arithmetic = "bfloat16") -> FloatArray:
    """Outputs [tokens, heads * output_dim] of one sequence."""
    multiplied = _multiplied_and_added_by_amx if arithmetic == "bfloat16-amx" else _multiplied_and_added
    n, kv, dim = len(sequence.query), case.kv_heads, case.dim
    query = sequence.query.reshape(n, case.heads, dim)
    if case.rotation is not None:
        query = case.rotation.apply(query, np.arange(n))
    query = bfloat16(query * (np.float32(case.step.scale) * np.float32(1.44269504)))
    queries = query.reshape(n, kv, -1, dim).transpose(1, 3, 0, 2).reshape(kv, dim, -1)  # [kv heads, dim, rows]
    keys = bfloat16(stored(case, key_type(case.dtype), sequence.key, case.rotation)).transpose(1, 2, 0)
    values = keys[:, dim - case.output_dim :]  # [kv heads, dim, tokens]
    if not case.is_latent:
        values = bfloat16(stored(case, value_type(case.dtype), sequence.value)).transpose(1, 2, 0)
    positions = np.arange(n).repeat(case.heads // kv)
    total = _Sums(kv, len(positions), case.output_dim)
    for split in range(0, n, SPLIT):
        own = _Sums(kv, len(positions), case.output_dim, multiplied)
        for start in range(split, min(n, split + SPLIT), TILE):
            tile = slice(start, start + TILE)
            own.attend(queries, keys[..., tile], values[..., tile], _seen(case, positions, start, n))
        total.merge(own)
    sinks = None if case.sinks is None else np.tile(case.sinks.reshape(kv, -1), n)  # [kv heads, rows]
    outputs: FloatArray = total.result(sinks).reshape(kv, n, -1, case.output_dim).transpose(1, 0, 2, 3).reshape(n, -1)
    return outputs


def _seen(
    case: Case, positions: Int64Array, start: int, tokens: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether each row attends to each token of the tile: [rows, tokens]."""
    distance = positions[:, None] - np.arange(start, min(start + TILE, tokens))
    return (distance >= 0) & (distance < (case.window or tokens))


class _Sums:
    """A split's running results of all rows: maximum, sums of probabilities by lane, output."""

    def __init__(self, kv_heads: int, rows: int, dim: int, multiplied: Multiplied = _multiplied_and_added) -> None:
        self._multiplied = multiplied
        self.top = np.full((kv_heads, rows, 1), _MASKED)
        self.sums = np.zeros((kv_heads, rows, LANES), np.float32)
        self.output = np.zeros((kv_heads, rows, dim), np.float32)

    def attend(
        self,
        queries: FloatArray,
        keys: FloatArray,
        values: FloatArray,
        seen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    ) -> None:
        """Add a tile: queries [kv heads, dim, rows], keys and values [kv heads, dim, tokens], seen [rows, tokens]."""
        scores = np.where(seen, self._multiplied(queries, keys), _MASKED)
        top = np.maximum(self.top, scores.max(axis=-1, keepdims=True))
        alpha = exp2_negative(self.top - top)
        weights = np.where(seen, exp2_negative(scores - top), np.float32(0))
        self.sums *= alpha
        for lane in range(0, weights.shape[-1], LANES):
            part = weights[..., lane : lane + LANES]
            self.sums[..., : part.shape[-1]] += part
        weighed = self._multiplied(bfloat16(weights).swapaxes(1, 2), values.swapaxes(1, 2))
        self.output, self.top = self.output * alpha + weighed, top

    def merge(self, own: "_Sums") -> None:
        """Add the results of the next split."""
        top = np.maximum(self.top, own.top)
        keep, add = exp2_negative(self.top - top), exp2_negative(own.top - top)
        self.output = self.output * keep + own.output * add
        self.sums, self.top = self.sums * keep + own.sums * add, top

    def result(self, sinks: FloatArray | None) -> FloatArray:
        """Outputs [kv heads, rows, dim]; sinks [kv heads, rows]."""
        sums = self.sums
        while sums.shape[-1] > 1:
            half = sums.shape[-1] // 2
            sums = sums[..., :half] + sums[..., half:]
        if sinks is not None:
            sums = sums + exp2(sinks[..., None] * np.float64(1.4426950408889634) - self.top)
        return self.output * (np.float32(1) / sums) + np.float32(0)
