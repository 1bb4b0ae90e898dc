"""The checkpoint's tensors against its configuration: none missing, none left over, all of the right shape."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD, check_tensors
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.oracle.dense_cases import DENSE_CASES
from tests.parity import CHECKPOINTS
from tests.pipeline.tiny_checkpoint import ABSENT, copy_fixture, edit_tensors, ones

QUERY = "model.layers.0.self_attn.q_proj.weight"


def check(folder: Path) -> tuple[str, ...]:
    checkpoint = Checkpoint.open(folder)
    return check_tensors(checkpoint, read_config(checkpoint))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(folder)
    return str(caught.value)


@each_case("case", [*CASES, *DENSE_CASES], ids=lambda case: case.name)
def test_every_tensor_of_a_right_checkpoint_is_imported(case: Any) -> None:
    assert set(check(CHECKPOINTS / case.name)) == set(Checkpoint.open(CHECKPOINTS / case.name).tensors)


def test_a_missing_tensor_is_named_with_shape_and_nearest(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    edit_tensors(folder, {QUERY: ABSENT, "model.layers.0.self_attn.q_prj.weight": ones(32, 32)})
    message = refusal(folder)
    assert f"the tensor {QUERY!r} of shape [32, 32] is missing, which a llama model needs" in message
    assert "Did you mean 'model.layers.0.self_attn.q_prj.weight'" in message


def test_a_missing_head_points_to_tie_word_embeddings(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    edit_tensors(folder, {HEAD: ABSENT})
    assert "set tie_word_embeddings to true if the model shares them" in refusal(folder)


def test_a_wrong_shape_names_both_shapes_and_the_keys(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    edit_tensors(folder, {QUERY: ones(24, 32)})
    message = refusal(folder)
    assert f"{QUERY!r} has the shape [24, 32]" in message
    assert "(num_attention_heads, head_dim, hidden_size) requires [32, 32]" in message


def test_a_config_of_another_size_contradicts_the_tensors(tmp_path: Path) -> None:
    assert "(vocab_size, hidden_size) requires [129, 32]" in refusal(copy_fixture(tmp_path, vocab_size=129))


def test_left_over_tensors_are_named_with_the_nearest(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    edit_tensors(folder, {f"model.layers.0.self_attn.{name}_proj.bias": ones(32) for name in "qo"})
    message = refusal(folder)
    assert "'model.layers.0.self_attn.o_proj.bias', 'model.layers.0.self_attn.q_proj.bias': no such tensor" in message
    assert "Did you mean 'model.layers.0.self_attn.o_proj.weight'" in message


def test_many_left_over_tensors_are_counted(tmp_path: Path) -> None:
    assert ", 'model.layers.2.mlp.down_proj.weight', " in refusal(copy_fixture(tmp_path, num_hidden_layers=2))
    assert "and 4 more: no such tensor" in refusal(copy_fixture(tmp_path / "again", num_hidden_layers=2))


def test_stored_rope_buffers_are_harmless(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, {buffer: ones(4)})
    assert buffer not in check(folder)


def test_a_tied_head_that_equals_the_embedding_is_not_imported_twice(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path, tie_word_embeddings=True)
    edit_tensors(folder, {HEAD: load_file(folder / "model.safetensors")[EMBEDDING]})
    assert HEAD not in check(folder)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_tied_head_that_differs_is_refused(tmp_path: Path, dtype: Any) -> None:
    folder = copy_fixture(tmp_path, tie_word_embeddings=True)
    edit_tensors(folder, {HEAD: load_file(folder / "model.safetensors")[EMBEDDING].astype(dtype) + dtype(1)})
    assert "tie_word_embeddings is true, but 'lm_head.weight' differs" in refusal(folder)


@each_case("dtype", [np.float64, np.int8, np.int32, np.uint8, np.bool_])
@each_case("name", [QUERY, EMBEDDING, "model.norm.weight"])
def test_a_weight_of_another_dtype_is_refused_by_name(tmp_path: Path, dtype: type[np.generic], name: str) -> None:
    folder = copy_fixture(tmp_path)
    edit_tensors(folder, {name: load_file(folder / "model.safetensors")[name].astype(dtype)})
    assert f"{name!r} is " in refusal(folder)
    assert "weights must be F32, F16 or BF16" in refusal(folder)
