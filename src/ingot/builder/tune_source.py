"""The program that is tuned: an artifact's, or what a recipe would build, without its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ingot.artifact import MANIFEST, ModelFacts, open_artifact
from ingot.artifact.launch_program import CudaProgram, read_cuda_program
from ingot.errors import UsageError
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.compile import import_and_pass
from ingot.pipeline.cuda.cuda_writer import lower_by_recipe
from ingot.pipeline.cuda.tiles import TileTable
from ingot.pipeline.recipe import Recipe
from ingot.pipeline.recipe_loader import load_recipe
from ingot.pipeline.targets import get_target
from ingot.progress import Progress

_ADVICE = "only programs for a card (targets cuda-smXX) have tiles to tune"


@dataclass(frozen=True)
class TuneSource:
    """Where a program comes from: an artifact that holds it, or a recipe that it would be built by."""

    sms: tuple[int, ...]
    program: Callable[[Progress], CudaProgram]

    @classmethod
    def of(cls, source: str, overrides: tuple[str, ...] = ()) -> "TuneSource":
        """An artifact's folder, or a recipe by name or file.

        UsageError for what has no products of ours, and for overrides of an artifact. The recipe's passes run when
        its program is asked for.
        """
        if not (Path(source) / MANIFEST).is_file():
            recipe = load_recipe(source, overrides)
            target = get_target(recipe.target)
            if not target.name.startswith("cuda-"):
                raise UsageError(f"recipe {recipe.name} is for the target {target.name}; {_ADVICE}")
            return cls(target.sms, partial(_of_recipe, recipe))
        if overrides:
            raise UsageError(f"{source} is an artifact, which is built already; --set is for recipes")
        artifact = open_artifact(source, verify=False)
        if artifact.manifest.program.launches is None:
            raise UsageError(f"{source}: is for the target {artifact.manifest.target}; {_ADVICE}")
        program = read_cuda_program(artifact.file(artifact.manifest.program.launches))
        return cls(program.sms, lambda _: program)


def _of_recipe(recipe: Recipe, progress: Progress) -> CudaProgram:
    """Passes and lowering as in a build; nothing is compiled or written."""
    target = get_target(recipe.target)
    model, _records = import_and_pass(recipe, Checkpoint.open(recipe.require_checkpoint()), progress=progress)
    facts = ModelFacts.model_validate_json(model.metadata_props["ingot.model"])
    return lower_by_recipe(model, recipe, TileTable(sm=target.sms[0])).cuda_program(facts, target.sms, {})
