"""compressed-tensors' storage formats: decode to the packages' weights, encode to their tensors, refuse the rest."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats import compressed_tensors
from ingot.pipeline.model.importer import import_checkpoint
from tests.pipeline.checkpoint.formats.golden import (
    assert_decodes_to_the_packages_weights,
    assert_differs_only_by_rounding,
    assert_stored,
    decoded_layers,
    names_of,
)
from tests.pipeline.checkpoint.formats.refusals import LAYER, assert_setting_is_refused
from tests.pipeline.checkpoint.formats.tiny_model import exported


@pytest.mark.parametrize("name", names_of("compressed-tensors"))
def test_a_folder_decodes_to_the_packages_weights(name: str) -> None:
    assert_decodes_to_the_packages_weights(name)


def test_a_package_that_computes_in_sixteen_bits_differs_only_by_rounding() -> None:
    assert_differs_only_by_rounding("llmcompressor-nvfp4a16")


@pytest.mark.parametrize(("name", "bits"), [("llmcompressor-gptq-w4-asym", 4), ("llmcompressor-w8a16", 8)])
def test_a_decoded_layer_encodes_to_the_packages_own_tensors(name: str, bits: int) -> None:
    for weight, stored in decoded_layers(name):
        assert_stored(compressed_tensors.encode(weight, bits), stored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_groups": {}}, "config_groups is {}; it must hold at least one group"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "is .*sparse-24.*; Ingot reads no sparse"),
        ({"transform_config": {"R1": {}}}, "transforms that run with the model"),
    ],
)
def test_an_unsupported_setting_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert_setting_is_refused(tmp_path, "compressed-tensors", changes, message)


def test_tensors_of_a_layer_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, "compressed-tensors")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"][:, :1]
    tensors[f"{LAYER}.weight_shape"] = np.array([96, 128], np.int64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight"):
        import_checkpoint(Checkpoint.open(folder))
