"""fp8: weights, activations and optionally the head as float8, with the same numbers after the lowering."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import calibrate_with
from ingot.passes.lowering.lower_onnxruntime_cpu import LowerOnnxruntimeCpu
from ingot.passes.manager import PassManager
from ingot.passes.quantization.activation_nodes import activation_scheme
from ingot.passes.quantization.fp8 import Fp8
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS
from ingot.passes.quantization.weight_nodes import FLOAT8, STRATEGY_KEY
from ingot.passes.weights import weight_sites
from tests.each_case import each_case
from tests.passes.calibration_data import calibration
from tests.passes.quantization.test_quantize_activations import dead, decoder, error, logits
from tests.reference_runner import ReferenceRunner
from tests.tolerances import within

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
    return {row["name"]: row for row in QUANTIZATION_FACTS.of(model).weights}


@each_case("options", VARIANTS)
def test_the_loss_is_that_of_three_bits_of_mantissa(options: dict[str, Any]) -> None:
    found = error(quantized(decoder(), **options), logits(decoder()))
    print(f"{options}: {found:.4f}")
    assert 0.01 < found < 0.2


@each_case("options", VARIANTS)
def test_the_lowered_model_computes_the_same(options: dict[str, Any]) -> None:
    sequences, schedule = [list(range(1, 40))], [(13,), (1,), (25,)]
    model = quantized(decoder(), **options)
    expected = ReferenceRunner(model.clone()).run_ragged(sequences, schedule)[0]
    PassManager([LowerOnnxruntimeCpu()]).run(model)
    found = ReferenceRunner(model).run_ragged(sequences, schedule)[0]
    assert within("parity.float32", float(np.abs(found - expected).max()))


def test_linear_layers_have_float8_codes_and_the_head_is_optional() -> None:
    model = quantized(decoder())
    assert {site.role for site in weight_sites(model) if site.is_quantized} == {"linear"}
    assert model.graph.initializers["layers.0.q_proj.weight.q"].dtype == FLOAT8
    roles = {site.role: site.is_quantized for site in weight_sites(quantized(decoder(), lm_head=True))}
    assert roles == {"embedding": False, "linear": True, "head": True}


def test_a_scale_per_tensor_is_marked_on_the_node() -> None:
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


def test_nan_weights_and_layers_with_zero_inputs_are_named() -> None:
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
