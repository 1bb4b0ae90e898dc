"""Calibrated passes on latent attention: the layers of each head by their own inputs, and scales that they absorb."""

from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.quantization.awq import AWQ_FACTS
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS
from ingot.passes.registry import make_pass
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.parity import CHECKPOINTS, LOGITS, Parity, compare, load_logits, runner_of
from tests.passes.calibration_data import calibration_data

FAMILIES = ("minicpm3", "deepseek_v3")
BLOCKS = {"block_size": 16}


def run(name: str, *passes: tuple[str, dict[str, Any]]) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name), context_tokens=32 if name == "minicpm3" else None)
    with calibrate_with(CalibrationEngine(calibration_data(6, 20, 128), expert_tokens=1)):
        PassManager([make_pass(*one) for one in (("fold-constants", {}), *passes)]).run(model)
    return model


def parity(name: str, model: ir.Model) -> Parity:
    tokens, expected = load_logits(CHECKPOINTS / name / LOGITS)
    return compare(runner_of(model).run_ragged(tokens), expected)


def scaled(model: ir.Model) -> set[str]:
    """Kinds of the layers whose inputs have scales."""
    layers = (layer for row in AWQ_FACTS.of(model) for layer in row["layers"])
    return {part for layer in layers for part in layer.split(".") if part.endswith(("_proj", "_up"))}


@each_case("name", FAMILIES)
def test_each_heads_layers_absorb_scales_without_a_change_of_the_logits(name: str) -> None:
    model = run(name, ("awq", BLOCKS))
    assert {"key_up", "o_proj", "q_b_proj"} <= scaled(model)
    assert "value_up" not in scaled(model)  # latents are keys too
    found = parity(name, model)
    assert found.worst <= found.limit


def test_a_mul_scales_what_nothing_absorbs() -> None:
    model = run("minicpm3", ("awq", {**BLOCKS, "bits": 3, "fold": "always", "least_gain": 0.0}))
    assert "value_up" in scaled(model)
    found = parity("minicpm3", model)
    assert found.worst <= found.limit


@each_case("name", FAMILIES)
def test_gptq_calibrates_every_layer_of_latents(name: str) -> None:
    model = run(name, ("gptq", {"bits": 4, "block_size": 16}))
    rows = {row["name"]: row for row in QUANTIZATION_FACTS.of(model).weights if ".self_attn." in row["name"]}
    kinds = {name.removesuffix(".weight").split(".self_attn.")[1].split(".")[0] for name in rows}
    assert kinds >= {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "key_up", "value_up", "o_proj"}
    assert {row["method"] for row in rows.values()} == {"gptq"}


@each_case("name", FAMILIES)
def test_smooth_quant_leaves_the_logits(name: str) -> None:
    found = parity(name, run(name, ("smooth-quant", {"alpha": "auto", "weights": "none", "activations": "none"})))
    assert np.isfinite(found.worst)
    assert found.worst <= found.limit
