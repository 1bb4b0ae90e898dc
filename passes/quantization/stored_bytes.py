"""Bytes that a weight [rows, columns] takes under a scheme, without making it.

engine     as the artifact stores it: codes in the engine's container (3 bits in 4, whole blocks), scales in float32,
           zero points in the container's bits; a weight that stays is widened to float32 (nbits_packing.py)
nominal    as GPTQ and compressed-tensors files do: codes and zero points in their own bits, scales in float16; a
           weight that stays keeps its type
"""

from typing import Literal

import onnx_ir as ir

from ingot.passes.lowering.nbits_packing import container_bits, engine_block_size
from ingot.passes.quantization.scale_search import Scheme

Count = Literal["engine", "nominal"]

_ENGINE_SCALE_BYTES, _NOMINAL_SCALE_BYTES, _FLOAT_BYTES = 4, 2, 4


def stored_bytes(rows: int, columns: int, scheme: Scheme, count: Count) -> int:
    """Codes, scales and zero points of a quantized weight."""
    if count == "nominal":
        blocks = scheme.num_blocks(columns)
        zero_points = 0 if scheme.symmetric else _bytes_of(rows * blocks, scheme.bits)
        return _bytes_of(rows * columns, scheme.bits) + rows * blocks * _NOMINAL_SCALE_BYTES + zero_points
    size, bits = scheme.block_size or engine_block_size(columns), container_bits(scheme.bits)
    blocks = -(-columns // size)
    row = _bytes_of(blocks * size, bits) + blocks * _ENGINE_SCALE_BYTES
    return rows * (row + (0 if scheme.symmetric else _bytes_of(blocks, bits)))


def unquantized_bytes(tensor: ir.TensorProtocol, count: Count, is_table: bool) -> int:
    """A weight that stays as it is. Of what is a table and nothing else, the engine widens rows as it reads them."""
    return tensor.nbytes if count == "nominal" or is_table else tensor.size * _FLOAT_BYTES


def _bytes_of(codes: int, bits: int) -> int:
    return -(-codes * bits // 8)
