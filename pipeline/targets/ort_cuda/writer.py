"""Writes program/ of an artifact whose segments onnxruntime runs: ONNX files, launches, cubins, and the weights.

program/segment-000.onnx ...        segments between attentions, for any number of rows; layers of one structure
                                    share a file, because all weights are inputs
program/launches.json, cubins-smXX.safetensors, weights.safetensors        as of the targets cuda-smXX
"""

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from ingot.artifact import Program
from ingot.artifact.programs.launch_program import LAUNCHES_FILE, ActivationType
from ingot.artifact.writer import explain_full_disk
from ingot.passes.model_facts import KV
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches
from ingot.pipeline.targets.cuda.program_builder import Bucket, Shared
from ingot.pipeline.targets.cuda.tiles import TileTable
from ingot.pipeline.targets.cuda.writer import TOOLS, activation_type, recipe_buckets, recipe_tiles, write_lowered
from ingot.pipeline.targets.ort_cuda.segment_lowering import is_kernel, lower_ort_segment
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_calls import SegmentFile, lower_to_calls
from ingot.pipeline.targets.segments.stages import SegmentStage, split_stages
from ingot.pipeline.targets.table import Target
from ingot.pipeline.targets.writers import Written, kv_geometry


def write_ort_cuda_program(model: ir.Model, folder: Path, recipe: Recipe, target: Target) -> Written:
    """Write a program for the SMs of the recipe's gpu.sms. See `ProgramWriter`."""
    sms, tiles = recipe.gpu.sms, recipe_tiles(recipe, recipe.gpu.sms)
    KV.record(model, kv_geometry(model, recipe))
    lowered = lower_with_segments(model, folder, recipe_buckets(model, recipe), activation_type(model, recipe), tiles)
    write_lowered(lowered, model, folder, sms, tiles, recipe.threads)
    return Written(Program(launches=LAUNCHES_FILE), lowered.shared.kv, TOOLS)


def lower_with_segments(
    model: ir.Model, folder: Path, buckets: Sequence[Bucket], compute: ActivationType, tiles: TileTable
) -> LoweredLaunches:
    """Return the programs of all buckets, and write their segments below the folder.

    An unquantized KV pool gets the activations' type. PassError names a node that onnxruntime has no form for.
    """
    stages = split_stages(model.graph, is_kernel)
    segments = [lower_ort_segment(stage, compute) for stage in stages if isinstance(stage, SegmentStage)]
    names = write_segments(segments, folder)
    files = [SegmentFile(segment, "onnxruntime", name) for segment, name in zip(segments, names, strict=True)]
    geometry = KV.of(model)
    shared = Shared.of(compute, geometry, tiles)
    return LoweredLaunches(lower_to_calls(model, stages, files, buckets, shared), shared)


def write_segments(segments: Sequence[Segment], folder: Path) -> list[str]:
    """Write the models to folder/program and return the file of each. Equal models share one."""
    (folder / "program").mkdir(parents=True, exist_ok=True)
    files: dict[bytes, str] = {}
    return [_write(ir.to_proto(one.model).SerializeToString(deterministic=True), folder, files) for one in segments]


def _write(content: bytes, folder: Path, files: dict[bytes, str]) -> str:
    if content not in files:
        files[content] = f"program/segment-{len(files):03}.onnx"
        with explain_full_disk(folder / files[content], "a segment", len(content)):
            (folder / files[content]).write_bytes(content)
    return files[content]
