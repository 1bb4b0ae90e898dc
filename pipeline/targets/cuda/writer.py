"""Writes program/ of an artifact for a GPU: the launches, the cubins for each SM, and the weights."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ingot.artifact import Program
from ingot.artifact.programs.launch_program import (
    LAUNCHES_FILE,
    TILES_FILE,
    WEIGHTS_FILE,
    ActivationType,
    CubinFacts,
    cubins_file,
)
from ingot.artifact.programs.stages import STREAMED_WEIGHTS_FILE
from ingot.artifact.writer import explain_full_disk
from ingot.passes.model_facts import DTYPE, KV, MODEL
from ingot.pipeline.checkpoint.safetensors_writer import arrays_as_safetensors, stream_weights
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.cubins import compile_kernels, require_shared_memory
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches, StreamedExperts, lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket, Shared
from ingot.pipeline.targets.cuda.tiles import TileTable, read_tile_table
from ingot.pipeline.targets.table import Target
from ingot.pipeline.targets.writers import Written, kv_geometry

TOOLS = ("triton",)
_TYPES: dict[str, ActivationType] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def write_cuda_program(model: ir.Model, folder: Path, recipe: Recipe, target: Target) -> Written:
    """Write a program for the target's SM. See `ProgramWriter`."""
    tiles = recipe_tiles(recipe, target.sms)
    lowered = lower_by_recipe(model, recipe, tiles)
    write_lowered(lowered, model, folder, target.sms, tiles, recipe.threads)
    return Written(Program(launches=LAUNCHES_FILE), lowered.shared.kv, TOOLS)


def lower_by_recipe(model: ir.Model, recipe: Recipe, tiles: TileTable) -> LoweredLaunches:
    """Return the programs of the recipe's buckets, with KV blocks of the recipe's size."""
    KV.record(model, kv_geometry(model, recipe))
    return lower_launches(model, recipe, tiles)


def lower_launches(
    model: ir.Model, recipe: Recipe, tiles: TileTable, streamed: StreamedExperts | None = None
) -> LoweredLaunches:
    """Return the programs of the recipe's buckets, with the model's own KV blocks."""
    buckets, compute = recipe_buckets(model, recipe), activation_type(model, recipe)
    flags = {
        "batch_invariant": recipe.gpu.batch_invariant,
        "dependent": recipe.gpu.dependent_launches,
        "specialized": recipe.gpu.specialized_attention,
        "adapters": recipe.gpu.adapters,
    }
    return lower_to_launches(model, buckets, compute, tiles, **flags, streamed=streamed)


def recipe_tiles(recipe: Recipe, sms: tuple[int, ...]) -> TileTable:
    """Return the recipe's tile table, or an empty one."""
    file = recipe.tile_table()
    table = read_tile_table(file, sms) if file else TileTable(sm=sms[0] if len(sms) == 1 else None)
    return table.model_copy(update={"specialized": recipe.gpu.specialized_matmuls})


def recipe_buckets(model: ir.Model, recipe: Recipe) -> tuple[Bucket, ...]:
    """Return the recipe's buckets: decode first, each kind by rows; batch-invariant ones are all ragged."""
    context_tokens = MODEL.of(model).context_tokens
    decode = recipe.gpu.decode_rows
    ragged = recipe.gpu.ragged_rows(recipe.engine.max_batch_tokens)
    if recipe.gpu.batch_invariant:
        most = ragged[-1]  # tokens of a step
        rows = sorted({*(rows for rows in decode if rows <= most), *ragged})
        return tuple(Bucket.ragged(rows, context_tokens, decode[-1]) for rows in rows)
    return (
        *(Bucket.decode(rows, context_tokens) for rows in decode),
        *(Bucket.ragged(rows, context_tokens, decode[-1]) for rows in ragged),
    )


def activation_type(model: ir.Model, recipe: Recipe) -> ActivationType:
    """Return the type of the activations: the recipe's, by default the checkpoint's."""
    wanted = recipe.gpu.activations
    return _TYPES[DTYPE.of(model) if wanted == "checkpoint" else wanted]


def write_lowered(
    lowered: LoweredLaunches,
    model: ir.Model,
    folder: Path,
    sms: Sequence[int],
    tiles: TileTable,
    workers: int | None,
    weights_file: str = WEIGHTS_FILE,
) -> None:
    """Write launches, cubins for every SM, and weights to folder/program."""
    (folder / "program").mkdir(parents=True, exist_ok=True)
    cubins = {sm: _write_cubins(lowered, folder, sm, workers) for sm in sms}
    facts = MODEL.of(model)
    program = lowered.cuda_program(facts, sms, cubins, tiles.device)
    file = folder / LAUNCHES_FILE
    text = json.dumps(program.model_dump(mode="json"), separators=(",", ":"))
    with explain_full_disk(file, "the launches", len(text)):
        file.write_text(text, encoding="utf-8")
    if tiles.choices:
        (folder / TILES_FILE).write_text(tiles.model_dump_json(indent=2) + "\n", encoding="utf-8")
    write_launch_weights(lowered.shared, folder, weights_file)


def write_launch_weights(shared: Shared, folder: Path, weights_file: str) -> None:
    """Write the weights of launches, and those of the host's that steps copy to the GPU, if there are any."""
    stream_weights(folder / weights_file, {name: (one.type, one.make) for name, one in shared.weights.items()})
    streamed = {name: ("u8", layer.content) for name, layer in shared.streamed.items()}
    if streamed:
        stream_weights(folder / STREAMED_WEIGHTS_FILE, streamed)


def _write_cubins(lowered: LoweredLaunches, folder: Path, sm: int, workers: int | None) -> dict[str, CubinFacts]:
    made = compile_kernels(lowered.shared.kernels, sm, workers)
    require_shared_memory(made, sm)
    file = folder / cubins_file(sm)
    content = arrays_as_safetensors({key: np.frombuffer(cubin.code, np.uint8) for key, cubin in made.items()})
    with explain_full_disk(file, "the cubins", len(content)):
        file.write_bytes(content)
    return {key: cubin.facts for key, cubin in made.items()}
