"""Exports of recipes: they read back with the same codes, the same bits, and the same logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.manager import PassManager
from ingot.passes.model_facts import DEQUANTIZED
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats.decoded import load
from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.segments.onnx_files import write_program
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.pipeline.checkpoint.formats.tiny_model import VOCABULARY, quantize, recipe, tiny_checkpoint
from tests.pipeline.targets.program_chain import ProgramChain
from tests.reference_runner import ReferenceRunner
from tests.tolerances import within

Weights = dict[str, np.ndarray[Any, Any]]
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 24)
CASES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "gptq asymmetric": ("gptq", quantize()),
    "gptq, blocks wider than rows": ("gptq", quantize(block_size=128)),
    "gptq 8 bits symmetric, whole rows": ("gptq", quantize(bits=8, block_size="channel", symmetric=True)),
    "awq asymmetric": ("awq", quantize()),
    "awq symmetric, one layer in floats": ("awq", quantize(symmetric=True, overrides={"*.1.mlp.up_proj": "none"})),
    "compressed-tensors asymmetric": ("compressed-tensors", quantize()),
    "compressed-tensors 8 bits, whole rows": ("compressed-tensors", quantize(bits=8, block_size="channel")),
    "compressed-tensors, two schemes": (
        "compressed-tensors",
        quantize(lm_head=8, overrides={"*.down_proj": {"bits": 8, "symmetric": True}}),
    ),
    "gguf Q4_0, Q8_0": ("gguf", quantize(symmetric=True, lm_head=8, embedding=8)),
    "gguf floats": ("gguf", None),
    "safetensors": ("safetensors", quantize(lm_head=8, embedding=4)),
}
RTN = {"quantize-weights": {"block_size": "channel", "lm_head": "none", "embedding": "none"}}
TIED = ("llama-tied-biases", "granite-tied-biases", "smollm3")


def dequantized(checkpoint: Checkpoint) -> Weights:
    """Every weight as float32."""
    plain = {name: load(stored).astype(np.float32) for name, stored in checkpoint.tensors.items()}
    return plain | {name: tensor.dequantize() for name, tensor in checkpoint.encoded.items()}


def in_ir(model: ir.Model) -> Weights:
    """Every two-dimensional weight of the IR as float32, by the checkpoint's name."""
    found = {}
    for node in model.graph:
        if node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].is_initializer():
            codes, scale, *zero = (values(operand) for operand in node.inputs)
            block = node.attributes.get_int("block_size", codes.shape[1])
            columns = np.arange(codes.shape[1]) // block
            points = zero[0].reshape(len(codes), -1).astype(np.float32)[:, columns] if zero else np.float32(0)
            name = node.outputs[0].name or ""
            found[name.removesuffix(".dequantized")] = (codes.astype(np.float32) - points) * scale.reshape(
                len(codes), -1
            )[:, columns]
    names = [name for name in model.graph.initializers if name.endswith(".weight")]
    return found | {name: values(model.graph.initializers[name]) for name in names}


def values(value: ir.Value | None) -> np.ndarray[Any, Any]:
    """A copy of an initializer's values."""
    assert value is not None
    assert value.const_value is not None
    return np.array(value.const_value.numpy())


def logits(model: ir.Model, folder: Path) -> np.ndarray[Any, Any]:
    lowering = ["lower-onnxruntime-cpu", "clean-up", "partition-at-attention"]
    PassManager([make_pass(name) for name in lowering]).run(model)
    return ProgramChain(write_program(model, folder)[0], folder).logits(TOKENS)


@pytest.mark.parametrize("name", CASES)
def test_an_export_reads_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    format_name, quantization = CASES[name]
    passes: list[str | dict[str, Any]] = [quantization, "round-scales"] if quantization else []
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), *passes)
    folder = export_checkpoint(made, tmp_path / "out", format_name)

    model = import_checkpoint(Checkpoint.open(tmp_path / "model"))
    PassManager(made.make_passes()).run(model)
    expected, found = in_ir(model), dequantized(Checkpoint.open(folder))
    assert set(expected) == set(found)
    assert all(np.array_equal(found[key], expected[key]) for key in expected)

    again = import_checkpoint(Checkpoint.open(folder))
    assert not DEQUANTIZED.is_in(again) or format_name == "gguf"
    if format_name != "safetensors":
        assert np.array_equal(logits(again, tmp_path / "again"), logits(model, tmp_path / "first"))


def test_quantize_weights_skips_quantized_weights(tmp_path: Path) -> None:
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), quantize(), "round-scales")
    folder = export_checkpoint(made, tmp_path / "out", "gptq")
    before = in_ir(import_checkpoint(Checkpoint.open(folder)))
    model = import_checkpoint(Checkpoint.open(folder))
    PassManager([make_pass("pack-projections"), make_pass("quantize-weights", {"bits": 8})]).run(model)
    after = in_ir(model)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"lm_head.weight", "model.embed_tokens.weight"}


def test_an_export_of_an_export_holds_the_same_weights(tmp_path: Path) -> None:
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), quantize(symmetric=True), "round-scales")
    folder = export_checkpoint(made, tmp_path / "gptq", "gptq")
    expected = dequantized(Checkpoint.open(folder))
    for format_name in ("awq", "compressed-tensors", "gguf", "safetensors"):
        folder = export_checkpoint(recipe(tmp_path, folder), tmp_path / format_name, format_name)
        found = dequantized(Checkpoint.open(folder))
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_refused_export_leaves_nothing_and_no_folder_is_replaced(tmp_path: Path) -> None:
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), quantize())
    with pytest.raises(Exception, match="stores scales as float16"):
        export_checkpoint(made, tmp_path / "out", "gptq")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(Exception, match="exists already"):
        export_checkpoint(made, tmp_path / "there", "compressed-tensors")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "there", "recipe.yaml"}


def reference_logits(name: str, model: ir.Model) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    tokens, _ = load_logits(CHECKPOINTS / name / LOGITS)
    return ReferenceRunner(model).run_ragged(tokens)


def rotated(made: Recipe) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(made.require_checkpoint()))
    PassManager(made.make_passes()).run(model)
    return model


@pytest.mark.parametrize("name", [*TIED, "qwen2", "phi3", "gemma2"])
def test_a_rotated_checkpoint_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    folder = export_checkpoint(recipe(tmp_path, CHECKPOINTS / name, "rotate"), tmp_path / "out", "safetensors")
    first, again = (import_checkpoint(Checkpoint.open(place)) for place in (CHECKPOINTS / name, folder))
    assert within("parity.float32", compare(reference_logits(name, again), reference_logits(name, first)).worst, name)


@pytest.mark.parametrize("name", TIED)
def test_a_rotated_tied_head_is_written_separately_and_untied_in_the_config(name: str, tmp_path: Path) -> None:
    made = recipe(tmp_path, CHECKPOINTS / name, "rotate", RTN)
    folder = export_checkpoint(made, tmp_path / "out", "compressed-tensors")
    written = Checkpoint.open(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert written.shapes["lm_head.weight"] == written.shapes["model.embed_tokens.weight"]
    assert np.all(np.asarray(written.external("model.norm.weight").numpy()) == 1)
    expected, found = reference_logits(name, rotated(made)), reference_logits(name, import_checkpoint(written))
    assert within("parity.float32", compare(found, expected).worst, name)
