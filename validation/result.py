"""The evidence as data: everything that was measured, and what followed from it.

Bytes on disk of an artifact by kind, from its manifest. Evidence is not counted: a baseline has none.
"""

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol

from ingot.artifact import Artifact, GateOutcome
from ingot.artifact.reader import is_evidence
from ingot.validation.accuracy import AccuracyResult
from ingot.validation.latency import LatencyResult
from ingot.validation.memory import MemoryResult
from ingot.validation.quantization import Quantization
from ingot.validation.statistics import Measured, exact


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


Verdict = Literal["PASS", "FAIL", "UNDECIDED"]


@dataclass(frozen=True)
class SubjectFacts:
    """Which artifact was measured. `identity` is the digest of what it computes."""

    name: str
    identity: str
    target: str
    family: str
    num_parameters: int
    context_tokens: int

    @classmethod
    def of(cls, artifact: Artifact) -> "SubjectFacts":
        """From the artifact's manifest."""
        manifest = artifact.manifest
        return cls(
            name=manifest.name,
            identity=manifest.identity,
            target=manifest.target,
            family=manifest.model.family,
            num_parameters=manifest.model.num_parameters,
            context_tokens=manifest.model.context_tokens,
        )


class PassRow(Protocol):
    """What the report shows of a pass; the pass manager's records have it."""

    @property
    def name(self) -> str:
        """Kebab-case name."""
        ...

    @property
    def options(self) -> str:
        """The pass as a recipe writes it."""
        ...

    @property
    def seconds(self) -> float:
        """Time that it took."""
        ...

    @property
    def nodes_before(self) -> int:
        """Nodes of the graph before it."""
        ...

    @property
    def nodes_after(self) -> int:
        """Nodes of the graph after it."""
        ...

    @property
    def weight_bytes_before(self) -> int:
        """Bytes of all weights before it."""
        ...

    @property
    def weight_bytes_after(self) -> int:
        """Bytes of all weights after it."""
        ...


@dataclass(frozen=True)
class BuildNotes:
    """What only the build knows, for the report. An artifact keeps its quantization, and is measured again with it."""

    passes: tuple[PassRow, ...] = ()
    quantization: Quantization = field(default_factory=Quantization)


@dataclass(frozen=True)
class Evidence:
    """One candidate against one baseline. `measured` is keyed by metric, or metric@level."""

    candidate: SubjectFacts
    baseline: SubjectFacts
    environment: dict[str, Any]
    sizes: SizeResult
    accuracy: AccuracyResult | None
    latency: LatencyResult | None
    memory: MemoryResult | None
    measured: dict[str, Measured]
    gates: tuple[GateOutcome, ...]
    notes: BuildNotes = field(default_factory=BuildNotes)

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict of all gates: FAIL over UNDECIDED over PASS; None without gates."""
        verdicts = {gate.verdict for gate in self.gates}
        worst: tuple[Verdict, ...] = ("FAIL", "UNDECIDED", "PASS")
        return next((verdict for verdict in worst if verdict in verdicts), None)
