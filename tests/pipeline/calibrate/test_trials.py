"""Trials of other weights: their KL, together as alone, against a reference that stays that of the first call."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.weights import float32_values
from ingot.pipeline.calibrate.activations import MEMORY_BYTES, Activations
from ingot.pipeline.calibrate.steps import StepRunner
from ingot.pipeline.calibrate.trials import Trials
from tests.passes.calibration_data import calibration_data
from tests.passes.tiny_decoder import TinyDecoder

DATA = calibration_data(4, 16)


def operand(model: ir.Model, name: str, index: int = 1) -> ir.Value:
    found = model.graph.node(name).inputs[index]
    assert found is not None
    return found


def scaled(value: ir.Value, factor: float) -> Callable[[], Float32Array]:
    return lambda: float32_values(value) * np.float32(factor)


def test_trials_together_are_those_alone_and_an_unchanged_model_has_no_divergence() -> None:
    model = TinyDecoder(tied=False).model
    value, table = operand(model, "layers.1.up_proj"), operand(model, "embed_tokens", 0)
    tried = [{value: scaled(value, 0.5)}, {table: scaled(table, 0.5)}, {}, {value: scaled(value, 1.5)}]
    with Activations(MEMORY_BYTES) as store:
        runs = Trials(StepRunner(DATA, model.graph, store)).on(DATA.tokens)
        together = runs.divergences(0, tried)
        alone = [runs.divergences(0, [trial])[0] for trial in tried]
    assert together == alone
    assert together[2] == 0
    assert all(together[at] > 1e-6 for at in (0, 1, 3))


def test_a_weight_that_a_pass_changed_counts_in_every_later_trial() -> None:
    model = TinyDecoder(tied=False, weight_dtype=np.float32).model
    value = operand(model, "layers.1.up_proj")
    with Activations(MEMORY_BYTES) as store:
        runs = Trials(StepRunner(DATA, model.graph, store)).on(DATA.tokens)
        (tried,) = runs.divergences(0, [{value: scaled(value, 0.5)}])
        value.const_value = ir.tensor(scaled(value, 0.5)(), name=value.name)
        (changed,) = runs.divergences(0, [{}])
    assert changed == pytest.approx(tried, rel=1e-5)


def test_equal_numbers_of_tokens_share_their_reference() -> None:
    with Activations(MEMORY_BYTES) as store:
        trials = Trials(StepRunner(DATA, TinyDecoder().model.graph, store))
        assert trials.on(16) is trials.on(16)
        assert trials.on(16) is not trials.on(64)
