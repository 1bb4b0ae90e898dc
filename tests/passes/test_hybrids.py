"""Passes over hybrids: every projection is rounded, what steers a state stays float, and fusions change no logits."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS
from ingot.passes.recurrent_ops import recurrent_nodes
from ingot.passes.registry import make_pass
from ingot.passes.weights import is_stored, weight_sites
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.passes.calibration_data import calibration_data
from tests.simulators.float64_ir import Float64Runner

FOUR_BITS = {"bits": 4, "block_size": 16}
EIGHT_BITS = {"bits": 8, "block_size": 16}
NAMES = ("qwen3_5_text", "qwen3_next", "olmo_hybrid", "lfm2_moe", "granitemoehybrid", "falcon_h1", "nemotron_h")


def hybrid(name: str) -> ir.Model:
    return import_checkpoint(Checkpoint.open(CHECKPOINTS / name))


def run(model: ir.Model, *passes: tuple[str, dict[str, Any]]) -> ir.Model:
    with calibrate_with(CalibrationEngine(calibration_data(6, 20, 128), expert_tokens=1)):
        PassManager([make_pass(*one) for one in passes]).run(model)
    return model


def worst(name: str, model: ir.Model) -> float:
    tokens, expected = load_logits(CHECKPOINTS / name / LOGITS)
    return compare(Float64Runner(model).run_ragged(tokens), expected).worst


def typical(name: str, model: ir.Model) -> float:
    """The median difference of the logits; the worst is that of a token whose experts are others."""
    tokens, expected = load_logits(CHECKPOINTS / name / LOGITS)
    pairs = zip(Float64Runner(model).run_ragged(tokens), expected, strict=True)
    return float(np.median(np.concatenate([np.abs(ours - theirs).reshape(-1) for ours, theirs in pairs])))


@each_case("name", NAMES)
def test_projections_are_rounded_and_gates_convolutions_and_vectors_are_not(name: str) -> None:
    model = run(hybrid(name), ("quantize-weights", FOUR_BITS))
    rounded = [str(site.node.name) for site in weight_sites(model) if site.is_quantized]
    projections = {node.rsplit(".", 1)[-1] for node in rounded if ".linear_attn." in node}
    assert "out_proj" in projections
    assert projections & {"in_proj", "in_proj_qkv", "q_proj"}
    assert not projections & {"in_proj_a", "in_proj_b"}
    for node in recurrent_nodes(model.graph):
        assert all(value is None or not is_stored(value) or value.is_initializer() for value in node.inputs)


@pytest.mark.parametrize("method", ["gptq", "awq", "smooth-quant"])
@each_case("name", ["qwen3_5_text", "granitemoehybrid", "lfm2_moe"])
def test_calibrated_passes_read_the_inputs_of_every_projection(name: str, method: str) -> None:
    scaled = [(method, {}), ("quantize-weights", EIGHT_BITS)]
    model = run(hybrid(name), ("fold-constants", {}), *([(method, EIGHT_BITS)] if method == "gptq" else scaled))
    rows = {row["name"]: row for row in QUANTIZATION_FACTS.of(model).weights}
    mixed = [row for row in rows if "linear_attn" in row or ".conv." in row or ".mamba." in row]
    assert mixed
    assert typical(name, model) < 0.1  # rounding to 8 bits, not another model


@each_case("name", NAMES)
def test_fusions_change_no_logits(name: str) -> None:
    passes = ["fold-constants", "pack-projections", "fuse-gated-activation", "clean-up"]
    model = run(hybrid(name), *((one, {}) for one in passes))
    assert worst(name, model) < 1e-5


@each_case("name", ["qwen3_5_text", "lfm2", "bamba"])
def test_rotation_leaves_the_logits_or_the_model_alone(name: str) -> None:
    model = run(hybrid(name), ("fold-constants", {}), ("rotate", {}))
    assert worst(name, model) < 2e-5
    assert np.isfinite(worst(name, model))
