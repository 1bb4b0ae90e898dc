"""Writes evidence as JSON, from which every number of the report can be recomputed.

summary.json       artifacts, every metric with its interval, gates, sizes, memory
accuracy.json      one item per window
generation.json    one item per prompt of the greedy generations
latency.json       one record per request
verify.json        one record per feature, pair and triple of the runtime's features
quantization.json  one record per quantized weight
prediction.json    what the build predicted before it measured, and the scores
environment.json   machine and versions
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.artifact import SUMMARY_FILE, Artifact
from ingot.artifact.json_text import invalid_file, read_limited
from ingot.artifact.metrics import METRICS
from ingot.errors import ArtifactError, shown
from ingot.validation.accuracy import AccuracyResult
from ingot.validation.latency.measurement import LatencyResult, RequestRecord, RunRecord
from ingot.validation.latency.metrics import summarize
from ingot.validation.machine import MachineLoad
from ingot.validation.memory import peaks
from ingot.validation.memory_probe import ProcessMemory
from ingot.validation.prediction import PREDICTION_FILE
from ingot.validation.quantization import Quantization
from ingot.validation.result import Evidence, Origin, Sample
from ingot.validation.statistics import CONFIDENCE, POWER, Estimate, Measured
from ingot.validation.verify.result import VERIFY_FILE, VerifyResult

_MICROSECOND_DIGITS = 6
QUANTIZATION_FILE = "quantization.json"
_ACCURACY_NAME = "accuracy.json"
_ACCURACY_FILE = f"evidence/{_ACCURACY_NAME}"
_Finite = Annotated[float, Field(allow_inf_nan=False)]


def evidence_files(evidence: Evidence) -> dict[str, str]:
    """File name -> text of the JSON files; parts that were not measured have no file."""
    values: dict[str, Any] = {"summary.json": summary(evidence), "environment.json": evidence.environment}
    if evidence.accuracy:
        values["accuracy.json"] = _accuracy(evidence.accuracy)
    if evidence.generation:
        values["generation.json"] = asdict(evidence.generation)
    if evidence.latency:
        values["latency.json"] = _latency(evidence.latency)
    if evidence.notes.quantization.weights:
        values[QUANTIZATION_FILE] = evidence.notes.quantization.as_json()
    if evidence.notes.prediction:
        values[PREDICTION_FILE] = evidence.notes.prediction.model_dump(mode="json")
    files = {name: _dump(value) for name, value in values.items()}
    if evidence.verification:
        files[VERIFY_FILE] = evidence.verification.as_json()
    return files


def quantization_text(found: Quantization) -> str:
    """The text of quantization.json."""
    return _dump(found.as_json())


def summary(evidence: Evidence) -> dict[str, Any]:
    """The content of summary.json, which `--json` also prints."""
    return {
        "verdict": evidence.verdict,
        "measured_at": evidence.measured_at,
        "origin": asdict(evidence.notes.origin) if evidence.notes.origin else None,
        "candidate": asdict(evidence.candidate),
        "baseline": asdict(evidence.baseline),
        "confidence": CONFIDENCE,
        "power": POWER,
        "metrics": {key: _metric(measured) for key, measured in evidence.measured.items()},
        "gates": [gate.model_dump(mode="json") for gate in evidence.gates],
        "sizes": asdict(evidence.sizes),
        "memory": asdict(evidence.memory) if evidence.memory else None,
        "load": asdict(evidence.load) if evidence.load else None,
        "samples": [asdict(sample) for sample in evidence.notes.samples],
        "prediction": evidence.notes.prediction.model_dump(mode="json") if evidence.notes.prediction else None,
    }


class SealedSummary(BaseModel):
    """The parts of summary.json that are not in the manifest; older files have none of them."""

    model_config = ConfigDict(frozen=True)

    measured_at: str = ""
    origin: Origin | None = None
    load: MachineLoad | None = None
    samples: tuple[Sample, ...] = ()


def sealed_summary(artifact: Artifact) -> SealedSummary | None:
    """Read the summary of the measurement before the artifact was sealed; None if it was not measured.

    ArtifactError for an invalid file.
    """
    if not artifact.has(SUMMARY_FILE):
        return None
    file = artifact.file(SUMMARY_FILE)
    try:
        return SealedSummary.model_validate(artifact.json_object(SUMMARY_FILE))
    except ValidationError as error:
        raise invalid_file(file, "summary of the evidence", error) from error


class SealedWindow(BaseModel):
    """A window of accuracy.json: nll and kl are sums over its tokens, in nats."""

    model_config = ConfigDict(frozen=True)

    start: int = Field(ge=0)
    tokens: int = Field(ge=1)
    candidate_nll: float = Field(allow_inf_nan=False)
    kl: float = Field(default=0.0, allow_inf_nan=False)
    agreements: int = Field(default=0, ge=0)


class SealedText(BaseModel):
    """The evaluation text of accuracy.json."""

    model_config = ConfigDict(frozen=True)

    name: str
    sha256: str


class SealedAccuracy(BaseModel):
    """The parts of accuracy.json on how well an artifact predicts a text."""

    model_config = ConfigDict(frozen=True)

    text: SealedText
    candidate_perplexity: float
    items: tuple[SealedWindow, ...]


def sealed_accuracy(artifact: Artifact) -> SealedAccuracy | None:
    """Read the accuracy before the artifact was sealed; None if it was not measured. ArtifactError for a wrong file."""
    if not artifact.has(_ACCURACY_FILE):
        return None
    file = artifact.file(_ACCURACY_FILE)
    try:
        return SealedAccuracy.model_validate(artifact.json_object(_ACCURACY_FILE))
    except ValidationError as error:
        raise invalid_file(file, "accuracy of the evidence", error) from error


_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RecordedRequest(BaseModel):
    """The times of a request of latency.json, in seconds."""

    model_config = ConfigDict(frozen=True)

    ttft: _Seconds
    tpot: _Seconds
    token_seconds: tuple[_Seconds, ...] = Field(min_length=1)


class RecordedRun(BaseModel):
    """One side at one concurrency in one round of latency.json."""

    model_config = ConfigDict(frozen=True)

    round: int = Field(ge=0)
    level: int = Field(ge=1)
    side: Literal["baseline", "candidate"]
    seconds: _Seconds
    requests: tuple[RecordedRequest, ...] = Field(min_length=1)

    def value(self, name: str) -> float:
        """The median of "ttft" or "tpot" over its requests, in seconds, or "throughput" in tokens a second."""
        if name == "throughput":
            return sum(len(request.token_seconds) for request in self.requests) / self.seconds
        return median(float(getattr(request, name)) for request in self.requests)


class _RecordedLatency(BaseModel):
    runs: tuple[RecordedRun, ...] = ()


class _RecordedMetric(BaseModel):
    value: _Finite
    low: _Finite
    high: _Finite
    items: int = Field(ge=1)
    method: str
    detectable: _Finite = 0.0
    baseline: _Finite | None = None
    candidate: _Finite | None = None
    measured_in: str = ""
    concurrency: int | None = None

    def measured(self, key: str) -> Measured:
        estimate = Estimate(self.value, self.low, self.high, self.items, self.method, self.detectable)
        name = key.partition("@")[0]
        return Measured(name, estimate, self.baseline, self.candidate, self.measured_in, self.concurrency)


class _RecordedProbe(BaseModel):
    generated: ProcessMemory


class _RecordedMemory(BaseModel):
    candidate: tuple[_RecordedProbe, ...]


class _RecordedSummary(BaseModel):
    metrics: dict[str, _RecordedMetric]
    memory: _RecordedMemory | None = None


@dataclass(frozen=True)
class Recorded:
    """Evidence that was read from its folder: metrics, windows of accuracy and runs of latency, where measured.

    peak_bytes   of the candidate, a value for each probe of memory
    """

    measured: Mapping[str, Measured]
    accuracy: SealedAccuracy | None = None
    runs: tuple[RecordedRun, ...] = ()
    peak_bytes: tuple[int, ...] = ()

    def rounds(self, name: str, level: int, side: str = "candidate") -> list[float]:
        """A value of every round of a side at a concurrency, in order; see RecordedRun.value."""
        runs = sorted((run for run in self.runs if (run.level, run.side) == (level, side)), key=lambda run: run.round)
        return [run.value(name) for run in runs]


def read_recorded(folder: Path) -> Recorded:
    """Read what `write_evidence` wrote to a folder. ArtifactError for a missing or wrong summary or part."""
    summary = _recorded(folder / "summary.json", _RecordedSummary)
    accuracy, latency = folder / _ACCURACY_NAME, folder / "latency.json"
    unknown = sorted(key for key in summary.metrics if key.partition("@")[0] not in METRICS)
    if unknown:
        raise ArtifactError(
            f"{folder / 'summary.json'}: has the metric {shown(unknown[0])}, which is not one of Ingot's"
        )
    return Recorded(
        {key: metric.measured(key) for key, metric in summary.metrics.items()},
        _recorded(accuracy, SealedAccuracy) if accuracy.is_file() else None,
        _recorded(latency, _RecordedLatency).runs if latency.is_file() else (),
        tuple(peaks(summary.memory.candidate)) if summary.memory else (),
    )


_Part = TypeVar("_Part", bound=BaseModel)


def _recorded(file: Path, kind: type[_Part]) -> _Part:
    try:
        return kind.model_validate_json(read_limited(file))
    except (OSError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise invalid_file(file, "evidence", error) from error
        raise ArtifactError(f"{file}: cannot be read: {error}; measure again") from error


def sealed_verification(artifact: Artifact) -> VerifyResult | None:
    """Read the verification before the artifact was sealed; None without one. ArtifactError for a wrong file."""
    name = f"evidence/{VERIFY_FILE}"
    if not artifact.has(name):
        return None
    file = artifact.file(name)
    try:
        return VerifyResult.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise invalid_file(file, "verification", error) from error


def _metric(measured: Measured) -> dict[str, Any]:
    facts, estimate = METRICS[measured.metric], measured.estimate
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "method": estimate.method,
        "items": estimate.items,
        "detectable": estimate.detectable,
        "better": facts.better,
        "unit": facts.unit,
        "change": measured.change,
        "baseline": measured.baseline,
        "candidate": measured.candidate,
        "measured_in": measured.unit,
        "concurrency": measured.level,
    }


def _accuracy(result: AccuracyResult) -> dict[str, Any]:
    return {
        "text": {"name": result.text_name, "sha256": result.text_sha256},
        "options": asdict(result.options),
        "predicted_tokens": result.num_tokens,
        "baseline_perplexity": result.baseline_perplexity,
        "candidate_perplexity": result.candidate_perplexity,
        "unit": "nats, sums over the window's tokens; start counts tokens of the text",
        "items": [asdict(item) for item in result.items],
    }


def _latency(result: LatencyResult) -> dict[str, Any]:
    return {
        "options": asdict(result.options),
        "rounds": result.num_rounds,
        "looks": result.stop.looks if result.stop else 1,
        "confidence": result.confidence,
        "unit": "seconds; token_seconds and submitted count from the start of the run",
        "summary": [asdict(level) for level in summarize(result)],
        "runs": [_run(run) for run in result.runs],
    }


def _run(record: RunRecord) -> dict[str, Any]:
    return {
        **asdict(record.run),
        "seconds": _rounded(record.seconds),
        "requests": [_request(request) for request in record.requests],
    }


def _request(request: RequestRecord) -> dict[str, Any]:
    return {
        "submitted": _rounded(request.submitted),
        "ttft": _rounded(request.ttft),
        "tpot": _rounded(request.tpot),
        "e2e": _rounded(request.e2e),
        "token_seconds": [_rounded(moment) for moment in request.token_seconds],
    }


def _rounded(seconds: float) -> float:
    return round(seconds, _MICROSECOND_DIGITS)


def _dump(value: Any) -> str:
    return _text(value, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    """Indented JSON with each array of numbers on one line."""
    inner, outer = "\n" + "  " * (depth + 1), "\n" + "  " * depth
    if isinstance(value, dict) and value:
        entries = (f"{json.dumps(str(key))}: {_text(item, depth + 1)}" for key, item in value.items())
        return "{" + ",".join(inner + entry for entry in entries) + outer + "}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (dict, list, tuple)) for item in value):
        return "[" + ",".join(inner + _text(item, depth + 1) for item in value) + outer + "]"
    return json.dumps(value, allow_nan=False)
