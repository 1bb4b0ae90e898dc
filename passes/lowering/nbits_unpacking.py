"""From the operands of com.microsoft::MatMulNBits and GatherBlockQuantized back to codes, scales and zero points.

Undoes nbits_packing.py, whose docstring has the layout: what a DequantizeLinear would read again, exactly. Two things
cannot be seen in the operands, and stand in the node's metadata, put there by lower-onnxruntime-cpu:

    ingot.bits       bits of the codes where the container has more (3 in 4)
    ingot.blocks     "channel" where a channel's scale was repeated for each block
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.quantization.quantized_tensors import BITS_KEY
from ingot.passes.weight_sites import apply_to_array

BLOCKS_KEY = "ingot.blocks"  # metadata_props of a node that reads packed codes
PER_CHANNEL = "channel"

ByteArray = NDArray[np.uint8]


@dataclass(frozen=True)
class PackedWeight:
    """A [rows, columns] weight as the engine holds it. `codes` is read when it is asked for.

    container_bits    2, 4 or 8, as the engine counts them; `bits` of them are used
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
        """The weight that a node reads through these operands: codes, scales, zero points."""
        codes, scales, zero_points = (_tensor(node, index) for index in operands)
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
        """As scales_of; None when symmetric."""
        if self.zero_points is None:
            return None
        return self._by_group(unpack(self._rows_of(self.zero_points, rows), self.container_bits)[:, : self.num_blocks])

    def _rows_of(self, tensor: ir.TensorProtocol, rows: slice) -> NDArray[Any]:
        return apply_to_array(tensor, lambda values: np.array(values.reshape(self.rows, -1)[rows]))

    def _by_group(self, values: NDArray[Any]) -> NDArray[Any]:
        if not self.per_channel:
            return values
        if (values != values[:, :1]).any():
            raise PassError(f"{self.scales.name!r} is said to be per channel, but differs within a row")
        return np.ascontiguousarray(values[:, :1])


def unpack(packed: ByteArray, bits: int) -> ByteArray:
    """Codes of packed rows [rows, bytes]: [rows, bytes * 8 / bits], the first from the low bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: ByteArray = packed[:, :, None] >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _tensor(node: ir.Node, index: int) -> ir.TensorProtocol | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else value.const_value
