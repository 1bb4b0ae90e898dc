"""A tiny sealed artifact for tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ingot.artifact import (
    ArtifactWriter,
    KVGeometry,
    Manifest,
    ModelFacts,
    Program,
    SegmentStep,
    ValueFacts,
)
from ingot.artifact.program_checks import PROGRAM_INPUTS
from ingot.artifact.reader import evidence_digest, file_sha256, identity_digest, manifest_digest

MODEL = ModelFacts(family="llama", num_layers=1, hidden_size=8, vocab_size=16, context_tokens=32, num_parameters=100)


KV = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8)


PROGRAM = Program(
    steps=(SegmentStep(file="program/segment-000.onnx", inputs=("input_ids",), outputs=("logits",)),),
    values={**PROGRAM_INPUTS, "logits": ValueFacts(dtype="float32", rows="logits", columns=16)},
)


def seal(target: Path, weights: bytes = b"weights", evidence: str = "fine") -> Path:
    with ArtifactWriter(target) as writer:
        for name, data in {
            "program/segment-000.onnx": b"graph",
            "program/weights.safetensors": weights,
            "evidence/report.md": evidence.encode(),
        }.items():
            (writer.path / name).parent.mkdir(exist_ok=True)
            (writer.path / name).write_bytes(data)
        describe(writer)
        return writer.seal()


def describe(writer: ArtifactWriter, program: Program = PROGRAM) -> Manifest:
    return writer.describe(name="t", model=MODEL, kv=KV, target="cpu", program=program, versions={"ingot": "1"})


def reseal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda raw: None) -> None:
    """Edit the manifest and make sizes and digests right again, as an adversary would."""
    raw = json.loads((folder / "manifest.json").read_text())
    for name in raw["files"]:
        file = folder / name
        raw["files"][name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    change(raw)
    write_resealed(folder, raw)


def write_resealed(folder: Path, raw: Any) -> None:
    """Write a manifest with right digests, as far as it is a manifest at all."""
    try:
        fields = {key: value for key, value in raw.items() if key != "verdict"}
        manifest = Manifest.model_validate_json(json.dumps(fields), strict=True)
    except (AttributeError, ValidationError):
        pass
    else:
        raw = {**raw, "identity": identity_digest(manifest), "evidence": evidence_digest(manifest)}
        raw["digest"] = manifest_digest(raw)
    (folder / "manifest.json").write_text(json.dumps(raw))
