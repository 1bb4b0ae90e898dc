"""4-bit codes as TensorRT takes them: signed, two to a byte, [out, in]."""

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.passes.quantization.quantized_tensors import pack_nibbles

_EIGHT = np.uint8(0x88)  # 8 in both halves: turns unsigned codes into those less 8


def int4_codes(codes: ir.Value) -> ir.TensorProtocol:
    """The codes as INT4, made when they are written. Unsigned codes c become c - 8."""
    tensor = codes.const_value
    assert tensor is not None
    shape = ir.Shape(tensor.shape.numpy())
    return ir.LazyTensor(partial(_pack, tensor), ir.DataType.INT4, shape, name=codes.name)


def _pack(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    packed: Any = tensor.numpy_packed() if isinstance(tensor, ir.PackedTensor) else pack_nibbles(tensor.numpy())
    if tensor.dtype == ir.DataType.UINT4:
        packed = packed ^ _EIGHT
    return ir.PackedTensor(packed, ir.DataType.INT4, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name)
