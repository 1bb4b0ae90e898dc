"""QDQ ONNX runs in plain onnxruntime on input_ids, with the IR's logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.writers.qdq_onnx import make_standalone, write_qdq_onnx
from ingot.pipeline.model.importer import import_checkpoint
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.pipeline.checkpoint.formats.whole_fixture import FIXTURES, VOCABULARY, whole_checkpoint
from tests.pipeline.targets.program_chain import ProgramChain, reference_logits
from tests.sessions import plain_session

FAMILIES = (
    "llama",
    "gemma2",
    "gemma3_text",
    "granite",
    "granite_swa",
    "mistral",
    "mixtral",
    "phimoe",
    "dbrx",
    "deepseek_v3",
    "mistral4",
    "olmo2",
    "phi3",
    "qwen3",
    "smollm3",
)
TOKENS = 12


def quantized(checkpoint: Path, *passes: tuple[str, dict[str, Any]]) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(checkpoint))
    PassManager([make_pass(name, options) for name, options in passes]).run(model)
    return model


def run(file: Path, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    session = plain_session(str(file))
    assert [value.name for value in session.get_inputs()] == ["input_ids"]
    return np.asarray(session.run(["logits"], {"input_ids": tokens})[0])


def tokens_for(checkpoint: Path, rows: int = 2) -> np.ndarray[Any, Any]:
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    return np.random.default_rng(2).integers(0, vocabulary, (rows, TOKENS))


@each_case("family", FAMILIES)
def test_every_row_has_the_logits_of_its_sequence(family: str, tmp_path: Path) -> None:
    source = CHECKPOINTS / family
    options = ("quantize-weights", {"bits": 4, "block_size": 16, "symmetric": False})
    tokens = tokens_for(source)
    found = run(write_qdq_onnx(quantized(source, options), tmp_path), tokens)
    for row, logits in zip(tokens, found, strict=True):
        expected = reference_logits(quantized(source, options), row)
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    "options", [{"bits": 2}, {"bits": 3, "symmetric": True}, {"bits": 8, "block_size": "channel", "symmetric": True}]
)
def test_every_width_runs(options: dict[str, Any], tmp_path: Path) -> None:
    source = CHECKPOINTS / "llama"
    tokens = tokens_for(source, rows=1)
    chosen = ("quantize-weights", {"block_size": 16, **options})
    found = run(write_qdq_onnx(quantized(source, chosen), tmp_path), tokens)[0]
    expected = reference_logits(quantized(source, chosen), tokens[0])
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_demo_model_has_the_engines_logits(tmp_path: Path, build_unmeasured: BuildArtifact) -> None:
    tokens = tokens_for(DEMO_MODEL, rows=1)
    found = run(write_qdq_onnx(quantized(DEMO_MODEL), tmp_path), tokens)[0]
    artifact = build_unmeasured("fp32-cpu", DEMO_MODEL, "cpu.engine=onnxruntime")
    expected = ProgramChain(artifact.manifest.program, artifact.path).logits(tokens[0])
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@each_case("name", FIXTURES)
def test_checkpoints_of_other_packages_keep_their_codes(name: str, tmp_path: Path) -> None:
    source = whole_checkpoint(name, tmp_path / "model")
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (1, TOKENS))
    (tmp_path / "onnx").mkdir()
    file = write_qdq_onnx(quantized(source), tmp_path / "onnx")
    expected = reference_logits(quantized(source), tokens[0])
    assert np.abs(run(file, tokens)[0] - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_graph_has_only_standard_operators_and_external_weights(tmp_path: Path) -> None:
    options = ("quantize-weights", {"bits": 4, "block_size": 32})
    file = write_qdq_onnx(quantized(DEMO_MODEL, options), tmp_path)
    onnx.checker.check_model(str(file), full_check=True)
    model = ir.load(file)
    assert set(model.graph.opset_imports) == {""}
    assert {node.domain for node in model.graph} == {""}
    assert file.stat().st_size < 0.05 * (tmp_path / "weights.safetensors").stat().st_size
    codes = [node.inputs[0] for node in model.graph if node.op_type == "DequantizeLinear"]
    assert {value.dtype for value in codes if value is not None} == {ir.DataType.UINT4, ir.DataType.UINT8}


def test_a_graph_that_was_lowered_is_refused() -> None:
    model = quantized(CHECKPOINTS / "llama", ("quantize-weights", {"bits": 4}), ("lower-onnxruntime-cpu", {}))
    with pytest.raises(PassError, match=r"com\.microsoft::MatMulNBits.* are not standard operators"):
        make_standalone(model)
