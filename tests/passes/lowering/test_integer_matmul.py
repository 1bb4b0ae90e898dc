"""Integer matmuls equal the IR up to rounding, and a row's result does not depend on the other rows."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from ingot.passes.lowering.lower_onnxruntime_cpu import LowerOnnxruntimeCpu
from ingot.passes.manager import PassManager
from ingot.passes.numerics.activation_rounding import ActivationScheme, round_activations
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.quantization.activation_nodes import ACTIVATIONS_KEY, insert_activation_quantization
from ingot.passes.quantization.quantize_activations import QuantizeActivations
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.weights import float32_values
from tests.each_case import each_case
from tests.passes.lowering.test_lower_onnxruntime_cpu import COUNTS, ROWS, linear_model
from tests.passes.tiny_decoder import TinyDecoder
from tests.sessions import plain_session

DYNAMIC, STATIC = ActivationScheme("int"), ActivationScheme("int", 0.03)


def quantized(scheme: ActivationScheme, symmetric: bool = True, bias: bool = True, bits: int = 8) -> ir.Model:
    model = linear_model(bias=bias)
    block: Any = "channel" if bits == 8 else 32
    grid: dict[str, Any] = {"bits": bits, "block_size": block, "symmetric": symmetric, "lm_head": bits}
    PassManager([QuantizeWeights(**grid)]).run(model)
    gemm = model.graph.node("proj")
    source = gemm.inputs[0]
    assert source is not None
    insert_activation_quantization(model.graph, source, [gemm], scheme)
    return model


def lowered(model: ir.Model) -> ir.Model:
    PassManager([LowerOnnxruntimeCpu()]).run(model)
    return model


def rows() -> Float32Array:
    rng = np.random.default_rng(3)
    return (rng.standard_normal((ROWS, 172)) * rng.gamma(1, 1, (ROWS, 1))).astype(np.float32)


def outputs(model: ir.Model, x: Float32Array) -> NDArray[Any]:
    found: NDArray[Any] = plain_session(model).run(None, {"x": x})[0]
    return found


@each_case("bias", [False, True])
@each_case("symmetric", [False, True])
@each_case("scheme", [DYNAMIC, STATIC])
def test_the_engine_computes_the_ir_up_to_rounding(scheme: ActivationScheme, symmetric: bool, bias: bool) -> None:
    model = quantized(scheme, symmetric, bias)
    gemm = model.graph.node("proj")
    weight = gemm.inputs[1]
    assert weight is not None
    expected = round_activations(rows(), scheme).astype(np.float64) @ float32_values(weight).astype(np.float64).T
    if bias:
        assert gemm.inputs[2] is not None
        expected = expected + float32_values(gemm.inputs[2])
    difference = np.abs(outputs(lowered(model), rows()) - expected).max() / np.abs(expected).max()
    print(f"{difference:.1e} of the largest result")
    assert difference < 1e-6


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC])
def test_a_row_has_the_same_bits_in_every_batch(scheme: ActivationScheme, symmetric: bool) -> None:
    session, x = plain_session(lowered(quantized(scheme, symmetric))), rows()
    whole = session.run(None, {"x": x})[0]
    for count in COUNTS:
        for start in (0, (ROWS - count) // 2):
            part = session.run(None, {"x": x[start : start + count]})[0]
            np.testing.assert_array_equal(part.view(np.int32), whole[start : start + count].view(np.int32))


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC])
def test_codes_are_integers_and_the_stored_weight_is_unchanged(scheme: ActivationScheme) -> None:
    model = quantized(scheme)
    codes = np.array(model.graph.initializers["proj.weight.q"].const_value.numpy())  # type: ignore[union-attr]
    lowered(model)
    matmul = model.graph.node("proj.integer")
    assert matmul.op_type == "QGemm"
    assert ACTIVATIONS_KEY in matmul.metadata_props
    assert [value.dtype for value in matmul.inputs[::3]] == [ir.DataType.UINT8, ir.DataType.INT8]  # type: ignore[union-attr]
    np.testing.assert_array_equal(matmul.inputs[3].const_value.numpy(), codes)  # type: ignore[union-attr]
    assert not [node for node in model.graph if node.op_type == "DequantizeLinear"]


def test_weights_in_blocks_read_dequantized_activations() -> None:
    model = lowered(quantized(DYNAMIC, bits=4))
    ops = [node.op_type for node in model.graph]
    assert "MatMulNBits" in ops
    assert "DequantizeLinear" in ops


def test_codes_of_a_shared_input_are_made_once() -> None:
    model = TinyDecoder(layers=1).model
    passes = [QuantizeActivations(), QuantizeWeights(bits=8, block_size="channel", symmetric=True)]
    PassManager([*passes, LowerOnnxruntimeCpu()]).run(model)
    ops = [node.op_type for node in model.graph]
    assert ops.count("QGemm") == 7
    assert ops.count("QuantizeLinear") == 4
