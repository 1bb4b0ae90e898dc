"""The numbers behind a weight operand, whatever form the IR holds them in: float32, 16 bits widened, or quantized."""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.quantization.rounding import dequantize

_FORMS = ("Cast", "DequantizeLinear")


def is_stored(value: ir.Value) -> bool:
    """Whether the value is an initializer, or one behind a Cast or DequantizeLinear."""
    if value.is_initializer():
        return True
    producer = value.producer()
    if producer is None or producer.op_type not in _FORMS:
        return False
    return all(operand is None or operand.is_initializer() for operand in producer.inputs)


def float32_values(value: ir.Value) -> NDArray[np.float32]:
    """A stored value in float32: a copy that the caller may change."""
    assert is_stored(value), value.name
    producer = value.producer()
    if producer is None or producer.op_type == "Cast":
        return _read(value if producer is None else producer.inputs[0]).astype(np.float32)
    codes, scale, *rest = (_read(operand) for operand in producer.inputs if operand is not None)
    zero_point = rest[0] if rest else None
    if scale.ndim == 1:
        scale, zero_point = scale[:, None], None if zero_point is None else zero_point[:, None]
    return dequantize(codes, scale, zero_point, producer.attributes.get_int("block_size", 0) or codes.shape[1])


def _read(value: ir.Value | None) -> NDArray[Any]:
    """The initializer's values; a memory map is given back after a copy."""
    assert value is not None
    assert value.const_value is not None
    tensor = value.const_value
    array = np.array(tensor.numpy())
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()
    return array
