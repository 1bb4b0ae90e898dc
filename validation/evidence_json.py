"""Writes evidence as JSON, from which every number of the report can be recomputed.

summary.json       artifacts, every metric with its interval, gates, sizes, memory
accuracy.json      one item per window
generation.json    one item per prompt of the greedy generations
latency.json       one record per request
verify.json        one record per feature, pair and triple of the runtime's features
quantization.json  one record per quantized weight
environment.json   machine and versions
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.artifact import SUMMARY_FILE, Artifact
from ingot.artifact.metrics import METRICS
from ingot.errors import ArtifactError
from ingot.validation.accuracy import AccuracyResult
from ingot.validation.latency.measurement import LatencyResult, RequestRecord, RunRecord
from ingot.validation.latency.metrics import summarize
from ingot.validation.machine import MachineLoad
from ingot.validation.quantization import Quantization
from ingot.validation.result import Evidence, Origin, Sample
from ingot.validation.statistics import CONFIDENCE, POWER, Measured
from ingot.validation.verify.result import VERIFY_FILE, VerifyResult

_MICROSECOND_DIGITS = 6
QUANTIZATION_FILE = "quantization.json"
_ACCURACY_FILE = "evidence/accuracy.json"


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
    """A window of accuracy.json: nll is the sum over its tokens, in nats."""

    model_config = ConfigDict(frozen=True)

    start: int = Field(ge=0)
    tokens: int = Field(ge=1)
    candidate_nll: float = Field(allow_inf_nan=False)


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


def invalid_file(file: Path, content: str, error: ValidationError) -> ArtifactError:
    """Return the refusal of a sealed file of evidence, with its first wrong value."""
    first = error.errors()[0]
    reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    return ArtifactError(f"{file}: invalid {content} ({reason}); build the artifact again")


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
