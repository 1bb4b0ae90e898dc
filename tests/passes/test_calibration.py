"""The interface of calibrated passes: lending a service, recording weights as arrays, reporting errors."""

import numpy as np
import pytest

from ingot.cli.terminal.console import show_log
from ingot.errors import PassError
from ingot.passes.calibration import (
    CalibrationFacts,
    RecordedWeight,
    calibrate_with,
    fact_arrays,
    note_errors,
    recorded_facts,
    report_kept,
    require_calibration,
    weight_arrays,
)
from ingot.passes.numerics.rounding import round_weight
from ingot.passes.numerics.scheme import Scheme
from tests.passes.calibration_data import calibration


def test_a_pass_notes_what_it_gained_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_log()
    note_errors("gptq", {"a": (0.2, 0.1), "b": (0.4, 0.3)})
    assert capsys.readouterr().err == (
        "gptq: error of the outputs of 2 layers on the calibration data 20.00% on average, 30.00% when rounded to the "
        "nearest; the largest 30.00%, b\n"
    )


def test_a_pruned_layer_is_reported_with_what_it_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    show_log(details=True)
    report_kept("prune-structure", "layers.0.down_proj", 128, 172, 0.0123)
    note_errors("gptq", {})
    assert capsys.readouterr().err == "prune-structure: layers.0.down_proj keeps 128 of 172, 1.23%\n"


def test_a_service_is_lent_within_the_block_only() -> None:
    service = calibration()
    with calibrate_with(service):
        assert require_calibration("gptq") is service
        with calibrate_with(None), pytest.raises(PassError, match="awq: needs calibration data"):
            require_calibration("awq")
        assert require_calibration("gptq") is service
    with pytest.raises(PassError, match=r"gptq: needs calibration data; give the recipe a section `calibration:"):
        require_calibration("gptq")


def test_the_tokens_of_calibration_data_leave_out_missing_ones() -> None:
    facts = CalibrationFacts("t", "0" * 64, text_tokens=9, sequences=3, sequence_tokens=4, seed=0, missing_tokens=5)
    assert facts.tokens == facts.as_json()["tokens"] == 7


@pytest.mark.parametrize("scheme", [Scheme(4, 16, symmetric=False), Scheme(8, 0, symmetric=True)])
def test_a_recorded_weight_comes_back_bit_for_bit_with_its_facts(scheme: Scheme) -> None:
    values = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    rounded = round_weight(values, scheme)
    facts = {"method": "gptq", "error": 0.1 + 0.2}
    arrays = weight_arrays("layers.0.q_proj", rounded, facts)
    rounder = RecordedWeight(arrays, "layers.0.q_proj")
    again = rounder(np.zeros_like(values))
    np.testing.assert_array_equal(again.restored(scheme), rounded.restored(scheme))
    np.testing.assert_array_equal(again.codes, rounded.codes)
    assert rounder.facts == facts


def test_facts_of_a_name_are_encoded_as_an_array() -> None:
    arrays = fact_arrays("a", {"x": 1, "y": [0.1]}) | fact_arrays("b", {"x": 2})
    assert (recorded_facts(arrays, "a"), recorded_facts(arrays, "b")) == ({"x": 1, "y": [0.1]}, {"x": 2})
