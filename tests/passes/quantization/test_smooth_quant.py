"""smooth-quant: the function stays, planted outliers stop hurting, each of its three steps is optional."""

import logging
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import calibrate_with
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.fusion.pack_projections import PackProjections
from ingot.passes.lowering.lower_onnxruntime_cpu import LowerOnnxruntimeCpu
from ingot.passes.manager import PassManager
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.printing import model_to_text
from ingot.passes.quantization.activation_nodes import activation_scheme
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.quantize_activations import ACTIVATIONS_FACTS
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS
from ingot.passes.quantization.smooth_quant import SMOOTHING_FACTS, SmoothQuant
from ingot.passes.quantization.weight_nodes import STRATEGY_KEY
from ingot.passes.weights import weight_sites
from tests.each_case import each_case
from tests.passes.calibration_data import calibration
from tests.passes.quantization.test_quantize_activations import dead
from tests.passes.tiny_decoder import TinyDecoder, array

OUTLIERS = slice(3, 60, 14)
FLOATS = {"lm_head": "none", "embedding": "none"}


def decoder(packed: bool = True, planted: float = 60.0) -> ir.Model:
    """The tiny decoder with channels that norms multiply by `planted` and weights divide by it.

    Large models have such channels. The function is unchanged, and rounding to the inputs' range loses it.
    """
    model = TinyDecoder(weight_dtype=np.float32).model
    PassManager([FoldConstants()]).run(model)
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
    for layer in range(2):
        for norm, linears in readers.items():
            _scale(model, f"layers.{layer}.{norm}.weight", (OUTLIERS,), planted)
            for linear in linears:
                _scale(model, f"layers.{layer}.{linear}.weight", (slice(None), OUTLIERS), 1 / planted)
    PassManager([PackProjections()] if packed else []).run(model)
    return model


def _scale(model: ir.Model, name: str, where: tuple[slice, ...], factor: float) -> None:
    values = array(model, name).copy()
    values[where] *= np.float32(factor)
    model.graph.initializers[name].const_value = ir.tensor(values, name=name)


def quantized(model: ir.Model, **options: Any) -> ir.Model:
    with calibrate_with(calibration()):
        PassManager([SmoothQuant(**FLOATS | options)]).run(model)
    return model


def logits(model: ir.Model) -> Float32Array:
    return np.concatenate(list(calibration().logits(model)))


def divergence(model: ir.Model, exact: Float32Array) -> float:
    """Mean KL divergence from the exact model's next-token distributions, in nats."""
    p, q = (rows - np.logaddexp.reduce(rows, -1, keepdims=True) for rows in (exact.astype(np.float64), logits(model)))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def choices(model: ir.Model) -> dict[str, dict[str, Any]]:
    return {row["layers"][0]: row for row in SMOOTHING_FACTS.of(model)}


@pytest.mark.parametrize("packed", [False, True])
def test_smoothing_alone_does_not_change_the_function(packed: bool) -> None:
    exact = logits(decoder(packed))
    smoothed = quantized(decoder(packed), weights="none", activations="none")
    assert np.linalg.norm(logits(smoothed) - exact) / np.linalg.norm(exact) < 2e-5
    assert SMOOTHING_FACTS.is_in(smoothed)
    assert not QUANTIZATION_FACTS.is_in(smoothed)


@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize("alpha", [0.5, "auto"])
def test_planted_outliers_hurt_little_once_they_are_smoothed(alpha: Any, activations: Any) -> None:
    exact = logits(decoder())
    plain = divergence(quantized(decoder(), alpha="none", activations=activations), exact)
    smooth = divergence(quantized(decoder(), alpha=alpha, activations=activations), exact)
    print(f"{activations}: KL {plain:.5f} without smoothing, {smooth:.5f} with alpha {alpha}")
    assert smooth < 0.1 * plain


def test_outlier_channels_help_as_much_as_smoothing() -> None:
    exact = logits(decoder())
    plain = divergence(quantized(decoder(), alpha="none"), exact)
    split = divergence(quantized(decoder(), alpha="none", outliers=5), exact)
    print(f"KL {plain:.5f}, {split:.5f} with five outlier channels")
    assert split < 0.1 * plain


def test_the_search_reduces_the_error_of_each_group() -> None:
    found = choices(quantized(decoder(), alpha="auto"))
    assert {name.rpartition(".")[2] for name in found} >= {"q_proj", "gate_up_proj"}
    assert all(row["error_after"] < row["error_before"] for row in found.values())


def test_a_search_leaves_the_graph_as_it_was() -> None:
    searched, fixed = (quantized(decoder(), alpha=alpha) for alpha in ("auto", 0.5))
    assert [node.name for node in searched.graph] == [node.name for node in fixed.graph]
    assert set(searched.graph.initializers) == set(fixed.graph.initializers)


def test_weights_share_a_scale_per_channel_or_per_tensor() -> None:
    for weights, distinct in (("channel", 64), ("tensor", 1)):
        model = quantized(decoder(), weights=weights)
        scale = model.graph.initializers["layers.0.q_proj.weight.scale"].const_value
        assert scale is not None
        assert scale.shape == ir.Shape([64])
        assert len(np.unique(scale.numpy())) == distinct
        node = next(iter(model.graph.initializers["layers.0.q_proj.weight.q"].consumers()))
        assert node.metadata_props.get(STRATEGY_KEY) == ("tensor" if distinct == 1 else None)


def test_other_passes_can_do_steps_that_are_left_out() -> None:
    exact, model = logits(decoder()), decoder()
    options: dict[str, Any] = {"bits": 8, "block_size": "channel", "symmetric": True, **FLOATS}
    with calibrate_with(calibration()):
        PassManager([SmoothQuant(weights="none"), Gptq(**options), LowerOnnxruntimeCpu()]).run(model)
    rows = QUANTIZATION_FACTS.of(model).weights
    assert {row["method"] for row in rows} == {"gptq"}
    assert all(row["activations"]["dynamic"] for row in rows)
    assert divergence(quantized(decoder()), exact) < 0.1
    assert {node.op_type for node in model.graph} >= {"QGemm"}


def test_statistics_include_the_activations_of_every_layer_but_the_head() -> None:
    model = quantized(decoder(), activations="static", lm_head=8)
    rows = {row["name"]: row for row in QUANTIZATION_FACTS.of(model).weights}
    assert "activations" not in rows.pop("lm_head")
    assert all(row["activations"]["strategy"] == "tensor" for row in rows.values())
    assert len(ACTIVATIONS_FACTS.of(model)) == 8


def test_excluded_layers_stay_as_they_are() -> None:
    model = quantized(decoder(), exclude=("*.down_proj",))
    for site in weight_sites(model):
        is_left = "down_proj" in (site.node.name or "") or site.role != "linear"
        assert site.is_quantized != is_left
        assert (activation_scheme(site.node) is None) == is_left


def test_a_second_run_changes_nothing_and_the_same_data_gives_the_same_model() -> None:
    first, second = quantized(decoder(), alpha="auto"), quantized(decoder(), alpha="auto")
    assert model_to_text(first) == model_to_text(second)
    with calibrate_with(calibration()):
        (record,) = PassManager([SmoothQuant(alpha="auto", **FLOATS)]).run(first)  # type: ignore[arg-type]  # plain
    assert not record.modified


def test_rounding_to_nearest_with_dynamic_scales_needs_no_data() -> None:
    assert not SmoothQuant(alpha="none").needs_calibration
    model = decoder()
    PassManager([SmoothQuant(alpha="none", **FLOATS)]).run(model)  # type: ignore[arg-type]  # plain options
    assert {row["strategy"] for row in ACTIVATIONS_FACTS.of(model)} == {"token"}


def test_layers_that_cannot_be_scaled_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder(packed=False)
    model.graph.node("layers.0.q_proj").replace_input_with(1, model.graph.initializers["layers.1.q_proj.weight"])
    with caplog.at_level(logging.INFO, "ingot.passes"):
        quantized(model)
    assert "smooth-quant: left alone: node 'layers.0.q_proj' has a weight that others read too" in caplog.text


def test_fold_always_adds_a_mul_where_no_node_absorbs_the_scale() -> None:
    model = decoder(packed=False)
    reader = ir.node("Identity", [model.graph.node("layers.0.q_proj").inputs[0]], name="reader")
    reader.outputs[0].name = "reader"
    model.graph.insert_after(model.graph.node("layers.0.q_proj"), reader)
    exact = logits(model)
    quantized(model, fold="always", weights="none", activations="none")
    assert model.graph.node("layers.0.q_proj.scale_input").op_type == "Mul"
    assert np.linalg.norm(logits(model) - exact) / np.linalg.norm(exact) < 2e-5


def test_a_layer_with_zero_inputs_is_named_when_it_needs_a_static_range() -> None:
    assert np.isfinite(logits(quantized(dead(decoder(), 0.0)))).all()
    with pytest.raises(PassError, match=r"'layers.1.gate_up_proj' reads .*zero on all calibration data"):
        quantized(dead(decoder(), 0.0), activations="static")


def test_nan_activations_are_named() -> None:
    with pytest.raises(PassError, match=r"'layers.1.gate_up_proj' reads .* NaN or infinite on calibration data"):
        quantized(dead(decoder(), np.nan))


@each_case(
    ("options", "message"),
    [
        ({"alpha": 1.5}, r"smooth-quant: alpha is 1.5; allowed: a number from 0 to 1"),
        ({"alpha": -0.1}, r"alpha is -0.1; allowed: a number from 0 to 1"),
        ({"alpha": "atuo"}, r"alpha is 'atuo'; allowed: a number from 0 to 1 .* or 'auto' or 'none'"),
        ({"alpha": "none", "weights": "none", "activations": "none"}, r"are all \"none\"; set one of them"),
        ({"activations": "none", "outliers": 2}, r"outliers are kept next to quantized activations"),
        ({"range": "mse"}, r"smooth-quant: range is 'mse', but dynamic scales"),
        ({"steps": 0}, r"steps is 0; allowed: a whole number from 1 to 1000"),
    ],
)
def test_options_out_of_range_or_in_conflict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SmoothQuant(**options)
