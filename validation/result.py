"""The evidence as data: everything that was measured, the metrics and the gates, and the sizes of both artifacts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from ingot.artifact import Artifact, GateOutcome
from ingot.artifact.calibration_record import CalibrationRecord, read_calibration
from ingot.artifact.reader import is_evidence
from ingot.validation.accuracy import AccuracyResult
from ingot.validation.generation import GenerationResult
from ingot.validation.latency.measurement import LatencyResult
from ingot.validation.machine import MachineLoad
from ingot.validation.memory import MemoryResult
from ingot.validation.prediction import Prediction
from ingot.validation.quantization import Quantization
from ingot.validation.statistics import Measured, exact
from ingot.validation.verify.result import VerifyResult

if TYPE_CHECKING:  # an installed runtime measures without the compiler
    from ingot.passes.manager import PassRecord

Verdict = Literal["PASS", "FAIL", "UNDECIDED"]


@dataclass(frozen=True)
class ArtifactSize:
    """Bytes on disk: weights (safetensors), graph (the rest of program/), tokenizer, and other (recipe)."""

    weights: int = 0
    graph: int = 0
    tokenizer: int = 0
    other: int = 0

    @property
    def program(self) -> int:
        """Bytes of weights and graph, which size_ratio compares."""
        return self.weights + self.graph

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.program + self.tokenizer + self.other


@dataclass(frozen=True)
class SizeResult:
    """Sizes of both artifacts."""

    candidate: ArtifactSize
    baseline: ArtifactSize


@dataclass(frozen=True)
class SubjectFacts:
    """Facts about a measured artifact. `identity` is the digest of program, weights, tokenizer and recipe.

    calibration  the text that its passes were calibrated on, and how much of the evaluation it has; None without one
    """

    name: str
    identity: str
    target: str
    family: str
    num_parameters: int
    context_tokens: int
    calibration: CalibrationRecord | None = None

    @classmethod
    def of(cls, artifact: Artifact) -> "SubjectFacts":
        """Read the facts from the artifact. ArtifactError for a damaged calibration.json."""
        manifest = artifact.manifest
        return cls(
            name=manifest.name,
            identity=manifest.identity,
            target=manifest.target,
            family=manifest.model.family,
            num_parameters=manifest.model.num_parameters,
            context_tokens=manifest.model.context_tokens,
            calibration=read_calibration(artifact),
        )


@dataclass(frozen=True)
class Origin:
    """Sources of the candidate: recipe and checkpoint by name, and the digest of the checkpoint's tensors."""

    recipe: str
    checkpoint: str
    checkpoint_digest: str


@dataclass(frozen=True)
class Sample:
    """One prompt, and how each side continued it with the same parameters; baseline is None without one."""

    prompt: str
    candidate: str
    baseline: str | None = None


@dataclass(frozen=True)
class BuildNotes:
    """Facts from the build, for the report. The artifact stores all but `passes`, so that later reports have them."""

    passes: "tuple[PassRecord, ...]" = ()
    quantization: Quantization = field(default_factory=Quantization)
    origin: Origin | None = None
    samples: tuple[Sample, ...] = ()
    prediction: Prediction | None = None


@dataclass(frozen=True)
class Evidence:
    """One candidate compared with one baseline. `measured` is keyed by metric, or metric@level.

    measured_at  date and time of the measurement, UTC, as 2026-01-31T12:00:00Z
    """

    candidate: SubjectFacts
    baseline: SubjectFacts
    environment: dict[str, Any]
    sizes: SizeResult
    accuracy: AccuracyResult | None
    latency: LatencyResult | None
    memory: MemoryResult | None
    measured: dict[str, Measured]
    gates: tuple[GateOutcome, ...]
    verification: VerifyResult | None = None
    generation: GenerationResult | None = None
    notes: BuildNotes = field(default_factory=BuildNotes)
    measured_at: str = ""

    @property
    def load(self) -> MachineLoad | None:
        """Other processes' use of the machine during the latency rounds; None where it was not measured."""
        return self.latency.load if self.latency else None

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict of the gates; see `worst_verdict`."""
        return worst_verdict(self.gates)


def worst_verdict(gates: Iterable[GateOutcome]) -> Verdict | None:
    """Return the worst verdict of gates that are not advisory: FAIL, then UNDECIDED, then PASS; None without any."""
    verdicts = {gate.verdict for gate in gates if not gate.advisory}
    worst: tuple[Verdict, ...] = ("FAIL", "UNDECIDED", "PASS")
    return next((verdict for verdict in worst if verdict in verdicts), None)


def artifact_size(artifact: Artifact) -> ArtifactSize:
    """Sum the bytes of the manifest's files by kind, without the evidence, which a baseline lacks."""
    sums = {"weights": 0, "graph": 0, "tokenizer": 0, "other": 0}
    for name, entry in artifact.manifest.files.items():
        if not is_evidence(name):
            sums[_kind(PurePosixPath(name))] += entry.bytes
    return ArtifactSize(**sums)


def size_metrics(result: SizeResult) -> list[Measured]:
    """The metric size_ratio: bytes of program and weights, candidate over baseline."""
    candidate, baseline = result.candidate.program, result.baseline.program
    return [Measured("size_ratio", exact(candidate / baseline), float(baseline), float(candidate), unit="bytes")]


def _kind(name: PurePosixPath) -> str:
    if name.suffix == ".safetensors":
        return "weights"
    return {"program": "graph", "tokenizer": "tokenizer"}.get(name.parts[0], "other")
