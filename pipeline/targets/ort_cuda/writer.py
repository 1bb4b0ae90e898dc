"""IR -> program/ of an artifact whose segments onnxruntime runs: ONNX files, launches, cubins, and the weights.

program/segment-000.onnx ...        segments between attentions, for any number of rows; layers of one structure
                                    share a file, as all weights are inputs
program/launches.json, cubins-smXX.safetensors, weights.safetensors        as of the targets cuda-smXX
"""

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from ingot.artifact import KVGeometry, Program
from ingot.artifact.launch_program import LAUNCHES_FILE
from ingot.artifact.writer import needing_room
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.lowering import Lowered
from ingot.pipeline.targets.cuda.program_builder import Bucket, Shared
from ingot.pipeline.targets.cuda.tiles import TileTable
from ingot.pipeline.targets.cuda.writer import activation_type, recipe_buckets, recipe_tiles, write_lowered
from ingot.pipeline.targets.ort_cuda.segment_lowering import lower_ort_segment
from ingot.pipeline.targets.segments.builder import Compute
from ingot.pipeline.targets.segments.launches import lower_to_calls, stage_files
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.stages import ATTENTION, SegmentStage, split_stages
from ingot.pipeline.targets.table import Target
from ingot.pipeline.targets.writers import Written, kv_geometry

TOOLS = ("triton",)


def write_ort_cuda_program(model: ir.Model, folder: Path, recipe: Recipe, target: Target) -> Written:
    """A program for the SMs of the recipe's gpu.sms. See `program_writers.ProgramWriter`."""
    sms, tiles = recipe.gpu.sms, recipe_tiles(recipe, recipe.gpu.sms)
    model.metadata_props["ingot.kv"] = kv_geometry(model, recipe).model_dump_json()
    buckets, compute = recipe_buckets(model, recipe), activation_type(model, recipe)
    lowered = lower_with_segments(model, folder, buckets, compute, tiles)
    write_lowered(lowered, model, folder, sms, tiles, recipe.threads)
    return Written(Program(launches=LAUNCHES_FILE), lowered.shared.kv, TOOLS)


def lower_with_segments(
    model: ir.Model, folder: Path, buckets: Sequence[Bucket], compute: Compute, tiles: TileTable
) -> Lowered:
    """The programs of all buckets, whose segments are written below the folder.

    The KV pool is in the activations' type where the model's is not quantized. PassError names a node that has no form.
    """
    stages = split_stages(model.graph, is_kernel)
    segments = [lower_ort_segment(stage, compute) for stage in stages if isinstance(stage, SegmentStage)]
    with_files = stage_files(stages, segments, write_segments(segments, folder))
    geometry = KVGeometry.model_validate_json(model.metadata_props["ingot.kv"])
    shared = Shared.of(compute, geometry, tiles)
    return Lowered(lower_to_calls(model, with_files, buckets, shared, "onnxruntime"), shared)


def is_kernel(node: ir.Node) -> bool:
    """Attention, and the look-up of rows that want logits, where a program's head begins."""
    indices = node.inputs[1] if node.op_type == "Gather" else None
    return node.op_type == ATTENTION or (indices is not None and indices.name == "logits_indices")


def write_segments(segments: Sequence[Segment], folder: Path) -> list[str]:
    """Write the models to folder/program; the file of each. Equal models share one."""
    (folder / "program").mkdir(parents=True, exist_ok=True)
    files: dict[bytes, str] = {}
    return [_write(ir.to_proto(one.model).SerializeToString(deterministic=True), folder, files) for one in segments]


def _write(content: bytes, folder: Path, files: dict[bytes, str]) -> str:
    if content not in files:
        files[content] = f"program/segment-{len(files):03}.onnx"
        with needing_room(folder / files[content], "a segment", len(content)):
            (folder / files[content]).write_bytes(content)
    return files[content]
