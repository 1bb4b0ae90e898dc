"""The program that is tuned: an artifact's, or what a recipe would build, without its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ingot.artifact import MANIFEST, ModelFacts, open_artifact
from ingot.artifact.launch_program import CudaProgram, read_cuda_program
from ingot.errors import UsageError
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.progress import progress_to
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.compile import calibration_engine
from ingot.pipeline.cuda.cuda_writer import activation_type, recipe_buckets
from ingot.pipeline.cuda.lowering import lower_to_launches
from ingot.pipeline.cuda.program_builder import TILE_QUERIES
from ingot.pipeline.cuda.tiles import TileTable
from ingot.pipeline.importer import import_checkpoint
from ingot.pipeline.program_writers import kv_geometry
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
    checkpoint = Checkpoint.open(recipe.require_checkpoint())
    with progress_to(progress):
        model = import_checkpoint(checkpoint, recipe.context_tokens)
        passes = [*recipe.make_passes(), *map(make_pass, target.lowering)]
        with calibrate_with(calibration_engine(recipe, checkpoint, model, passes)):
            PassManager(passes).run(model)
    model.metadata_props["ingot.kv"] = kv_geometry(model, recipe).model_dump_json()
    tiles = TileTable(sm=target.sms[0])
    lowered = lower_to_launches(model, recipe_buckets(model, recipe), activation_type(model, recipe), tiles)
    facts = ModelFacts.model_validate_json(model.metadata_props["ingot.model"])
    return CudaProgram(
        sms=target.sms,
        activation_type=lowered.shared.activation_type,
        kv=lowered.shared.kv,
        vocab_size=facts.vocab_size,
        context_tokens=facts.context_tokens,
        tile_queries=TILE_QUERIES,
        kernels=lowered.shared.kernels,
        cubins={},
        programs=lowered.programs,
    )
