"""Weights from a quantized model, from passes that have not run, and from a checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np

from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight
from ingot.pipeline.interchange.weight_sources import (
    weights_before_passes,
    weights_of_checkpoint,
    weights_of_model,
)
from ingot.pipeline.model.importer import import_checkpoint
from tests.data_paths import FIXTURES
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.tiny_model import exported

LLAMA = FIXTURES / "checkpoints" / "llama"
TIED = FIXTURES / "checkpoints" / "llama-tied-biases"


def predicted_and_made(folder: Path, options: dict[str, Any]) -> tuple[list[Weight], dict[str, Weight]]:
    """The weights before and after quantize-weights with these options."""
    checkpoint = Checkpoint.open(folder)
    model, passes = import_checkpoint(checkpoint), [make_pass("quantize-weights", options)]
    before = weights_before_passes(model, passes, checkpoint.shapes)
    assert before is not None
    PassManager(passes).run(model)
    return before, weights_of_model(model, checkpoint.shapes)


@each_case("folder", [LLAMA, TIED])
@each_case(
    "options",
    [
        {"bits": 4, "block_size": 16, "symmetric": True},
        {"bits": 8, "block_size": "channel", "overrides": {"*.down_proj": "none"}},
        {"bits": 3, "block_size": 16, "embedding": "none", "lm_head": 8},
    ],
)
def test_schemes_that_passes_will_leave_are_predicted(folder: Path, options: dict[str, Any]) -> None:
    before, after = predicted_and_made(folder, options)
    assert {weight.name for weight in before} == set(after)
    for weight in before:
        made = after[weight.name]
        assert type(made) is type(weight), weight.name
        if isinstance(weight, QuantizedLayer) and isinstance(made, QuantizedLayer):
            assert (weight.facts.bits, weight.facts.group_size) == (made.facts.bits, made.facts.group_size)
            assert weight.shape == made.shape


def test_passes_that_choose_schemes_while_they_run_cannot_be_predicted() -> None:
    model = import_checkpoint(Checkpoint.open(LLAMA))
    passes = [make_pass("mixed-precision", {}), make_pass("quantize-weights", {})]
    assert weights_before_passes(model, passes, []) is None


def test_every_tensor_of_a_plain_checkpoint_is_read_unchanged() -> None:
    checkpoint = Checkpoint.open(LLAMA)
    found = weights_of_checkpoint(checkpoint)
    assert {weight.name for weight in found.weights} == set(checkpoint.shapes)
    assert found.left_out == []
    for weight in found.weights:
        assert isinstance(weight, PlainWeight)
        expected = np.asarray(checkpoint.external(weight.name).numpy())
        assert np.array_equal(np.asarray(weight.tensor.numpy()), expected)


def test_quantized_layers_of_a_checkpoint_keep_their_codes(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(exported(tmp_path, "gptq"))
    layers = [weight for weight in weights_of_checkpoint(checkpoint).weights if isinstance(weight, QuantizedLayer)]
    assert {layer.name for layer in layers} == set(checkpoint.encoded)
    for layer in layers:
        assert np.array_equal(layer.read().dequantize(), checkpoint.encoded[layer.name].dequantize())
