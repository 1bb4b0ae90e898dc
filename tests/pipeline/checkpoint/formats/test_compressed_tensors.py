"""compressed-tensors' storage formats: decode to the packages' weights, encode to their tensors, refuse the rest."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats import compressed_weights
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.interchange.transcode import transcode
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
from tests.pipeline.tiny_checkpoint import entry, write_raw


@each_case("name", names_of("compressed-tensors"))
def test_a_folder_decodes_to_the_packages_weights(name: str) -> None:
    assert_decodes_to_the_packages_weights(name)


def test_a_package_that_computes_in_sixteen_bits_differs_only_by_rounding() -> None:
    assert_differs_only_by_rounding("llmcompressor-nvfp4a16")


@pytest.mark.parametrize(("name", "bits"), [("llmcompressor-gptq-w4-asym", 4), ("llmcompressor-w8a16", 8)])
def test_a_decoded_layer_encodes_to_the_packages_own_tensors(name: str, bits: int) -> None:
    for weight, stored in decoded_layers(name):
        assert_stored(compressed_weights.encode(weight, bits), stored)


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
    with pytest.raises(CheckpointError, match=f"'{LAYER}': 'weight_packed' has the shape"):
        import_checkpoint(Checkpoint.open(folder))


def without_groups(folder: Path) -> Path:
    """Have the settings of an exported model say neither strategy nor size of its groups, as older tools wrote."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    for group in config["config_groups"].values():
        del group["weights"]["strategy"], group["weights"]["group_size"]
    edit_quantization(folder, config)
    return folder


@pytest.mark.parametrize("block_size", [16, 32, 0], ids=["groups of 16", "groups of 32", "whole rows"])
def test_groups_that_the_shape_of_the_scales_alone_shows_decode_to_the_same_weights(
    tmp_path: Path, block_size: int
) -> None:
    folder = exported(tmp_path, "compressed-tensors", block_size=block_size)
    named = {name: tensor.dequantize() for name, tensor in Checkpoint.open(folder).encoded.items()}
    shown = Checkpoint.open(without_groups(folder)).encoded
    assert {*shown} == {*named}
    for name, weight in named.items():
        assert np.array_equal(shown[name].dequantize(), weight)
        found = shown[name].read()
        assert isinstance(found, DecodedWeight)
        assert found.scales.shape == load_file(folder / "model.safetensors")[f"{name}_scale"].shape


@pytest.mark.parametrize("shape", [(96, 3), (96, 0)])
def test_scales_whose_groups_do_not_divide_the_columns_are_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    folder = without_groups(exported(tmp_path, "compressed-tensors", block_size=16))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.weight_scale"] = np.ones(shape, np.float16)
    save_file(tensors, folder / "model.safetensors")
    message = rf"'{LAYER}': 'weight_scale' has the shape \[96, {shape[1]}\], which does not divide 64 columns"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


FP8_BLOCK: dict[str, dict[str, Any]] = {  # llm-compressor's preset: compressed_tensors/quantization/quant_scheme.py
    "weights": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "symmetric": True,
        "dynamic": False,
        "block_structure": [128, 128],
        "group_size": None,
        "actorder": None,
    },
    "input_activations": {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "symmetric": True,
        "dynamic": True,
        "observer": None,
        "group_size": 128,
        "block_structure": None,
    },
}


def write_fp8_block(folder: Path, inputs: object) -> Path:
    """Write one layer as FP8_BLOCK stores it, with these input_activations."""
    codes = np.random.default_rng(0).integers(0, 120, (256, 256), np.uint8)  # finite ones
    scales = np.random.default_rng(1).uniform(0.01, 0.1, (2, 2)).astype(np.float32)
    name, size = "model.layers.0.mlp.up_proj", codes.nbytes
    header = {f"{name}.weight": entry("F8_E4M3", [256, 256], 0, size)}
    header[f"{name}.weight_scale"] = entry("F32", [2, 2], size, size + scales.nbytes)
    write_raw(folder / "model.safetensors", header, codes.tobytes() + scales.tobytes())
    group = {**FP8_BLOCK, "input_activations": inputs, "targets": ["Linear"], "format": "float-quantized"}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return folder


def test_blocks_of_fp8_with_inputs_in_groups_are_read_bit_for_bit(tmp_path: Path) -> None:
    """The group of an input changes no weight: it is kept for other tools, and shown."""
    checkpoint = Checkpoint.open(write_fp8_block(tmp_path, FP8_BLOCK["input_activations"]))
    tensor = checkpoint.encoded["model.layers.0.mlp.up_proj.weight"]
    (tmp_path / "plain").mkdir()
    plain = Checkpoint.open(write_fp8_block(tmp_path / "plain", None)).encoded[tensor.name]
    assert np.array_equal(tensor.dequantize(), plain.dequantize())
    assert tensor.activations is not None
    assert tensor.activations.words == "fp8 dynamic per group of 128"
    written = FP8_BLOCK["input_activations"]
    assert {key: written[key] for key in tensor.activations.config()} == tensor.activations.config()


def test_fp8_blocks_are_transcoded_with_their_inputs_scheme(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = write_fp8_block(tmp_path / "source", FP8_BLOCK["input_activations"])
    outcome = transcode(source, tmp_path / "out", "compressed-tensors")
    assert outcome.proof.equal
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert (config["weights"]["strategy"], config["weights"]["block_structure"]) == ("block", [128, 128])
    assert config["input_activations"]["strategy"] == "group"
    assert config["input_activations"]["group_size"] == 128


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"strategy": "rows"}, r"input_activations\.strategy is 'rows'; it must be 'token', 'tensor', 'group' or"),
        ({"group_size": None}, r"input_activations: group_size is None; group needs a number from 1"),
        ({"dynamic": "global"}, r"input_activations\.dynamic"),
    ],
)
def test_inputs_of_an_unknown_scheme_are_refused_by_key(
    tmp_path: Path, inputs: dict[str, object], message: str
) -> None:
    changed = {**FP8_BLOCK["input_activations"], **inputs}
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(write_fp8_block(tmp_path, changed))
    assert len(str(caught.value)) < 400
