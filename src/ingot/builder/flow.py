"""The whole build on one screen: compile, make the baseline, measure, decide, seal.

The artifact appears under its name only if every gate passed. A refused build leaves its evidence in NAME.rejected,
so that its report can be read.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.artifact import Artifact, ArtifactWriter, open_artifact
from ingot.builder.baseline import baseline_artifact
from ingot.builder.notes import WeightWatch, quantization_of, write_pass_facts
from ingot.builder.options import describe_artifact, is_measured, measure_options
from ingot.builder.requirements import require_gpu, require_text
from ingot.errors import GateError
from ingot.pipeline.calibrate import resumable
from ingot.pipeline.compile import Compiled, Observer, compile_recipe, open_source
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.validation.evidence import BuildNotes, Evidence, measure, write_evidence, write_quantization
from ingot.validation.gates import raise_for


def _ignore(evidence: Evidence, report: Path) -> None:
    """Observe nothing."""


@dataclass(frozen=True)
class Observers:
    """Callbacks of a build; none of them changes it.

    after_pass  called with the IR and its record after every pass of the candidate
    measured    called with the evidence and the report's final path, before a failed gate raises
    """

    after_pass: Observer | None = None
    measured: Callable[[Evidence, Path], None] = _ignore


@dataclass(frozen=True)
class BuildResult:
    """A sealed artifact, the recipe as resolved, how it was compiled, and its evidence (None without measurement)."""

    artifact: Artifact
    recipe: Recipe
    compiled: Compiled
    evidence: Evidence | None


def build(
    source: str | Path,
    overrides: Sequence[str] = (),
    output: Path | str | None = None,
    observers: Observers | None = None,
    resume: bool = True,
) -> BuildResult:
    """Build the recipe `source` (a shipped recipe's name or a file), with `key=value` overrides, into `output`.

    Raises RecipeError, CheckpointError, DataError, PassError or BuildError for what cannot be built, GateFailed and
    GateUndecided for an artifact that was built and refused. The calibration of an earlier, interrupted build of the
    same recipe is resumed, unless `resume` is False. Whatever is raised, an older artifact at `output` stays, and
    nothing half-written is left.
    """
    observers = observers or Observers()
    recipe = load_recipe(source, overrides)
    target = Path(output).expanduser() if output else recipe.output_folder
    require_text(recipe)
    require_gpu(recipe)
    with ArtifactWriter(target) as writer, resumable(resume):
        opened = open_source(recipe)
        watch = WeightWatch(opened.copy, observers.after_pass)
        compiled = compile_recipe(recipe, writer.path, watch, opened)
        notes = BuildNotes(compiled.passes, quantization_of(recipe, compiled, watch, writer.path))
        write_quantization(notes.quantization, writer.path / "evidence")
        write_pass_facts(compiled.pass_facts, writer.path / "evidence")
        describe_artifact(writer, recipe, compiled)
        evidence = _measure(recipe, opened, writer, notes) if is_measured(recipe) else None
        if evidence:
            _admit(evidence, writer, observers)
            describe_artifact(writer, recipe, compiled, evidence.gates)
        path = writer.seal()
    shutil.rmtree(rejected_folder(writer.target), ignore_errors=True)
    return BuildResult(open_artifact(path, verify=False), recipe, compiled, evidence)


def rejected_folder(target: Path) -> Path:
    """Folder for the evidence of a build that its gates refused."""
    return target.with_name(f"{target.name}.rejected")


def _measure(recipe: Recipe, source: ModelSource, writer: ArtifactWriter, notes: BuildNotes) -> Evidence:
    return measure(writer.path, baseline_artifact(recipe, source), measure_options(recipe), notes)


def _admit(evidence: Evidence, writer: ArtifactWriter, observers: Observers) -> None:
    """Write the evidence; raise GateError, with the evidence kept in NAME.rejected, when a gate refuses."""
    write_evidence(evidence, writer.path / "evidence")
    try:
        raise_for(evidence.gates, evidence.measured)
    except GateError:
        kept = rejected_folder(writer.target)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(writer.path / "evidence", kept / "evidence")
        shutil.copyfile(writer.path / "recipe.yaml", kept / "recipe.yaml")
        observers.measured(evidence, kept / "evidence" / "report.html")
        raise
    observers.measured(evidence, writer.target / "evidence" / "report.html")
