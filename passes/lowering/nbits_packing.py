"""Weights in the layout of com.microsoft::MatMulNBits and GatherBlockQuantized: packed, and read back.

    B             [out, blocks, block * bits / 8] uint8   codes of a block, the first in the low bits of the first byte;
                                                          a partial last block is padded with zeros
    scales        [out, blocks] float32
    zero_points   [out, ceil(blocks * bits / 8)] uint8    packed as B, row by row; absent: 2 ** (bits - 1)

The engine's codes are unsigned. A signed code c becomes c + 2 ** (bits - 1), which is the engine's default zero point.
Blocks have 16, 32, 64, 128 or 256 columns, so a weight quantized per channel repeats its scale over blocks of
CHANNEL_BLOCK: the same numbers, and finer blocks for the int8 activations of accuracy_level 4.

The engine has 2, 4 and 8 bits. Weights of 3 bits are stored in 4: a third more bytes in the artifact and in memory, and
the speed of 4 bits.

Tensors are packed one at a time, when they are written. (Source: onnxruntime 1.31, ContribOperators.md.)

Two facts do not show in the operands. lower-onnxruntime-cpu writes them into the metadata of the node that reads these:

    ingot.bits       bits of the codes where the container has more (3 in 4)
    ingot.blocks     "channel" where a channel's scale was repeated for each block
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.quantization.weight_nodes import BITS_KEY, pack_nibbles, weight_bits
from ingot.passes.weights import apply_to_array

ENGINE_BLOCKS = (16, 32, 64, 128, 256)
CHANNEL_BLOCK = 128
BLOCKS_KEY = "ingot.blocks"  # node.metadata_props
PER_CHANNEL = "channel"
STORAGE_KEY = "ingot.storage"  # tensor.metadata_props: name of the initializer whose bytes this one shares

ByteArray = NDArray[np.uint8]


@dataclass(frozen=True)
class UnpackedWeight:
    """The operands of a DequantizeLinear over a [rows, columns] weight, and their packed form.

    bits    of the engine's container: 2, 4 or 8
    """

    codes: ir.TensorProtocol
    scale: ir.TensorProtocol
    zero_point: ir.TensorProtocol | None
    name: str
    block_size: int
    bits: int

    @classmethod
    def read(cls, node: ir.Node) -> "UnpackedWeight":
        """Read a DequantizeLinear; PassError for a block size that the engine does not support."""
        codes, scale, zero_point = (_tensor(node, index) for index in range(3))
        if codes is None or scale is None:
            raise PassError(f"{node.name!r} dequantizes a value that is not an initializer")
        columns = int(codes.shape.numpy()[1])
        default = 0 if len(scale.shape) == 1 else columns
        block_size = node.attributes.get_int("block_size", default) or engine_block_size(columns)
        if block_size not in ENGINE_BLOCKS:
            allowed = ", ".join(map(str, ENGINE_BLOCKS))
            raise PassError(f"{node.name!r} has blocks of {block_size}; onnxruntime's are of {allowed}")
        bits = container_bits(weight_bits(node))
        return cls(codes, scale, zero_point, (codes.name or "").removesuffix(".q"), block_size, bits)

    @property
    def rows(self) -> int:
        """Out-features, or rows of the embedding table."""
        return int(self.codes.shape.numpy()[0])

    @property
    def columns(self) -> int:
        """In-features, or the hidden size."""
        return int(self.codes.shape.numpy()[1])

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.columns // self.block_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return self.num_blocks * self.block_size * self.bits // 8

    def packed_codes(self) -> ir.LazyTensor:
        """B, [out, blocks, blob]."""
        shape = (self.rows, self.num_blocks, self.row_bytes // self.num_blocks)
        return _lazy(f"{self.name}.q", shape, self._pack_codes)

    def packed_rows(self) -> ir.LazyTensor:
        """The bytes of packed_codes as [out, blocks * blob]; the two share their storage."""
        tensor = _lazy(f"{self.name}.q.rows", (self.rows, self.row_bytes), self._pack_codes)
        tensor.metadata_props[STORAGE_KEY] = f"{self.name}.q"
        return tensor

    def packed_scales(self) -> ir.TensorProtocol:
        """[out, blocks]: unchanged, or a channel's scale repeated for each of its blocks."""
        if len(self.scale.shape) == 2:
            return self.scale
        shape = (self.rows, self.num_blocks)
        return _lazy(f"{self.name}.scale", shape, lambda: self._per_block(self.scale), ir.DataType.FLOAT)

    def packed_zero_points(self) -> ir.LazyTensor | None:
        """[out, ceil(blocks * bits / 8)], or None when symmetric."""
        if self.zero_point is None:
            return None
        shape = (self.rows, -(-self.num_blocks * self.bits // 8))
        return _lazy(f"{self.name}.zero_point", shape, self._pack_zero_points)

    def _pack_codes(self) -> ByteArray:
        whole = self.columns % self.block_size == 0
        if whole and self.bits == 4 and isinstance(self.codes, ir.PackedTensor):
            return self.codes.numpy_packed() ^ np.uint8(0x88 if self._is_signed else 0)
        codes = self.codes.numpy().view(np.uint8)
        if self._is_signed:
            codes = codes + np.uint8(1 << (self.bits - 1))  # two's complement to offset binary: wraps
        padding = self.num_blocks * self.block_size - self.columns
        return _pack(np.pad(codes, ((0, 0), (0, padding))) if padding else codes, self.bits)

    def _pack_zero_points(self) -> ByteArray:
        assert self.zero_point is not None
        points = self._per_block(self.zero_point).view(np.uint8)  # [out, blocks]
        padding = -points.shape[1] % (8 // self.bits)
        return _pack(np.pad(points, ((0, 0), (0, padding))), self.bits)

    def _per_block(self, tensor: ir.TensorProtocol) -> NDArray[Any]:
        values = np.asarray(tensor.numpy())
        return values if values.ndim == 2 else np.repeat(values[:, None], self.num_blocks, axis=1)

    @property
    def _is_signed(self) -> bool:
        return self.codes.dtype in (ir.DataType.INT4, ir.DataType.INT8)


def _pack(values: ByteArray, bits: int) -> ByteArray:
    """Pack codes, the first in the low bits; the result is flat unless bits is 8. A row fills whole bytes."""
    if bits == 2:
        four = values.reshape(-1, 4) & np.uint8(3)
        packed: ByteArray = (
            four[:, 0] | four[:, 1] << np.uint8(2) | four[:, 2] << np.uint8(4) | four[:, 3] << np.uint8(6)
        )
        return packed
    return pack_nibbles(values) if bits == 4 else values


def container_bits(bits: int) -> int:
    """Bits that the engine stores codes of `bits` bits in."""
    return 4 if bits == 3 else bits


def engine_block_size(columns: int) -> int:
    """Block size for a weight per channel: the smallest that holds the row, CHANNEL_BLOCK at most."""
    return next((block for block in ENGINE_BLOCKS if block >= min(columns, CHANNEL_BLOCK)), CHANNEL_BLOCK)


def _tensor(node: ir.Node, index: int) -> ir.TensorProtocol | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return value.const_value if value is not None and value.is_initializer() else None


def _lazy(
    name: str, shape: tuple[int, ...], make: Callable[[], NDArray[Any]], dtype: ir.DataType = ir.DataType.UINT8
) -> ir.LazyTensor:
    return ir.LazyTensor(
        lambda: ir.Tensor(np.ascontiguousarray(make()).reshape(shape)), dtype, ir.Shape(shape), name=name
    )


@dataclass(frozen=True)
class PackedWeight:
    """A [rows, columns] weight in the engine's layout; rows are read on demand.

    container_bits    2, 4 or 8, the engine's; `bits` of them are used
    """

    codes: ir.TensorProtocol
    scales: ir.TensorProtocol
    zero_points: ir.TensorProtocol | None
    columns: int
    block_size: int
    container_bits: int
    bits: int
    per_channel: bool

    @classmethod
    def read(cls, node: ir.Node, columns: int, operands: tuple[int, int, int]) -> "PackedWeight":
        """The weight that a node reads by these operands: codes, scales, zero points."""
        codes, scales, zero_points = (_operand(node, index) for index in operands)
        if codes is None or scales is None:
            raise PassError(f"{node.name!r} ({node.op_type}) reads codes or scales that are not stored")
        container, block_size = (node.attributes.get_int(name, 0) or 0 for name in ("bits", "block_size"))
        bits = int(node.metadata_props.get(BITS_KEY, container))
        per_channel = node.metadata_props.get(BLOCKS_KEY) == PER_CHANNEL
        return cls(codes, scales, zero_points, columns, block_size, container, bits, per_channel)

    @property
    def rows(self) -> int:
        """Out-features, or rows of the embedding table."""
        return int(self.codes.shape.numpy()[0])

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.columns // self.block_size)

    def codes_of(self, rows: slice) -> NDArray[np.int8] | ByteArray:
        """Codes [rows, columns]: uint8, or int8 around zero where there are no zero points."""
        packed = apply_to_array(self.codes, lambda values: np.array(values.reshape(self.rows, -1)[rows]))
        codes = unpack(packed, self.container_bits)[:, : self.columns]
        if self.zero_points is not None:
            return codes
        return (codes.astype(np.int16) - (1 << (self.container_bits - 1))).astype(np.int8)

    def scales_of(self, rows: slice) -> NDArray[np.float32]:
        """[rows, blocks], or [rows, 1] where a row has one scale."""
        return self._by_group(self._rows_of(self.scales, rows))

    def zero_points_of(self, rows: slice) -> ByteArray | None:
        """[rows, blocks], or [rows, 1] where a row has one zero point; None when symmetric."""
        if self.zero_points is None:
            return None
        return self._by_group(unpack(self._rows_of(self.zero_points, rows), self.container_bits)[:, : self.num_blocks])

    def _rows_of(self, tensor: ir.TensorProtocol, rows: slice) -> NDArray[Any]:
        return apply_to_array(tensor, lambda values: np.array(values.reshape(self.rows, -1)[rows]))

    def _by_group(self, values: NDArray[Any]) -> NDArray[Any]:
        if not self.per_channel:
            return values
        if (values != values[:, :1]).any():
            raise PassError(f"{self.scales.name!r} is marked as per channel, but differs within a row")
        return np.ascontiguousarray(values[:, :1])


def unpack(packed: ByteArray, bits: int) -> ByteArray:
    """Codes of packed rows [rows, bytes]: [rows, bytes * 8 / bits], the first from the low bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: ByteArray = packed[:, :, None] >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _operand(node: ir.Node, index: int) -> ir.TensorProtocol | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else value.const_value
