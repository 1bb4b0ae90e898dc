"""A GGUF file as a checkpoint: its metadata as keys of config.json, its tensors under the names of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.gguf import (
    gguf_config,
    gguf_name,
    gguf_tensors,
    rows_of_halves,
    rows_of_neighbours,
    transformers_name,
)
from ingot.pipeline.checkpoint.gguf_file import GgufFile, GgufTensor
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.tiny_model import exported
from tests.pipeline.tiny_checkpoint import ABSENT


def gguf(folder: Path) -> Path:
    return exported(folder, "gguf", symmetric=True) / "out.gguf"


def test_a_gguf_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    file = gguf(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"llama", b"lamma"))
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'lamma'; GGUF files of llama, qwen2, qwen3"):
        Checkpoint.open(file)


def file_with(**metadata: Any) -> GgufFile:
    """A file of one tensor, with the metadata of a llama changed."""
    known: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "tokenizer.ggml.eos_token_id": 2,
    }
    changed = {key.replace("__", "."): value for key, value in metadata.items()}
    kept = {key: value for key, value in {**known, **changed}.items() if value is not ABSENT}
    table = GgufTensor("token_embd.weight", 0, (128, 64), 0, 128 * 64 * 4)
    return GgufFile(Path("m.gguf"), kept, {table.name: table})


def test_metadata_become_keys_of_config_json() -> None:
    config = gguf_config(file_with())
    assert config["rms_norm_eps"] == 1e-5, "the shortest decimal of the float32"
    assert (config["vocab_size"], config["head_dim"], config["rope_theta"]) == (128, 16, 10000.0)
    assert (config["tie_word_embeddings"], config["eos_token_id"]) == (True, 2)
    assert "bos_token_id" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]


@each_case(
    ("metadata", "message"),
    [
        ({"llama__block_count": ABSENT}, "its metadata lacks llama.block_count; convert it again"),
        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.type is 'yarn'; none is read"),
        ({"llama__attention__head_count": 0}, "llama.attention.head_count is 0; it must be a whole number from 1"),
        ({"llama__attention__head_count": [4, 4]}, r"llama.attention.head_count is \[4, 4\]; it must be a whole"),
        ({"llama__embedding_length": "64"}, "llama.embedding_length is '64'; it must be a whole number from 1"),
        ({"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base is nan; it must be a finite number"),
        ({"llama__attention__layer_norm_rms_epsilon": "x"}, "layer_norm_rms_epsilon is 'x'; it must be a finite"),
        ({"general__architecture": ["llama"]}, r"general.architecture is \['llama'\]; GGUF files of"),
        ({"general__architecture": "phi3"}, "general.architecture is 'phi3'; GGUF files of llama, qwen2, qwen3"),
    ],
)
def test_metadata_that_cannot_be_imported_are_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^m\.gguf: .*{message}"):
        gguf_config(file_with(**metadata))


def test_the_ends_of_a_turn_are_end_tokens() -> None:
    eot = {"tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__eom_token_id": 2}
    assert gguf_config(file_with(**eot))["eos_token_id"] == [2, 7]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.3.attn_q.bias", "model.layers.3.self_attn.q_proj.bias"),
        ("blk.11.ffn_norm.weight", "model.layers.11.post_attention_layernorm.weight"),
    ],
)
def test_names_are_translated_both_ways(theirs: str, ours: str) -> None:
    assert (transformers_name(theirs), gguf_name(ours)) == (ours, theirs)


def test_a_name_that_the_other_side_does_not_have_stays_or_is_an_error() -> None:
    assert transformers_name("blk.3.attn_sinks.weight") == "blk.3.attn_sinks.weight"
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.self_attn.sinks.weight")


def test_rows_of_each_head_change_between_neighbours_and_halves() -> None:
    assert rows_of_halves(12, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    for order in (rows_of_halves(12, 2)[rows_of_neighbours(12, 2)], rows_of_neighbours(12, 2)[rows_of_halves(12, 2)]):
        assert order.tolist() == list(range(12))


@each_case(
    ("name", "type_id", "shape", "message"),
    [
        ("blk.0.attn_norm.weight", 0, (64, 2), r"is \[64, 2\]; it must have 1 axes"),
        ("blk.0.attn_norm.weight", 2, (64,), "is Q4_0; it must be F32, F16 or BF16"),
        ("blk.0.attn_q.bias", 8, (64,), "is Q8_0; it must be F32, F16 or BF16"),
        ("blk.0.ffn_up.weight", 2, (64,), r"is \[64\]; it must have 2 axes"),
        ("blk.0.ffn_up.weight", 0, (2, 8, 64), r"is \[2, 8, 64\]; it must have 2 axes"),
        ("blk.0.attn_q.weight", 2, (60, 64), "has 60 rows, not a multiple of twice its 4 heads"),
        ("blk.0.attn_k.weight", 0, (30, 64), "has 30 rows, not a multiple of twice its 2 heads"),
    ],
)
def test_a_tensor_of_another_kind_or_shape_is_refused_by_name(
    name: str, type_id: int, shape: tuple[int, ...], message: str
) -> None:
    file = file_with()
    tensors = {**file.tensors, name: GgufTensor(name, type_id, shape, 0, 64)}
    with pytest.raises(CheckpointError, match=rf"'{name}' {message}"):
        gguf_tensors(GgufFile(file.path, file.metadata, tensors))
