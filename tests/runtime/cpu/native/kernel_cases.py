"""Matrices packed as launch.h says, calls of the C kernels, and float64 references; for the tests of the kernels."""

from ctypes import POINTER, Array, c_float
from dataclasses import dataclass, field
from math import erfc
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact.programs.cpu_program import Activation, Rounding
from ingot.artifact.programs.operation_row import LANES, Form, Matrix
from ingot.runtime.cpu.native.kernels import RoundedRows, find_kernels
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.program import instruction_sets
from ingot.runtime.cpu.native.structures import LinearOperation, LowRankAt, MatrixAt, NormOf, ViewAt
from ingot.runtime.forward_batch import FloatArray

DoubleArray = NDArray[np.float64]

FORMS: tuple[Form, ...] = ("float32", "float16", "bfloat16", "float8", "int2", "int3", "int4", "int8")
INTEGERS = FORMS[4:]
ROUNDINGS: tuple[Rounding, ...] = ("none", "block", "token", "static")
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
UNGATED = tuple(name for name in ACTIVATIONS if name != "clamped-swiglu")
NUMBERS: dict[Activation, tuple[float, ...]] = {
    "xielu": (0.8, 0.5, 0.3, -1e-6),
    "clamped-swiglu": (1.702, 7.0),
    "clamp": (-3.0, 50.0),
}
FLOAT_TYPES: dict[Form, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8": ml_dtypes.float8_e4m3fn,
}


SETS = instruction_sets() if native_library() else ()
needs_library = pytest.mark.skipif(not SETS, reason="the native library was not built")


def view_of(array: FloatArray | None, *, gathered: bool = False) -> ViewAt:
    """Rows of an array."""
    return ViewAt() if array is None else ViewAt(array.ctypes.data, array.strides[0] // 4, gathered)


def norm_of(kind: str, weight: FloatArray | None, bias: FloatArray | None = None, epsilon: float = 1e-5) -> NormOf:
    """A norm; the arrays must outlive it."""
    data = (None if array is None else array.ctypes.data for array in (weight, bias))
    return NormOf(*data, epsilon, ("none", "rms", "layer").index(kind))


@dataclass
class Weight:
    """A packed matrix [n, k] and its exact values.

    codes    [n, k] unsigned codes, or floats of the form's type
    scales   [n, blocks], as stored; None for floats without scales
    zeros    [n, blocks] uint8 or None
    """

    matrix: Matrix
    codes: NDArray[Any]
    scales: NDArray[Any] | None = None
    zeros: NDArray[np.uint8] | None = None
    tiles: NDArray[np.uint8] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        packed = _pack(self)
        memory = np.zeros(packed.size + 16, np.uint8)
        start = (8 - memory.ctypes.data) % 16  # no more than what safetensors aligns to
        self.tiles = memory[start : start + packed.size].reshape(packed.shape)
        self.tiles[:] = packed

    @property
    def values(self) -> DoubleArray:
        """[n, k] what the matrix means."""
        values: DoubleArray = self.codes.astype(np.float64)
        if self.matrix.is_integer:
            values -= self.spread(self.zero_points)
        if self.scales is not None:
            values *= self.spread(self.scales) if self.matrix.is_integer else self.scales
        return values

    @property
    def zero_points(self) -> NDArray[Any]:
        """[n, blocks]"""
        assert self.scales is not None
        middle = 1 << (int(self.matrix.form[3:]) - 1)
        return np.full(self.scales.shape, middle) if self.zeros is None else self.zeros.astype(np.int64)

    def spread(self, per_block: NDArray[Any]) -> NDArray[Any]:
        """[n, k] of numbers [n, blocks]."""
        if self.matrix.per_row:
            return np.repeat(per_block, self.matrix.k, 1)
        return np.repeat(per_block, self.matrix.block, 1)[:, : self.matrix.k]

    def as_structure(self) -> MatrixAt:
        """launch.h's struct matrix."""
        m = self.matrix
        return MatrixAt(
            self.tiles.ctypes.data, m.tile_bytes, m.codes_offset, m.n, m.k, m.padded_k, FORMS.index(m.form), m.block,
            m.scale_blocks, m.scale_bytes, m.has_zeros,
        )  # fmt: skip


def random_weight(
    rng: np.random.Generator, n: int, k: int, form: Form, *, block: int = 32, per_row: bool = False,
    zeros: bool = False, scale_bytes: int = 2, pairs: bool = False,
) -> Weight:  # fmt: skip
    """A matrix with scales around 0.01, or floats around 0.02."""
    if not form.startswith("int"):
        matrix = Matrix(
            n=n, k=k, form=form, scale_bytes=4 if form == "float8" else 0, per_row=form == "float8", pairs=pairs
        )
        codes = (rng.standard_normal((n, k)) * (50 if form == "float8" else 0.02)).astype(FLOAT_TYPES[form])
        return Weight(matrix, codes, rng.uniform(1e-4, 3e-4, (n, 1)).astype(np.float32) if form == "float8" else None)
    matrix = Matrix(
        n=n, k=k, form=form, block=block, per_row=per_row, scale_bytes=4 if scale_bytes == 4 else 2, has_zeros=zeros,
        pairs=pairs,
    )  # fmt: skip
    blocks = 1 if per_row else -(-k // block)
    levels = 1 << int(form[3:])
    codes = rng.integers(0, levels, (n, k), dtype=np.uint8)
    scales = rng.uniform(0.005, 0.015, (n, blocks)).astype(np.float16 if scale_bytes == 2 else np.float32)
    return Weight(matrix, codes, scales, rng.integers(0, levels, (n, blocks), dtype=np.uint8) if zeros else None)


def _pack(weight: Weight) -> NDArray[np.uint8]:
    """[tiles, tile_bytes], code by code as launch.h describes them."""
    m = weight.matrix
    tiles = np.zeros((m.num_tiles, m.tile_bytes), np.uint8)
    half = m.n // 2 if m.pairs else m.n
    for row in range(m.n):
        part, at = divmod(row, half)
        tile = tiles[2 * (at // LANES) + part if m.pairs else at // LANES]
        _pack_row(weight, row, at % LANES, tile)
    return tiles


def _pack_row(weight: Weight, row: int, lane: int, tile: NDArray[np.uint8]) -> None:
    m, body = weight.matrix, tile[weight.matrix.codes_offset :]
    if weight.scales is not None:
        stored = weight.scales[row]
        tile[: m.scale_blocks * LANES * m.scale_bytes].view(stored.dtype).reshape(-1, LANES)[: len(stored), lane] = (
            stored
        )
    if weight.zeros is not None:
        begin = m.scale_blocks * LANES * m.scale_bytes
        zeros = tile[begin : begin + m.scale_blocks * LANES].reshape(-1, LANES)
        zeros[: weight.zeros.shape[1], lane] = weight.zeros[row]
    if not m.is_integer:
        body[: m.k * LANES * weight.codes.itemsize].view(weight.codes.dtype).reshape(-1, LANES)[:, lane] = weight.codes[
            row
        ]
        return
    zero_of_last = weight.zero_points[row, -1]
    codes = np.full(m.padded_k, zero_of_last, np.uint8)
    codes[: m.k] = weight.codes[row]
    for k, code in enumerate(codes):
        group, j = k // 4, k % 4
        if m.form == "int8":
            body[64 * group + 4 * lane + j] = code
        elif m.form == "int4":
            body[64 * (group // 2) + 4 * lane + j] |= code << (4 * (group % 2))
        elif m.form == "int2":
            body[64 * (group // 4) + 4 * lane + j] |= code << (2 * (group % 4))
        else:
            at, i = 192 * (group // 8), group % 8
            body[at + 64 * (i // 4) + 4 * lane + j] |= (code & 3) << (2 * (i % 4))
            body[at + 128 + 4 * lane + j] |= (code >> 2) << i


@dataclass
class LinearCase:
    """y = alpha * (norm(x) @ W^T) + bias, capped, activated and stored."""

    weight: Weight
    rounding: Rounding = "none"
    store: str = "store"
    activation: Activation = "none"
    norm: str = "none"
    norm_weight: FloatArray | None = None
    norm_bias: FloatArray | None = None
    bias: FloatArray | None = None
    static_scale: float = 0.0
    alpha: float = 1.0
    cap: float = 0.0

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return self.weight.matrix.n // (2 if self.store == "gate" else 1)

    def run(
        self,
        name: str,
        x: FloatArray,
        before: float = 0.0,
        units: tuple[int, int] | None = None,
        changes: tuple[LowRankAt, NDArray[np.bool_]] | None = None,
    ) -> FloatArray:
        """[rows, columns] by one instruction set. `before` is in the output already; `units`: only those.

        changes   of the rows [rows] that are marked
        """
        matrix = self.weight.as_structure()
        stride = -(-self.columns // LANES) * LANES + LANES
        output = np.full((len(x), stride), np.nan, np.float32)
        output[:, : self.columns] = before
        op = LinearOperation(
            matrix=POINTER(MatrixAt)(matrix),
            bias=data_of(self.bias),
            output=view_of(output),
            norm=norm_of(self.norm, self.norm_weight, self.norm_bias),
            rounding=ROUNDINGS.index(self.rounding),
            store=("store", "add", "gate").index(self.store),
            activation=ACTIVATIONS.index(self.activation),
            static_scale=self.static_scale,
            alpha=self.alpha,
            cap=self.cap,
            numbers=numbers_of(self.activation),
        )
        table = find_kernels(name)
        rounded = RoundedRows(table, op, x)
        if changes is not None:
            rounded.change(table, *changes, self.normed(x))
        rounded.multiply(table, op, *(units or (0, -(-self.columns // LANES))))
        assert np.isnan(output[:, self.columns :]).all(), "wrote beyond its columns"
        return output[:, : self.columns]

    def expected(self, x: FloatArray, before: float = 0.0, added: DoubleArray | float = 0.0) -> DoubleArray:
        """[rows, columns] in float64, after the rounding of activations in float32. added: to x' @ W^T, [rows, n]."""
        y = (self._operand(x) @ self.weight.values.T + added) * self.alpha
        y = y + (0 if self.bias is None else self.bias)
        y = self.cap * np.tanh(y / self.cap) if self.cap else y
        if self.store == "gate":
            gate, up = np.split(y, 2, axis=1)
            return gated(gate, up, self.activation)
        return activated(y, self.activation) + (before if self.store == "add" else 0)

    def magnitudes(self, x: FloatArray) -> DoubleArray:
        """[rows, n] sums of the magnitudes of the numbers that the matmul adds: |x'| @ |W|^T."""
        sums: DoubleArray = np.abs(self._operand(x)) @ np.abs(self.weight.values).T
        return sums

    def _operand(self, x: FloatArray) -> DoubleArray:
        """x' [rows, k]: the normed and rounded input."""
        return self._rounded(self.normed(x))

    def normed(self, x: FloatArray) -> FloatArray:
        """x' [rows, k] before it is rounded."""
        return norm(x, self.norm, self.norm_weight, self.norm_bias).astype(np.float32)

    def _rounded(self, x: FloatArray) -> DoubleArray:
        """x' [rows, k]: what the codes of the activations mean."""
        if self.rounding == "none":
            return x.astype(np.float64)
        size = self.weight.matrix.block if self.rounding == "block" else x.shape[1]
        parts = []
        for begin in range(0, x.shape[1], size):
            part = x[:, begin : begin + size]
            peak = np.maximum(np.abs(part).max(axis=1, keepdims=True), np.float32(1e-30))
            scale = np.float32(self.static_scale) if self.rounding == "static" else peak / np.float32(127)
            parts.append(np.clip(np.rint(part / scale), -128, 127) * np.float64(scale))
        return np.concatenate(parts, axis=1)


def data_of(array: FloatArray | None) -> int | None:
    """Address of an array's first element."""
    return None if array is None else array.ctypes.data


def norm(x: FloatArray, kind: str, weight: FloatArray | None, bias: FloatArray | None) -> DoubleArray:
    """The norm of rows in float64, with epsilon 1e-5."""
    y = x.astype(np.float64)
    if kind == "none":
        return y
    if kind == "layer":
        y -= y.mean(axis=1, keepdims=True)
    y /= np.sqrt(np.square(y).mean(axis=1, keepdims=True) + np.float64(np.float32(1e-5)))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def activated(x: DoubleArray, activation: Activation) -> DoubleArray:
    """The activation in float64."""
    y: DoubleArray = x
    with np.errstate(over="ignore"):
        match activation:
            case "silu":
                y = x / (1 + np.exp(-x))
            case "gelu-erf":
                y = x * 0.5 * np.vectorize(erfc)(-x / np.sqrt(2))
            case "gelu-tanh":
                y = x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
            case "sigmoid":
                y = 1 / (1 + np.exp(-x))
            case "relu":
                y = np.maximum(x, 0)
            case "relu2":
                y = np.maximum(x, 0) ** 2
            case "tanh":
                y = np.tanh(x)
            case "clamp":
                least, most = NUMBERS["clamp"]
                y = np.clip(x, least, most)
            case "softplus":
                y = np.logaddexp(x, 0)
            case "xielu":
                a, b, beta, eps = NUMBERS["xielu"]
                y = np.where(x > 0, a * x**2, b * (np.expm1(np.minimum(x, eps)) - x)) + beta * x
    return y


def gated(gate: DoubleArray, up: DoubleArray, activation: Activation) -> DoubleArray:
    """activation(gate) * up in float64."""
    if activation != "clamped-swiglu":
        return activated(gate, activation) * up
    alpha, limit = NUMBERS["clamped-swiglu"]
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    y: DoubleArray = g / (1 + np.exp(-alpha * g)) * (u + 1)
    return y


def numbers_of(activation: Activation) -> Array[c_float]:
    """The numbers of an activation as the structures have them."""
    return (c_float * 4)(*NUMBERS.get(activation, ()))
