"""Sizes of artifacts by kind of file, and the verdict of all gates."""

from dataclasses import replace
from pathlib import Path

from ingot.artifact import Artifact, FileEntry, KVGeometry, Manifest, ModelFacts, Program
from ingot.validation.gates import GateSpec
from ingot.validation.result import ArtifactSize, SizeResult, artifact_size, size_metrics
from tests.validation.sample_evidence import sample_evidence


def _artifact(files: dict[str, int]) -> Artifact:
    manifest = Manifest(
        name="a",
        identity="0" * 64,
        model=ModelFacts(family="f", num_layers=1, hidden_size=1, vocab_size=1, context_tokens=1, num_parameters=1),
        kv=KVGeometry(num_layers=1, num_kv_heads=1, head_dim=1),
        target="cpu",
        engine="onnxruntime",
        program=Program(steps=(), values={}),
        files={name: FileEntry(bytes=size, sha256="0" * 64) for name, size in files.items()},
        versions={},
    )
    return Artifact(Path("a"), manifest)


def test_files_are_counted_by_kind_and_evidence_is_not() -> None:
    files = {
        "program/weights.safetensors": 1000,
        "program/segment-000.onnx": 20,
        "program/segment-001.onnx": 30,
        "tokenizer/tokenizer.json": 7,
        "recipe.yaml": 3,
        "evidence/report.html": 99999,
    }
    size = artifact_size(_artifact(files))
    assert size == ArtifactSize(weights=1000, graph=50, tokenizer=7, other=3)
    assert (size.program, size.total) == (1050, 1060)


def test_the_ratio_compares_weights_and_graph_and_is_exact() -> None:
    [measured] = size_metrics(SizeResult(ArtifactSize(250, 50, 900), ArtifactSize(1000, 200, 900)))
    assert measured.estimate.low == measured.estimate.high == 0.25
    assert (measured.baseline, measured.candidate, measured.unit) == (1200.0, 300.0, "bytes")


def test_advisory_gates_do_not_change_the_verdict() -> None:
    evidence = sample_evidence(with_runs=False, gates=(GateSpec("size_ratio", "max", 0.1),))
    assert evidence.verdict == "FAIL"
    advisory = tuple(gate.model_copy(update={"advisory": True}) for gate in evidence.gates)
    passing = evidence.gates[0].model_copy(update={"verdict": "PASS"})
    assert replace(evidence, gates=(*advisory, passing)).verdict == "PASS"
    assert replace(evidence, gates=advisory).verdict is None
