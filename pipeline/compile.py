"""The whole compile on one screen: checkpoint -> IR -> passes -> segments -> program on disk."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import onnx_ir as ir

from ingot.artifact import CALIBRATION_FILE, KVGeometry, ModelFacts, Program
from ingot.errors import UsageError
from ingot.passes.base import Pass
from ingot.passes.calibration import CALIBRATION_KEY, calibrate_with
from ingot.passes.manager import PassManager, PassRecord
from ingot.passes.registry import make_pass
from ingot.pipeline.calibrate import CalibrationEngine, open_journal, read_calibration_data
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.sealed import as_pruned, seal_checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.table import Target, get_target, require_kv_type
from ingot.pipeline.targets.writers import program_writer, require_packages

Observer = Callable[[ir.Model, PassRecord], None]
TOOLS = ("ingot", "numpy", "onnx", "onnx-ir", "onnxruntime", "safetensors", "tokenizers")


@dataclass(frozen=True)
class Compiled:
    """A program on disk and what its manifest will say of it."""

    model: ModelFacts
    kv: KVGeometry
    target: Target
    program: Program
    weight_bytes: Mapping[str, int]  # of the program, see Written
    tools: tuple[str, ...]  # packages that took part beside TOOLS
    passes: tuple[PassRecord, ...]
    facts: Mapping[str, str]  # the IR's metadata as the passes left it, quantization statistics among it


def compile_recipe(recipe: Recipe, folder: Path, observe: Observer | None = None) -> Compiled:
    """Compile the recipe's checkpoint into `folder`: program/, tokenizer/ and recipe.yaml, and calibration.json where a
    pass looked at data.

    `observe` is called after every pass with the IR as it then is. Raises CheckpointError, PassError or BuildError;
    the folder is the caller's to remove.
    """
    target = get_target(recipe.target)
    require_packages(target)
    checkpoint = Checkpoint.open(recipe.require_checkpoint())
    model, records = import_and_pass(recipe, checkpoint, observe)
    geometry = KVGeometry.model_validate_json(model.metadata_props["ingot.kv"])
    if geometry.is_quantized:
        require_kv_type(target, geometry.dtype)
    written = program_writer(target)(model, folder, recipe, target)
    seal_checkpoint(as_pruned(checkpoint, model), folder)
    (folder / "recipe.yaml").write_text(recipe.resolved_yaml(), encoding="utf-8")
    if CALIBRATION_KEY in model.metadata_props:
        facts = json.dumps(json.loads(model.metadata_props[CALIBRATION_KEY]), indent=2)
        (folder / CALIBRATION_FILE).write_text(f"{facts}\n", encoding="utf-8")
    return Compiled(
        model=ModelFacts.model_validate_json(model.metadata_props["ingot.model"]),
        kv=written.kv,
        target=target,
        program=written.program,
        weight_bytes=written.weight_bytes,
        tools=written.tools,
        passes=tuple(records),
        facts=dict(model.metadata_props),
    )


def import_and_pass(
    recipe: Recipe, checkpoint: Checkpoint, observe: Observer | None = None
) -> tuple[ir.Model, list[PassRecord]]:
    """The IR as the recipe's passes and its target's lowering leave it, and what each pass did."""
    model = import_checkpoint(checkpoint, recipe.context_tokens)
    passes = [*recipe.make_passes(), *map(make_pass, get_target(recipe.target).lowering)]
    with calibrate_with(calibration_engine(recipe, checkpoint, model, passes)):
        return model, PassManager(passes, observe).run(model)


def tool_versions(beside: Iterable[str] = ()) -> dict[str, str]:
    """Versions of all that took part in the build: TOOLS, and what else is named."""
    return {"python": python_version(), **{name: version(name) for name in (*TOOLS, *beside)}}


def calibration_engine(
    recipe: Recipe, checkpoint: Checkpoint, model: ir.Model, passes: Sequence[Pass]
) -> CalibrationEngine | None:
    """The service for passes that need one, on the recipe's data."""
    if recipe.calibration is None or not any(pass_.needs_calibration for pass_ in passes):
        return None
    options, facts = recipe.calibration, ModelFacts.model_validate_json(model.metadata_props["ingot.model"])
    if options.sequence_tokens > facts.context_tokens:
        raise UsageError(
            f"calibration.sequence_tokens is {options.sequence_tokens}; the model's context holds "
            f"{facts.context_tokens}: set it to that or less"
        )
    data = read_calibration_data(
        recipe.calibration_text(),
        checkpoint.folder,
        options.sequences,
        options.sequence_tokens,
        options.seed,
        facts.vocab_size,
        packing=options.packing,
        chat_template=options.chat_template,
        field=options.field,
    )
    start = partial(import_checkpoint, checkpoint, recipe.context_tokens, check_weights=False)
    journal = open_journal(checkpoint.digest, data, tool_versions())
    return CalibrationEngine(data, threads=recipe.threads, journal=journal, reference=start)
