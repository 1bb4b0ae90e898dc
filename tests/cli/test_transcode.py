"""`ingot transcode`: the folder, the proof as text, JSON and file, and refusals on standard error."""

import json
from pathlib import Path

import pytest

from ingot.cli.main import run
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.export import export_checkpoint
from tests.data_paths import DEMO_MODEL
from tests.pipeline.formats.tiny_model import quantize, recipe, tiny_checkpoint


def quantized(folder: Path) -> Path:
    """A GPTQ checkpoint."""
    made = recipe(folder, tiny_checkpoint(folder / "model"), quantize(symmetric=True), "round-scales")
    return export_checkpoint(made, folder / "gptq", "gptq")


def test_a_checkpoint_is_written_with_its_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, proof = quantized(tmp_path), tmp_path / "awq", tmp_path / "proof.json"
    assert run(["transcode", str(source), "--to", "awq", "-o", str(out), "--proof", str(proof)]) == 0
    text = capsys.readouterr().out
    told = json.loads(proof.read_text())
    assert "largest difference 0\n" in text
    assert f"sha256:{told['source_digest']}" in text
    assert (told["equal"], told["largest_difference"], told["format"]) == (True, 0, "awq")
    assert told["tensors"] == len(Checkpoint.open(source).shapes)


def test_a_plain_model_becomes_gguf_and_json_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert run(["transcode", str(DEMO_MODEL), "--to", "gguf", "-o", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["source"], told["folder"], told["equal"]) == (str(DEMO_MODEL), str(out), True)
    assert {file.name for file in out.iterdir()} >= {"demo.gguf", "tokenizer.json"}


def test_what_does_not_fit_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["transcode", str(DEMO_MODEL), "--to", "gptq", "-o", str(tmp_path / "out")]) == 2
    assert "Formats that hold this checkpoint exactly: gguf, safetensors" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
