"""Import: check a foreign checkpoint, write it in one canonical form, prove it, and add a recipe that builds it.

    nothing quantized     plain safetensors, every tensor in its own type
    quantized             compressed-tensors with the same codes; layers that it cannot hold as float32

A build does not need an import: recipes read foreign checkpoints directly. An import drops what Ingot does not read
(indexes, shards, other layouts of the same codes), reports every error before anything is built, and reports which
weights an artifact will hold as codes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.errors import CheckpointError
from ingot.passes.model_facts import DEQUANTIZED
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.folder import Source
from ingot.pipeline.interchange.formats import formats_that_hold
from ingot.pipeline.interchange.lint import LintFinding, lint_checkpoint
from ingot.pipeline.interchange.transcode import TRANSCODING, Transcoded, write_and_prove
from ingot.pipeline.interchange.weight_sources import weights_of_checkpoint
from ingot.pipeline.model.importer import import_checkpoint

RECIPE = "recipe.yaml"
_SHOWN = 5
_OPTIONS = replace(TRANSCODING, floats=True)


@dataclass(frozen=True)
class Imported:
    """The new folder, and the effects of building it.

    transcoded    the folder with its proof
    warnings      findings that do not stop a build
    kept          number of quantized layers whose codes an artifact keeps
    floats        reason -> quantized layers that become 32-bit floats in an artifact
    recipe        text of the folder's recipe
    """

    transcoded: Transcoded
    warnings: Sequence[LintFinding]
    kept: int
    floats: Mapping[str, Sequence[str]]
    recipe: str


def import_foreign(source: Path, folder: Path) -> Imported:
    """Write the checkpoint `source` to the new folder `folder` in its canonical form, with a recipe that builds it.

    Raises CheckpointError with every error of the source, or with the part of its model that Ingot does not build;
    UsageError when the folder exists. Nothing is written then.
    """
    findings = lint_checkpoint(source)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise CheckpointError(_message(source, errors))
    checkpoint = Checkpoint.open(source)
    kept, floats = _weights_of_artifact(checkpoint)
    recipe = _recipe(source, kept, floats)
    read = weights_of_checkpoint(checkpoint)
    has_codes = formats_that_hold(Source(checkpoint, read.weights), _OPTIONS, ["compressed-tensors"])
    target = "compressed-tensors" if has_codes else "safetensors"
    outcome = write_and_prove(checkpoint, read, folder, target, _OPTIONS, {RECIPE: recipe})
    return Imported(outcome, findings, kept, floats, recipe)


def _message(source: Path, errors: Sequence[LintFinding]) -> str:
    shown = "; ".join(_problem(source, finding) for finding in errors[:_SHOWN])
    more = f"; and {len(errors) - _SHOWN} more (ingot lint-checkpoint lists them)" if len(errors) > _SHOWN else ""
    return f"{source}: {shown}{more}. Use another checkpoint, or repair this one"


def _problem(source: Path, finding: LintFinding) -> str:
    """Return the finding without the source's path, which begins the message."""
    own = f"{source}: "
    return (
        finding.message.removeprefix(own) if finding.message.startswith(own) else f"{finding.where}: {finding.message}"
    )


def _weights_of_artifact(checkpoint: Checkpoint) -> tuple[int, dict[str, list[str]]]:
    """Return how many quantized layers the IR holds as codes, and the others by the reason why not."""
    model = import_checkpoint(checkpoint, check_weights=False)
    floats: dict[str, list[str]] = {}
    for name, reason in (DEQUANTIZED.find(model) or {}).items():
        floats.setdefault(reason, []).append(name)
    kept = sum(f"{name}.q" in model.graph.initializers for name in checkpoint.encoded)
    return kept, floats


def _recipe(source: Path, kept: int, floats: Mapping[str, Sequence[str]]) -> str:
    changed = sum(map(len, floats.values()))
    summary = f"{kept} weights keep their codes" if kept else "weights as they are"
    summary += f", {changed} become 32-bit floats" if changed else ""
    return (
        f"# {source.name}, written by ingot import: {summary}.\n"
        "# Build it:  ingot build recipe.yaml --set evaluation.text=TEXT\n"
        "extends: fp32-cpu\n"
        f"description: {json.dumps(f'{source.name}, {summary}')}\n"
        "checkpoint: .\n"
    )
