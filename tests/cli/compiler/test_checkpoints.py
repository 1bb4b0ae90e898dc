"""Export and transcode: the folder, the outcome and the proof as text, JSON and file, refusals on standard error."""

import json
from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import pytest

from ingot.cli.main import run
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.gguf_file import read_gguf
from ingot.pipeline.interchange.export import export_checkpoint
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL
from tests.pipeline.checkpoint.formats.tiny_model import quantize, recipe, tiny_checkpoint

PASS = "[{quantize-weights: {block_size: 32, symmetric: %s}}]"
BASE = ["export", "fp32-cpu", "--set", f"checkpoint={DEMO_MODEL}"]
SYMMETRIC = ["--set", f"passes={PASS % 'true'}"]


def test_a_gguf_file_with_its_tokenizer_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert run([*BASE, *SYMMETRIC, "--to", "gguf", "--round-scales", "-o", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    size = sum(file.stat().st_size for file in out.iterdir())
    assert facts == {"path": str(out), "format": "gguf", "bytes": size, "notes": []}

    metadata = read_gguf(out / "demo.gguf").metadata
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    tokens = metadata["tokenizer.ggml.tokens"]
    assert metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert [tokens.index(token) for token in ("Ġdef", "<|endoftext|>")] == [tokenizer["model"]["vocab"]["Ġdef"], 0]
    assert len(metadata["tokenizer.ggml.merges"]) == len(tokenizer["model"]["merges"])
    assert metadata["tokenizer.ggml.token_type"][0] == 3  # a control token


def test_the_exported_gguf_holds_the_source_model(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    assert run([*BASE, *SYMMETRIC, "--to", "gguf", "--round-scales", "-o", str(out)]) == 0
    original, again = Checkpoint.open(DEMO_MODEL), Checkpoint.open(out / "demo.gguf")
    assert set(again.shapes) == set(original.shapes)
    for key in (
        "hidden_size",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "eos_token_id",
    ):
        assert again.config[key] == original.config[key]
    name = "model.layers.2.self_attn.q_proj.weight"
    there = np.asarray(original.external(name).numpy()).astype(np.float32)
    here = again.encoded[name].dequantize()
    assert np.linalg.norm(here - there) < 0.15 * np.linalg.norm(there)


def test_a_scheme_that_does_not_fit_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BASE, "--set", f"passes={PASS % 'false'}", "--to", "awq", "-o", str(tmp_path / "out")]) == 2
    assert "passes.quantize-weights.embedding=none" in capsys.readouterr().err
    assert run([*BASE, "--set", f"passes={PASS % 'false'}", "--to", "gtpq", "-o", str(tmp_path / "out")]) == 2
    assert "Did you mean 'gptq'?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_artifact_is_exported_without_its_checkpoint(
    build_unmeasured: BuildArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = build_unmeasured("int4-cpu").path
    out = tmp_path / "out"
    assert run(["export", str(artifact), "--to", "compressed-tensors", "--widen", "-o", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"wrote {out} (compressed-tensors, ")
    assert "becomes float32: compressed-tensors keeps it in floats" in printed.err
    assert Checkpoint.open(out).encoded


def test_a_refused_export_prints_the_command_that_works(
    build_unmeasured: BuildArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = "passes.quantize-weights.scale_dtype=float32"
    for artifact, flags in (
        (build_unmeasured("int4-cpu"), "--widen"),
        (build_unmeasured("int4-cpu", DEMO_MODEL, setting), "--widen --round-scales"),
    ):
        out = tmp_path / flags.replace(" ", "")
        assert run(["export", str(artifact.path), "--to", "gptq", "-o", str(out)]) == 2
        command = capsys.readouterr().err.rstrip().splitlines()[-1].strip()
        assert command == f"ingot export {artifact.path} --to gptq -o {out} {flags}"
        assert run(command.split()[1:]) == 0
        assert Checkpoint.open(out).encoded


def test_a_setting_cannot_change_an_artifact(
    build_unmeasured: BuildArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = build_unmeasured("int4-cpu").path
    assert run(["export", str(artifact), "--to", "gguf", "-o", str(tmp_path / "x"), "--set", "seed=1"]) == 2
    assert "--set seed=1 can only change what a recipe makes" in capsys.readouterr().err


def test_an_onnx_file_runs_on_input_ids_alone(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    assert run([*BASE, *SYMMETRIC, "--to", "onnx", "-o", str(out)]) == 0
    assert {file.name for file in out.iterdir()} >= {"model.onnx", "weights.safetensors", "tokenizer.json"}
    tokens = np.arange(10, dtype=np.int64).reshape(2, 5)
    # With onnxruntime's own options: the one for exact sums of integers fails on a table that is the head too (1.32).
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    logits = session.run(None, {"input_ids": tokens})[0]
    assert logits.shape == (2, 5, json.loads((out / "config.json").read_text())["vocab_size"])


def test_onnx_cannot_be_exported_from_an_artifact(
    tmp_path: Path, build_unmeasured: BuildArtifact, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = build_unmeasured("fp32-cpu")
    assert run(["export", str(artifact.path), "--to", "onnx", "-o", str(tmp_path / "out")]) == 2
    assert "onnx is written from a recipe" in capsys.readouterr().err


def quantized(folder: Path) -> Path:
    """A GPTQ checkpoint."""
    made = recipe(folder, tiny_checkpoint(folder / "model"), quantize(symmetric=True, scale_dtype="float16"))
    return export_checkpoint(made, folder / "gptq", "gptq")


def test_a_checkpoint_is_written_with_its_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, proof = quantized(tmp_path), tmp_path / "awq", tmp_path / "proof.json"
    assert run(["transcode", str(source), "--to", "awq", "-o", str(out), "--proof", str(proof)]) == 0
    text = capsys.readouterr().out
    facts = json.loads(proof.read_text())
    assert "largest difference 0\n" in text
    assert f"sha256:{facts['source_digest']}" in text
    assert (facts["equal"], facts["largest_difference"], facts["format"]) == (True, 0, "awq")
    assert facts["tensors"] == len(Checkpoint.open(source).shapes)


@pytest.mark.parametrize("place", ["none/proof.json", "."])
def test_a_proof_that_cannot_be_written_is_refused_before_the_folder_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    source, out = quantized(tmp_path), tmp_path / "awq"
    assert run(["transcode", str(source), "--to", "awq", "-o", str(out), "--proof", str(tmp_path / place)]) == 2
    assert "name a file in a folder that exists" in capsys.readouterr().err
    assert not out.exists()


def test_a_plain_model_becomes_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert run(["transcode", str(DEMO_MODEL), "--to", "gguf", "-o", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["source"], facts["folder"], facts["equal"]) == (str(DEMO_MODEL), str(out), True)
    assert {file.name for file in out.iterdir()} >= {"demo.gguf", "tokenizer.json"}


def test_a_target_that_does_not_fit_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["transcode", str(DEMO_MODEL), "--to", "gptq", "-o", str(tmp_path / "out")]) == 2
    assert "Formats that hold this checkpoint exactly: gguf, safetensors" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
