"""Stored weights of the IR as packed matrices: their form, and their values when they are written.

    float32, float16 or bfloat16, as stored or through a Cast     the same floats
    float8_e4m3fn per channel                                     float8, a float32 scale per row
    2, 3, 4 or 8 bits, in blocks or per channel                   unsigned codes: c + 2^(bits - 1) for signed ones

Scales are float16 where that holds every one of them exactly (`scale_dtype` of a quantizer), and float32 otherwise. A
weight per channel has blocks for the scales of its activations: of up to CHANNEL_BLOCK columns, which fill its rows if
that is possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.programs.operation_row import LEAST_BLOCK, Form, Matrix
from ingot.errors import PassError
from ingot.passes.numerics.scheme import is_float16
from ingot.passes.quantization.weight_nodes import FLOAT8, weight_bits
from ingot.passes.weights import apply_to_array
from ingot.pipeline.targets.cpu.packing import ByteArray, MatrixArrays, default_zero, pack_tiles

PAIRS, TRANSPOSED, OTHER = ".pairs", ".transposed", ".other"  # suffixes of names
_MOST_COLUMNS = 2**16  # limit of the columns that share a scale: their sum must be exact in 32 bits
_FORMS: dict[ir.DataType | None, Form] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}
_SIGNED = (ir.DataType.INT4, ir.DataType.INT8)
_UNSIGNED = (ir.DataType.UINT4, ir.DataType.UINT8)


class NotANumber(PassError):
    """A weight has codes of NaN: damage, with which no engine computes anything but NaN."""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix, and the weight operands whose rows it holds, one after another; transposed: operands are [k, n]."""

    matrix: Matrix
    operands: tuple[ir.Value, ...]
    transposed: bool = False

    @classmethod
    def of(cls, operand: ir.Value, *, transposed: bool = False) -> "StoredMatrix":
        """Describe a stored operand. PassError for a form that has no tiles."""
        matrix = _matrix(operand)
        if transposed:
            if matrix.is_integer or matrix.scale_bytes:
                raise PassError(f"{operand.name!r} is a quantized weight [in, out]; the CPU's kernels read [out, in]")
            matrix = matrix.model_copy(update={"n": matrix.k, "k": matrix.n})
        return cls(matrix, (operand,), transposed)

    @property
    def name(self) -> str:
        """Name of the matrix and of its tensor: that of the first weight."""
        name = _stored(self.operands[0]).name or ""
        return f"{name.removesuffix('.q')}{PAIRS * self.matrix.pairs}{TRANSPOSED * self.transposed}"

    def is_same(self, other: "StoredMatrix") -> bool:
        """Whether both pack the same stored values in the same form."""
        return (self.matrix, self._initializers()) == (other.matrix, other._initializers())

    def _initializers(self) -> list[ir.Value]:
        return [_stored(operand) for operand in self.operands]

    def as_pairs(self, up: "StoredMatrix | None" = None) -> "StoredMatrix | None":
        """Return a matrix of pairs: of this one's halves, or of this one and `up`; None where their forms differ."""
        matrix = self.matrix
        if matrix.pairs or (up is None and matrix.n % 2):
            return None
        if up is None:
            return StoredMatrix(matrix.model_copy(update={"pairs": True}), self.operands, self.transposed)
        scale_bytes, has_zeros = max(matrix.scale_bytes, up.matrix.scale_bytes), matrix.has_zeros or up.matrix.has_zeros
        common = {"scale_bytes": scale_bytes, "has_zeros": has_zeros}
        if matrix.model_copy(update=common) != up.matrix.model_copy(update=common) or self.transposed != up.transposed:
            return None
        both = matrix.model_copy(update={**common, "n": 2 * matrix.n, "pairs": True})
        return StoredMatrix(both, (*self.operands, *up.operands), self.transposed)

    def pack(self) -> ByteArray:
        """Read and pack the weights: [num_tiles, tile_bytes]."""
        parts = [_arrays(operand, self.matrix) for operand in self.operands]
        codes = _joined([part.codes for part in parts])
        scales = [part.scales for part in parts if part.scales is not None]
        zeros = [part.zero_points for part in parts if part.zero_points is not None]
        arrays = MatrixArrays(
            np.ascontiguousarray(codes.T) if self.transposed else codes,
            _joined(scales) if scales else None,
            _joined(zeros) if zeros else None,
        )
        return pack_tiles(self.matrix, arrays)

    def bytes_by_weight(self) -> dict[str, int]:
        """Name of each weight's codes or floats -> its bytes in the program."""
        total, n = self.matrix.num_bytes, self.matrix.n
        return {_stored(operand).name or "": total * _size(operand)[self.transposed] // n for operand in self.operands}


def _matrix(operand: ir.Value) -> Matrix:
    producer = operand.producer()
    if producer is not None and producer.op_type == "DequantizeLinear":
        return _quantized(producer)
    stored, (n, k) = _stored(operand), _size(operand)
    form = _FORMS.get(stored.dtype)
    if form is None:
        raise PassError(f"{stored.name!r} has elements of {stored.dtype}; the CPU's kernels read 32- and 16-bit floats")
    return Matrix(n=n, k=k, form=form)


def _quantized(node: ir.Node) -> Matrix:
    codes, scale = _required(node, 0), _required(node, 1)
    n, k = _size(codes)
    per_row = len(scale.shape or ()) == 1
    if codes.dtype == FLOAT8:
        if not per_row:
            raise PassError(f"{node.name!r} has float8 codes in blocks; the CPU's kernels read one scale per row")
        _require_numbers(codes)
        return Matrix(n=n, k=k, form="float8", per_row=True, scale_bytes=4)
    if codes.dtype not in (*_SIGNED, *_UNSIGNED):
        raise PassError(f"{node.name!r} has codes of {codes.dtype}; the CPU's kernels read float8 and 2 to 8 bits")
    block = 0 if per_row else _block(node, k)
    matrix = Matrix.of_integers(n, k, weight_bits(node), block, _scale_bytes(scale))
    if per_row and matrix.padded_k > _MOST_COLUMNS:
        raise PassError(
            f"{node.name!r} has {k} columns with one scale per row; the CPU's kernels sum up to {_MOST_COLUMNS}: set "
            "block_size to 128"
        )
    zeros = _zero_points(node, matrix)
    has_zeros = zeros is not None and bool((zeros != default_zero(matrix)).any())
    return matrix.model_copy(update={"has_zeros": has_zeros})


def _require_numbers(codes: ir.Value) -> None:
    """NotANumber for float8 codes of NaN: the kernels have no NaN of this form, and would read 480."""
    assert codes.const_value is not None
    count, size = apply_to_array(codes.const_value, lambda values: (int(np.isnan(values).sum()), values.size))
    if count:
        raise NotANumber(
            f"{codes.name!r} has {count:,} NaN among {size:,} float8 codes (0x7f or 0xff); the CPU's kernels read "
            "finite ones: check the checkpoint, leave the weight out of fp8 with exclude, or set "
            "cpu.engine: onnxruntime"
        )


def _block(node: ir.Node, k: int) -> int:
    block = node.attributes.get_int("block_size", 0) or k
    if block % LEAST_BLOCK or block > _MOST_COLUMNS:
        raise PassError(
            f"{node.name!r} has blocks of {block}; the CPU's kernels read multiples of {LEAST_BLOCK}: set block_size "
            "to 32, 64 or 128"
        )
    return block


def _scale_bytes(scale: ir.Value) -> Literal[2, 4]:
    return 2 if is_float16(_read(scale).astype(np.float32)) else 4


def _arrays(operand: ir.Value, matrix: Matrix) -> MatrixArrays:
    """Values of one operand; `matrix` may hold more rows than it."""
    producer = operand.producer()
    if producer is None or producer.op_type != "DequantizeLinear":
        return MatrixArrays(_read(_stored(operand)))
    codes = _required(producer, 0)
    scales = _read(_required(producer, 1)).astype(np.float32)
    scales = scales.reshape(len(scales), -1)
    if codes.dtype == FLOAT8:
        return MatrixArrays(_read(codes), scales)
    zeros = _zero_points(producer, matrix) if matrix.has_zeros else None
    if matrix.has_zeros and zeros is None:
        zeros = np.full(scales.shape, default_zero(matrix), np.uint8)
    return MatrixArrays(_unsigned(codes, matrix), scales, zeros)


def _zero_points(node: ir.Node, matrix: Matrix) -> ByteArray | None:
    """Zero points of the unsigned codes, [n, blocks]."""
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if value is None:
        return None
    found = _unsigned(value, matrix)
    return found.reshape(len(found), -1)


def _unsigned(value: ir.Value, matrix: Matrix) -> ByteArray:
    """Codes as uint8; signed ones, whose range is around 0, are shifted up by half of it."""
    codes: ByteArray = _read(value).view(np.uint8)
    if value.dtype in _SIGNED:
        codes += np.uint8(default_zero(matrix))  # two's complement to offset binary: wraps
    codes &= np.uint8(2 * default_zero(matrix) - 1)
    return codes


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _stored(operand: ir.Value) -> ir.Value:
    """The initializer that an operand is, or that its Cast or DequantizeLinear reads."""
    producer = operand.producer()
    return operand if producer is None else _required(producer, 0)


def _size(operand: ir.Value) -> tuple[int, int]:
    assert operand.shape is not None
    rows, columns = operand.shape.numpy()
    return int(rows), int(columns)


def _required(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _read(value: ir.Value) -> NDArray[Any]:
    """A copy of an initializer's values."""
    assert value.const_value is not None
    return apply_to_array(value.const_value, np.array)
