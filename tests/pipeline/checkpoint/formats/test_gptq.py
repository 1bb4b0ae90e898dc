"""GPTQ checkpoints: decode to the packages' weights, encode to their tensors, refuse what would be ignored."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import CheckpointError
from ingot.passes.model_facts import DEQUANTIZED
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats import gptq
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.golden import (
    assert_decodes_to_the_packages_weights,
    assert_differs_only_by_rounding,
    assert_stored,
    decoded_layers,
    names_of,
)
from tests.pipeline.checkpoint.formats.refusals import LAYER, assert_setting_is_refused
from tests.pipeline.checkpoint.formats.tiny_model import edit_quantization, exported
from tests.pipeline.tiny_checkpoint import ABSENT, edit_tensors


@each_case("name", names_of("gptq"))
def test_a_folder_decodes_to_the_packages_weights(name: str) -> None:
    assert_decodes_to_the_packages_weights(name)


def test_a_package_that_computes_in_sixteen_bits_differs_only_by_rounding() -> None:
    assert_differs_only_by_rounding("gptqmodel-gptq_v1-w4-sym")


@pytest.mark.parametrize(
    ("name", "bits"), [("autogptq-w3-asym", 3), ("autogptq-w4-asym", 4), ("autogptq-w4-sym-descact", 4)]
)
def test_a_decoded_layer_encodes_to_the_packages_own_tensors(name: str, bits: int) -> None:
    for weight, stored in decoded_layers(name):
        assert_stored(gptq.encode(weight, bits, version=1), stored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits is 5; it must be 2, 3, 4 or 8"),
        ({"group_size": 0}, "group_size is 0; it must be a number from 1, or -1"),
        ({"group_size": 64}, r"'qzeros' has the shape \[2, 8\]; gptq needs \[groups, out words\], which is \[1, 8\]"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"dynamic": {"-:x": {}}}, "dynamic is .*; settings per layer are not read"),
    ],
)
def test_an_unsupported_setting_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert_setting_is_refused(tmp_path, "gptq", changes, message)


def test_a_layer_without_its_zero_points_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq")
    edit_tensors(folder, {f"{LAYER}.qzeros": ABSENT})
    with pytest.raises(CheckpointError, match=f"the quantized layer '{LAYER}': has no 'qzeros'"):
        Checkpoint.open(folder)


def test_activation_order_without_g_idx_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq")
    edit_tensors(folder, {f"{LAYER}.g_idx": ABSENT})
    Checkpoint.open(folder)
    edit_quantization(folder, {"desc_act": True})
    with pytest.raises(CheckpointError, match="has no 'g_idx', which gptq needs because desc_act is true"):
        Checkpoint.open(folder)


def test_activation_order_becomes_floats_and_says_why(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq")
    order = np.random.default_rng(0).permutation(np.arange(64, dtype=np.int32) // 32)
    edit_tensors(folder, {f"{LAYER}.g_idx": order})
    edit_quantization(folder, {"desc_act": True})
    checkpoint = Checkpoint.open(folder)
    model = import_checkpoint(checkpoint)
    reasons = DEQUANTIZED.of(model)
    assert list(reasons) == [f"{LAYER}.weight"]
    assert "activation order" in reasons[f"{LAYER}.weight"]
    tensor = model.graph.initializers[f"{LAYER}.weight"].const_value
    assert tensor is not None
    assert np.array_equal(tensor.numpy(), checkpoint.encoded[f"{LAYER}.weight"].dequantize())
