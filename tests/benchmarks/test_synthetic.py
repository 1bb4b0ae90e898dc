"""Synthetic checkpoints are readable by safetensors, tokenizers and Ingot's own importer."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.shapes import SHAPES, ModelShape
from benchmarks.synthetic import tensor_shapes, write_checkpoint
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint

TINY = ModelShape(
    name="tiny",
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    vocab_size=300,
    tied_head=True,
)


def test_the_file_holds_every_tensor_in_fp16_with_norms_around_one(tmp_path: Path) -> None:
    tensors = load_file(write_checkpoint(TINY, tmp_path) / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == tensor_shapes(TINY)
    assert all(tensor.dtype == np.float16 for tensor in tensors.values())
    assert 0.8 < float(tensors["model.norm.weight"].mean()) < 1.2


def test_the_same_seed_makes_the_same_file(tmp_path: Path) -> None:
    one, two = (write_checkpoint(TINY, tmp_path / name) / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_finished_checkpoint_is_left_alone(tmp_path: Path) -> None:
    write_checkpoint(TINY, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"kept")
    write_checkpoint(TINY, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"kept"


def test_the_tokenizer_has_exactly_the_vocabulary_and_restores_text(tmp_path: Path) -> None:
    write_checkpoint(TINY, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY.vocab_size
    assert tokenizer.decode(tokenizer.encode("naïve text, 123").ids) == "naïve text, 123"


@pytest.mark.parametrize("experts", [0, 3])
def test_ingot_imports_it(experts: int, tmp_path: Path) -> None:
    shape = replace(TINY, num_experts=experts, chosen_experts=min(experts, 2))
    model = import_checkpoint(Checkpoint.open(write_checkpoint(shape, tmp_path)))
    assert [value.name for value in model.graph.outputs] == ["logits"]


@pytest.mark.parametrize(("name", "parameters"), [("smollm2-135m", 134_515_008), ("tinyllama-1.1b", 1_100_048_384)])
def test_the_shapes_have_as_many_parameters_as_the_models_they_stand_for(name: str, parameters: int) -> None:
    assert sum(int(np.prod(dims)) for dims in tensor_shapes(SHAPES[name]).values()) == parameters


def test_an_untied_head_is_a_tensor_of_its_own_and_the_config_says_so(tmp_path: Path) -> None:
    shape = SHAPES["tinyllama-1.1b"]
    assert tensor_shapes(shape)["lm_head.weight"] == (32000, 2048)
    assert json.loads((write_checkpoint(TINY, tmp_path) / "config.json").read_text("utf-8"))["tie_word_embeddings"]
