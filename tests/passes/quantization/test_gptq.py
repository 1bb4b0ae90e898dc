"""gptq: rounds with less error in the layers' outputs than to the nearest, and says what it did and did not do."""

import json
import logging
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import CALIBRATION_KEY, calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.numerics.gptq_rounding import DampedGram, damped_gram, gptq_round, output_error
from ingot.passes.numerics.rounding import RoundedWeight, dequantize, round_weight
from ingot.passes.numerics.scale_search import FloatArray, Scheme
from ingot.passes.printing import model_to_text
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.quantize_weights import QUANTIZATION_KEY, QuantizeWeights
from ingot.pipeline.calibrate import CalibrationEngine
from tests.passes.calibration_data import SEQUENCES, TOKENS, calibration, calibration_data
from tests.passes.tiny_decoder import INNER, TinyDecoder

SCHEMES = [Scheme(4, 32, False), Scheme(4, 32, True), Scheme(4, 0, True), Scheme(4, 128, False), Scheme(8, 64, True)]


def correlated(rows: int = 1024, columns: int = 172, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    """X^T X of inputs whose channels go together and differ in size, as a decoder's do."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((columns, columns)) * np.exp(-np.arange(columns) / 40)[:, None]
    inputs = random.standard_normal((rows, columns)) @ mixed
    return np.asarray(inputs.T @ inputs)


def toy_weight(rows: int = 48, columns: int = 172) -> FloatArray:
    return np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)


def error_of(weight: FloatArray, rounded: RoundedWeight, damped: DampedGram, scheme: Scheme) -> float:
    block = scheme.block_columns(weight.shape[1])
    restored = dequantize(rounded.codes, rounded.scale, rounded.zero_point, block)
    return output_error(weight - restored, damped.gram)


def statistics(model: ir.Model) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(model.metadata_props[QUANTIZATION_KEY])["weights"]}


def quantized(pass_: QuantizeWeights, service: CalibrationEngine | None = None, tied: bool = True) -> ir.Model:
    model = TinyDecoder(tied=tied).model
    with calibrate_with(service or calibration()):
        PassManager([pass_]).run(model)
    return model


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_output_error_is_well_below_that_of_rounding_to_the_nearest(scheme: Scheme) -> None:
    weight, damped = toy_weight(), damped_gram(correlated(), 0.01, act_order=True)
    grid = round_weight(weight, scheme)
    nearest = error_of(weight, grid, damped, scheme)
    plain = error_of(weight, gptq_round(weight, grid, damped, scheme, refine=0), damped, scheme)
    refined = error_of(weight, gptq_round(weight, grid, damped, scheme, refine=2), damped, scheme)
    assert plain < 0.5 * nearest
    assert refined < 0.95 * plain


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_stay_in_the_scheme_and_scales_stay_positive(scheme: Scheme) -> None:
    weight, damped = toy_weight(), damped_gram(correlated(), 0.01, act_order=True)
    rounded = gptq_round(weight, round_weight(weight, scheme), damped, scheme, refine=2)
    low, high = scheme.code_range
    assert rounded.codes.dtype == (np.int8 if scheme.symmetric else np.uint8)
    assert low <= rounded.codes.min()
    assert rounded.codes.max() <= high
    assert (rounded.scale > 0).all()
    assert rounded.scale.shape == (48, scheme.num_blocks(172))


def test_inputs_that_do_not_go_together_leave_nothing_to_gain_over_the_nearest() -> None:
    weight, scheme = toy_weight(), Scheme(4, 32, False)
    grid = round_weight(weight, scheme)
    rounded = gptq_round(weight, grid, damped_gram(np.eye(172), 0.01, act_order=True), scheme, refine=0)
    np.testing.assert_array_equal(rounded.codes, grid.codes)


def test_the_inverse_factor_is_that_of_the_damped_matrix_in_the_order_of_the_work() -> None:
    damped = damped_gram(correlated(), 0.01, act_order=True)
    ordered = damped.gram[np.ix_(damped.order, damped.order)].astype(np.float64)
    inverse = damped.factor.T.astype(np.float64) @ damped.factor
    np.testing.assert_allclose(inverse @ ordered, np.eye(172), atol=2e-3)
    assert (np.diff(np.diagonal(ordered)) <= 0).all()


def test_a_matrix_that_cannot_be_factored_is_damped_more() -> None:
    gram = correlated(columns=64)
    broken = gram - 0.05 * np.diagonal(gram).mean() * np.eye(64)
    assert damped_gram(broken, 0.01, act_order=True).damping == pytest.approx(0.1)


def test_a_channel_that_never_fires_is_rounded_to_the_nearest() -> None:
    gram = correlated()
    gram[7], gram[:, 7] = 0, 0
    weight, scheme = toy_weight(), Scheme(4, 32, False)
    grid = round_weight(weight, scheme)
    rounded = gptq_round(weight, grid, damped_gram(gram, 0.01, act_order=True), scheme, refine=0)
    np.testing.assert_array_equal(rounded.codes[:, 7], grid.codes[:, 7])


@pytest.mark.parametrize("bad", [np.zeros((8, 8)), np.full((8, 8), np.nan)])
def test_inputs_that_say_nothing_are_refused(bad: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    with pytest.raises(ValueError, match="zero on all of the calibration data, or not finite"):
        damped_gram(bad, 0.01, act_order=True)


def degenerate(kind: str, columns: int = 172) -> np.ndarray[Any, np.dtype[np.float64]]:
    """X^T X of inputs that leave Cholesky little to hold on to."""
    random = np.random.default_rng(4)
    inputs = random.standard_normal((300, columns))
    if kind == "one token":
        inputs = inputs[:1]
    elif kind == "fewer tokens than channels":
        inputs = inputs[:20]
    elif kind == "channels that are copies":
        inputs[:, 1::2] = inputs[:, ::2]
    elif kind == "huge range":
        inputs *= 10.0 ** random.uniform(-9, 9, columns)
    elif kind == "one channel fires":
        inputs[:, 1:] = 0
    return np.asarray(inputs.T @ inputs)


@pytest.mark.parametrize("refine", [0, 2])
@pytest.mark.parametrize(
    "kind",
    ["one token", "fewer tokens than channels", "channels that are copies", "huge range", "one channel fires"],
)
def test_inputs_that_hardly_define_a_matrix_still_lose_no_more_than_the_nearest(kind: str, refine: int) -> None:
    weight, scheme = toy_weight(), Scheme(3, 64, symmetric=False)  # blocks that do not divide 172 columns
    damped, grid = damped_gram(degenerate(kind), 0.01, act_order=True), round_weight(weight, scheme)
    rounded = gptq_round(weight, grid, damped, scheme, refine)
    assert np.isfinite(rounded.scale).all()
    assert (rounded.scale > 0).all()
    assert rounded.codes.max() <= 7
    assert error_of(weight, rounded, damped, scheme) <= error_of(weight, grid, damped, scheme) * (1 + 1e-5)


def test_every_layer_s_outputs_are_nearer_than_with_rounding_to_the_nearest() -> None:
    rows = [row for row in statistics(quantized(Gptq())).values() if row["method"] == "gptq"]
    assert len(rows) == 14
    assert all(row["output_error"] < 0.85 * row["output_error_nearest"] for row in rows)
    assert all(row["tokens"] == SEQUENCES * TOKENS for row in rows)


def test_the_model_s_logits_are_nearer_than_with_rounding_to_the_nearest() -> None:
    service = calibration()
    exact = np.concatenate(list(service.logits(TinyDecoder().model)))
    distance = {
        pass_.name: np.square(np.concatenate(list(service.logits(quantized(pass_)))) - exact).mean()
        for pass_ in (QuantizeWeights(lm_head="none"), Gptq(lm_head="none"))
    }
    print(distance)
    assert distance["gptq"] < 0.6 * distance["quantize-weights"]


def test_what_no_data_reaches_is_rounded_to_the_nearest_and_says_so() -> None:
    tied = statistics(quantized(Gptq()))["embed_tokens"]
    assert (tied["method"], tied["reason"]) == ("round-to-nearest", "shares the embedding table's tensor")
    untied = statistics(quantized(Gptq(), tied=False))
    assert untied["embed_tokens"]["reason"] == "embedding table"
    assert untied["lm_head"]["method"] == "gptq"


def test_the_same_data_gives_the_same_bytes() -> None:
    first, second = quantized(Gptq()), quantized(Gptq())
    assert model_to_text(first) == model_to_text(second)
    for name, value in first.graph.initializers.items():
        other = second.graph.initializers[name].const_value
        assert value.const_value is not None
        assert other is not None
        assert value.const_value.tobytes() == other.tobytes(), name


def test_the_data_s_digest_and_counts_are_in_the_model() -> None:
    facts = json.loads(quantized(Gptq()).metadata_props[CALIBRATION_KEY])
    assert facts["sha256"] == "0" * 64
    assert facts["tokens"] == SEQUENCES * TOKENS


def test_a_second_run_changes_nothing() -> None:
    model = quantized(Gptq())
    with calibrate_with(calibration()):
        (record,) = PassManager([Gptq()]).run(model)
    assert not record.modified


def test_too_few_tokens_for_layers_are_warned_of_once_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    few = CalibrationEngine(calibration_data(sequences=2, tokens=32))
    with caplog.at_level(logging.WARNING, "ingot"):
        quantized(Gptq(), few)
    (record,) = caplog.records
    assert f"layers.0.down_proj (64 tokens, {INNER} channels), layers.1.down_proj" in record.getMessage()
    assert f"until {INNER} tokens and more reach each" in record.getMessage()


def test_a_layer_that_never_fires_is_rounded_to_the_nearest_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """And a channel that never fires is counted."""
    model = TinyDecoder().model
    np.asarray(model.graph.initializers["layers.1.up_proj.weight"].const_value.numpy())[...] = 0  # type: ignore[union-attr]
    np.asarray(model.graph.initializers["layers.0.up_proj.weight"].const_value.numpy())[:5] = 0  # type: ignore[union-attr]
    with calibrate_with(calibration()), caplog.at_level(logging.WARNING, "ingot"):
        PassManager([Gptq()]).run(model)
    found = statistics(model)["layers.1.down_proj"]
    assert found["method"] == "round-to-nearest"
    assert found["reason"] == "its inputs are zero on all of the calibration data"
    assert statistics(model)["layers.0.down_proj"]["method"] == "gptq"
    (record,) = caplog.records
    assert "only zeros reach layers.1.down_proj (172 channels)" in record.getMessage()
    assert "5 input channels are zero for all tokens, in layers.0.down_proj (5 of 172)" in record.getMessage()


def test_inputs_that_are_not_finite_are_refused_by_name() -> None:
    model = TinyDecoder(weight_dtype=np.float32).model
    np.asarray(model.graph.initializers["layers.0.up_proj.weight"].const_value.numpy())[...] = 3e38  # type: ignore[union-attr]
    message = r"gptq: 'layers.0.mul.out' gives its linear layers inputs .* not finite"
    with calibrate_with(calibration()), np.errstate(all="ignore"), pytest.raises(PassError, match=message):
        PassManager([Gptq()]).run(model)


def test_without_data_it_says_how_to_give_some() -> None:
    with pytest.raises(PassError, match=r"gptq: needs calibration data; give the recipe a section `calibration:"):
        PassManager([Gptq()]).run(TinyDecoder().model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, r"damping is 0.0; allowed: above 0, up to 1"),
        ({"refine": -1}, r"refine is -1; allowed: 0 or more"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Gptq(**options)
