"""Bytes of the matrices that onnxruntime reads in one decode step, taken from the model files."""

from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import helper

# Inputs of each op that are weights read whole at every step; a Gather reads a few rows, and is left out.
_WEIGHT_INPUTS = {
    "MatMulNBits": slice(1, None),
    "MatMul": slice(1, 2),
    "Gemm": slice(1, None),
    "QGemm": slice(3, None),
}


def weight_bytes(models: Iterable[Path]) -> int:
    """Sum of the initializers that matmuls read, over all model files; weights of norms are too small."""
    return sum(_model_bytes(onnx.load(path, load_external_data=False)) for path in models)


def _model_bytes(model: onnx.ModelProto) -> int:
    sizes = {tensor.name: _tensor_bytes(tensor) for tensor in model.graph.initializer}
    used = {
        name
        for node in model.graph.node
        if node.op_type in _WEIGHT_INPUTS
        for name in node.input[_WEIGHT_INPUTS[node.op_type]]
    }
    return sum(sizes.get(name, 0) for name in used)


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    count = 1
    for dim in tensor.dims:
        count *= dim
    if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        return (count + 1) // 2
    return count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
