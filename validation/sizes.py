"""Bytes on disk of an artifact by kind, from its manifest. Evidence is not counted: a baseline has none."""

from dataclasses import dataclass
from pathlib import PurePosixPath

from ingot.artifact import Artifact
from ingot.artifact.reader import is_evidence
from ingot.validation.measured import Measured
from ingot.validation.statistics import exact


@dataclass(frozen=True)
class ArtifactSize:
    """weights (safetensors), graph (the rest of program/), tokenizer, and other (recipe)."""

    weights: int = 0
    graph: int = 0
    tokenizer: int = 0
    other: int = 0

    @property
    def program(self) -> int:
        """Weights and graph: what size_ratio compares."""
        return self.weights + self.graph

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.program + self.tokenizer + self.other


@dataclass(frozen=True)
class SizeResult:
    """Both artifacts."""

    candidate: ArtifactSize
    baseline: ArtifactSize


def artifact_size(artifact: Artifact) -> ArtifactSize:
    """Sum the manifest's files by kind."""
    sums = {"weights": 0, "graph": 0, "tokenizer": 0, "other": 0}
    for name, entry in artifact.manifest.files.items():
        if not is_evidence(name):
            sums[_kind(PurePosixPath(name))] += entry.bytes
    return ArtifactSize(**sums)


def size_metrics(result: SizeResult) -> list[Measured]:
    """size_ratio: program and weights of the candidate over those of the baseline."""
    candidate, baseline = result.candidate.program, result.baseline.program
    return [Measured("size_ratio", exact(candidate / baseline), float(baseline), float(candidate), unit="bytes")]


def _kind(name: PurePosixPath) -> str:
    if name.suffix == ".safetensors":
        return "weights"
    return {"program": "graph", "tokenizer": "tokenizer"}.get(name.parts[0], "other")
