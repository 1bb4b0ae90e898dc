"""Checkpoint folders: what is opened, what is left in place, what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file

from ingot.errors import CheckpointError, ConfigError
from ingot.pipeline.checkpoint.checkpoint import INDEX, WEIGHTS, Checkpoint
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.pipeline.tiny_checkpoint import copy_fixture, edit_tensors, ones

SHARDED = "llama-sharded"


def refusal(folder: Path, error: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def test_tensors_are_external_and_equal_the_files_bytes() -> None:
    checkpoint = Checkpoint.open(CHECKPOINTS / "llama")
    tensor = checkpoint.external("model.norm.weight")
    stored = checkpoint.tensor("model.norm.weight")
    assert isinstance(tensor, ir.ExternalTensor)
    assert tensor.dtype == ir.DataType.FLOAT
    raw = stored.file.read_bytes()[stored.offset : stored.offset + stored.num_bytes]
    assert tensor.numpy().tobytes() == raw


def test_sixteen_bit_tensors_keep_their_dtype() -> None:
    half = Checkpoint.open(CHECKPOINTS / "llama-old-spelling").external("model.norm.weight")
    brain = Checkpoint.open(CHECKPOINTS / "llama-rope-yarn").external("model.norm.weight")
    assert (half.dtype, brain.dtype) == (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def test_shards_are_read_as_one_checkpoint() -> None:
    checkpoint = Checkpoint.open(CHECKPOINTS / SHARDED)
    assert len(checkpoint.weight_files) > 1
    for name, stored in checkpoint.tensors.items():
        assert checkpoint.external(name).numpy().shape == stored.shape


def test_a_symbolic_link_to_the_weights_is_followed(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    (folder / WEIGHTS).rename(tmp_path / "blob")
    (folder / WEIGHTS).symlink_to("../blob")
    tensor = Checkpoint.open(folder).external("model.norm.weight")
    assert tensor.numpy().shape == (32,)


def test_a_relative_path_survives_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_fixture(tmp_path)
    monkeypatch.chdir(tmp_path)
    tensor = Checkpoint.open("llama").external("model.norm.weight")
    monkeypatch.chdir("/")
    assert tensor.numpy().shape == (32,)


def test_tokenizer_files_are_those_that_exist(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    names = list(Checkpoint.open(folder).tokenizer_files)
    assert names == ["tokenizer.json", "generation_config.json"]


def test_the_digest_follows_the_bytes_and_not_the_folder(tmp_path: Path) -> None:
    original = Checkpoint.open(CHECKPOINTS / "llama").digest
    folder = copy_fixture(tmp_path)
    shutil.copy(CHECKPOINTS / "llama" / "config.json", folder / "config.json")
    assert Checkpoint.open(folder).digest == original
    edit_tensors(folder, {"model.norm.weight": ones(32)})
    assert Checkpoint.open(folder).digest != original


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert "holds no config.json" in refusal(tmp_path)


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    (folder / "config.json").write_text("{")
    assert "config.json: is not JSON" in refusal(folder, ConfigError)


def test_a_config_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    (folder / "config.json").write_text("[]")
    assert "is a JSON list" in refusal(folder, ConfigError)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    (folder / WEIGHTS).unlink()
    assert f"neither {WEIGHTS} nor {INDEX}" in refusal(folder)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin, a pickle, which Ingot never loads; convert it to safetensors" in refusal(folder)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[: len(raw) // 2])
    assert "is truncated" in refusal(folder)


def test_a_shard_missing_from_the_disk_is_named(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path, SHARDED)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard.name}: the shard is missing" in refusal(folder)


def test_a_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path, SHARDED)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.wait"] = index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    message = refusal(folder)
    assert "holds no tensor 'model.norm.wait'" in message
    assert "Did you mean 'model.norm.weight'?" in message


def test_a_tensor_that_the_index_does_not_list_is_named(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path, SHARDED)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert "holds 'model.norm.weight', which" in refusal(folder)


@each_case("other", [0, 1], ids=["copy", "different"])
def test_a_tensor_in_two_shards_must_be_a_copy(other: int, tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path, SHARDED)
    shard = json.loads((folder / INDEX).read_text())["weight_map"]["model.norm.weight"]
    norm = load_file(folder / shard)["model.norm.weight"]
    second = next(file for file in sorted(folder.glob("model-*.safetensors")) if file.name != shard)
    save_file({**load_file(second), "model.norm.weight": norm + norm.dtype.type(other)}, second)
    if other:
        message = refusal(folder)
        assert f"{second.name} and {shard} both hold 'model.norm.weight', and with different values" in message
    else:
        assert Checkpoint.open(folder).tensor("model.norm.weight").file.name == shard


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "a\\b", ""])
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    folder = copy_fixture(tmp_path, SHARDED)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": shard}}))
    assert "must be a file in the same folder" in refusal(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"w": 1}}'])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, content: str) -> None:
    folder = copy_fixture(tmp_path, SHARDED)
    (folder / INDEX).write_text(content)
    assert "weight_map must be an object" in refusal(folder)


def test_an_unknown_tensor_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'model.norm.wait'.*Did you mean 'model.norm.weight'"):
        Checkpoint.open(CHECKPOINTS / "llama").external("model.norm.wait")


def test_an_integer_weight_is_refused(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    edit_tensors(folder, {"model.norm.weight": np.ones(32, np.int8)})
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' is I8; weights must be F32, F16 or BF16"):
        Checkpoint.open(folder).external("model.norm.weight")


def test_every_tensor_with_nan_or_inf_is_named_with_counts(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    norm, other = ones(32), ones(32)
    norm[[3, 4]], norm[5], other[0] = np.nan, np.inf, -np.inf
    edit_tensors(folder, {"model.norm.weight": norm, "model.layers.0.input_layernorm.weight": other})
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_finite()
    assert "'model.norm.weight' in model.safetensors has 2 NaN and 1 Inf" in str(caught.value)
    assert "'model.layers.0.input_layernorm.weight' in model.safetensors has 0 NaN and 1 Inf" in str(caught.value)
    checkpoint.check_finite(["lm_head.weight"])
