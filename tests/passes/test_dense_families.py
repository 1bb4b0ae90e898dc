"""Passes that change weights, on families with LayerNorm, parallel blocks, plain feed-forwards, learned positions.

Exact passes keep the logits; where a structure cannot absorb a scale or a rotation, the log names it.
"""

import logging
from typing import Any

import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.quantization.awq import AWQ_FACTS
from ingot.passes.registry import make_pass
from ingot.passes.rotation.rotate import ROTATE_FACTS
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.oracle.dense_cases import DENSE_CASES
from tests.parity import CHECKPOINTS, LOGITS, Parity, compare, load_logits, runner_of
from tests.passes.calibration_data import calibration_data
from tests.tolerances import within

NAMES = [case.name for case in DENSE_CASES]
CONFIGS = {name: read_config(Checkpoint.open(CHECKPOINTS / name)) for name in NAMES}
CLIPPED = "olmo-clipped"
AWQ = {"bits": 3, "block_size": 16, "steps": 4}
# Norms whose readers are q, k, v and gate, up; o_proj after attention; down_proj after a gate.
GATED = [name for name in NAMES if CONFIGS[name].family.gated]


def changed(name: str, *passes: tuple[str, dict[str, Any]]) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name))
    service = CalibrationEngine(calibration_data(sequences=4, tokens=24, vocab=128))
    with calibrate_with(service):
        PassManager([make_pass("fold-constants"), *(make_pass(*entry) for entry in passes)]).run(model)
    return model


def parity(name: str, model: ir.Model) -> Parity:
    tokens, expected = load_logits(CHECKPOINTS / name / LOGITS)
    return compare(runner_of(model).run_ragged(tokens), expected)


def is_close(name: str, model: ir.Model) -> bool:
    found = parity(name, model)
    return within("parity.float32", found.worst, name, 2 * max(1.0, found.largest / 4))


@each_case("name", NAMES)
def test_awq_keeps_the_logits_and_scales_what_can_absorb_a_scale(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ingot.passes"):
        model = changed(name, ("awq", AWQ))
    scaled = {layer.rsplit(".", 1)[1] for row in AWQ_FACTS.of(model) for layer in row["layers"]}
    assert ("down_proj" in scaled) <= (name in GATED)
    # A scale goes into a norm whose only readers are these layers; one of the residual stream itself has others.
    if CONFIGS[name].family.norm_place in ("before", "around") and not CONFIGS[name].stream_norms:
        assert scaled & {"q_proj", "qkv_proj", "up_proj", "gate_up_proj"}
    if name not in GATED:
        assert "mlp.down_proj' reads" in caplog.text.replace('"', "'")
    assert is_close(name, model)


def test_awq_scales_what_makes_the_keys_of_later_layers() -> None:
    model = changed("gemma4_text", ("awq", AWQ))
    assert any("self_attn.k_proj" in layer for row in AWQ_FACTS.of(model) for layer in row["layers"])
    assert is_close("gemma4_text", model)


def test_rotate_refuses_a_model_of_which_nothing_can_be_rotated() -> None:
    """Its norms are LayerNorms, and its values are clipped before attention."""
    with pytest.raises(PassError, match=r"nothing in the model can be rotated: .*o_proj' reads an attention whose"):
        changed(CLIPPED, ("rotate", {"matrix": "orthogonal"}))


@each_case("name", [name for name in NAMES if name != CLIPPED])
def test_rotate_keeps_the_logits_and_leaves_streams_of_layer_norms_alone(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = changed(name, ("rotate", {"matrix": "orthogonal"}))
    config, family = CONFIGS[name], CONFIGS[name].family
    has_rms = family.norm.startswith("rms")
    can_rotate = has_rms and family.norm_place == "before" and not family.embedding_norm
    assert bool(ROTATE_FACTS.of(model)["residual"]) == can_rotate
    # A narrower embedding is refused before its projection and the stream after it.
    if not has_rms and config.embedding_size == config.hidden_size:
        assert "residual stream" in caplog.text
    assert is_close(name, model)


@pytest.mark.parametrize("name", ["cohere2", "gpt_neox", "gpt2", "phi", "nemotron"])
def test_fusions_and_smooth_quant_keep_the_logits(name: str) -> None:
    fusions = [(fusion, dict[str, Any]()) for fusion in ("clean-up", "pack-projections", "fuse-residual-norm")]
    smoothed = ("smooth-quant", {"weights": "none", "activations": "none", "lm_head": "none", "embedding": "none"})
    assert is_close(name, changed(name, *fusions, smoothed))


@pytest.mark.parametrize("name", ["arcee", "cohere2", "gpt_neox", "opt", "stablelm"])
def test_gptq_rounds_every_linear_layer(name: str) -> None:
    model = changed(name, ("gptq", {"bits": 8, "block_size": 16}))
    gemms = [node for node in model.graph if node.op_type == "Gemm"]
    coded = [
        node
        for node in gemms
        if (made := node.inputs[1]) and (maker := made.producer()) and maker.op_type == "DequantizeLinear"
    ]
    assert len(coded) >= len(gemms) - 1
    found = parity(name, model)
    assert found.worst < 0.05 * found.largest


@pytest.mark.parametrize("name", ["arcee", "cohere2", "gpt_neox", "opt", "phi"])
def test_pruned_neurons_leave_a_model_that_runs(name: str) -> None:
    model = changed(name, ("prune-structure", {"ffn": 0.5, "multiple": 4}))
    inner = CONFIGS[name].intermediate_size
    downs = [node for node in model.graph if (node.name or "").endswith("mlp.down_proj")]
    assert {int(str(node.inputs[0].shape[-1])) for node in downs if node.inputs[0] and node.inputs[0].shape} == {
        inner // 2
    }
    assert parity(name, model).worst > 0
