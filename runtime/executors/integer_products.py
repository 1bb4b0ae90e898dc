"""Does onnxruntime multiply uint8 by int8 exactly on this CPU?

x86 CPUs without VNNI add pairs of such products in 16 bits, which saturate: 255 * 127 + 255 * 127 comes out as 32767.
onnxruntime can compute with unsigned weights there, exactly and more slowly; elsewhere that would only cost speed. So
one product is computed to see. Its model is written byte by byte here (onnx.proto: tags of ModelProto, GraphProto,
NodeProto, ValueInfoProto), because the runtime does without the package onnx.
"""

from functools import cache

import numpy as np
import onnxruntime  # type: ignore[import-untyped]

PRECISION_OPTION = "session.x64quantprecision"

_UINT8, _INT8, _INT32 = 2, 3, 6  # TensorProto.DataType
_WIDTH = 16
_IR_VERSION, _OPSET = 10, 21


@cache
def products_saturate() -> bool:
    """Whether 16 products of the largest codes, summed up, are not what they should be."""
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(product_model(), options, providers=["CPUExecutionProvider"])
    largest, weights = np.full((1, _WIDTH), 255, np.uint8), np.full((_WIDTH, _WIDTH), 127, np.int8)
    (found,) = session.run(None, {"a": largest, "b": weights})
    return bool((found != _WIDTH * 255 * 127).any())


def product_model() -> bytes:
    """y [1, 16] int32 = MatMulInteger(a [1, 16] uint8, b [16, 16] int8) as an ONNX file."""
    node = _text(1, "a") + _text(1, "b") + _text(2, "y") + _text(4, "MatMulInteger")
    a, b = _value("a", _UINT8, (1, _WIDTH)), _value("b", _INT8, (_WIDTH, _WIDTH))
    graph = _message(1, node) + _text(2, "product") + _message(11, a) + _message(11, b)
    graph += _message(12, _value("y", _INT32, (1, _WIDTH)))
    return _number(1, _IR_VERSION) + _message(7, graph) + _message(8, _text(1, "") + _number(2, _OPSET))


def _value(name: str, dtype: int, shape: tuple[int, ...]) -> bytes:
    dimensions = b"".join(_message(1, _number(1, size)) for size in shape)
    return _text(1, name) + _message(2, _message(1, _number(1, dtype) + _message(2, dimensions)))


def _number(tag: int, value: int) -> bytes:
    """A varint below 128."""
    return bytes((tag << 3, value))


def _text(tag: int, value: str) -> bytes:
    return _message(tag, value.encode())


def _message(tag: int, content: bytes) -> bytes:
    """A field with its length, of up to 14 bits."""
    size = len(content)
    length = bytes((size,)) if size < 128 else bytes((size & 127 | 128, size >> 7))
    return bytes((tag << 3 | 2,)) + length + content
