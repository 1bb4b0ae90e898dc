"""Text models within multimodal checkpoints, made of the fixtures of text models: their logits stay as they were."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.errors import CheckpointError, ConfigError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.tensors import check_tensors
from ingot.pipeline.model.importer import import_checkpoint
from ingot.progress import NOTES
from tests.each_case import each_case
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.pipeline.checkpoint.formats.tiny_model import exported
from tests.pipeline.tiny_checkpoint import ABSENT, copy_fixture, edit_json, ones
from tests.reference_runner import ReferenceRunner

Rename = Callable[[str], str]
SPELLINGS: dict[str, Rename] = {
    "model.language_model": lambda name: name.replace("model.", "model.language_model.", 1),
    "language_model.model": lambda name: f"language_model.{name}",
    "model": lambda name: name,
}
TOWER = {
    "vision_tower.layers.0.weight": ones(4, 4),
    "vision_tower.norm.weight": ones(4),
    "projector.weight": ones(4, 2),
}
NESTED: dict[str, Any] = {"vision_config": {"hidden_size": 4}, "eos_token_id": [7, 8]}


def around(folder: Path, name: str, model_type: str, rename: Rename = SPELLINGS["model.language_model"]) -> Path:
    """The fixture `name` within a multimodal checkpoint, its configuration under text_config."""
    return nest(copy_fixture(folder, name), model_type, rename)


def nest(path: Path, model_type: str, rename: Rename = SPELLINGS["model.language_model"]) -> Path:
    text = json.loads((path / "config.json").read_text())
    outer = {key: text.pop(key) for key in ("quantization_config", "dtype") if key in text}
    (path / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": text, **NESTED, **outer}))
    tensors = load_file(path / "model.safetensors")
    save_file({rename(key): array for key, array in tensors.items()} | TOWER, path / "model.safetensors")
    return path


def worst_difference(path: Path, fixture: str) -> float:
    tokens, expected = load_logits(CHECKPOINTS / fixture / LOGITS)
    parity = compare(ReferenceRunner(import_checkpoint(Checkpoint.open(path))).run_ragged(tokens), expected)
    return parity.worst / parity.limit


@each_case("spelling", SPELLINGS)
def test_the_text_model_has_the_logits_that_it_has_alone(
    spelling: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = around(tmp_path, "gemma3_text", "gemma3", SPELLINGS[spelling])
    with caplog.at_level("INFO", NOTES):
        assert worst_difference(path, "gemma3_text") <= 1
    assert caplog.messages == [
        "the checkpoint is a gemma3 model; its text model (gemma3_text) is imported, projector (1 tensors), "
        "vision_tower (2 tensors) left aside"
    ]
    (path / "generation_config.json").unlink()
    assert read_config(Checkpoint.open(path)).eos_token_ids == (7, 8)


def test_keys_next_to_the_vision_config_are_those_of_the_text_model(tmp_path: Path) -> None:
    """As Qwen2-VL was published; positions of three axes are equal in text."""
    mrope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    path = copy_fixture(
        tmp_path, "qwen2", model_type="qwen2_vl", rope_parameters=ABSENT, rope_theta=10000.0, rope_scaling=mrope
    )
    save_file(load_file(path / "model.safetensors") | {"visual.weight": ones(2)}, path / "model.safetensors")
    assert worst_difference(path, "qwen2") <= 1
    assert dict(Checkpoint.open(path).tower.left_aside) == {"visual": 1}  # type: ignore[union-attr]


@each_case("fixture, model_type", [("llama", "llava"), ("cohere2", "aya_vision"), ("qwen3", "internvl")])
def test_text_config_may_be_of_another_family(fixture: str, model_type: str, tmp_path: Path) -> None:
    assert worst_difference(around(tmp_path, fixture, model_type), fixture) <= 1


@each_case("model_type", ["kimi_k25", "a_model_of_tomorrow"])
def test_any_model_with_a_text_config_of_a_family_is_imported(model_type: str, tmp_path: Path) -> None:
    assert worst_difference(around(tmp_path, "deepseek_v3", model_type), "deepseek_v3") <= 1


def test_the_text_model_of_a_thinker_is_imported(tmp_path: Path) -> None:
    """As Qwen's omni models are published: a thinker with towers, and a talker with an embedding of its own."""
    path = around(tmp_path, "qwen2", "qwen2_5_omni", lambda name: f"thinker.{name}")
    config = json.loads((path / "config.json").read_text())
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": config["text_config"], **NESTED}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": thinker}))
    talker = {"talker.model.embed_tokens.weight": ones(8, 4), "talker.codec_head.weight": ones(8, 4)}
    save_file(load_file(path / "model.safetensors") | talker, path / "model.safetensors")
    assert worst_difference(path, "qwen2") <= 1
    assert Checkpoint.open(path).tower.left_aside["talker"] == 2  # type: ignore[union-attr]


@each_case(
    ("model_type", "text_type", "message"),
    [
        (
            "paligemma",
            "gemma",
            "'paligemma', which Ingot does not import: it has attention both ways within its prompt",
        ),
        ("llama4", "llama4_text", "of the text model in llama4 is 'llama4_text', which Ingot does not import: it has"),
        ("clip", "clip_text_model", "'clip_text_model', which Ingot does not import: no version of Ingot knows that"),
    ],
)
def test_a_text_model_of_no_family_is_refused_by_its_feature(
    model_type: str, text_type: str, message: str, tmp_path: Path
) -> None:
    path = around(tmp_path, "gemma", model_type)
    config = json.loads((path / "config.json").read_text())
    edit_json(path / "config.json", {"text_config": {**config["text_config"], "model_type": text_type}})
    with pytest.raises(ConfigError, match=message):
        read_config(Checkpoint.open(path))


def test_a_text_config_without_model_type_is_of_the_default_one(tmp_path: Path) -> None:
    path = around(tmp_path, "mistral", "mistral3")
    text = json.loads((path / "config.json").read_text())["text_config"]
    del text["model_type"]
    edit_json(path / "config.json", {"text_config": text})
    assert read_config(Checkpoint.open(path)).model_type == "mistral"


def test_layers_of_a_quantized_text_model_are_renamed(tmp_path: Path) -> None:
    plain = exported(tmp_path, "gptq")
    alone = Checkpoint.open(plain)
    codes = {name: tensor.dequantize() for name, tensor in alone.encoded.items()}
    names = check_tensors(alone, read_config(alone))
    within = Checkpoint.open(nest(plain, "llava"))
    assert within.encoded.keys() == codes.keys()
    assert check_tensors(within, read_config(within)) == names
    for name, tensor in within.encoded.items():
        assert tensor.name == name
        np.testing.assert_array_equal(tensor.dequantize(), codes[name])


def test_the_head_is_tied_where_none_is_stored_unless_a_key_says_otherwise(tmp_path: Path) -> None:
    path = around(tmp_path, "llama", "llava")
    assert not read_config(Checkpoint.open(path)).tied_embeddings
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight.* is missing"):
        check_tensors(Checkpoint.open(path), read_config(Checkpoint.open(path)))
    edit_json(path / "config.json", {"tie_word_embeddings": True})
    assert read_config(Checkpoint.open(path)).tied_embeddings


def test_a_text_model_that_is_not_imported_is_refused_by_its_feature(tmp_path: Path) -> None:
    path = around(tmp_path, "llama", "llava")
    edit_json(path / "config.json", {"text_config": {"model_type": "mpt"}})
    message = r"model_type of the text model in llava is 'mpt', which Ingot does not import: it has ALiBi positions\. "
    with pytest.raises(ConfigError, match=message):
        read_config(Checkpoint.open(path))


def test_an_error_in_the_text_config_names_it(tmp_path: Path) -> None:
    path = around(tmp_path, "llama", "llava")
    text = json.loads((path / "config.json").read_text())["text_config"]
    edit_json(path / "config.json", {"text_config": text | {"hidden_act": "swish"}})
    with pytest.raises(ConfigError, match=r"config\.json: text_config: hidden_act is 'swish'"):
        read_config(Checkpoint.open(path))
    edit_json(path / "config.json", {"text_config": [1]})
    with pytest.raises(ConfigError, match=r"config\.json: text_config is \[1\]; it must be an object"):
        Checkpoint.open(path)


def test_a_checkpoint_with_no_embedding_or_two_is_refused(tmp_path: Path) -> None:
    path = around(tmp_path, "llama", "llava")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"talker.embed_tokens.weight": ones(2, 2)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"several tensors \(model\.language_model\., talker\.\) named"):
        Checkpoint.open(path)
    save_file(TOWER, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor named '\.\.\.embed_tokens\.weight', the embedding of"):
        Checkpoint.open(path)


def test_a_tensor_of_the_text_model_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = around(tmp_path, "llama", "llava")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.language_model.layers.0.extra.weight": ones(2)}, path / "model.safetensors")
    checkpoint = Checkpoint.open(path)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.extra\.weight': no such tensor in a model of this"):
        check_tensors(checkpoint, read_config(checkpoint))
