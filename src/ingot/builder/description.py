"""What a compiled recipe's manifest says, of the candidate and of the baseline alike."""

from ingot.artifact import ArtifactWriter, GateOutcome, Manifest
from ingot.pipeline.compile import Compiled, tool_versions
from ingot.pipeline.recipe import Recipe


def describe_artifact(
    writer: ArtifactWriter, recipe: Recipe, compiled: Compiled, gates: tuple[GateOutcome, ...] = ()
) -> Manifest:
    """Write the manifest over what lies in the staging folder. May be called again as files come."""
    return writer.describe(
        name=recipe.name,
        model=compiled.model,
        kv=compiled.kv,
        target=compiled.target.name,
        engine=compiled.target.engine,
        program=compiled.program,
        versions=tool_versions(compiled.tools),
        max_batch_tokens=recipe.engine.max_batch_tokens,
        gates=gates,
    )
