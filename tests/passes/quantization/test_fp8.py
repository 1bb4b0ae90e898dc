"""fp8: weights and activations as float8, the head if wanted, the same numbers behind the lowering.

float8 weights: codes as numpy's table has them, scales by row or whole, widened to the same bits for the CPU.
"""

import json
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import Float32Array, calibrate_with
from ingot.passes.lowering.lower_onnxruntime_cpu import LowerOnnxruntimeCpu
from ingot.passes.manager import PassManager
from ingot.passes.quantization.activation_quantization import activation_scheme
from ingot.passes.quantization.fp8 import (
    FLOAT8,
    Fp8,
    insert_float8_weight,
    round_float8,
    to_float8,
    widen_float8_weights,
)
from ingot.passes.quantization.quantize_weights import QUANTIZATION_KEY
from ingot.passes.quantization.quantized_tensors import STRATEGY_KEY
from ingot.passes.weights import float32_values, weight_sites
from ingot.pipeline.checkpoint.formats.codes import from_e4m3
from tests.passes.calibration_data import calibration
from tests.passes.quantization.test_quantize_activations import dead, decoder, error, logits
from tests.reference_runner import ReferenceRunner
from tests.sessions import plain_session
from tests.tolerances import within


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


VARIANTS: list[dict[str, Any]] = [
    {},
    {"weights": "tensor"},
    {"clip": True},
    {"activations": "dynamic"},
    {"activations": "static"},
    {"activations": "static", "range": "mse", "lm_head": True},
]


def quantized(model: ir.Model, **options: Any) -> ir.Model:
    with calibrate_with(calibration()):
        PassManager([Fp8(**options)]).run(model)
    return model


def statistics(model: ir.Model) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(model.metadata_props[QUANTIZATION_KEY])["weights"]}


@pytest.mark.parametrize("options", VARIANTS)
def test_it_loses_what_three_bits_of_mantissa_lose(options: dict[str, Any]) -> None:
    found = error(quantized(decoder(), **options), logits(decoder()))
    print(f"{options}: {found:.4f}")
    assert 0.01 < found < 0.2


@pytest.mark.parametrize("options", VARIANTS)
def test_the_lowered_model_computes_the_same(options: dict[str, Any]) -> None:
    sequences, schedule = [list(range(1, 40))], [(13,), (1,), (25,)]
    model = quantized(decoder(), **options)
    expected = ReferenceRunner(model.clone()).run_ragged(sequences, schedule)[0]
    PassManager([LowerOnnxruntimeCpu()]).run(model)
    found = ReferenceRunner(model).run_ragged(sequences, schedule)[0]
    assert within("parity.float32", float(np.abs(found - expected).max()))


def test_codes_are_float8_and_table_and_head_stay_unless_asked() -> None:
    model = quantized(decoder())
    assert {site.role for site in weight_sites(model) if site.is_quantized} == {"linear"}
    assert model.graph.initializers["layers.0.q_proj.weight.q"].dtype == FLOAT8
    roles = {site.role: site.is_quantized for site in weight_sites(quantized(decoder(), lm_head=True))}
    assert roles == {"embedding": False, "linear": True, "head": True}


def test_one_scale_for_a_weight_is_said_on_its_node() -> None:
    for weights, strategy in (("tensor", "tensor"), ("channel", None)):
        codes = quantized(decoder(), weights=weights).graph.initializers["layers.0.q_proj.weight.q"]
        assert next(iter(codes.consumers())).metadata_props.get(STRATEGY_KEY) == strategy


def test_statistics_name_kind_error_and_activations() -> None:
    row = statistics(quantized(decoder(), activations="static"))["layers.0.down_proj"]
    assert (row["bits"], row["kind"], row["strategy"]) == (8, "float", "channel")
    assert 0.01 < row["relative_error"] < 0.04
    assert row["activations"]["kind"] == "float"
    assert row["activations"]["scale"] > 0


def test_a_second_run_changes_nothing() -> None:
    model = quantized(decoder(), activations="dynamic")
    (record,) = PassManager([Fp8(activations="dynamic")]).run(model)
    assert not record.modified


def test_weights_alone_and_dynamic_scales_need_no_data() -> None:
    model = decoder()
    PassManager([Fp8(activations="dynamic")]).run(model)
    scheme = activation_scheme(model.graph.node("layers.0.q_proj"))
    assert scheme is not None
    assert (scheme.kind, scheme.dynamic) == ("float", True)


def test_excluded_layers_stay_as_they_are() -> None:
    model = quantized(decoder(), exclude=("layers.0.*",))
    assert all(not site.is_quantized for site in weight_sites(model) if (site.node.name or "").startswith("layers.0."))
    assert statistics(model).keys() >= {"layers.1.q_proj"}


def test_nan_weights_and_layers_that_never_fire_are_named() -> None:
    model = decoder()
    weight = model.graph.initializers["layers.1.up_proj.weight"]
    weight.const_value = ir.tensor(np.full((172, 64), np.nan, np.float16), name=weight.name)
    with pytest.raises(PassError, match=r"weight 'layers.1.up_proj.weight' holds NaN or infinite values"):
        quantized(model)
    with pytest.raises(PassError, match=r"fp8: .*zero on all calibration data"):
        quantized(dead(decoder(), 0.0), activations="static")


def test_a_range_for_dynamic_scales_is_refused_in_the_passs_name() -> None:
    with pytest.raises(UsageError, match="fp8: range is 'mse', but dynamic scales"):
        Fp8(activations="dynamic", range="mse")
