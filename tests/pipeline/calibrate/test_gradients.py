"""Gradients of a model's KL match finite differences on every family; an op without a rule is refused by name."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.manager import PassManager
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.registry import make_pass
from ingot.passes.weights import float32_values
from ingot.pipeline.calibrate import CalibrationData, CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.passes.calibration_data import calibration_data
from tests.passes.test_fusions_on_families import FAMILIES
from tests.passes.tiny_decoder import TinyDecoder

STEP = 1e-2  # relative to a weight's norm; second-order terms are far smaller than the slope
VARIANTS = ("gemma2-tight-softcaps", "qwen2-rope-yarn")


def family(name: str) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name), check_weights=False)
    PassManager([make_pass(fusion) for fusion in ("fold-constants", "pack-projections")]).run(model)
    return model


def wanted_of(model: ir.Model) -> list[ir.Value]:
    nodes = [node for node in model.graph if node.op_type in ("Gemm", "RMSNormalization") and node.name != "lm_head"]
    return [value for node in nodes if (value := node.inputs[1]) is not None]


def compare(make: Callable[[], ir.Model], data: CalibrationData) -> None:
    """Compare gradients along random directions, of all weights and of single ones, with central differences."""
    model, random = make(), np.random.default_rng(0)
    engine, wanted = CalibrationEngine(data, reference=make), wanted_of(model)
    base = {value: float32_values(value) for value in wanted}
    base = {value: array + _noise(random, array, 0.2) for value, array in base.items()}  # the reference has no gradient
    found: dict[ir.Value, Float32Array] = {}
    with engine.divergence(model, wanted, data.tokens) as divergence:
        loss = divergence.gradients(0, base.get, found.__setitem__)
        assert loss == pytest.approx(divergence.value(0, base.get), rel=1e-5)
        directions = {value: _noise(random, array, STEP) for value, array in base.items()}
        for moved in ([value] for value in [*wanted[:4], *wanted[-4:]]):
            _check(divergence.value, base, {value: directions[value] for value in moved}, found)
        _check(divergence.value, base, directions, found)


def _check(
    value: Callable[..., float],
    base: dict[ir.Value, Float32Array],
    directions: dict[ir.Value, Float32Array],
    found: dict[ir.Value, Float32Array],
) -> None:
    plus, minus = (
        value(0, {**base, **{key: base[key] + sign * way for key, way in directions.items()}}.get) for sign in (1, -1)
    )
    slope = sum(float((found[key] * way).sum()) for key, way in directions.items())
    bound = sum(float(np.linalg.norm(found[key]) * np.linalg.norm(way)) for key, way in directions.items())
    assert (plus - minus) / 2 == pytest.approx(slope, abs=0.02 * bound + 1e-7), [key.name for key in directions]


def _noise(random: np.random.Generator, array: Float32Array, size: float) -> Float32Array:
    noise = random.standard_normal(array.shape).astype(np.float32)
    return noise * np.float32(size * np.linalg.norm(array) / np.linalg.norm(noise))


@each_case("name", FAMILIES + VARIANTS)
def test_gradients_match_finite_differences_on_every_family(name: str) -> None:
    model = family(name)
    table = next(node for node in model.graph if node.op_type == "Gather").inputs[0]
    assert table is not None
    assert table.shape is not None
    compare(lambda: family(name), calibration_data(2, 12, int(table.shape.numpy()[0])))


def test_gradients_match_finite_differences_on_sequences_of_different_lengths() -> None:
    data = calibration_data(4, 16)
    ragged = CalibrationData(data.facts, data.sequences, np.array([16, 5, 9, 16]))
    compare(lambda: TinyDecoder(tied=False, weight_dtype=np.float32).model, ragged)


def test_a_model_equal_to_its_reference_has_no_divergence_and_no_gradient() -> None:
    model = TinyDecoder(tied=False).model
    found: dict[ir.Value, Float32Array] = {}
    engine = CalibrationEngine(calibration_data(4, 16), reference=lambda: TinyDecoder(tied=False).model)
    with engine.divergence(model, wanted_of(model), 64) as divergence:
        assert divergence.gradients(0, lambda value: None, found.__setitem__) == pytest.approx(0, abs=1e-6)
    assert max(float(np.abs(array).max()) for array in found.values()) < 1e-6


def test_an_op_without_a_rule_is_refused_by_name() -> None:
    model = TinyDecoder(tied=False).model
    silu = next(node for node in model.graph if node.name == "layers.1.silu")
    silu.op_type = "Softplus"
    engine = CalibrationEngine(calibration_data(4, 16), reference=lambda: TinyDecoder(tied=False).model)
    with pytest.raises(PassError, match=r"layers\.1\.silu.*no gradient rule for Softplus; rules exist for Add, Div"):
        with engine.divergence(model, wanted_of(model), 64):
            pass
