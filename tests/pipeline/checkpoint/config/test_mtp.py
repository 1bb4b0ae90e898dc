"""MTP layers of a checkpoint: found by their tensors, checked with the decoder's; heads without a model are refused."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.errors import CheckpointError, ConfigError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.config.mtp import find_mtp
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.tensors import check_tensors
from tests.each_case import each_case
from tests.parity import CHECKPOINTS, MTP_CHECKPOINTS
from tests.pipeline.tiny_checkpoint import copy_fixture, edit_json

WITH_LAYER = ("deepseek_v3", "glm4_moe", "mimo", "qwen3_5_text", "qwen3_next")


def _changed(folder: Path, change: dict[str, Any], family: str = "mimo") -> Checkpoint:
    """The fixture with some tensors replaced; None removes one."""
    copy = folder / family
    shutil.copytree(MTP_CHECKPOINTS / family, copy)
    tensors = {**load_file(copy / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, copy / "model.safetensors")
    return Checkpoint.open(copy)


@each_case("family", [name for name, family in FAMILIES.items() if family.mtp])
def test_a_checkpoint_without_the_layers_tensors_has_none(family: str) -> None:
    checkpoint = Checkpoint.open(CHECKPOINTS / family)
    assert find_mtp(read_config(checkpoint), checkpoint.shapes) is None


@each_case("family", WITH_LAYER)
def test_the_layer_is_like_the_last_that_attends(family: str) -> None:
    checkpoint = Checkpoint.open(MTP_CHECKPOINTS / family)
    config = read_config(checkpoint)
    check_tensors(checkpoint, config)
    mtp = find_mtp(config, checkpoint.shapes)
    assert mtp is not None
    (layer,) = mtp.layers
    assert layer.attends
    assert layer.recurrent is None
    assert (layer.experts is not None) == any(each.experts is not None for each in config.layers if each.attends)


def test_a_missing_tensor_of_the_layer_is_named(tmp_path: Path) -> None:
    checkpoint = _changed(tmp_path, {"model.mtp_layers.0.self_attn.q_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"mtp_layers\.0\.self_attn\.q_proj\.weight' of shape .* is missing"):
        check_tensors(checkpoint, read_config(checkpoint))


def test_a_shape_that_contradicts_the_config_is_named(tmp_path: Path) -> None:
    checkpoint = _changed(tmp_path, {"model.mtp_layers.0.input_proj.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match=r"input_proj\.weight' has the shape \[4, 4\], but config\.json"):
        check_tensors(checkpoint, read_config(checkpoint))


HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "EAGLE": ({"architectures": ["LlamaForCausalLMEagle3"]}, {}),
    "EAGLE, by its vocabulary": ({}, {"d2t": np.zeros(4, np.float32)}),
    "Medusa": ({"medusa_num_heads": 4, "base_model_name_or_path": "the/model"}, {}),
    "Hydra": ({"hydra_num_heads": 4}, {}),
    "MLP speculator": ({"model_type": "mlp_speculator", "architectures": 5}, {}),
}


@each_case("kind", HEADS)
def test_heads_without_a_model_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    keys, tensors = HEADS[kind]
    copy = copy_fixture(tmp_path, "llama", **keys)
    if tensors:
        save_file({**load_file(copy / "model.safetensors"), **tensors}, copy / "model.safetensors")
    with pytest.raises(ConfigError, match=f"is {kind.partition(',')[0]} heads, which draft for another model"):
        read_config(Checkpoint.open(copy))


def test_the_decoder_reads_none_of_the_layers_and_a_second_one_is_left_out(tmp_path: Path) -> None:
    copy = tmp_path / "glm4_moe"
    shutil.copytree(MTP_CHECKPOINTS / "glm4_moe", copy)
    edit_json(copy / "config.json", {"num_nextn_predict_layers": 2})
    tensors = load_file(copy / "model.safetensors")
    more = {
        "model.layers.3.eh_proj.weight",
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight",
    }
    save_file({**tensors, **dict.fromkeys(more, np.ones((2, 2), np.float32))}, copy / "model.safetensors")
    checkpoint = Checkpoint.open(copy)
    names = check_tensors(checkpoint, read_config(checkpoint))
    assert not [name for name in names if name.startswith(("model.layers.2.", "model.layers.3."))]
