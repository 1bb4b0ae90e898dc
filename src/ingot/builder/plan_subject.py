"""Reads what `ingot plan` is about: an artifact, a recipe, a checkpoint or a bare config.json, as sizes and shapes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.programs.expert_choices import read_expert_choices
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.stage_checks import read_stages
from ingot.artifact.programs.stages import DEVICE_WEIGHTS_FILE, GPU, STAGES_FILE, STREAMED_WEIGHTS_FILE
from ingot.errors import UsageError
from ingot.passes.manager import weight_bytes
from ingot.passes.model_facts import DTYPE, KV, MODEL
from ingot.passes.pruning.prune_structure import PruneStructure
from ingot.pipeline.checkpoint.hollow import hollow_checkpoint
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.planned_program import model_shape, plan_program
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cpu.place_stages import cut_parts, part_of, placed_shapes
from ingot.pipeline.targets.recurrent_layers import with_states
from ingot.planning.memory import DevicePart, ProgramMemory
from ingot.planning.plan import PlannedModel
from ingot.runtime.cpu.limits import MAX_SEQUENCES
from ingot.runtime.cuda.loading import GRAPH_CAPTURES

_STEP_TOKENS, _STEP_SEQUENCES = 2048, 256
_CONFIG = "config.json"


def read_subject(
    what: str, recipe: str | None = None, overrides: Sequence[str] = (), *, on_cpu: bool = False
) -> PlannedModel:
    """Read the sizes of WHAT: an artifact, a recipe with a checkpoint, or a checkpoint or config.json.

    recipe     name or file of the recipe that the checkpoint would be built with; None: as the checkpoint stores it
    on_cpu     where the model runs, if no recipe says so

    Raises UsageError, ConfigError, CheckpointError or RecipeError for what cannot be read.
    """
    place = Path(what).expanduser()
    if (place / "manifest.json").is_file():
        if recipe:
            raise UsageError(f"{what} is an artifact, whose recipe is sealed: leave out --recipe")
        return _artifact(open_artifact(place, verify=False))
    if place.suffix == ".json" or place.suffix == ".gguf" or (place / _CONFIG).is_file() or place.is_dir():
        with _opened(place) as source:
            return _planned(what, recipe, overrides, source) if recipe else _as_stored(what, source, on_cpu)
    found = load_recipe(what, overrides)
    if found.checkpoint is None:
        raise UsageError(
            f"recipe {found.name} names no checkpoint: give --checkpoint, a folder or a config.json, or name that and"
            f" --recipe {what}"
        )
    with _opened(Path(found.require_checkpoint())) as source:
        return _of_recipe(found.name, found, source)


@contextmanager
def _opened(place: Path) -> Iterator[ModelSource]:
    """A checkpoint, or the tensors that a config.json without weights describes."""
    config = place if place.suffix == ".json" else place / _CONFIG
    has_weights = place.is_dir() and any(place.glob("*.safetensors"))
    if place.suffix == ".gguf" or has_weights or not config.is_file():
        yield ModelSource.open(place)
        return
    with hollow_checkpoint(config) as checkpoint:
        yield ModelSource(checkpoint)


def _planned(what: str, recipe: str, overrides: Sequence[str], source: ModelSource) -> PlannedModel:
    found = load_recipe(recipe, [f"checkpoint={source.checkpoint.path}", *overrides])
    return _of_recipe(f"{what} by {found.name}", found, source)


def _of_recipe(name: str, recipe: Recipe, source: ModelSource) -> PlannedModel:
    source = ModelSource(source.checkpoint, recipe.context_tokens)
    program = plan_program(recipe, source)
    left_out = f"; passes that change no size are left out: {', '.join(program.left_out)}" if program.left_out else ""
    words = f"the program that the recipe makes for {program.target.name}, without its weights{left_out}"
    return PlannedModel(name, program.model, program.shape, program.memory, words, program.placed)


def _as_stored(what: str, source: ModelSource, on_cpu: bool) -> PlannedModel:
    """Weights in the checkpoint's own types, and KV in its 16-bit type."""
    model = source.copy()
    kv = KV.of(model).model_copy(update={"dtype": DTYPE.of(model)})
    KV.record(model, kv)
    shape = replace(model_shape(model), kv=with_states(kv, model.graph))
    memory = ProgramMemory(weight_bytes(model), 0, _STEP_TOKENS, MAX_SEQUENCES if on_cpu else _STEP_SEQUENCES, on_cpu)
    words = (
        f"the checkpoint's own types, KV in {kv.dtype}; no recipe plans an arena: give --recipe for a program's sizes"
    )
    return PlannedModel(what, MODEL.of(model), shape, memory, words)


def _artifact(artifact: Artifact) -> PlannedModel:
    """Sizes of the sealed files; shapes of the matmuls by the sealed recipe and configuration."""
    manifest = artifact.manifest
    sealed = load_recipe(artifact.path / "recipe.yaml", [f"checkpoint={artifact.path / 'tokenizer'}"])
    # Pruned shapes are those of the sealed configuration already.
    passes = [entry for entry, made in zip(sealed.passes, sealed.make_passes(), strict=True) if not _prunes(made)]
    recipe = sealed.model_copy(update={"passes": tuple(passes), "place": None})  # its stages are sealed too
    with hollow_checkpoint(artifact.path / "tokenizer" / _CONFIG) as checkpoint:
        program = plan_program(recipe, ModelSource(checkpoint, manifest.model.context_tokens))
    choices = read_expert_choices(artifact)
    shape = replace(program.shape, kv=manifest.kv, measured_reach=choices.reach if choices else ())
    counted = f"; experts that rows reach as counted on {choices}" if choices else ""
    memory = _sealed_memory(artifact, program.memory)
    placed = placed_shapes(read_stages(artifact), recipe, shape) if artifact.has(STAGES_FILE) else ()
    return PlannedModel(manifest.name, manifest.model, shape, memory, f"the sealed files{counted}", placed)


def _prunes(made: object) -> bool:
    return isinstance(made, PruneStructure)


def _sealed_memory(artifact: Artifact, planned: ProgramMemory) -> ProgramMemory:
    """Replace planned sizes by those of the program's files."""
    manifest = artifact.manifest
    files = {name: entry.bytes for name, entry in manifest.files.items() if name.startswith("program/")}
    weights = files.get("program/weights.safetensors", sum(files.values()))
    if manifest.engine == "native":
        tokens = manifest.max_batch_tokens
        parts = cut_parts(read_stages(artifact), tokens) if artifact.has(STAGES_FILE) else ()
        arena = sum(part.arena for part in parts) if parts else read_operations(artifact).arena_floats * 4 * tokens
        return replace(planned, weight_bytes=weights, arena_bytes=arena, max_batch_tokens=tokens, parts=parts)
    if manifest.on_cpu:
        return replace(planned, weight_bytes=weights, max_batch_tokens=manifest.max_batch_tokens)
    program = read_launches(artifact)
    nodes = sum(len(one.launches) + len(one.samplers) for one in program.programs)
    arena = max(one.arena_bytes for one in program.programs)
    placed: tuple[DevicePart, ...] = ()
    if artifact.has(STAGES_FILE):
        tokens = max(one.rows for one in program.programs)
        of_gpu = DevicePart.of(GPU, files[DEVICE_WEIGHTS_FILE], arena, program.kv, program.context_tokens)
        host = read_stages(artifact).on_host
        of_host = part_of(host.name, host.program, tokens)
        placed = (of_gpu, replace(of_host, weights=of_host.weights + files.get(STREAMED_WEIGHTS_FILE, 0)))
        weights, arena = sum(part.weights for part in placed), sum(part.arena for part in placed)
    return replace(planned, weight_bytes=weights, arena_bytes=arena, graph_nodes=GRAPH_CAPTURES * nodes, parts=placed)
