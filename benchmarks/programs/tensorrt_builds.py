"""TensorRT plans built on a machine without a GPU: time, size, peak memory, fused operators, and numerics.

    python -m benchmarks.programs.tensorrt_builds --output benchmarks/results/tensorrt-builds.json

The demo model and a checkpoint of TinyLlama's shape with random weights (--model leaves one out), for each SM alone and
for all at once; in 16 bits and in int4, by the recipes fp16-tensorrt and int4-tensorrt. Every case has a process and a
cache of its own, so that every plan is built. Numerics: each kind of segment, as TensorRT gets it, run by onnxruntime
in float16 and compared with the IR in float32, on 8 rows of random activations.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import click
import onnx_ir as ir

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.programs.segment_numerics import random_feeds, relative_errors
from benchmarks.shapes import SHAPES
from benchmarks.synthetic import write_checkpoint
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.writer import activation_type, recipe_buckets
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.stages import SegmentStage, split_stages
from ingot.pipeline.targets.table import get_target
from ingot.pipeline.targets.tensorrt.library import load_library
from ingot.pipeline.targets.tensorrt.plan_builder import PlanCache
from ingot.pipeline.targets.tensorrt.plan_settings import PlanSettings, bucket_profiles
from ingot.pipeline.targets.tensorrt.segment_lowering import is_kernel, lower_segment, pack_attention_operands
from ingot.pipeline.targets.tensorrt.writer import SegmentPlan, write_plans

DEMO = "demo"
TINYLLAMA = "tinyllama-1.1b"
SMS = (86, 89, 120)
RECIPES = {"fp16": "fp16-tensorrt", "int4": "int4-tensorrt"}
PACKAGES = ("tensorrt-rtx", "onnx", "onnx-ir", "onnxruntime", "numpy")
_ROWS = 8
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Case:
    """One program to build."""

    model: str
    form: str
    sms: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """Segments that share a structure: one plan for all, or one each.

    operators    by rows of the profile ("8", "32-512")
    errors       relative, by output
    """

    last_node: str
    segments: int
    plans: int
    plan_bytes: int
    operators: Mapping[str, Mapping[str, int]]
    errors: Mapping[str, float]


@dataclass(frozen=True)
class Result:
    """Result of one case.

    build_cpu_seconds     processor time, the builders' included: independent of other load on the machine
    builder_peak_bytes    peak memory of the processes that build one plan each, the largest
    """

    model: str
    form: str
    sms: tuple[int, ...]
    pass_seconds: float
    build_seconds: float
    build_cpu_seconds: float
    segments: int
    plans: int
    plan_bytes: int
    constant_bytes: int
    weight_input_bytes: int
    builder_peak_bytes: int
    compiler_peak_bytes: int
    kinds: tuple[Kind, ...]


def cases(models: tuple[str, ...]) -> Iterator[Case]:
    """The demo model for each SM alone, both for all."""
    for model in models:
        for form in RECIPES:
            for sms in (*((sm,) for sm in SMS), SMS):
                yield Case(model, form, sms)


def measure(case: Case, checkpoint: Path) -> Result:
    """Compile and build once."""
    recipe = load_recipe(RECIPES[case.form], [f"checkpoint={checkpoint}", f"gpu.sms={list(case.sms)}"])
    start = time.perf_counter()
    model = passed(recipe, checkpoint)
    compute, settled = activation_type(model, recipe), time.perf_counter()
    assert compute != "fp32", "the checkpoints have 16 bits"
    stages = split_stages(model.graph, is_kernel)
    segments = [lower_segment(stage, compute) for stage in stages if isinstance(stage, SegmentStage)]
    profiles, used = bucket_profiles(recipe_buckets(model, recipe)), _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        cache = PlanCache(Path(folder) / "cache")
        settings = PlanSettings(load_library(), case.sms, profiles, cache)
        plans = write_plans(segments, settings, Path(folder))
    built, used, peak = time.perf_counter(), _cpu_seconds() - used, _peak_bytes()
    distinct = {plan.facts.file: plan for plan in plans}.values()
    return Result(
        **asdict(case),
        pass_seconds=round(settled - start, 2),
        build_seconds=round(built - settled, 2),
        build_cpu_seconds=round(used, 2),
        segments=len(segments),
        plans=len(distinct),
        plan_bytes=sum(plan.facts.bytes for plan in distinct),
        constant_bytes=sum(plan.facts.weight_bytes for plan in distinct),
        weight_input_bytes=_weight_input_bytes(segments),
        builder_peak_bytes=max(plan.peak_bytes or 0 for plan in distinct),
        compiler_peak_bytes=peak,
        kinds=tuple(_kinds(segments, plans)),
    )


def passed(recipe: Recipe, checkpoint: Path) -> ir.Model:
    """The recipe's model as the target lowers it."""
    model = import_checkpoint(Checkpoint.open(checkpoint))
    PassManager([*recipe.make_passes(), *map(make_pass, get_target(recipe.target).lowering)]).run(model)
    pack_attention_operands(model.graph)
    return model


def _kinds(segments: list[Segment], plans: list[SegmentPlan]) -> Iterator[Kind]:
    """Segments by structure: before the first attention, between, after the last, the head."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, segment in enumerate(segments):
        groups.setdefault(tuple(node.op_type for node in segment.model.graph), []).append(index)
    for members in groups.values():
        segment, first = segments[members[0]], plans[members[0]].facts
        files = {plans[index].facts.file: plans[index].facts for index in members}
        errors = relative_errors(segment, random_feeds(segment, _ROWS))
        yield Kind(
            last_node=segment.name,
            segments=len(members),
            plans=len(files),
            plan_bytes=sum(facts.bytes for facts in files.values()),
            operators={_rows(p.least_rows, p.most_rows): p.operators for p in first.profiles},
            errors={name: round(error, 6) for name, error in errors.items()},
        )


def _rows(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}-{most}"


def _weight_input_bytes(segments: list[Segment]) -> int:
    weights = {weight.name: weight for segment in segments for weight in segment.weights.values()}
    return sum(int(math.prod(weight.shape) * weight.dtype.itemsize) for weight in weights.values())


def _cpu_seconds() -> float:
    """Processor time of this process and of those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak_bytes() -> int:
    """Peak memory of this process."""
    lines = (line.split() for line in _STATUS.read_text("ascii").splitlines())
    return next(1024 * int(words[1]) for words in lines if words[0] == "VmHWM:")


def table(results: list[Result]) -> str:
    """A Markdown table, a row per case."""
    lines = ["| model | form | SMs | processor time | plans | size | builder's peak | worst error |", "|---" * 8 + "|"]
    for result in results:
        worst = max(error for kind in result.kinds for error in kind.errors.values())
        sms, size = ", ".join(map(str, result.sms)), f"{result.plan_bytes / 1e6:.1f} MB"
        cells = (result.model, result.form, sms, f"{result.build_cpu_seconds:.1f} s", str(result.plans), size)
        lines.append(f"| {' | '.join(cells)} | {result.builder_peak_bytes / 1e9:.2f} GB | {worst:.1e} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, type=click.Choice([DEMO, TINYLLAMA]), default=(DEMO, TINYLLAMA))
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(models: tuple[str, ...], output: Path | None) -> None:
    """Measure, print the table, write the JSON."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(models):
            checkpoint = ROOT / "examples" / "models" / "stdlib-llama-6m"
            if case.model != DEMO:
                checkpoint = write_checkpoint(SHAPES[case.model], Path(folder) / case.model)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                results.append(alone.submit(measure, case, checkpoint).result())
            click.echo(table(results[-1:]).splitlines()[-1])
    if output is not None:
        versions = {name: version(name) for name in PACKAGES}
        record = {"device": device_facts(), "versions": versions, "results": [asdict(result) for result in results]}
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
