"""A tiny sealed artifact for tests."""

from pathlib import Path

from ingot.artifact import (
    ArtifactWriter,
    KVGeometry,
    Manifest,
    ModelFacts,
    Program,
    SegmentStep,
    ValueFacts,
)

MODEL = ModelFacts(family="llama", num_layers=1, hidden_size=8, vocab_size=16, context_tokens=32, num_parameters=100)


KV = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8)


PROGRAM = Program(
    steps=(SegmentStep(file="program/segment-000.onnx", inputs=("input_ids",), outputs=("logits",)),),
    values={"logits": ValueFacts(dtype="float32", rows="logits", columns=16)},
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


def describe(writer: ArtifactWriter) -> Manifest:
    return writer.describe(name="t", model=MODEL, kv=KV, target="cpu", program=PROGRAM, versions={"ingot": "1"})
