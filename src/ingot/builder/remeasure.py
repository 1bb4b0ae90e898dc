"""Measuring an artifact again, on this machine, by the recipe that it carries."""

import json
from collections.abc import Sequence
from pathlib import Path

from ingot.artifact import Artifact, open_artifact
from ingot.builder.baseline import baseline_artifact
from ingot.builder.options import is_measured, measure_options
from ingot.errors import UsageError
from ingot.pipeline.recipe import Recipe
from ingot.pipeline.recipe_loader import load_recipe
from ingot.progress import Progress, silent
from ingot.validation.evidence import BuildNotes, Evidence, measure, sealed_quantization


def remeasure(
    artifact: Path | str,
    *,
    checkpoint: Path | str | None = None,
    baseline: Path | str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress = silent,
) -> Evidence:
    """Measure a sealed artifact against a baseline artifact, or one made from the checkpoint; decide its gates.

    With a baseline the checkpoint is only wanted where it holds the evaluation text. `overrides` change the recipe's
    evaluation, latency and gates. The artifact is left as it is. Raises ArtifactError for a damaged one, UsageError
    when neither baseline nor checkpoint is given.
    """
    opened = open_artifact(artifact)
    if checkpoint is None and baseline is None:
        raise UsageError("name what to compare with: --baseline ARTIFACT, or --checkpoint FOLDER to make one from")
    recipe = with_checkpoint(opened, checkpoint, overrides)
    if not is_measured(recipe):
        raise UsageError(
            f"recipe {recipe.name} measures nothing: set evaluation.text or latency, as in "
            "--set evaluation.text=FILE --set latency.rounds=5"
        )
    other = Path(baseline) if baseline else baseline_artifact(recipe, progress)
    notes = BuildNotes(quantization=sealed_quantization(opened))
    return measure(opened.path, other, measure_options(recipe), progress, notes)


def with_checkpoint(artifact: Artifact, checkpoint: Path | str | None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that the artifact carries, on this checkpoint where one is named."""
    source = [f"checkpoint={_as_yaml(Path(checkpoint).expanduser().absolute())}"] if checkpoint else []
    return load_recipe(artifact.file("recipe.yaml"), [*source, *overrides])


def _as_yaml(path: Path) -> str:
    """The path in quotes, for a name may hold what YAML reads as more than a text."""
    return json.dumps(str(path), ensure_ascii=False)
