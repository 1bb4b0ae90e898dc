"""Segments -> plans on disk, one at a time: each segment is written as ONNX, its plan built or taken from the cache,
checked, and copied into the program's folder.

Segments of one structure whose weights are inputs share a plan. A segment with int4 constants has a plan of its own,
and holds its weights in memory only while its ONNX is written.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir as ir

from ingot.artifact.programs.plan_facts import PlanFacts
from ingot.errors import BuildError
from ingot.pipeline.targets.segments.onnx_files import write_model
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.split import WEIGHTS
from ingot.pipeline.targets.tensorrt.plan_builder import WORK, BuiltPlan, PlanCache, build_or_recall
from ingot.pipeline.targets.tensorrt.plan_report import check_plan
from ingot.pipeline.targets.tensorrt.plan_request import PlanRequest
from ingot.pipeline.targets.tensorrt.plan_settings import PlanSettings, check_sms, segment_profiles
from ingot.progress import report_progress

ONNX = "segment.onnx"


@dataclass(frozen=True)
class SegmentPlan:
    """A segment's plan, and the peak memory of the process that built it; None if it came from the cache."""

    facts: PlanFacts
    peak_bytes: int | None


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
