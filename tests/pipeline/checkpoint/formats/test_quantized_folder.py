"""Quantized folders: contradicting configurations and layers that are not quantized are refused by name."""

from pathlib import Path

import numpy as np
import pytest

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.pipeline.checkpoint.formats.refusals import LAYER, assert_setting_is_refused
from tests.pipeline.checkpoint.formats.tiny_model import exported, tiny_checkpoint
from tests.pipeline.tiny_checkpoint import edit_json, edit_tensors


def test_an_unknown_method_is_refused_with_the_nearest(tmp_path: Path) -> None:
    message = r"quant_method is 'gtpq', which Ingot does not read. Did you mean 'gptq'\?"
    assert_setting_is_refused(tmp_path, "gptq", {"quant_method": "gtpq"}, message)


def test_contradicting_configurations_are_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq")
    edit_json(folder / "quantize_config.json", {"bits": 8})
    with pytest.raises(CheckpointError, match=r"bits is 8, but config\.json says 4"):
        Checkpoint.open(folder)


def test_biases_of_zeros_are_ignored_and_others_are_not(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq")
    edit_tensors(folder, {f"{LAYER}.bias": np.zeros(96, np.float16)})
    import_checkpoint(Checkpoint.open(folder))
    edit_tensors(folder, {f"{LAYER}.bias": np.ones(96, np.float16)})
    with pytest.raises(CheckpointError, match=r"no such tensor in a model of this config\.json"):
        import_checkpoint(Checkpoint.open(folder))


def test_a_configuration_without_a_quantized_layer_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    edit_json(folder / "config.json", {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}})
    with pytest.raises(CheckpointError, match="announces a quantized checkpoint, but no layer is"):
        Checkpoint.open(folder)
