"""Quantized activations in the IR: onnxruntime computes the bits that numpy does, row by row."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from ingot.passes.invariants import verify
from ingot.passes.numerics.activation_rounding import ActivationScheme, round_activations
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.quantization.activation_nodes import activation_scheme, dequantizer, insert_activation_quantization
from tests.sessions import plain_session

SCHEMES = [
    ActivationScheme("int"),
    ActivationScheme("float"),
    ActivationScheme("int", 0.03),
    ActivationScheme("float", 0.007),
]
WIDTH = 172


def linear(scheme: ActivationScheme, weight: Float32Array) -> ir.Model:
    """y = Gemm(x', W) over x [T, in]."""
    shapes = {"x": ("T", weight.shape[1]), "y": ("T", weight.shape[0]), "w": weight.shape}
    values = {
        name: ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        for name, shape in shapes.items()
    }
    values["w"].const_value = ir.Tensor(weight, name="w")
    gemm = ir.node("Gemm", [values["x"], values["w"]], {"transB": 1}, name="linear", outputs=[values["y"]])
    opsets = {"": 24, "com.microsoft": 1}
    graph = ir.Graph(
        [values["x"]], [values["y"]], nodes=[gemm], initializers=[values["w"]], opset_imports=opsets, name="one"
    )
    insert_activation_quantization(graph, values["x"], [gemm], scheme)
    model = ir.Model(graph, ir_version=11)
    verify(model)
    return model


def through(scheme: ActivationScheme, x: Float32Array) -> NDArray[Any]:
    """x' as onnxruntime computes it."""
    model = linear(scheme, np.eye(x.shape[1], dtype=np.float32))
    outputs: NDArray[Any] = plain_session(model).run(None, {"x": x})[0]
    return outputs


def rows(count: int = 33) -> Float32Array:
    """Rows of very different magnitudes."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal((count, WIDTH)) * 10.0 ** rng.uniform(-3, 3, (count, 1))).astype(np.float32)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_onnxruntime_and_numpy_agree_to_the_last_bit(scheme: ActivationScheme) -> None:
    model = linear(scheme, np.eye(WIDTH, dtype=np.float32))
    gemm = model.graph.node("linear")
    x_quantized = gemm.inputs[0]
    assert x_quantized is not None
    model.graph.outputs.append(x_quantized)
    found = plain_session(model).run([x_quantized.name], {"x": rows()})[0]
    np.testing.assert_array_equal(found, round_activations(rows(), scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_does_not_depend_on_other_rows(scheme: ActivationScheme) -> None:
    whole = through(scheme, rows())
    for part in (slice(0, 1), slice(3, 10), slice(17, 33)):
        np.testing.assert_array_equal(through(scheme, rows()[part]), whole[part])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_zeros_stay_zero_and_large_values_saturate(scheme: ActivationScheme) -> None:
    x = np.zeros((3, WIDTH), np.float32)
    x[1, :2] = [3e38, -3e38]
    x[2] = 1e-38
    found = through(scheme, x)
    assert not found[0].any()
    assert np.isfinite(found).all()
    assert abs(found[2]).max() <= 1e-30


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_scheme_is_read_back(scheme: ActivationScheme) -> None:
    gemm = linear(scheme, np.eye(4, dtype=np.float32)).graph.node("linear")
    assert activation_scheme(gemm) == scheme
    maker = dequantizer(gemm)
    assert maker is not None
    assert maker.op_type == "DequantizeLinear"


def test_a_layer_that_reads_such_a_layer_is_not_quantized_itself() -> None:
    gemm = linear(SCHEMES[0], np.eye(4, dtype=np.float32)).graph.node("linear")
    reader = ir.node("Gemm", [gemm.outputs[0], gemm.inputs[1]], {"transB": 1}, name="reader")
    assert dequantizer(reader) is None
    assert activation_scheme(reader) is None
