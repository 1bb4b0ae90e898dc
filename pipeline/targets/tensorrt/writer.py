"""Writes program/ of an artifact with TensorRT plans: plans, launches, cubins for each SM, and the weights.

    program/segment-000.plan ...        segments between attentions, for all SMs at once
    program/plans.json                  facts of each plan: SMs, bytes, operators of every profile
    program/launches.json, cubins-smXX.safetensors, weights.safetensors        as of the targets cuda-smXX

Two builds of a plan usually give the same bytes; in about one of ten TensorRT writes a segment's outputs in another
order (docs/log.md). A plan from the cache always has the same bytes.

Each segment is written as ONNX, its plan built or taken from the cache, checked, and copied into the program's folder.
Segments of one structure whose weights are inputs share a plan. A segment with int4 constants has a plan of its own,
and holds its weights in memory only while its ONNX is written.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir as ir

from ingot.artifact import Program
from ingot.artifact.programs.launch_program import LAUNCHES_FILE
from ingot.artifact.programs.plan_facts import PLANS_FILE, PlanFacts, ProgramPlans
from ingot.errors import BuildError, UsageError
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches
from ingot.pipeline.targets.cuda.program_builder import Shared
from ingot.pipeline.targets.cuda.writer import TOOLS, activation_type, recipe_buckets, recipe_tiles, write_lowered
from ingot.pipeline.targets.segments.onnx_files import write_model
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_calls import SegmentFile, lower_to_calls
from ingot.pipeline.targets.segments.split import WEIGHTS
from ingot.pipeline.targets.segments.stages import SegmentStage, split_stages
from ingot.pipeline.targets.table import Target
from ingot.pipeline.targets.tensorrt.library import load_library
from ingot.pipeline.targets.tensorrt.plan_builder import WORK, BuiltPlan, PlanCache, build_or_recall
from ingot.pipeline.targets.tensorrt.plan_report import check_plan
from ingot.pipeline.targets.tensorrt.plan_request import PlanRequest
from ingot.pipeline.targets.tensorrt.plan_settings import (
    PlanSettings,
    bucket_profiles,
    check_sms,
    profile_number,
    segment_profiles,
)
from ingot.pipeline.targets.tensorrt.segment_lowering import is_kernel, lower_segment, pack_attention_operands
from ingot.pipeline.targets.writers import Written, kv_geometry
from ingot.progress import report_progress


@dataclass(frozen=True)
class SegmentPlan:
    """A segment's plan, and the peak memory of the process that built it; None if it came from the cache."""

    facts: PlanFacts
    peak_bytes: int | None


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


ONNX = "segment.onnx"


def write_plans(segments: Sequence[Segment], settings: PlanSettings, folder: Path) -> list[SegmentPlan]:
    """Write the segments' plans to folder/program/segment-000.plan ...; return the plan of each segment.

    UsageError, before anything is built, for SMs without plans; BuildError names what TensorRT
    refuses, and a plan that check_plan refuses.
    """
    formats = frozenset().union(*(segment.number_formats for segment in segments))
    check_sms(settings.library, settings.sms, formats)
    groups = sharing_segments(segments)
    plans: dict[int, SegmentPlan] = {}
    for number, members in enumerate(groups):
        built = _write_plan(segments[members[0]], len(members), settings, folder, f"program/segment-{number:03}.plan")
        plans.update(dict.fromkeys(members, built))
        report_progress(WORK, number + 1, len(groups))
    return [plans[index] for index in range(len(segments))]


def plan_request(segment: Segment, folder: Path, settings: PlanSettings) -> PlanRequest:
    """Return the request for a segment whose ONNX is in the folder."""
    data = folder / WEIGHTS
    return PlanRequest(
        onnx=str(folder / ONNX),
        data=str(data) if segment.constant_bytes else None,
        rows=segment.rows,
        vectors=segment.vectors,
        profiles=segment_profiles(settings.profiles, segment),
        sms=settings.sms,
        library=settings.library.name,
        library_version=settings.library.version,
    )


def sharing_segments(segments: Sequence[Segment]) -> list[list[int]]:
    """Return the numbers of the segments that share each plan."""
    groups: dict[object, list[int]] = {}
    for index, segment in enumerate(segments):
        key = index if segment.constant_bytes else ir.to_proto(segment.model).SerializeToString(deterministic=True)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _write_plan(segment: Segment, sharers: int, settings: PlanSettings, folder: Path, file: str) -> SegmentPlan:
    with TemporaryDirectory(prefix="ingot-segment-") as scratch:
        write_model(segment.copied_model(), Path(scratch) / ONNX)  # a copy: writing points its weights to files
        request = plan_request(segment, Path(scratch), settings)
        try:
            built = build_or_recall(request, settings.cache)
            facts = _checked(built, request, settings.cache, file)
        except BuildError as error:
            raise BuildError(f"segment {segment.name!r}: {segment.with_original_layers(str(error))}") from error
    target = folder / file
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(built.file, target)
    return SegmentPlan(facts.model_copy(update={"segments": sharers}), built.peak_bytes)


def _checked(built: BuiltPlan, request: PlanRequest, cache: PlanCache, file: str) -> PlanFacts:
    """Return the plan's facts; remove a plan that is refused from the cache."""
    try:
        return check_plan(built.file.read_bytes(), request, file)
    except BuildError:
        cache.forget(request.key())
        raise
