"""Writes program/ of an artifact for Ingot's own CPU engine: the operations, and the packed weights."""

from pathlib import Path

import onnx_ir as ir

from ingot.artifact import Program
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, WEIGHTS_FILE
from ingot.artifact.writer import explain_full_disk
from ingot.passes.model_facts import KV
from ingot.pipeline.checkpoint.safetensors_writer import stream_weights
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cpu.lowering import Lowered, lower_to_operations, weight_bytes
from ingot.pipeline.targets.table import Target
from ingot.pipeline.targets.writers import Written, kv_geometry


def write_cpu_program(model: ir.Model, folder: Path, recipe: Recipe, target: Target) -> Written:
    """Lower the model and write its program. See `ProgramWriter`."""
    KV.record(model, kv_geometry(model, recipe))
    lowered = lower_to_operations(model, recipe.cpu.attention)
    write_lowered(lowered, folder)
    sizes = weight_bytes(list(lowered.stored.values()))
    return Written(Program(launches=OPERATIONS_FILE), lowered.program.kv, weight_bytes=sizes)


def write_lowered(lowered: Lowered, folder: Path) -> None:
    """Write folder/program: one weight in memory at a time."""
    (folder / "program").mkdir(parents=True, exist_ok=True)
    file, text = folder / OPERATIONS_FILE, lowered.program.model_dump_json()
    with explain_full_disk(file, "the operations", len(text)):
        file.write_text(text, encoding="utf-8")
    read = set(lowered.program.tensors())
    matrices = {name: ("u8", stored.pack) for name, stored in lowered.stored.items()}
    vectors = {name: ("fp32", make) for name, make in lowered.vectors.items() if name in read}
    stream_weights(folder / WEIGHTS_FILE, {**matrices, **vectors})
