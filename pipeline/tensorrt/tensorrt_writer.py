"""IR -> program/ of an artifact with TensorRT plans: plans, launches, a table of cubins for each SM, and the weights.

    program/segment-000.plan ...        segments between attentions, for all SMs at once
    program/plans.json                  what each plan holds: SMs, bytes, operators of every profile
    program/launches.json, cubins-smXX.safetensors, weights.safetensors        as of the targets cuda-smXX

Plans built in processes of their own are the same, byte for byte, in most builds; in one of ten or so TensorRT writes a
segment's outputs in another order (docs/log.md). What comes from the cache is always the same.
"""

import json
from pathlib import Path

import onnx_ir as ir

from ingot.artifact import Program
from ingot.artifact.launch_program import LAUNCHES_FILE
from ingot.artifact.plan_facts import PLANS_FILE, PlanFacts, ProgramPlans
from ingot.errors import UsageError
from ingot.pipeline.cuda.cuda_writer import activation_type, recipe_buckets, recipe_tiles, write_lowered
from ingot.pipeline.cuda.lowering import Lowered
from ingot.pipeline.cuda.program_builder import Shared
from ingot.pipeline.program_writers import Written, kv_geometry
from ingot.pipeline.recipe import Recipe
from ingot.pipeline.targets import Target
from ingot.pipeline.tensorrt.library import load_library
from ingot.pipeline.tensorrt.lowering import lower_to_calls, stage_files
from ingot.pipeline.tensorrt.pack_attention import pack_attention_operands
from ingot.pipeline.tensorrt.plan_cache import PlanCache
from ingot.pipeline.tensorrt.profiles import bucket_profiles
from ingot.pipeline.tensorrt.segment_lowering import lower_segment
from ingot.pipeline.tensorrt.segment_plans import PlanSettings, SegmentPlan, write_plans
from ingot.pipeline.tensorrt.stages import SegmentStage, split_stages
from ingot.progress import Progress

TOOLS = ("triton",)


def write_tensorrt_program(
    model: ir.Model, folder: Path, recipe: Recipe, target: Target, progress: Progress
) -> Written:
    """A program for the SMs of the recipe's gpu.sms. See `program_writers.ProgramWriter`."""
    library, sms, compute = load_library(), recipe.gpu.sms, activation_type(model, recipe)
    if compute == "fp32":
        raise UsageError(f"target {target.name} computes in 16 bits; set gpu.activations to float16 or bfloat16")
    pack_attention_operands(model.graph)
    stages = split_stages(model.graph)
    segments = [lower_segment(stage, compute) for stage in stages if isinstance(stage, SegmentStage)]
    buckets, tiles = recipe_buckets(model, recipe), recipe_tiles(recipe, sms)
    settings = PlanSettings(library, sms, bucket_profiles(buckets), PlanCache())
    plans = write_plans(segments, settings, folder, progress)
    _write_facts(plans, folder)
    shared = Shared.of(compute, kv_geometry(model, recipe), tiles)
    with_files = stage_files(stages, segments, [plan.facts.file for plan in plans])
    lowered = Lowered(lower_to_calls(model, with_files, buckets, shared), shared)
    write_lowered(lowered, model, folder, sms, tiles, recipe.threads, progress)
    return Written(Program(launches=LAUNCHES_FILE), shared.kv, (*TOOLS, library.name))


def _write_facts(plans: list[SegmentPlan], folder: Path) -> None:
    distinct: dict[str, PlanFacts] = {plan.facts.file: plan.facts for plan in plans}
    facts = ProgramPlans(plans=tuple(distinct.values()))
    text = json.dumps(facts.model_dump(mode="json"), indent=1)
    (folder / PLANS_FILE).write_text(f"{text}\n", encoding="utf-8")
