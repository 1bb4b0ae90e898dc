"""Writes program/ of an artifact with TensorRT plans: plans, launches, cubins for each SM, and the weights.

    program/segment-000.plan ...        segments between attentions, for all SMs at once
    program/plans.json                  facts of each plan: SMs, bytes, operators of every profile
    program/launches.json, cubins-smXX.safetensors, weights.safetensors        as of the targets cuda-smXX

Two builds of a plan usually give the same bytes; in about one of ten TensorRT writes a segment's outputs in another
order (docs/log.md). A plan from the cache always has the same bytes.
"""

import json
from functools import partial
from pathlib import Path

import onnx_ir as ir

from ingot.artifact import Program
from ingot.artifact.programs.launch_program import LAUNCHES_FILE
from ingot.artifact.programs.plan_facts import PLANS_FILE, PlanFacts, ProgramPlans
from ingot.errors import UsageError
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches
from ingot.pipeline.targets.cuda.program_builder import Shared
from ingot.pipeline.targets.cuda.writer import TOOLS, activation_type, recipe_buckets, recipe_tiles, write_lowered
from ingot.pipeline.targets.segments.segment_calls import SegmentFile, lower_to_calls
from ingot.pipeline.targets.segments.stages import SegmentStage, split_stages
from ingot.pipeline.targets.table import Target
from ingot.pipeline.targets.tensorrt.library import load_library
from ingot.pipeline.targets.tensorrt.plan_builder import PlanCache
from ingot.pipeline.targets.tensorrt.plan_settings import (
    PlanSettings,
    bucket_profiles,
    profile_number,
    segment_profiles,
)
from ingot.pipeline.targets.tensorrt.plans import SegmentPlan, write_plans
from ingot.pipeline.targets.tensorrt.segment_lowering import is_kernel, lower_segment, pack_attention_operands
from ingot.pipeline.targets.writers import Written, kv_geometry


def write_tensorrt_program(model: ir.Model, folder: Path, recipe: Recipe, target: Target) -> Written:
    """Write a program for the SMs of the recipe's gpu.sms. See `ProgramWriter`."""
    library, sms, compute = load_library(), recipe.gpu.sms, activation_type(model, recipe)
    if compute == "fp32":
        raise UsageError(f"target {target.name} computes in 16 bits; set gpu.activations to float16 or bfloat16")
    pack_attention_operands(model.graph)
    stages = split_stages(model.graph, is_kernel)
    segments = [lower_segment(stage, compute) for stage in stages if isinstance(stage, SegmentStage)]
    buckets, tiles = recipe_buckets(model, recipe), recipe_tiles(recipe, sms)
    profiles = bucket_profiles(buckets)
    plans = write_plans(segments, PlanSettings(library, sms, profiles, PlanCache()), folder)
    _write_facts(plans, folder)
    files = [
        SegmentFile(segment, "tensorrt", plan.facts.file, partial(profile_number, segment_profiles(profiles, segment)))
        for segment, plan in zip(segments, plans, strict=True)
    ]
    shared = Shared.of(compute, kv_geometry(model, recipe), tiles)
    lowered = LoweredLaunches(lower_to_calls(model, stages, files, buckets, shared), shared)
    write_lowered(lowered, model, folder, sms, tiles, recipe.threads)
    return Written(Program(launches=LAUNCHES_FILE), shared.kv, (*TOOLS, library.name))


def _write_facts(plans: list[SegmentPlan], folder: Path) -> None:
    distinct: dict[str, PlanFacts] = {plan.facts.file: plan.facts for plan in plans}
    facts = ProgramPlans(plans=tuple(distinct.values()))
    text = json.dumps(facts.model_dump(mode="json"), indent=1)
    (folder / PLANS_FILE).write_text(f"{text}\n", encoding="utf-8")
