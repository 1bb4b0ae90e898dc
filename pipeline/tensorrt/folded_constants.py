"""Constants that the IR computes from weights (a norm's weight plus one): folded when the weights are written."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.weight_values import float32_values, is_stored

_FOLDED: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
}


def is_constant(value: ir.Value) -> bool:
    """Whether a value is an initializer, or computed from initializers alone."""
    if value.is_initializer() or is_stored(value):
        return True
    producer = value.producer()
    if producer is None:
        return False
    return producer.op_type in _FOLDED and all(v is not None and is_constant(v) for v in producer.inputs)


def folded(value: ir.Value) -> NDArray[np.float32]:
    """What a constant comes to, in float32."""
    producer = value.producer()
    if producer is None or producer.op_type not in _FOLDED:
        return float32_values(value)
    left, right = (folded(operand) for operand in producer.inputs if operand is not None)
    return np.asarray(_FOLDED[producer.op_type](left, right), np.float32)
