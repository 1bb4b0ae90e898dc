"""Taking over a foreign checkpoint: looked through, written anew in one canonical form, proven, and ready to build.

    nothing quantized                 plain safetensors, every tensor in its own type
    quantized                         compressed-tensors with the same codes; layers that it cannot hold as float32

Recipes read foreign checkpoints as they are, so this is no step that a build needs. It leaves out what Ingot does not
read (indexes, shards, other layouts of the same codes), finds what is wrong before anything is built, and says what the
artifact will hold.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.lint import Finding, lint_checkpoint
from ingot.pipeline.interchange.transcode import Transcoded, transcode
from ingot.pipeline.model.importer import import_checkpoint

RECIPE = "recipe.yaml"
_SHOWN = 5


@dataclass(frozen=True)
class Imported:
    """What was taken over.

    transcoded    the folder with its proof
    warnings      what looks wrong, but does not stop a build
    kept          quantized layers whose codes an artifact holds as they are
    floats        reason -> quantized layers that an artifact holds as 32-bit floats
    recipe        text of the recipe that stands in the folder
    """

    transcoded: Transcoded
    warnings: Sequence[Finding]
    kept: int
    floats: Mapping[str, Sequence[str]]
    recipe: str


def import_foreign(source: Path, folder: Path) -> Imported:
    """Write the checkpoint `source` to the new folder `folder` in its canonical form, with a recipe that builds it.

    Raises CheckpointError with everything that is wrong with the source, or with what its model has that Ingot does not
    build; UsageError when the folder is there already. Nothing is written then.
    """
    findings = lint_checkpoint(source)
    wrong = [finding for finding in findings if finding.severity == "error"]
    if wrong:
        raise CheckpointError(_told(source, wrong))
    checkpoint = Checkpoint.open(source)
    kept, floats = _in_the_ir(checkpoint)
    target = "compressed-tensors" if _has_codes(checkpoint, floats) else "safetensors"
    outcome = transcode(source, folder, target, floats=True)
    recipe = _recipe(source, kept, floats)
    (folder / RECIPE).write_text(recipe, encoding="utf-8")
    return Imported(outcome, findings, kept, floats, recipe)


def _problem(source: Path, finding: Finding) -> str:
    """A finding behind the source's path, which its message may begin with."""
    own = f"{source}: "
    return (
        finding.message.removeprefix(own) if finding.message.startswith(own) else f"{finding.where}: {finding.message}"
    )


def _told(source: Path, wrong: Sequence[Finding]) -> str:
    shown = "; ".join(_problem(source, finding) for finding in wrong[:_SHOWN])
    more = f"; and {len(wrong) - _SHOWN} more (ingot lint-checkpoint lists them)" if len(wrong) > _SHOWN else ""
    return f"{source}: {shown}{more}. Take another checkpoint, or mend this one"


def _in_the_ir(checkpoint: Checkpoint) -> tuple[int, dict[str, list[str]]]:
    model = import_checkpoint(checkpoint, check_weights=False)
    floats: dict[str, list[str]] = {}
    for name, reason in json.loads(model.metadata_props.get("ingot.dequantized", "{}")).items():
        floats.setdefault(reason, []).append(name)
    kept = sum(f"{name}.q" in model.graph.initializers for name in checkpoint.encoded)
    return kept, floats


def _has_codes(checkpoint: Checkpoint, floats: Mapping[str, Sequence[str]]) -> bool:
    """Whether compressed-tensors holds a layer in codes: one that the IR does, or fp8, or in activation order."""
    minima = {name for reason, names in floats.items() if "minima" in reason for name in names}
    tables = {"model.embed_tokens.weight"}
    plain = {name for name, tensor in checkpoint.encoded.items() if tensor.storage in ("F32", "F16", "BF16")}
    return bool(set(checkpoint.encoded) - minima - tables - plain)


def _recipe(source: Path, kept: int, floats: Mapping[str, Sequence[str]]) -> str:
    changed = sum(map(len, floats.values()))
    told = f"{kept} weights keep their codes" if kept else "weights as they are"
    told += f", {changed} become 32-bit floats" if changed else ""
    return (
        f"# {source.name}, taken over by ingot import: {told}.\n"
        "# Build it:  ingot build recipe.yaml --set evaluation.text=TEXT\n"
        "extends: fp32-cpu\n"
        f"description: {json.dumps(f'{source.name}, {told}')}\n"
        "checkpoint: .\n"
    )
