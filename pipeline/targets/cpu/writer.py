"""Writes program/ of an artifact for Ingot's own CPU engine: the operations, and the packed weights."""

from pathlib import Path

import onnx_ir as ir
from pydantic import BaseModel

from ingot.artifact import Program
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, WEIGHTS_FILE, CpuProgram
from ingot.artifact.programs.draft_head import DRAFT_HEAD_FILE
from ingot.artifact.programs.stages import STAGES_FILE, StagePlan
from ingot.artifact.writer import explain_full_disk
from ingot.errors import PassError
from ingot.passes.model_facts import EXPERT_CHOICES, KV
from ingot.pipeline.checkpoint.safetensors_writer import stream_weights
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cpu.draft_head import HeadModel, LoweredHead, lower_head
from ingot.pipeline.targets.cpu.lowering import Lowered, lower_to_operations, weight_bytes
from ingot.pipeline.targets.cpu.place_stages import place_program
from ingot.pipeline.targets.table import Target
from ingot.pipeline.targets.writers import Written, kv_geometry
from ingot.progress import note


def write_cpu_program(
    model: ir.Model, folder: Path, recipe: Recipe, target: Target, head: HeadModel | None = None
) -> Written:
    """Lower the model, and the draft head that it may have, and write their programs. See `ProgramWriter`."""
    KV.record(model, kv_geometry(model, recipe))
    lowered = lower_to_operations(model, recipe.cpu.attention)
    plan = None if recipe.place is None else place_program(lowered.program, recipe, choices=EXPERT_CHOICES.find(model))
    write_lowered(lowered, folder, _lowered_head(model, head, recipe) if head else None)
    if plan is not None:
        _write_operations(folder / STAGES_FILE, plan)
    sizes = weight_bytes(list(lowered.stored.values()))
    return Written(Program(launches=OPERATIONS_FILE), lowered.program.kv, weight_bytes=sizes)


def _lowered_head(model: ir.Model, head: HeadModel, recipe: Recipe) -> LoweredHead | None:
    """The head's programs; None, with a note, where passes left a model that it does not fit."""
    KV.record(head.model, kv_geometry(head.model, recipe))
    try:
        return lower_head(model, head, recipe.cpu.attention)
    except PassError as error:
        note(f"the MTP layer is left out: {error}")
        return None


def write_lowered(lowered: Lowered, folder: Path, head: LoweredHead | None = None) -> None:
    """Write folder/program: one weight in memory at a time."""
    (folder / "program").mkdir(parents=True, exist_ok=True)
    _write_operations(folder / OPERATIONS_FILE, lowered.program)
    _write_weights(lowered, lowered.program, folder, head)


def write_stage(lowered: Lowered, stage: CpuProgram, plan: StagePlan, folder: Path) -> None:
    """Write folder/program of a model that another kind of device has the rest of: the weights of one stage."""
    (folder / "program").mkdir(parents=True, exist_ok=True)
    _write_operations(folder / OPERATIONS_FILE, lowered.program)
    _write_operations(folder / STAGES_FILE, plan)
    _write_weights(lowered, stage, folder)


def _write_weights(lowered: Lowered, program: CpuProgram, folder: Path, head: LoweredHead | None = None) -> None:
    stored = {name: matrix for name, matrix in lowered.stored.items() if name in program.matrices}
    made, read = lowered.vectors, set(program.tensors())
    if head is not None:
        _write_operations(folder / DRAFT_HEAD_FILE, head.programs)
        stored, made = {**head.weights.stored, **stored}, {**head.weights.vectors, **made}
        read |= {*head.programs.model.tensors(), *head.programs.head.tensors()}
    matrices = {name: ("u8", matrix.pack) for name, matrix in stored.items()}
    vectors = {name: ("fp32", make) for name, make in made.items() if name in read}
    stream_weights(folder / WEIGHTS_FILE, {**matrices, **vectors})


def _write_operations(file: Path, program: BaseModel) -> None:
    text = program.model_dump_json()
    with explain_full_disk(file, "the operations", len(text)):
        file.write_text(text, encoding="utf-8")
