"""The weights that a segment's nodes read: one row of READERS for each op that has any.

Names come from the initializers:

    <weight>.q, .q.rows, .scale, .zero_point     codes, scales and zero points
    <weight>.float32                             widened from 16 bits
    <path>.one_plus                              Gemma's 1 + w

A node that reads a stored vector or matrix through an operand that its row does not name is refused, so that no weight
is read back in part. To add an op: its row, its case in tests/pipeline/interchange/test_artifact_weights.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import UsageError, one_of
from ingot.passes.lowering.lower_onnxruntime_cpu import MICROSOFT
from ingot.passes.lowering.nbits_packing import PackedWeight
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.formats.activations import InputScheme, activations_of_node
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight

WIDENED = ".float32"
ONE_PLUS = ".one_plus"
_SUFFIXES = (".q.rows", ".q", WIDENED)
_COLUMN = ".scale.column"

Columns = Callable[[str], int]  # the width of the weight of that name, where the op has no attribute for it


@dataclass(frozen=True)
class Codes:
    """A quantized weight of so many rows; `decode` reads some of them from codes, scales and zero points, `tensors`."""

    rows: int
    tensors: tuple[ir.TensorProtocol, ...]
    decode: Callable[[slice], DecodedWeight]
    activations: InputScheme | None = None


@dataclass(frozen=True)
class Operand:
    """A weight that a node reads: the initializer's name, the weight's name, and its content."""

    stored: str
    name: str
    op_type: str
    content: Codes | ir.TensorProtocol

    @property
    def rows(self) -> int:
        """Rows of the weight, or elements of a vector."""
        return self.content.rows if isinstance(self.content, Codes) else int(self.content.shape.numpy()[0])

    @property
    def num_bytes(self) -> int:
        """Bytes in the program: of codes, scales and zero points, or of the floats."""
        tensors = self.content.tensors if isinstance(self.content, Codes) else (self.content,)
        return sum(tensor.nbytes for tensor in tensors)


Read = Callable[[ir.Node, tuple[int, ...], Columns], Iterator[Operand]]


@dataclass(frozen=True)
class OperandReader:
    """The operands of an op that are weights or tables, and how the weights among them are read."""

    operands: tuple[int, ...]
    read: Read


def weight_bytes(segments: Iterable[ir.Model]) -> dict[str, int]:
    """Operand.stored -> bytes in the program, of every weight; one that several nodes read counts once."""
    found: dict[str, int] = {}
    for segment in segments:
        for node in segment.graph:
            for operand in read_operands(node):
                found.setdefault(operand.stored, operand.num_bytes)
    return found


def _unknown(name: str) -> int:
    raise AssertionError(f"the width of {name!r} is needed to decode it; pass `columns`")


def read_operands(node: ir.Node, columns: Columns = _unknown) -> Iterator[Operand]:
    """The weights that a node reads, as far as its row of READERS names them; `columns` is used by decoding alone."""
    reader = READERS.get((node.domain, node.op_type), _NO_WEIGHTS)
    yield from reader.read(node, reader.operands, columns)


def require_known(node: ir.Node) -> None:
    """UsageError when the node reads a stored vector or matrix through an operand that its row does not name."""
    reader = READERS.get((node.domain, node.op_type), _NO_WEIGHTS)
    for index, value in enumerate(node.inputs):
        if value is not None and value.is_initializer() and index not in reader.operands and not _is_small(value):
            raise UsageError(
                f"{node.name!r} ({node.op_type}) reads {value.name!r}, which no checkpoint has a tensor for; programs "
                f"are read back with weights of {one_of(sorted({op for _, op in READERS}))}"
            )


def _is_small(value: ir.Value) -> bool:
    """Whether it is a scalar, integers (sizes, axes), or the scales of a float8 weight that its Cast reads."""
    tensor = value.const_value
    is_scale = (value.name or "").endswith(_COLUMN)
    return tensor is None or tensor.size <= 1 or tensor.dtype == ir.DataType.INT64 or is_scale


def _nothing(node: ir.Node, operands: tuple[int, ...], columns: Columns) -> Iterator[Operand]:
    yield from ()


def _floats(node: ir.Node, operands: tuple[int, ...], columns: Columns) -> Iterator[Operand]:
    for index in operands:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None and value.const_value is not None and value.const_value.size > 1:
            yield Operand(value.name or "", _name_of(value), node.op_type, value.const_value)


def _blocks(node: ir.Node, operands: tuple[int, ...], columns: Columns) -> Iterator[Operand]:
    """Packed codes, scales, zero points; then a bias, if the op has one."""
    codes, *rest = (node.inputs[index] for index in operands[:3] if index < len(node.inputs))
    assert codes is not None
    yield _coded(node, codes, rest, partial(_decode_blocks, node, operands, columns))
    yield from _floats(node, operands[3:], columns)


def _channels(node: ir.Node, operands: tuple[int, ...], columns: Columns) -> Iterator[Operand]:
    """8-bit codes [out, in], a scale for each row, and a zero point for each where codes are unsigned.

    Signed codes read zeros that all layers share.
    """
    codes, scales, zeros = (_stored(node, index) for index in operands)
    zero_points = zeros if codes.dtype == ir.DataType.UINT8 else None
    yield _coded(node, codes, [scales, zero_points], _channel_decoder(codes, scales, zero_points))


def _widened(node: ir.Node, operands: tuple[int, ...], columns: Columns) -> Iterator[Operand]:
    """A stored tensor of 16 bits, or float8 codes that a Mul multiplies by their scales."""
    codes = node.inputs[0]
    if codes is None or codes.dtype != ir.DataType.FLOAT8E4M3FN or not codes.is_initializer():
        yield from _floats(node, operands, columns)
        return
    scaled = next(iter(node.outputs[0].consumers()))
    (scales,) = (value for value in scaled.inputs if value is not None and value.is_initializer())
    reader = next(iter(scaled.outputs[0].consumers()), scaled)
    yield _coded(reader, codes, [scales], _channel_decoder(codes, scales))


READERS: Mapping[tuple[str, str], OperandReader] = {
    (MICROSOFT, "MatMulNBits"): OperandReader((1, 2, 3, 5), _blocks),
    (MICROSOFT, "GatherBlockQuantized"): OperandReader((0, 2, 3), _blocks),
    (MICROSOFT, "QGemm"): OperandReader((3, 4, 5), _channels),
    (MICROSOFT, "SkipLayerNormalization"): OperandReader((2, 3), _floats),
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): OperandReader((2,), _floats),
    ("", "Add"): OperandReader((0, 1), _floats),
    ("", "Cast"): OperandReader((0,), _widened),
    ("", "Gather"): OperandReader((0,), _floats),
    ("", "Gemm"): OperandReader((1, 2), _floats),
    ("", "LayerNormalization"): OperandReader((1, 2), _floats),
    ("", "RMSNormalization"): OperandReader((1,), _floats),
    ("", "RotaryEmbedding"): OperandReader((1, 2), _nothing),
}
_NO_WEIGHTS = OperandReader((), _nothing)


def _coded(
    node: ir.Node, codes: ir.Value, others: Sequence[ir.Value | None], decode: Callable[[slice], DecodedWeight]
) -> Operand:
    """A quantized weight: its codes, and `others`, scales and zero points, None for those that are absent."""
    stored = (codes.name or "").removesuffix(".rows")
    values = [value.const_value for value in (codes, *others) if value is not None]
    tensors = tuple(tensor for tensor in values if tensor is not None)
    return Operand(stored, _name_of(codes), node.op_type, Codes(_size(codes), tensors, decode, _activations(node)))


def _activations(node: ir.Node) -> InputScheme | None:
    """Read the quantization of a linear layer's inputs from its metadata or from that of the node that makes them."""
    maker = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    found = activations_of_node(node.metadata_props)
    return found if found is not None or maker is None else activations_of_node(maker.metadata_props)


def _decode_blocks(node: ir.Node, operands: tuple[int, ...], columns: Columns, rows: slice) -> DecodedWeight:
    width = node.attributes.get_int("K", 0) or columns(_name_of(_stored(node, operands[0])))
    packed = PackedWeight.read(node, width, (operands[0], operands[1], operands[2]))
    zero_points = packed.zero_points_of(rows)
    return DecodedWeight(
        codes=packed.codes_of(rows),
        scales=packed.scales_of(rows),
        group_size=packed.columns if packed.per_channel else packed.block_size,
        zero_points=None if zero_points is None else zero_points.astype(np.int16),
        bits=packed.bits,
    )


def _channel_decoder(
    codes: ir.Value, scales: ir.Value, zero_points: ir.Value | None = None
) -> Callable[[slice], DecodedWeight]:
    return lambda rows: _decode_channels(codes, scales, zero_points, rows)


def _decode_channels(codes: ir.Value, scales: ir.Value, zero_points: ir.Value | None, rows: slice) -> DecodedWeight:
    is_float = codes.dtype == ir.DataType.FLOAT8E4M3FN
    values = _stored_rows(codes, rows)
    return DecodedWeight(
        codes=values.astype(np.float32) if is_float else values,
        scales=_stored_rows(scales, rows).reshape(-1, 1),
        group_size=values.shape[1],
        zero_points=None if zero_points is None else _stored_rows(zero_points, rows).reshape(-1, 1).astype(np.int16),
        bits=8,
    )


def _stored_rows(value: ir.Value, rows: slice) -> NDArray[Any]:
    assert value.const_value is not None
    return apply_to_array(value.const_value, lambda values: np.array(values[rows]))


def _stored(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _size(value: ir.Value) -> int:
    assert value.const_value is not None
    return int(value.const_value.shape.numpy()[0])


def _name_of(value: ir.Value) -> str:
    return weight_name(value.name or "")


def weight_name(name: str) -> str:
    """The weight's name in the checkpoint, from that of its initializer."""
    if name.endswith(ONE_PLUS):
        return f"model.{name.removesuffix(ONE_PLUS)}.weight"
    suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix)
