"""Quantized folders with unsupported settings or damaged tensors are refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.errors import CheckpointError
from ingot.passes.model_facts import DEQUANTIZED
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.pipeline.checkpoint.formats.tiny_model import edit_quantization, exported, tiny_checkpoint
from tests.pipeline.tiny_checkpoint import ABSENT, edit_json, edit_tensors

LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("format_name", "changes", "message"),
    [
        ("gptq", {"quant_method": "gtpq"}, r"quant_method is 'gtpq'; .* Did you mean 'gptq'\?"),
        ("gptq", {"bits": 5}, "bits is 5; it must be 2, 3, 4 or 8"),
        ("gptq", {"group_size": 0}, "group_size is 0; it must be a number from 1, or -1"),
        ("gptq", {"group_size": 64}, "do not make"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("gptq", {"dynamic": {"-:x": {}}}, "dynamic is .*; settings per layer are not read"),
        ("awq", {"version": "gemv_fast"}, "version is 'gemv_fast'; Ingot reads 'gemm' and no other layout of AWQ"),
        ("awq", {"bits": 8}, "bits is 8; it must be 4"),
        ("awq", {"zero_point": False}, "zero_point is False; it must be True"),
        ("compressed-tensors", {"config_groups": {}}, "config_groups is {}; it must hold at least one group"),
        (
            "compressed-tensors",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "is .*sparse-24.*; Ingot reads no sparse",
        ),
        ("compressed-tensors", {"transform_config": {"R1": {}}}, "transforms that run with the model"),
    ],
)
def test_an_unsupported_setting_is_refused(
    tmp_path: Path, format_name: str, changes: dict[str, Any], message: str
) -> None:
    folder = exported(tmp_path, format_name)
    edit_quantization(folder, changes)
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(Checkpoint.open(folder))


def test_contradicting_configurations_are_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq")
    edit_json(folder / "quantize_config.json", {"bits": 8})
    with pytest.raises(CheckpointError, match=r"bits is 8, but config\.json says 4"):
        Checkpoint.open(folder)


def test_scales_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folder = exported(tmp_path, "awq")
    scales = load_file(folder / "model.safetensors")[f"{LAYER}.scales"]
    scales[1, 3] = np.nan
    edit_tensors(folder, {f"{LAYER}.scales": scales})
    with pytest.raises(CheckpointError, match=rf"'{LAYER}.weight': 1 of its 192 scales are NaN or infinite"):
        import_checkpoint(Checkpoint.open(folder))


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
    with pytest.raises(CheckpointError, match="desc_act is true but there is no g_idx"):
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


def test_tensors_of_a_layer_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, "compressed-tensors")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"][:, :1]
    tensors[f"{LAYER}.weight_shape"] = np.array([96, 128], np.int64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight"):
        import_checkpoint(Checkpoint.open(folder))
