"""Forms of linear layers: blocks, static scales, weights that need a kernel, refusals."""

import numpy as np
import onnx_ir as ir
import pytest
from benchmarks.programs.segment_numerics import random_feeds, relative_errors

from ingot.errors import PassError
from ingot.passes.manager import PassManager
from ingot.passes.numerics.activation_rounding import ActivationScheme, Kind
from ingot.passes.quantization.activation_nodes import insert_activation_quantization
from ingot.passes.registry import make_pass
from ingot.passes.weights import weight_sites
from ingot.pipeline.targets.tensorrt.linear_forms import QuantizedOperand, needs_kernel
from tests.each_case import each_case
from tests.pipeline.targets.tensorrt.models import CHANNEL, prepared, segments_of
from tests.tolerances import within


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


@each_case(
    ("columns", "block", "expected"),
    [(256, 64, 64), (256, None, 128), (320, None, 64), (320, 128, 64), (336, 32, 16), (256, 256, 256), (72, 32, None)],
)
def test_blocks_divide_the_row_and_have_one_scale_each(columns: int, block: int | None, expected: int | None) -> None:
    node = gemm(int4(8, columns), -(-columns // (block or columns)), block)
    operand = QuantizedOperand.of(node)
    assert operand is not None
    assert operand.plan_block == expected
    assert needs_kernel(node) is (expected is None)


def test_finer_blocks_repeat_the_scale() -> None:
    operand = QuantizedOperand.of(gemm(int4(1, 320), 3, 128))
    assert operand is not None
    assert operand.per_block(np.array([[1.0, 2.0, 3.0]]), 64).tolist() == [[1, 1, 2, 2, 3]]
    assert operand.per_block(np.array([7.0]), 64).tolist() == [[7] * 5]


def test_eight_bits_need_a_kernel_in_blocks_and_none_with_a_scale_per_row() -> None:
    codes = ir.Tensor(np.zeros((4, 64), np.int8), name="w.q")
    assert needs_kernel(gemm(codes, 2, 32))
    assert not needs_kernel(gemm(codes, 1, None))
    assert not any(needs_kernel(node) for node in prepared().graph if node.op_type == "Gemm")


def test_float8_in_blocks_is_refused_by_name() -> None:
    dtype = ir.DataType.FLOAT8E4M3FN
    codes = ir.Tensor(np.zeros((4, 64), dtype.numpy()), dtype=dtype, name="w.q")
    with pytest.raises(PassError, match=r"'w.q' is FLOAT8E4M3FN in blocks of 32; TensorRT takes"):
        needs_kernel(gemm(codes, 2, 32))


def test_unsigned_codes_become_signed_by_subtracting_8() -> None:
    packed = np.array([0x80, 0xF7], np.uint8)  # 0, 8, 7, 15
    tensor = ir.PackedTensor(packed, ir.DataType.UINT4, shape=ir.Shape([1, 4]), name="w.q")
    operand = QuantizedOperand.of(gemm(tensor, 1, None))
    assert operand is not None
    assert operand.int4_codes().numpy().astype(np.int8).tolist() == [[-8, 0, -1, 7]]


@pytest.mark.parametrize("kind", ["int", "float"])
def test_a_static_scale_is_an_input_so_that_layers_share_a_plan(kind: Kind) -> None:
    model = prepared()
    linears = [site.node for site in weight_sites(model) if site.role == "linear"]
    for number, gemm in enumerate(linears):
        source = gemm.inputs[0]
        assert source is not None
        insert_activation_quantization(model.graph, source, [gemm], ActivationScheme(kind, 0.01 + 0.001 * number))
    weights = (
        ("quantize-weights", {**CHANNEL, "symmetric": True}) if kind == "int" else ("fp8", {"activations": "none"})
    )
    PassManager([make_pass(*weights)]).run(model)
    segments = segments_of(model)
    layer = segments[1]
    assert "layers.0.mlp.down_proj.input.dequantize.inverse" in layer.weights
    assert layer.model.graph.num_nodes() == segments[2].model.graph.num_nodes()
    worst = max(relative_errors(layer, random_feeds(layer, 3)).values())
    assert within("segments.activations", worst, f"static {kind}")


def test_a_computed_weight_is_refused_by_name() -> None:
    model = prepared()
    gemm = next(node for node in model.graph if node.name == "layers.0.mlp.down_proj")
    source = next(node for node in model.graph if node.name == "layers.0.mlp.gated")
    gemm.replace_input_with(1, source.outputs[0])
    with pytest.raises(PassError, match=r"'layers.0.mlp.down_proj' multiplies by 'layers.0.mlp.gated', which is comp"):
        segments_of(model)
