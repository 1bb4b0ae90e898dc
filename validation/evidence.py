"""Measures an artifact against its baseline, decides its gates and writes the evidence.

In order:
    evidence = measure(candidate, baseline, options)
    write_evidence(evidence, folder)                    # JSON files, report.html, report.md
    require_passed(evidence)                             # gates.py: exit codes 3 and 4
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.json_text import invalid_file
from ingot.errors import UsageError
from ingot.runtime.executors import DeviceFacts
from ingot.settings import num_threads
from ingot.validation.accuracy import AccuracyResult, accuracy_metrics, measure_accuracy
from ingot.validation.evidence_json import QUANTIZATION_FILE, evidence_files, quantization_text
from ingot.validation.gates import GateSpec, Rerun, advisory_lines, decide, raise_for
from ingot.validation.generation import GenerationResult, generation_metrics, measure_generations
from ingot.validation.latency.measurement import LatencyResult, measure_latency
from ingot.validation.latency.metrics import latency_metrics
from ingot.validation.machine import LoadMeter, environment
from ingot.validation.memory import MemoryResult, measure_memory, memory_metrics
from ingot.validation.options import AccuracyOptions, GenerationOptions, LatencyLoad, MemoryOptions
from ingot.validation.prediction import measured_figures
from ingot.validation.quantization import Quantization
from ingot.validation.report.report import render_html, render_markdown
from ingot.validation.result import BuildNotes, Evidence, SizeResult, SubjectFacts, artifact_size, size_metrics
from ingot.validation.statistics import Measured
from ingot.validation.subject import EngineSubject
from ingot.validation.verify import VerifyOptions, VerifyResult, open_subject, verify
from ingot.validation.verify.result import verify_metrics
from ingot.validation.windows import EvaluationText, read_text

__all__ = [
    "BuildNotes",
    "Evidence",
    "MeasureOptions",
    "advisory_remarks",
    "measure",
    "require_passed",
    "sealed_quantization",
    "write_evidence",
    "write_quantization",
]


_GENERATED_AT_ONCE = 2  # EngineSubject doubles it


@dataclass(frozen=True)
class MeasureOptions:
    """Settings of the measurements; None disables a part. Accuracy requires `text`, the file of the evaluation text."""

    text: Path | None = None
    accuracy: AccuracyOptions | None = None
    generation: GenerationOptions | None = None
    latency: LatencyLoad | None = None
    memory: MemoryOptions | None = None
    verify: VerifyOptions | None = None
    gates: tuple[GateSpec, ...] = ()
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if (self.accuracy or self.generation) and self.text is None:
            raise UsageError("accuracy requires an evaluation text, but none is named; name a UTF-8 text file")

    @property
    def sequence_tokens(self) -> int:
        """Maximum tokens in the KV pool at the same time."""
        window = self.accuracy.window_tokens + 1 if self.accuracy else 1
        load = self.latency.sequence_tokens * max(self.latency.concurrency) if self.latency else 1
        each = self.generation.prompt_tokens + self.generation.output_tokens if self.generation else 1
        generation = _GENERATED_AT_ONCE * each
        return max(window, load, generation)


def measure(
    candidate: Path,
    baseline: Path,
    options: MeasureOptions,
    notes: BuildNotes | None = None,
) -> Evidence:
    """Measure the artifact `candidate` against the artifact `baseline`.

    Memory is measured in child processes before any engine is loaded, accuracy and latency with both engines loaded.
    Raises DataError for a text that is too short, UsageError for options that do not fit the artifacts.
    """
    artifacts = open_artifact(candidate), open_artifact(baseline)
    sizes = SizeResult(*(artifact_size(artifact) for artifact in artifacts))
    memory = measure_memory(candidate, baseline, options.memory) if options.memory else None
    accuracy, generation, latency, device = _run_engines(*artifacts, options)
    verification = _verify(artifacts[0], options)
    measured = collect(sizes, accuracy, latency, memory, verification, generation)
    return Evidence(
        candidate=SubjectFacts.of(artifacts[0]),
        baseline=SubjectFacts.of(artifacts[1]),
        environment=environment(options.num_threads, device),
        sizes=sizes,
        accuracy=accuracy,
        generation=generation,
        latency=latency,
        memory=memory,
        verification=verification,
        measured=measured,
        gates=tuple(decide(options.gates, measured)),
        notes=_with_scores(notes or BuildNotes(), measured, sizes),
        measured_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _with_scores(notes: BuildNotes, measured: dict[str, Measured], sizes: SizeResult) -> BuildNotes:
    """Score the prediction from before the measurement, if the notes have one."""
    if notes.prediction is None:
        return notes
    return replace(notes, prediction=notes.prediction.scored(measured_figures(measured, sizes.candidate.weights)))


def collect(
    sizes: SizeResult,
    accuracy: AccuracyResult | None,
    latency: LatencyResult | None,
    memory: MemoryResult | None,
    verification: VerifyResult | None = None,
    generation: GenerationResult | None = None,
) -> dict[str, Measured]:
    """All metrics of the results by key, in the order of the report."""
    found = accuracy_metrics(accuracy) if accuracy else []
    found += generation_metrics(generation) if generation else []
    found += latency_metrics(latency) if latency else []
    found += size_metrics(sizes)
    found += memory_metrics(memory) if memory else []
    found += verify_metrics(verification) if verification else []
    return {measured.key: measured for measured in found}


def write_evidence(evidence: Evidence, folder: Path) -> list[Path]:
    """Write every file of the evidence to `folder`, created if missing; return their paths."""
    files = evidence_files(evidence)
    files["report.html"] = render_html(evidence)
    files["report.md"] = render_markdown(evidence)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in files]


def require_passed(evidence: Evidence, command: Sequence[str] = (), cause: str | None = None) -> None:
    """Raise GateFailed or GateUndecided if a gate that is not advisory did not pass.

    `command` is the command line of this measurement, from which the message makes one that measures more. `cause` is
    the advice for a gate that failed, in place of the metric's.
    """
    raise_for(evidence.gates, evidence.measured, _rerun(evidence, command), cause)


def advisory_remarks(evidence: Evidence, command: Sequence[str] = ()) -> list[str]:
    """Describe the advisory gates that did not pass, a line each, as require_passed describes others."""
    return advisory_lines(evidence.gates, evidence.measured, _rerun(evidence, command))


def _rerun(evidence: Evidence, command: Sequence[str]) -> Rerun | None:
    stop = evidence.latency.stop if evidence.latency else None
    return Rerun(tuple(command), stop.seconds if stop else 0.0, evidence.load) if command else None


def write_quantization(found: Quantization, folder: Path) -> None:
    """Write only quantization.json to `folder`, created if missing; nothing if no weight is quantized."""
    if found.weights:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / QUANTIZATION_FILE).write_text(quantization_text(found), encoding="utf-8")


def sealed_quantization(artifact: Artifact) -> Quantization:
    """Statistics of the quantized weights from the artifact's build; empty if it stored none.

    ArtifactError for an invalid file.
    """
    name = f"evidence/{QUANTIZATION_FILE}"
    if not artifact.has(name):
        return Quantization()
    file = artifact.file(name)
    try:
        return Quantization.from_json(file.read_bytes())
    except ValidationError as error:
        raise invalid_file(file, "statistics of quantized weights", error) from error


class _Runs(NamedTuple):
    """Measurements of the loaded engines."""

    accuracy: AccuracyResult | None = None
    generation: GenerationResult | None = None
    latency: LatencyResult | None = None
    device: DeviceFacts | None = None


def _run_engines(candidate: Artifact, baseline: Artifact, options: MeasureOptions) -> _Runs:
    if options.accuracy is None and options.generation is None and options.latency is None:
        return _Runs()
    with (
        EngineSubject.load(candidate, options.sequence_tokens, options.num_threads) as new,
        EngineSubject.load(baseline, options.sequence_tokens, options.num_threads) as old,
    ):
        text = _evaluation_text(old, options)
        accuracy = measure_accuracy(new, old, text, options.accuracy) if text and options.accuracy else None
        generation = measure_generations(new, old, text, options.generation) if text and options.generation else None
        meter = LoadMeter(options.num_threads or num_threads())
        decided = _decided_by(options.gates)
        latency = (
            measure_latency(new, old, options.latency, meter=meter, is_decided=decided) if options.latency else None
        )
        return _Runs(accuracy, generation, latency, new.device)


def _verify(candidate: Artifact, options: MeasureOptions) -> VerifyResult | None:
    """Verify the candidate's runtime with prompts of the evaluation text, or else of the model's own."""
    if options.verify is None:
        return None
    text = read_text(options.text)[0] if options.text else None
    prompts = f" --prompts {options.text.name}" if options.text else ""
    command = f"ingot verify ARTIFACT{prompts}"  # evidence has no path of this machine; ADVICE says what they are
    return verify(open_subject(candidate, options.num_threads), replace(options.verify, text=text), command)


def _decided_by(gates: Sequence[GateSpec]) -> Callable[[LatencyResult], bool] | None:
    """Return a function that says whether every gate on latency is decided; None without such a gate."""
    specs = [spec for spec in gates if spec.facts.section == "latency"]
    if not specs:
        return None

    def is_decided(result: LatencyResult) -> bool:
        measured = {one.key: one for one in latency_metrics(result)}
        return all(gate.verdict != "UNDECIDED" for gate in decide(specs, measured))

    return is_decided


def _evaluation_text(baseline: EngineSubject, options: MeasureOptions) -> EvaluationText | None:
    """The text that accuracy and generations read; None where neither is measured."""
    if options.text is None or (options.accuracy is None and options.generation is None):
        return None
    text, sha256 = read_text(options.text)
    tokens, bos = baseline.encode(text)
    return EvaluationText(options.text.name, sha256, tuple(tokens), bos)
