"""Stored weights in the layouts that Ingot's kernels read.

4 and 8 bits    codes in spans of 64 bytes, those of 4 bits in the order of tensor cores' operands
                (kernels/matmul_nbits.py, matmul_int4.py); offset binary: a symmetric weight's zero is 8 or 128.
                Codes of 2 and 3 bits are stored in 4
Interleaved     rows of a weight that is a gate and its factor: 8 of each in turn (kernels/gated_activation.py)
8-bit rows      e4m3fn, or int8 without zero points, [n, columns], a scale per row (kernels/matmul.py)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import Argument, WeightArgument
from ingot.errors import PassError
from ingot.pipeline.targets.cuda.program_builder import ProgramBuilder
from ingot.pipeline.targets.cuda.tiles import SPAN_BYTES, span_columns
from ingot.sizes import ceil_div

FP8, INT8, FP8_WEIGHT = 1, 2, 3  # kernels/matmul.py
LEAST_GROUP = 32
_HALF = np.finfo(np.float16)


@dataclass(frozen=True)
class Interleaved:
    """The order of a weight's rows: 8 of the gate and 8 of its factor in turn, stored in halves; one may be first."""

    gate_first: bool
    MULTIPLE: ClassVar[int] = 16  # the number of all rows is a multiple of it

    def __call__(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values [n, ...] in that order."""
        first, second = values.reshape(2, -1, self.MULTIPLE // 2, *values.shape[1:])
        gate, factor = (first, second) if self.gate_first else (second, first)
        return np.stack([gate, factor], axis=1).reshape(values.shape)

    def name(self, name: str | None) -> str:
        """Name a weight in that order."""
        return f"{name}.{'gate' if self.gate_first else 'factor'}_first"


@dataclass(frozen=True)
class InOrder:
    """The order in which a weight's rows are stored."""

    def __call__(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values."""
        return values

    def name(self, name: str | None) -> str:
        """Return the name."""
        return name or ""


RowOrder = Interleaved | InOrder
IN_ORDER = InOrder()


@dataclass(frozen=True)
class Spans:
    """A weight of 4 or 8 bits [n, columns] as launch arguments."""

    bits: int
    group: int
    groups: int
    spans: int
    codes: Argument
    scales: Argument
    zero_points: Argument | None

    @property
    def constants(self) -> dict[str, int | bool]:
        """Constants of all kernels that read it; those of both sizes of codes have BITS, too."""
        return {"SPANS": self.spans, "GROUP": self.group, "HAS_ZERO_POINTS": self.zero_points is not None}


def quantizer(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear of a quantized weight; None for a plain one."""
    producer = None if value is None else value.producer()
    return producer if producer is not None and producer.op_type == "DequantizeLinear" else None


def is_float8(dequantize: ir.Node) -> bool:
    """Report whether the codes are e4m3fn. PassError for codes without a kernel."""
    codes = dequantize.inputs[0]
    assert codes is not None
    if codes.dtype in (ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.UINT8):
        return False
    if codes.dtype != ir.DataType.FLOAT8E4M3FN or _scale_rank(dequantize) != 1:
        raise PassError(
            f"{dequantize.name!r} has codes of {codes.dtype} in a form without a CUDA kernel; there are kernels for "
            "4 and 8 bits in blocks or per channel, and for float8_e4m3fn per channel"
        )
    return True


def is_plain_int8(dequantize: ir.Node) -> bool:
    """Report whether matmuls of int8 codes take it: signed, without zero points, a scale per row."""
    codes = dequantize.inputs[0]
    has_zero_points = len(dequantize.inputs) > 2 and dequantize.inputs[2] is not None
    return (
        codes is not None and codes.dtype == ir.DataType.INT8 and not has_zero_points and _scale_rank(dequantize) == 1
    )


def takes_codes(reader: ir.Node, kind: int) -> bool:
    """Report whether a layer multiplies 8-bit codes of this kind by its own codes."""
    dequantize = quantizer(reader.inputs[1]) if reader.op_type == "Gemm" else None
    if dequantize is None:
        return False
    if kind == FP8:
        codes = dequantize.inputs[0]
        return codes is not None and codes.dtype == ir.DataType.FLOAT8E4M3FN and is_float8(dequantize)
    return is_plain_int8(dequantize)


def byte_rows(
    builder: ProgramBuilder, dequantize: ir.Node, order: RowOrder = IN_ORDER
) -> tuple[WeightArgument, WeightArgument]:
    """Return codes [n, columns] of one byte, and scales [n]."""
    codes, scales = dequantize.inputs[0], dequantize.inputs[1]
    assert codes is not None
    assert scales is not None
    kind = "fp8e4nv" if codes.dtype == ir.DataType.FLOAT8E4M3FN else "i8"
    made = builder.weight(order.name(f"{codes.name}.rows"), kind, lambda: order(_stored(codes)))
    name = order.name(f"{scales.name}.rows")
    return made, builder.weight(name, "fp32", lambda: order(_as_float(_stored(scales))))


def spans(builder: ProgramBuilder, dequantize: ir.Node, order: RowOrder = IN_ORDER) -> Spans:
    """Return codes, scales and zero points of a weight of up to 8 bits."""
    codes, scales = dequantize.inputs[0], dequantize.inputs[1]
    zeros = dequantize.inputs[2] if len(dequantize.inputs) > 2 else None
    assert codes is not None
    assert codes.dtype is not None
    assert codes.shape is not None
    bits, columns = int(codes.dtype.bitwidth), int(codes.shape.numpy()[1])
    count = ceil_div(columns, span_columns(bits))
    group = _group(dequantize, codes, columns) or count * span_columns(bits)
    groups = ceil_div(columns, group)
    name = order.name(f"{codes.name}.spans")
    made = builder.weight(name, "u8", lambda: order(_packed_spans(codes, bits, count)))
    scale, zero = _scales(builder, scales, groups, order), _zeros(builder, zeros, groups, order)
    return Spans(bits, group, groups, count, made, scale, zero)


def stacked_spans(
    builder: ProgramBuilder, name: str, makers: Sequence[Sequence[ir.Node]], order: RowOrder = IN_ORDER
) -> Spans:
    """Return codes [count, n, ...], scales and zero points [count, groups, n] of `count` weights of one form.

    makers    [count][1 or more] DequantizeLinear, whose rows follow each other
    """
    first = makers[0][0]
    codes, scales = first.inputs[0], first.inputs[1]
    zeros = first.inputs[2] if len(first.inputs) > 2 else None
    assert codes is not None
    assert codes.dtype is not None
    assert codes.shape is not None
    assert scales is not None
    bits, columns = int(codes.dtype.bitwidth), int(codes.shape.numpy()[1])
    count = ceil_div(columns, span_columns(bits))
    group = _group(first, codes, columns) or count * span_columns(bits)
    groups = ceil_div(columns, group)

    def stacked(read: Callable[[ir.Node], NDArray[Any]]) -> NDArray[Any]:
        return np.stack([read_rows(nodes, read) for nodes in makers])

    def read_rows(nodes: Sequence[ir.Node], read: Callable[[ir.Node], NDArray[Any]]) -> NDArray[Any]:
        return order(np.concatenate([read(node) for node in nodes]))

    def turned(read: Callable[[ir.Node], NDArray[Any]]) -> NDArray[Any]:
        return np.ascontiguousarray(stacked(read).swapaxes(1, 2))

    def grouped(index: int, node: ir.Node) -> NDArray[Any]:
        value = node.inputs[index]
        assert value is not None
        return _stored(value).reshape(-1, groups)

    def packed(node: ir.Node) -> NDArray[Any]:
        value = node.inputs[0]
        assert value is not None
        return _packed_spans(value, bits, count)

    key = order.name(f"{name}.scales")
    kind = builder.type_of_weight(key) or _scale_type(builder, _as_float(stacked(partial(grouped, 1))))
    n = sum(node.inputs[0].shape.numpy()[0] for node in makers[0] if node.inputs[0] and node.inputs[0].shape)
    of_codes, of_scales = len(makers) * n * count * SPAN_BYTES, len(makers) * n * groups
    made = (
        builder.layer_weight(order.name(f"{name}.codes"), "u8", lambda: stacked(packed), of_codes),
        builder.layer_weight(key, kind, lambda: _as_float(turned(partial(grouped, 1))), of_scales),
        None
        if zeros is None
        else builder.layer_weight(
            order.name(f"{name}.zero_points"), "u8", lambda: turned(partial(grouped, 2)).astype(np.uint8), of_scales
        ),
    )
    return Spans(bits, group, groups, count, *made)


def _scale_rank(dequantize: ir.Node) -> int:
    """Number of axes of the scale."""
    scale = dequantize.inputs[1]
    assert scale is not None
    assert scale.shape is not None
    return len(scale.shape)


def _group(dequantize: ir.Node, codes: ir.Value, columns: int) -> int:
    """Columns that share a scale; 0: the row. PassError for blocks that the kernels do not take."""
    block = dequantize.attributes.get_int("block_size", 0) or 0
    if block % LEAST_GROUP:
        weight = (codes.name or "").removesuffix(".q")
        raise PassError(
            f"{weight!r} has {columns} columns in blocks of {block}, and Ingot's kernels take blocks of a multiple of "
            f"{LEAST_GROUP}: set its block_size to 32, 64, 128, 256 or channel in the overrides of the pass that "
            "quantizes it; where the checkpoint itself stores it so, build for target cpu"
        )
    return block


def _packed_spans(codes: ir.Value, bits: int, count: int) -> NDArray[np.uint8]:
    """Pack to [n, count * 64] bytes."""
    signed = codes.dtype in (ir.DataType.INT4, ir.DataType.INT8)
    stored = _stored(codes).astype(np.int16)
    unsigned = (stored + (1 << (bits - 1) if signed else 0)).astype(np.uint8)
    padded = np.pad(unsigned, ((0, 0), (0, count * span_columns(bits) - unsigned.shape[1])))
    return padded if bits == 8 else pack_four_bits(padded)


def pack_four_bits(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack codes [n, columns], columns a multiple of 128, to [n, columns / 2] bytes.

    Word 4 t + w of a span of 16 words has columns 32 w + 8 t + (0, 2, 4, 6, 1, 3, 5, 7), each in 4 bits, lowest first:
    a thread t needs its four words in one run (kernels/matmul_int4.py).
    """
    words = codes.reshape(len(codes), -1, 4, 4, 2, 2, 2)  # row, span, w, t, and the bits of the place in a word
    low, high = words[..., 0, :], words[..., 1, :]  # [row, span, w, t, bit 2, bit 0]
    packed: NDArray[np.uint8] = np.transpose(low | high << np.uint8(4), (0, 1, 3, 2, 5, 4))
    return np.ascontiguousarray(packed).reshape(len(codes), -1)


def _scales(builder: ProgramBuilder, scales: ir.Value | None, groups: int, order: RowOrder) -> Argument:
    """Store scales in 16 bits with 16-bit activations, if all are normal float16 numbers: they cost bandwidth."""
    assert scales is not None
    name = order.name(f"{scales.name}.groups")
    known = builder.shared.weights.get(name)
    kind = known.type if known else _scale_type(builder, _as_float(_stored(scales)))
    return builder.weight(name, kind, lambda: _by_groups(_as_float(_stored(scales)), groups, order))


def _scale_type(builder: ProgramBuilder, scales: NDArray[np.float32]) -> str:
    magnitudes = np.abs(scales)
    fits = not magnitudes.size or (magnitudes.min() >= _HALF.smallest_normal and magnitudes.max() <= _HALF.max)
    return "fp16" if fits and builder.activation_type != "fp32" else "fp32"


def _zeros(builder: ProgramBuilder, zeros: ir.Value | None, groups: int, order: RowOrder) -> Argument | None:
    if zeros is None:
        return None
    name = order.name(f"{zeros.name}.groups")
    return builder.weight(name, "u8", lambda: _by_groups(_stored(zeros).astype(np.uint8), groups, order))


def _by_groups(values: NDArray[Any], groups: int, order: RowOrder) -> NDArray[Any]:
    """Values of each group of each row as [groups, n]."""
    return np.ascontiguousarray(order(values.reshape(-1, groups)).T)


def _stored(value: ir.Value) -> NDArray[Any]:
    assert value.const_value is not None
    return np.asarray(value.const_value.numpy())


def _as_float(values: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, np.float32)
