"""quantize-activations: scales per token or from data, outlier channels, refusals of bad data and options."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import calibrate_with
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.manager import PassManager
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.quantization.activation_nodes import activation_scheme
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.quantize_activations import ACTIVATIONS_FACTS, QuantizeActivations
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS, QuantizeWeights
from ingot.pipeline.interchange.weight_sources import weights_of_model
from tests.each_case import each_case
from tests.passes.calibration_data import calibration
from tests.passes.tiny_decoder import TinyDecoder, array

EIGHT_BITS = {"bits": 8, "block_size": "channel", "symmetric": True, "lm_head": "none", "embedding": "none"}


def decoder(outlier: float = 1.0) -> ir.Model:
    """The tiny decoder, with one channel of each norm multiplied by `outlier`."""
    model = TinyDecoder().model
    for name, value in model.graph.initializers.items():
        if name.endswith("layernorm.weight"):
            scale = array(model, name).copy()
            scale[7] *= outlier
            value.const_value = ir.tensor(scale, name=name)
    PassManager([FoldConstants()]).run(model)
    return model


def quantized(model: ir.Model, **options: Any) -> ir.Model:
    with calibrate_with(calibration()):
        PassManager([QuantizeActivations(**options)]).run(model)
    return model


def logits(model: ir.Model) -> Float32Array:
    return np.concatenate(list(calibration().logits(model)))


def error(model: ir.Model, exact: Float32Array) -> float:
    return float(np.linalg.norm(logits(model) - exact) / np.linalg.norm(exact))


def choices(model: ir.Model) -> list[dict[str, Any]]:
    return ACTIVATIONS_FACTS.of(model)


@each_case("options", [{}, {"mode": "static"}, {"mode": "static", "range": "mse"}])
@each_case("dtype", ["int8", "float8"])
def test_the_function_stays_nearly_the_same(dtype: str, options: dict[str, Any]) -> None:
    found = error(quantized(decoder(), dtype=dtype, **options), logits(decoder()))
    print(f"{dtype} {options}: {found:.4f}")
    assert 1e-4 < found < (0.06 if dtype == "int8" else 0.15)


def test_dynamic_scales_need_no_data() -> None:
    model = decoder()
    assert not QuantizeActivations().needs_calibration
    PassManager([QuantizeActivations()]).run(model)
    assert {row["strategy"] for row in choices(model)} == {"token"}


def test_layers_that_read_one_value_share_its_codes_and_the_head_reads_floats() -> None:
    model = quantized(decoder())
    nodes = {node.name: node for node in model.graph}
    sources = {nodes[f"layers.0.{name}_proj"].inputs[0] for name in "qkv"}
    assert len(sources) == 1
    assert activation_scheme(nodes["lm_head"]) is None
    assert choices(model)[0]["layers"] == ["layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj"]


def test_a_second_run_changes_nothing() -> None:
    model = quantized(decoder())
    (record,) = PassManager([QuantizeActivations()]).run(model)
    assert not record.modified


def test_a_static_range_is_that_of_the_data_and_a_percentile_or_mse_reduces_it() -> None:
    peaks = [[row["scale"] for row in choices(quantized(decoder(), mode="static", **options))] for options in RANGES]
    assert all(small <= large for small, large in zip(peaks[1], peaks[0], strict=True))
    assert all(small <= large for small, large in zip(peaks[2], peaks[0], strict=True))
    assert sum(peaks[1]) < sum(peaks[0])
    found = choices(quantized(decoder(), mode="static"))[0]
    assert found["scale"] == pytest.approx(found["peak"] / 127)


RANGES: list[dict[str, Any]] = [{}, {"range": "percentile", "percentile": 99.0}, {"range": "mse"}]


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_without_outlier_channels_the_rest_is_rounded_more_finely(mode: Any) -> None:
    exact = logits(decoder(outlier=100.0))
    plain = error(quantized(decoder(outlier=100.0), mode=mode), exact)
    split = error(quantized(decoder(outlier=100.0), mode=mode, outliers=1), exact)
    print(f"{mode}: {plain:.4f}, without the outlier {split:.4f}")
    assert split < 0.5 * plain


def test_a_weights_outlier_columns_move_to_the_second_matmul() -> None:
    model = quantized(decoder(outlier=100.0), outliers=1)
    assert choices(model)[0]["outliers"] == 1
    weight = "layers.0.q_proj.weight"
    assert not array(model, weight)[:, 7].any()
    np.testing.assert_array_equal(array(model, "layers.0.q_proj.outliers.weight")[0], array(decoder(), weight)[:, 7])


def test_checkpoint_formats_cannot_hold_outlier_channels() -> None:
    with pytest.raises(
        UsageError, match=r"'layers.0.q_proj' and 13 more layers keep outlier channels .*export to onnx"
    ):
        weights_of_model(quantized(decoder(), outliers=1), [])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("quantizer", [QuantizeWeights, Gptq])
def test_weights_may_be_rounded_before_or_after_and_statistics_include_the_activations(
    quantizer: type[QuantizeWeights], first: bool
) -> None:
    model, exact = decoder(), logits(decoder())
    passes = [QuantizeActivations(), quantizer(**EIGHT_BITS)]  # type: ignore[arg-type]  # plain options
    with calibrate_with(calibration()):
        PassManager(passes if first else passes[::-1]).run(model)
    assert error(model, exact) < 0.07
    rows = QUANTIZATION_FACTS.of(model).weights
    assert {row["activations"]["strategy"] for row in rows} == {"token"}


def test_excluded_layers_keep_their_inputs() -> None:
    nodes = {node.name: node for node in quantized(decoder(), exclude=("*.down_proj", "layers.0.v_proj")).graph}
    assert activation_scheme(nodes["layers.1.down_proj"]) is None
    assert activation_scheme(nodes["layers.0.v_proj"]) is None
    assert activation_scheme(nodes["layers.0.q_proj"]) is not None


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(PassError, match=r"exclude 'layers.0.qproj' matches no weight; the nearest are layers"):
        quantized(decoder(), exclude=("layers.0.qproj",))


def dead(model: ir.Model, value: float) -> ir.Model:
    weight = model.graph.initializers["layers.1.post_attention_layernorm.weight"]
    weight.const_value = ir.tensor(np.full(64, value, np.float32), name=weight.name)
    return model


def test_a_layer_with_zero_inputs_has_no_static_range_but_a_dynamic_one() -> None:
    with pytest.raises(PassError, match=r"'layers.1.gate_proj' reads .*zero on all calibration data.*mode: dynamic"):
        quantized(dead(decoder(), 0.0), mode="static")
    assert np.isfinite(logits(quantized(dead(decoder(), 0.0)))).all()


def test_nan_activations_are_named() -> None:
    with pytest.raises(PassError, match=r"'layers.1.gate_proj' reads .*channel 0 is NaN or infinite"):
        quantized(dead(decoder(), np.nan), mode="static")


@each_case(
    ("options", "message"),
    [
        ({"range": "mse"}, "range is 'mse', but dynamic scales"),
        ({"percentile": 10.0}, "percentile is 10.0; allowed: a number from 50 to 100"),
        ({"outliers": -1.0}, "outliers is -1.0; allowed"),
        ({"outliers": 1.5}, "outliers is 1.5; allowed"),
        ({"outlier_threshold": -6.0}, "outlier_threshold is -6.0; allowed"),
        ({"mode": "statik"}, "mode is 'statik'; allowed: 'dynamic' or 'static'"),
    ],
)
def test_options_out_of_range_or_in_conflict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        QuantizeActivations(**options)
