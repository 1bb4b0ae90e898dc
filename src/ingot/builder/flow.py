"""The whole build on one screen: predict, compile, try, make the baseline, measure, decide, seal.

The artifact appears under its name only if the runtime can run it and every gate passed. If a gate rejects it, its
evidence and report are kept in NAME.rejected.
"""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.artifact import Artifact, ArtifactWriter, GateOutcome, open_artifact
from ingot.builder.baseline import baseline_artifact
from ingot.builder.gate_causes import failure_cause
from ingot.builder.inputs import input_digests, rejected_from, sealed_from, write_inputs
from ingot.builder.measurements import (
    bos_tokens,
    measure_options,
    origin_of,
    require_gpu,
    require_required_gates,
    require_texts,
    require_tokenizer,
)
from ingot.builder.prediction import Predictor
from ingot.builder.quantization_evidence import QuantizationObserver, quantization_of, why_unmeasured, write_pass_facts
from ingot.builder.trial import sample_request, try_artifact
from ingot.errors import ArtifactError, GateError, UsageError, naming_file
from ingot.pipeline.calibrate import resumable
from ingot.pipeline.compile import Compiled, Observer, compile_recipe, describe_artifact, open_source
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.fit import fit_to_model, warn_of_padding
from ingot.pipeline.recipe.load import load_recipe, require_paths
from ingot.pipeline.recipe.schema import Recipe
from ingot.progress import note
from ingot.validation.evidence import (
    BuildNotes,
    Evidence,
    advisory_remarks,
    measure,
    require_passed,
    write_evidence,
    write_quantization,
)
from ingot.validation.result import Sample

_HUB_MODEL = "models--"  # begins the folder of a model in the cache of Hugging Face's hub
_MOST_NAME_CHARS = 128


def _ignore(evidence: Evidence, report: Path) -> None:
    """Observe nothing."""


@dataclass(frozen=True)
class Observers:
    """Callbacks of a build; they do not change its result.

    after_pass  called with the IR and its record after every pass of the candidate
    measured    called with the evidence and the report's final path, before a failed gate raises
    """

    after_pass: Observer | None = None
    measured: Callable[[Evidence, Path], None] = _ignore


@dataclass(frozen=True)
class BuildResult:
    """A sealed artifact, its resolved recipe, how it was compiled, its evidence and its sample.

    evidence  None if nothing was measured
    sample    None if the recipe has neither `generate` nor an evaluation text, or its GPU is not here
    """

    artifact: Artifact
    recipe: Recipe
    compiled: Compiled
    evidence: Evidence | None
    sample: Sample | None = None


def build(
    source: str | Path,
    overrides: Sequence[str] = (),
    output: Path | str | None = None,
    observers: Observers | None = None,
    resume: bool = True,
    require_gates: bool = False,
    force: bool = False,
) -> BuildResult:
    """Build the recipe `source` (a shipped recipe's name or a file), with `key=value` overrides, into `output`.

    Raises RecipeError, CheckpointError, DataError, PassError or BuildError if the build fails, GateFailed or
    GateUndecided if a gate rejects the artifact. After an error, an older artifact at `output` is unchanged and no
    partial one remains. With `resume`, the calibration of an interrupted build of the same recipe continues. With
    `require_gates`, a recipe without a measured gate that must pass is refused with UsageError before any work; without
    `force`, so is one that would replace an artifact whose gates passed.
    """
    observers = observers or Observers()
    recipe = load_recipe(source, overrides)
    target = _target(recipe, output)
    if require_gates:
        require_required_gates(recipe)
    if not force:
        _keep_passed(target, recipe)
    require_paths(recipe)
    require_gpu(recipe)
    tokenizer = require_tokenizer(recipe)
    opened = open_source(recipe)
    inputs = input_digests(recipe, opened)
    name = model_name(recipe, overrides, output)
    recipe = fit_to_model(recipe, opened.facts.context_tokens, bos_tokens(tokenizer))
    warn_of_padding(recipe, opened.copy())
    recipe = require_texts(recipe, tokenizer, opened.facts)
    request = sample_request(recipe, tokenizer, opened.facts.context_tokens)
    with naming_file(target), ArtifactWriter(target) as writer, resumable(resume):
        write_inputs(inputs, writer.path / "evidence")
        predictor = Predictor.of_size(recipe, opened) if recipe.is_measured else None
        compiled, notes = _compile(recipe, opened, writer, observers, name)
        sample, evidence = try_artifact(writer.path, writer.target, recipe, request), None
        if predictor:
            notes = replace(notes, prediction=predictor.predict(writer.path, measure_options(recipe)))
            baseline = baseline_artifact(recipe.for_engine(compiled.target.engine), opened)
            if sample is not None and request is not None:
                sample = replace(sample, baseline=request.text(open_artifact(baseline, verify=False), recipe.threads))
                notes = replace(notes, samples=(sample,))
            evidence = measure(writer.path, baseline, measure_options(recipe), notes)
            cause = failure_cause(evidence, recipe, compiled, opened, (writer.path, baseline))
            _apply_gates(evidence, writer, observers, build_command(source, overrides, output), cause)
            describe_artifact(writer, recipe, compiled, name, evidence.gates)
        path = writer.seal()
    shutil.rmtree(rejected_folder(writer.target), ignore_errors=True)
    return BuildResult(open_artifact(path, verify=False), recipe, compiled, evidence, sample)


@dataclass(frozen=True)
class Unchanged:
    """The outcome of the last build, whose inputs are those of now. artifact: None if the gates rejected it."""

    gates: tuple[GateOutcome, ...]
    artifact: Artifact | None = None


def unchanged(source: str | Path, overrides: Sequence[str] = (), output: Path | str | None = None) -> Unchanged | None:
    """Return the outcome of the last build of the same inputs by the same code; None if `build` may make another."""
    recipe = load_recipe(source, overrides)
    target = _target(recipe, output)
    rejected = rejected_folder(target)
    if not (target.is_dir() or rejected.is_dir()):
        return None
    require_paths(recipe)
    inputs = input_digests(recipe, open_source(recipe))
    if gates := rejected_from(rejected, inputs):
        return Unchanged(gates)
    artifact = sealed_from(target, inputs)
    return Unchanged(artifact.manifest.gates, artifact) if artifact else None


def _target(recipe: Recipe, output: Path | str | None) -> Path:
    return Path(output).expanduser() if output else recipe.output_folder


def _keep_passed(target: Path, recipe: Recipe) -> None:
    """Raise UsageError where an artifact whose gates passed would be replaced by one that no gate decides."""
    try:
        verdict = open_artifact(target, verify=False).manifest.verdict
    except ArtifactError:
        return
    if verdict == "passed" and not recipe.has_required_gates:
        raise UsageError(
            f"{target}: the gates of this artifact passed, and no gate decides about the new one; name another folder "
            "with -o, give an evaluation text and gates, or replace it with --force"
        )


def model_name(recipe: Recipe, overrides: Sequence[str], output: Path | str | None) -> str:
    """Return the name of the model that is built: a given one, else the output folder's, else the given checkpoint's.

    A recipe that names its checkpoint itself is one of that model, and has its name.
    """
    if any(override.startswith("name=") for override in overrides):
        return recipe.name
    if output:
        return _fit_for_a_name(Path(output).expanduser().resolve().name, recipe.name)
    if any(override.startswith("checkpoint=") for override in overrides):
        return _fit_for_a_name(checkpoint_name(recipe.require_checkpoint()), recipe.name)
    return recipe.name


def checkpoint_name(path: Path) -> str:
    """Return the name of a folder or GGUF file; of a snapshot in the cache of Hugging Face's hub, that of its model."""
    cached = next((part for part in path.parts if part.startswith(_HUB_MODEL)), "")
    return cached.rpartition("--")[2] or (path.stem if path.suffix == ".gguf" else path.resolve().name)


def _fit_for_a_name(text: str, other: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("-._")[:_MOST_NAME_CHARS] or other


def build_command(source: str | Path, overrides: Sequence[str], output: Path | str | None) -> list[str]:
    """Return the command line that builds the same."""
    settings = [word for override in overrides for word in ("--set", override)]
    return ["ingot", "build", str(source), *settings, *(["-o", str(output)] if output else [])]


def rejected_folder(target: Path) -> Path:
    """Folder for the evidence of a build that a gate rejected."""
    return target.with_name(f"{target.name}.rejected")


def _compile(
    recipe: Recipe, source: ModelSource, writer: ArtifactWriter, observers: Observers, name: str
) -> tuple[Compiled, BuildNotes]:
    """Write program, manifest and the evidence of the passes to the staging folder."""
    quantization = QuantizationObserver(source.copy, observers.after_pass)
    observer = observers.after_pass if why_unmeasured(recipe) else quantization
    compiled = compile_recipe(recipe, writer.path, observer, source)
    figures = quantization_of(recipe, compiled, quantization, writer.path)
    write_quantization(figures, writer.path / "evidence")
    write_pass_facts(compiled.pass_facts, writer.path / "evidence")
    describe_artifact(writer, recipe, compiled, name)
    # The digest of an origin reads the whole checkpoint.
    origin = origin_of(recipe, source) if recipe.is_measured else None
    return compiled, BuildNotes(compiled.passes, figures, origin)


def _apply_gates(
    evidence: Evidence, writer: ArtifactWriter, observers: Observers, command: Sequence[str], cause: str | None
) -> None:
    """Write the evidence; if a gate rejects the artifact, keep the evidence in NAME.rejected and raise GateError."""
    write_evidence(evidence, writer.path / "evidence")
    try:
        require_passed(evidence, command, cause)
    except GateError:
        kept = rejected_folder(writer.target)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(writer.path / "evidence", kept / "evidence")
        shutil.copyfile(writer.path / "recipe.yaml", kept / "recipe.yaml")
        observers.measured(evidence, kept / "evidence" / "report.html")
        raise
    observers.measured(evidence, writer.target / "evidence" / "report.html")
    for remark in advisory_remarks(evidence, command):
        note(remark)
