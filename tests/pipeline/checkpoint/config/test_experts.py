"""Mixtures of experts in config.json: which layers have one, in what spelling, and what contradicts itself."""

from pathlib import Path
from typing import Any

import pytest

from ingot.errors import CheckpointError, ConfigError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import DecoderConfig, read_config
from ingot.pipeline.checkpoint.tensors import check_tensors
from tests.pipeline.tiny_checkpoint import ABSENT, copy_fixture, edit_tensors


def read(folder: Path, name: str, **changes: Any) -> DecoderConfig:
    return read_config(Checkpoint.open(copy_fixture(folder, name, **changes)))


def sparse_layers(config: DecoderConfig) -> list[int]:
    return [index for index, layer in enumerate(config.layers) if layer.experts is not None]


@pytest.mark.parametrize(
    ("name", "changes", "sparse"),
    [
        ("mixtral", {}, [0, 1]),
        ("qwen2_moe", {}, [1]),
        ("qwen2_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [1]}, [0, 2]),
        ("glm4_moe", {"first_k_dense_replace": 1}, [1]),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 0}, [0]),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_layer_end_index": -1}, [1]),
    ],
)
def test_the_layers_with_experts(name: str, changes: Any, sparse: list[int], tmp_path: Path) -> None:
    assert sparse_layers(read(tmp_path, name, **changes)) == sparse


def test_a_key_may_have_its_older_or_newer_name(tmp_path: Path) -> None:
    config = read(tmp_path, "qwen3_moe", num_experts=6, num_local_experts=ABSENT)
    assert config.layers[0].experts is not None
    assert config.layers[0].experts.count == 6


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "mixtral",
            {"num_experts_per_tok": 5},
            "num_experts_per_tok is 5; it must be at most the number of experts, num_",
        ),
        ("mixtral", {"num_local_experts": 5000}, "num_local_experts is 5000; it must be at most 4096"),
        (
            "hunyuan_v1_moe",
            {"moe_topk": [1]},
            r"moe_topk is \[1\]; it must be a whole number from 1 up, or a list of 2",
        ),
        (
            "glm4_moe",
            {"n_group": 3},
            "n_group is 3; it must be a divisor of the number of experts, 8, with at least two",
        ),
        ("glm4_moe", {"topk_group": 5}, "topk_group is 5; it must be at most n_group, 4"),
        ("glm4_moe", {"topk_group": 1}, r"num_experts_per_tok is 3, but topk_group groups \(1\) hold only 2 experts"),
        (
            "phimoe",
            {"num_experts_per_tok": 3},
            "num_experts_per_tok is 3; it must be 2: SparseMixer chooses two",
        ),
        (
            "dbrx",
            {"ffn_config": {"moe_num_experts": 5, "moe_top_k": 3, "moe_normalize_expert_weights": 2}},
            r"ffn_config\.moe_normalize_expert_weights is 2; it must be 1, so that weights are",
        ),
        (
            "dbrx",
            {"ffn_config": {"ffn_act_fn": "silu"}},
            r"ffn_config\.ffn_act_fn is 'silu'; it must be an object",
        ),
        ("dbrx", {"attn_config": {"clip_qkv": -8}}, r"attn_config\.clip_qkv is -8; it must be a finite number above 0"),
        ("olmoe", {"clip_qkv": 0.0}, "clip_qkv is 0.0; it must be a finite number above 0"),
    ],
)
def test_contradictions_are_refused_by_key(name: str, changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, name, **changes)


def test_dbrx_has_its_theta_in_an_object_unless_config_json_has_one_itself(tmp_path: Path) -> None:
    attention = {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 300.0}
    thetas = []
    for name, outer in (("inner", ABSENT), ("outer", 500.0)):
        changes = {"attn_config": attention, "rope_parameters": ABSENT, "rope_theta": outer}
        rope = read(tmp_path / name, "dbrx", **changes).layers[0].rope
        assert rope is not None
        thetas.append(rope.theta)
    assert thetas == [300.0, 500.0]
    with pytest.raises(ConfigError, match=r"attn_config.rope_theta is 300.0, but the rope parameters have 100.0"):
        read(tmp_path / "both", "dbrx", attn_config=attention)


def test_stacked_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    ffn = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 3}
    checkpoint = Checkpoint.open(copy_fixture(tmp_path, "dbrx", ffn_config=ffn))
    with pytest.raises(CheckpointError, match=r"blocks\.0\.ffn\.router\.layer\.weight' has the shape \[5, 32\], but"):
        check_tensors(checkpoint, read_config(checkpoint))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path, "mixtral")
    edit_tensors(folder, {"model.layers.1.block_sparse_moe.experts.3.w2.weight": ABSENT})
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=r"layers.1.block_sparse_moe.experts.3.w2.weight' of shape \[32, 48\]"):
        check_tensors(checkpoint, read_config(checkpoint))
