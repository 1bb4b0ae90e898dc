"""Which blocks a plan gets, and which weights are left to kernels."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.pipeline.targets.segments.linear import int4_codes
from ingot.pipeline.targets.segments.weight_forms import QuantizedOperand, needs_kernel
from tests.pipeline.targets.tensorrt.models import prepared


def gemm(codes: ir.TensorProtocol, blocks: int, block: int | None) -> ir.Node:
    """A linear layer over these codes [out, in]."""
    out = int(codes.shape.numpy()[0])
    scale = ir.Tensor(np.ones((out, blocks) if block else (out,), np.float32), name="w.scale")
    inputs = [ir.Value(name=t.name, type=ir.TensorType(t.dtype), const_value=t) for t in (codes, scale)]
    attributes = {"axis": 1, "block_size": block} if block else {"axis": 0}
    weight = ir.node("DequantizeLinear", inputs, attributes, name="w")
    return ir.node("Gemm", [ir.Value(name="x"), weight.outputs[0]], {"transB": 1}, name="y")


def int4(out: int, columns: int) -> ir.TensorProtocol:
    packed = np.zeros(out * columns // 2, np.uint8)
    return ir.PackedTensor(packed, ir.DataType.INT4, shape=ir.Shape([out, columns]), name="w.q")


@pytest.mark.parametrize(
    ("columns", "block", "expected"),
    [(256, 64, 64), (256, None, 128), (320, None, 64), (320, 128, 64), (336, 32, 16), (256, 256, 256), (72, 32, None)],
)
def test_blocks_divide_the_row_and_have_one_scale_each(columns: int, block: int | None, expected: int | None) -> None:
    node = gemm(int4(8, columns), -(-columns // (block or columns)), block)
    operand = QuantizedOperand.of(node)
    assert operand is not None
    assert operand.plan_block == expected
    assert needs_kernel(node) is (expected is None)


def test_a_finer_block_repeats_its_scale() -> None:
    operand = QuantizedOperand.of(gemm(int4(1, 320), 3, 128))
    assert operand is not None
    assert operand.per_block(np.array([[1.0, 2.0, 3.0]]), 64).tolist() == [[1, 1, 2, 2, 3]]
    assert operand.per_block(np.array([7.0]), 64).tolist() == [[7] * 5]


def test_eight_bits_in_blocks_are_left_to_a_kernel_and_a_scale_a_row_is_not() -> None:
    codes = ir.Tensor(np.zeros((4, 64), np.int8), name="w.q")
    assert needs_kernel(gemm(codes, 2, 32))
    assert not needs_kernel(gemm(codes, 1, None))
    assert not any(needs_kernel(node) for node in prepared().graph if node.op_type == "Gemm")


def test_float8_in_blocks_is_refused_by_name() -> None:
    dtype = ir.DataType.FLOAT8E4M3FN
    codes = ir.Tensor(np.zeros((4, 64), dtype.numpy()), dtype=dtype, name="w.q")
    with pytest.raises(PassError, match=r"'w.q' is FLOAT8E4M3FN in blocks of 32; TensorRT takes"):
        needs_kernel(gemm(codes, 2, 32))


def test_unsigned_codes_become_those_less_8() -> None:
    packed = np.array([0x80, 0xF7], np.uint8)  # 0, 8, 7, 15
    tensor = ir.PackedTensor(packed, ir.DataType.UINT4, shape=ir.Shape([1, 4]), name="w.q")
    value = ir.Value(name="w.q", type=ir.TensorType(tensor.dtype), const_value=tensor)
    assert int4_codes(value).numpy().astype(np.int8).tolist() == [[-8, 0, -1, 7]]
