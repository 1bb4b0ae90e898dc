"""Quantized weights in the IR: float8 codes are widened to the same bits for the CPU."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.numerics.float8 import round_float8
from ingot.passes.quantization.weight_nodes import FLOAT8, insert_float8_dequantize, widen_float8_weights
from ingot.passes.weights import float32_values
from tests.passes.numerics.test_float8 import weight
from tests.sessions import plain_session


def linear(*, per_tensor: bool = False) -> ir.Model:
    """y = Gemm(x, W') with float8 W'."""
    shapes = {"x": ("T", 172), "y": ("T", 40)}
    x, y = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        for name, shape in shapes.items()
    )
    gemm = ir.node("Gemm", [x, x], {"transB": 1}, name="linear", outputs=[y])
    graph = ir.Graph([x], [y], nodes=[gemm], opset_imports={"": 24}, name="one")
    rounded = round_float8(weight(), per_tensor=per_tensor, clip=False)
    gemm.replace_input_with(1, insert_float8_dequantize(graph, ir.Value(name="w"), gemm, rounded).outputs[0])
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_the_engine_widens_to_the_bits_of_the_ir(per_tensor: bool) -> None:
    model = linear(per_tensor=per_tensor)
    operand = model.graph.node("linear").inputs[1]
    assert operand is not None
    expected = float32_values(operand)
    eye = np.eye(172, dtype=np.float32)
    before = plain_session(model).run(None, {"x": eye})[0]
    assert widen_float8_weights(model.graph)
    assert not widen_float8_weights(model.graph)
    codes = model.graph.initializers["w.q"]
    assert codes.dtype == FLOAT8
    after = plain_session(model).run(None, {"x": eye})[0]
    np.testing.assert_array_equal(after, expected.T)
    np.testing.assert_array_equal(before, after)
