"""float8 weights: codes as numpy's table has them, scales by row or whole, widened to the same bits for the CPU."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.calibration import Float32Array
from ingot.passes.quantization.float8_weights import (
    FLOAT8,
    insert_float8_weight,
    round_float8,
    to_float8,
    widen_float8_weights,
)
from ingot.passes.weight_values import float32_values
from ingot.pipeline.formats.float_codes import from_e4m3
from tests.sessions import plain_session


def weight(rows: int = 40, columns: int = 172) -> Float32Array:
    rng = np.random.default_rng(1)
    return (rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-4, 2, (rows, 1))).astype(np.float32)


def linear(*, per_tensor: bool = False) -> ir.Model:
    """y = Gemm(x, W') with W' of float8."""
    shapes = {"x": ("T", 172), "y": ("T", 40)}
    x, y = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        for name, shape in shapes.items()
    )
    gemm = ir.node("Gemm", [x, x], {"transB": 1}, name="linear", outputs=[y])
    graph = ir.Graph([x], [y], nodes=[gemm], opset_imports={"": 24}, name="one")
    rounded = round_float8(weight(), per_tensor=per_tensor, clip=False)
    gemm.replace_input_with(1, insert_float8_weight(graph, "w", gemm, rounded, per_tensor=per_tensor))
    return ir.Model(graph, ir_version=11)


def test_every_code_is_its_own_nearest_number() -> None:
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])  # NaN
    assert to_float8(from_e4m3(codes)).view(np.uint8).tolist() == codes.tolist()


def test_numbers_between_two_codes_go_to_the_nearer_and_ties_to_even_mantissas() -> None:
    table = np.sort(from_e4m3(np.arange(0x7F, dtype=np.uint8)))
    low, high = table[:-1], table[1:]
    middle = ((low.astype(np.float64) + high) / 2).astype(np.float32)
    found = to_float8(middle).astype(np.float32)
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    np.testing.assert_array_equal(found, even)
    np.testing.assert_array_equal(to_float8(np.nextafter(middle, high)).astype(np.float32), high)


def test_what_is_too_large_saturates() -> None:
    huge = np.array([449.0, 1e30, -1e30, 480.0], np.float32)
    assert to_float8(huge).astype(np.float32).tolist() == [448.0, 448.0, -448.0, 448.0]


@pytest.mark.parametrize("per_tensor", [False, True])
def test_the_largest_value_of_a_scale_is_448_and_the_search_loses_no_more(per_tensor: bool) -> None:
    plain, searched = (round_float8(weight(), per_tensor=per_tensor, clip=clip) for clip in (False, True))
    peaks = np.abs(plain.codes.astype(np.float32)).max(axis=1)
    assert (peaks.max() if per_tensor else peaks.min()) == 448
    assert len(np.unique(plain.scale)) == (1 if per_tensor else 40)
    assert searched.squared_error <= plain.squared_error
    restored = plain.codes.astype(np.float32) * plain.scale[:, None]
    assert plain.squared_error == pytest.approx(float(np.square(weight() - restored, dtype=np.float64).sum()), rel=1e-5)


def test_rows_of_zeros_stay_and_nan_is_refused() -> None:
    zero = weight()
    zero[3] = 0
    assert not round_float8(zero, per_tensor=False, clip=True).codes[3].astype(np.float32).any()
    zero[3, 1] = np.inf
    with pytest.raises(ValueError, match="NaN or infinite"):
        round_float8(zero, per_tensor=False, clip=True)


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
