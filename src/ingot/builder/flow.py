"""The whole build on one screen: compile, try, make the baseline, measure, decide, seal.

The artifact appears under its name only if the runtime can run it and every gate passed. If a gate rejects it, its
evidence and report are kept in NAME.rejected.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.artifact import Artifact, ArtifactWriter, open_artifact
from ingot.builder.baseline import baseline_artifact
from ingot.builder.measurements import (
    bos_tokens,
    measure_options,
    origin_of,
    require_gpu,
    require_required_gates,
    require_texts,
    require_tokenizer,
)
from ingot.builder.quantization_evidence import QuantizationObserver, quantization_of, write_pass_facts
from ingot.builder.trial import sample_request, try_artifact
from ingot.errors import GateError, naming_file
from ingot.pipeline.calibrate import resumable
from ingot.pipeline.compile import Compiled, Observer, compile_recipe, describe_artifact, open_source
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.fit import fit_to_model, warn_of_padding
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.paths import require_paths
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
) -> BuildResult:
    """Build the recipe `source` (a shipped recipe's name or a file), with `key=value` overrides, into `output`.

    Raises RecipeError, CheckpointError, DataError, PassError or BuildError if the build fails, GateFailed or
    GateUndecided if a gate rejects the artifact. After an error, an older artifact at `output` is unchanged and no
    partial one remains. With `resume`, the calibration of an interrupted build of the same recipe continues. With
    `require_gates`, a recipe without a measured gate that must pass is refused with UsageError before any work.
    """
    observers = observers or Observers()
    recipe = load_recipe(source, overrides)
    target = Path(output).expanduser() if output else recipe.output_folder
    if require_gates:
        require_required_gates(recipe)
    require_paths(recipe)
    require_gpu(recipe)
    tokenizer = require_tokenizer(recipe)
    opened = open_source(recipe)
    recipe = fit_to_model(recipe, opened.facts.context_tokens, bos_tokens(tokenizer))
    warn_of_padding(recipe, opened.copy())
    require_texts(recipe, tokenizer, opened.facts)
    request = sample_request(recipe, tokenizer, opened.facts.context_tokens)
    with naming_file(target), ArtifactWriter(target) as writer, resumable(resume):
        compiled, notes = _compile(recipe, opened, writer, observers)
        sample, evidence = try_artifact(writer.path, writer.target, recipe, request), None
        if recipe.is_measured:
            baseline = baseline_artifact(recipe.for_engine(compiled.target.engine), opened)
            if sample is not None and request is not None:
                sample = replace(sample, baseline=request.text(open_artifact(baseline, verify=False), recipe.threads))
                notes = replace(notes, samples=(sample,))
            evidence = measure(writer.path, baseline, measure_options(recipe), notes)
            _apply_gates(evidence, writer, observers, build_command(source, overrides, output))
            describe_artifact(writer, recipe, compiled, evidence.gates)
        path = writer.seal()
    shutil.rmtree(rejected_folder(writer.target), ignore_errors=True)
    return BuildResult(open_artifact(path, verify=False), recipe, compiled, evidence, sample)


def build_command(source: str | Path, overrides: Sequence[str], output: Path | str | None) -> list[str]:
    """Return the command line that builds the same."""
    settings = [word for override in overrides for word in ("--set", override)]
    return ["ingot", "build", str(source), *settings, *(["-o", str(output)] if output else [])]


def rejected_folder(target: Path) -> Path:
    """Folder for the evidence of a build that a gate rejected."""
    return target.with_name(f"{target.name}.rejected")


def _compile(
    recipe: Recipe, source: ModelSource, writer: ArtifactWriter, observers: Observers
) -> tuple[Compiled, BuildNotes]:
    """Write program, manifest and the evidence of the passes to the staging folder."""
    quantization = QuantizationObserver(source.copy, observers.after_pass)
    compiled = compile_recipe(recipe, writer.path, quantization, source)
    figures = quantization_of(recipe, compiled, quantization, writer.path)
    write_quantization(figures, writer.path / "evidence")
    write_pass_facts(compiled.pass_facts, writer.path / "evidence")
    describe_artifact(writer, recipe, compiled)
    origin = origin_of(recipe, source) if recipe.is_measured else None  # its digest reads the whole checkpoint
    return compiled, BuildNotes(compiled.passes, figures, origin)


def _apply_gates(evidence: Evidence, writer: ArtifactWriter, observers: Observers, command: Sequence[str]) -> None:
    """Write the evidence; if a gate rejects the artifact, keep the evidence in NAME.rejected and raise GateError."""
    write_evidence(evidence, writer.path / "evidence")
    try:
        require_passed(evidence, command)
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
