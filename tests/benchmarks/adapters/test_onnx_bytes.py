"""Bytes that a decode step reads, counted from ONNX files."""

from pathlib import Path

import numpy as np
import onnx
from benchmarks.adapters.onnx_bytes import weight_bytes
from onnx import TensorProto, helper, numpy_helper


def test_matrices_and_scales_count_and_looked_up_rows_do_not(tmp_path: Path) -> None:
    weights = [
        numpy_helper.from_array(np.zeros((8, 1, 16), np.uint8), "q"),  # 128 bytes
        numpy_helper.from_array(np.zeros((8, 1), np.float32), "scale"),  # 32 bytes
        numpy_helper.from_array(np.zeros((100, 32), np.float32), "table"),  # read by rows
    ]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMulNBits", ["x", "q", "scale"], ["y"], domain="com.microsoft", K=32, N=8, block_size=32),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["T"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", 8])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [ids], [y], weights)), path)
    assert weight_bytes([path]) == 160


def test_a_matmul_of_integers_reads_its_weight_and_not_its_input(tmp_path: Path) -> None:
    weights = [
        numpy_helper.from_array(np.array(0.5, np.float32), "x_scale"),
        numpy_helper.from_array(np.array(128, np.uint8), "x_zero"),
        numpy_helper.from_array(np.zeros((8, 32), np.int8), "w"),  # 256 bytes
        numpy_helper.from_array(np.zeros(8, np.float32), "w_scale"),  # 32 bytes
        numpy_helper.from_array(np.zeros(8, np.int8), "w_zero"),  # 8 bytes
    ]
    node = helper.make_node(
        "QGemm", ["x", "x_scale", "x_zero", "w", "w_scale", "w_zero"], ["y"], domain="com.microsoft", transB=1
    )
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, ["T", 32])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", 8])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y], weights)), path)
    assert weight_bytes([path]) == 256 + 32 + 8


def test_two_four_bit_values_share_a_byte(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.INT4, [3, 3], [0] * 9)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", 3])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y], [weight])), path)
    assert weight_bytes([path]) == 5
