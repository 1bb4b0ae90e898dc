"""distill: the divergence on other data falls, codes and scales keep their form, and no model gets worse."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import CALIBRATION_FACTS, calibrate_with
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.manager import PassManager
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.numerics.scheme import is_float16
from ingot.passes.quantization.distill import DISTILL_FACTS, Distill
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.quantization.weight_nodes import weight_bits
from ingot.passes.registry import make_pass
from ingot.passes.weights import float32_values
from ingot.pipeline.calibrate import CalibrationData, CalibrationEngine
from ingot.pipeline.compile import compile_recipe
from ingot.pipeline.recipe.load import load_recipe
from tests.passes.calibration_data import calibration_data
from tests.passes.tiny_decoder import TinyDecoder

DATA = calibration_data(sequences=120, tokens=32)
OTHERS = calibration_data(sequences=160, tokens=32)
FAST: dict[str, Any] = {"epochs": 6, "batch_tokens": 256}


def decoder() -> ir.Model:
    model = TinyDecoder(tied=False).model
    PassManager([FoldConstants()]).run(model)
    return model


def service(data: CalibrationData = DATA) -> CalibrationEngine:
    return CalibrationEngine(data, reference=decoder)


def quantized(bits: int = 3, **options: Any) -> ir.Model:
    """The decoder rounded to nearest, without the head."""
    model = decoder()
    chosen = make_nearest(bits, **options)
    PassManager([chosen]).run(model)
    return model


def make_nearest(bits: int, **options: Any) -> QuantizeWeights:
    return QuantizeWeights(**{"bits": bits, "lm_head": "none", "embedding": "none", **options})


def distilled(model: ir.Model, data: CalibrationData = DATA, **options: Any) -> ir.Model:
    with calibrate_with(service(data)):
        PassManager([Distill(**{**FAST, **options})]).run(model)
    return model


def divergence(model: ir.Model) -> float:
    """KL over all positions of sequences that are not in DATA."""
    engine = CalibrationEngine(CalibrationData(OTHERS.facts, OTHERS.sequences[120:]), reference=decoder)
    with engine.divergence(model, [], 4096) as found:
        return found.value(0, lambda value: None)


def dequantizers(model: ir.Model) -> dict[str, ir.Node]:
    return {node.name or "": node for node in model.graph if node.op_type == "DequantizeLinear"}


def codes_of(node: ir.Node) -> np.ndarray[Any, Any]:
    value = node.inputs[0]
    assert value is not None
    assert value.const_value is not None
    return value.const_value.numpy().astype(np.int16)


def scales_of(node: ir.Node) -> Float32Array:
    value = node.inputs[1]
    assert value is not None
    assert value.const_value is not None
    return np.array(value.const_value.numpy())


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_divergence_on_other_data_falls_by_a_third(symmetric: bool) -> None:
    before = divergence(quantized(symmetric=symmetric))
    model = distilled(quantized(symmetric=symmetric))
    print(f"KL {before:.5f} before, {divergence(model):.5f} after")
    assert divergence(model) < 2 / 3 * before
    facts = DISTILL_FACTS.of(model)
    assert facts["kl_after"] < facts["kl_before"]
    assert facts["steps"] == 6 * 13
    assert 0 < facts["codes_changed"] < 1
    assert CALIBRATION_FACTS.of(model).tokens == DATA.tokens


def test_it_improves_on_gptq() -> None:
    model = decoder()
    with calibrate_with(service()):
        PassManager([Gptq(bits=3, lm_head="none", embedding="none")]).run(model)
        before = divergence(model)
        PassManager([Distill(**FAST)]).run(model)
    print(f"KL {before:.5f} before, {divergence(model):.5f} after")
    assert divergence(model) < before


@pytest.mark.parametrize(("bits", "block_size", "symmetric"), [(2, 16, False), (3, 32, True), (4, 0, False)])
def test_bits_blocks_and_zero_points_stay(bits: int, block_size: int, symmetric: bool) -> None:
    options = {"block_size": block_size, "symmetric": symmetric}
    before, after = (
        dequantizers(model) for model in (quantized(bits, **options), distilled(quantized(bits, **options)))
    )
    low, high = (-(1 << bits) // 2, (1 << bits) // 2 - 1) if symmetric else (0, (1 << bits) - 1)
    assert list(before) == list(after)
    for name, node in after.items():
        assert weight_bits(node) == bits
        assert low <= codes_of(node).min() <= codes_of(node).max() <= high
        for old, new in zip(before[name].inputs, node.inputs, strict=True):
            assert old is not None
            assert new is not None
            assert (old.dtype, old.shape, old.name) == (new.dtype, new.shape, new.name)
        if not symmetric:
            old_zeros, new_zeros = (nodes.inputs[2].const_value.numpy() for nodes in (before[name], node))  # type: ignore[union-attr]
            assert (old_zeros == new_zeros).all()
    scales = np.concatenate([float32_values(node.inputs[1]).reshape(-1) for node in after.values() if node.inputs[1]])
    assert (scales > 0).all()


def test_scales_of_float16_stay_float16_numbers() -> None:
    start = quantized(scale_dtype="float16")
    before = {name: scales_of(node) for name, node in dequantizers(start).items()}
    after = {name: scales_of(node) for name, node in dequantizers(distilled(start)).items()}
    assert all(is_float16(scales) for scales in (*before.values(), *after.values()))
    assert not any(np.array_equal(after[name], before[name]) for name in before)


def test_without_codes_only_scales_and_norms_change() -> None:
    before, model = quantized(), distilled(quantized(), codes=False)
    nodes = dequantizers(model)
    for name, node in dequantizers(before).items():
        assert (codes_of(node) == codes_of(nodes[name])).all()
        assert not np.array_equal(float32_values(node.outputs[0]), float32_values(nodes[name].outputs[0]))
    norms = [[node for node in each.graph if node.op_type == "RMSNormalization"] for each in (before, model)]
    for old, new in zip(*norms, strict=True):
        assert old.inputs[1] is not None
        assert new.inputs[1] is not None
        assert not np.array_equal(float32_values(old.inputs[1]), float32_values(new.inputs[1]))
    assert divergence(model) < divergence(before)
    assert DISTILL_FACTS.of(model)["codes_changed"] == 0


def test_keep_zeros_keeps_codes_that_represent_zero() -> None:
    before, model = quantized(symmetric=True), distilled(quantized(symmetric=True), keep_zeros=True)
    after = dequantizers(model)
    for name, node in dequantizers(before).items():
        zeros = codes_of(node) == 0
        assert zeros.any()
        assert (codes_of(after[name])[zeros] == 0).all()


def test_equal_seeds_give_equal_bits_and_other_seeds_others() -> None:
    first, again, other = (distilled(quantized(), seed=seed, epochs=2) for seed in (3, 3, 4))
    values = [
        [float32_values(node.outputs[0]) for node in dequantizers(model).values()] for model in (first, again, other)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(values[0], values[1], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(values[0], values[2], strict=True))


def test_a_model_that_would_get_worse_stays_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    before = quantized(bits=4)
    with calibrate_with(service()):
        model = quantized(bits=4)
        result = Distill(epochs=1, batch_tokens=256, codes_rate=1.0, scales_rate=0.1)(model)
    assert not result.modified
    assert not DISTILL_FACTS.is_in(model)
    for name, node in dequantizers(before).items():
        assert np.array_equal(float32_values(node.outputs[0]), float32_values(dequantizers(model)[name].outputs[0]))
    assert "left the model as it was: the KL did not fall" in caplog.text


def test_weights_that_several_layers_share_are_left_alone_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = quantized()
    nodes = {node.name: node for node in model.graph}
    first, second = nodes["layers.0.o_proj"], nodes["layers.1.o_proj"]
    second.replace_input_with(1, first.inputs[1])
    with caplog.at_level(logging.INFO, "ingot.passes"):
        distilled(model, epochs=1)
    assert "o_proj.weight.dequantized is left alone: several layers share it" in caplog.text


def test_a_model_without_quantized_weights_is_refused() -> None:
    with pytest.raises(PassError, match="no weight of up to 4 bits to tune; run it after a quantizer"):
        distilled(decoder())
    with pytest.raises(PassError, match="no weight of up to 4 bits"):
        distilled(quantized(bits=8))


def test_a_single_batch_is_refused() -> None:
    with pytest.raises(
        PassError, match="a single batch of 4096 tokens; give more sequences, or set batch_tokens lower"
    ):
        distilled(quantized(), batch_tokens=4096)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("epochs", 0, "from 1 to 10000"),
        ("codes_rate", 0.0, "up to 1"),
        ("scales_rate", 1.0, "up to 0.1"),
        ("held_out", 0.6, "0.5"),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: float, allowed: str) -> None:
    with pytest.raises(UsageError, match=f"distill: {option} is {value}; allowed: .*{allowed}"):
        make_pass("distill", {option: value})


def test_the_teacher_of_a_recipe_is_the_checkpoints_model(two_layers: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        "int4-gptq-distill-cpu",
        [
            f"checkpoint={two_layers}",
            "calibration.text=checkpoint:heldout.txt",
            "calibration.sequences=3",
            "calibration.sequence_tokens=48",
            "passes.distill.epochs=1",
            "passes.distill.batch_tokens=48",
        ],
    )
    compiled = compile_recipe(recipe, tmp_path)
    facts = compiled.pass_facts["distill"]
    assert facts["steps"] == 2
    assert 0 < facts["kl_after"] < facts["kl_before"] < 0.1
