"""gptq: less error in the layers' outputs than rounding to nearest, and a record of what was rounded how."""

import logging
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import CALIBRATION_FACTS, calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.printing import model_to_text
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS, QuantizeWeights
from ingot.pipeline.calibrate import CalibrationEngine
from tests.passes.calibration_data import SEQUENCES, TOKENS, calibration, calibration_data
from tests.passes.tiny_decoder import INNER, TinyDecoder


def statistics(model: ir.Model) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in QUANTIZATION_FACTS.of(model).weights}


def quantized(pass_: QuantizeWeights, service: CalibrationEngine | None = None, tied: bool = True) -> ir.Model:
    model = TinyDecoder(tied=tied).model
    with calibrate_with(service or calibration()):
        PassManager([pass_]).run(model)
    return model


def test_every_layers_output_error_is_below_that_of_rounding_to_nearest() -> None:
    rows = [row for row in statistics(quantized(Gptq())).values() if row["method"] == "gptq"]
    assert len(rows) == 14
    assert all(row["output_error"] < 0.85 * row["output_error_nearest"] for row in rows)
    assert all(row["tokens"] == SEQUENCES * TOKENS for row in rows)


def test_the_error_of_the_logits_is_below_that_of_rounding_to_nearest() -> None:
    service = calibration()
    exact = np.concatenate(list(service.logits(TinyDecoder().model)))
    distance = {
        pass_.name: np.square(np.concatenate(list(service.logits(quantized(pass_)))) - exact).mean()
        for pass_ in (QuantizeWeights(lm_head="none"), Gptq(lm_head="none"))
    }
    print(distance)
    assert distance["gptq"] < 0.6 * distance["quantize-weights"]


def test_weights_that_no_data_reaches_are_rounded_to_nearest_with_a_reason() -> None:
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


def test_the_datas_digest_and_counts_are_in_the_model() -> None:
    facts = CALIBRATION_FACTS.of(quantized(Gptq()))
    assert facts.sha256 == "0" * 64
    assert facts.tokens == SEQUENCES * TOKENS


def test_a_second_run_changes_nothing() -> None:
    model = quantized(Gptq())
    with calibrate_with(calibration()):
        (record,) = PassManager([Gptq()]).run(model)
    assert not record.modified


def test_layers_with_too_few_tokens_get_one_warning_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    few = CalibrationEngine(calibration_data(sequences=2, tokens=32))
    with caplog.at_level(logging.WARNING, "ingot"):
        quantized(Gptq(), few)
    (record,) = caplog.records
    assert f"layers.0.down_proj (64 tokens, {INNER} channels), layers.1.down_proj" in record.getMessage()
    assert f"until each gets at least {INNER} tokens" in record.getMessage()


def test_a_layer_with_zero_inputs_is_rounded_to_nearest_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """And channels that are always zero are counted."""
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


def test_without_data_the_error_says_how_to_provide_it() -> None:
    with pytest.raises(PassError, match=r"gptq: needs calibration data; give the recipe a section `calibration:"):
        PassManager([Gptq()]).run(TinyDecoder().model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, r"damping is 0.0; allowed: a number above 0, up to 1"),
        ({"refine": -1}, r"refine is -1; allowed: a whole number from 0 to 100"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Gptq(**options)
