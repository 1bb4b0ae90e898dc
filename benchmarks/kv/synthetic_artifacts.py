"""Artifacts of a given shape with random weights and long contexts, for benchmarks of time alone."""

import hashlib
from pathlib import Path

from benchmarks.hybrids import HybridShape
from benchmarks.paths import ROOT
from benchmarks.shapes import ModelShape
from benchmarks.synthetic import write_checkpoint
from ingot.artifact import Artifact, open_artifact
from ingot.builder import build
from ingot.pipeline.calibrate.journal import code_digest
from ingot.pipeline.compile import tool_versions
from ingot.pipeline.recipe.load import load_recipe

WORK_FOLDER = ROOT / "artifacts" / "synthetic"  # ignored by git


def synthetic_artifact(
    shape: ModelShape | HybridShape,
    recipe: str,
    *,
    context_tokens: int,
    folder: Path = WORK_FOLDER,
    overrides: tuple[str, ...] = (),
) -> Artifact:
    """The artifact of a shape, built without evidence if `folder` has none by this recipe, compiler and versions."""
    checkpoint = folder / f"{shape.name}-{context_tokens}"
    overrides = (f"checkpoint={checkpoint}", *overrides)
    resolved = load_recipe(recipe, overrides)
    program = f"{shape}{resolved.resolved_yaml()}{code_digest()}{tool_versions()}"
    output = folder / f"{checkpoint.name}-{recipe}-{hashlib.sha256(program.encode()).hexdigest()[:12]}"
    if not output.is_dir():
        write_checkpoint(shape, checkpoint, context_tokens=context_tokens)
        build(recipe, overrides, output=output)
    return open_artifact(output, verify=False)
