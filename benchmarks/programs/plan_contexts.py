"""Execution contexts of TensorRT plans, and the bytes of weights that each plan holds, counted without a GPU.

    python -m benchmarks.programs.plan_contexts --output benchmarks/results/plan-contexts.json

The demo model, and one of 32 layers and 256 columns with random weights, by the recipes fp16-tensorrt and
int4-tensorrt: their launch programs are lowered, and no plan is built. `contexts` is what runtime/cuda/plans.py makes;
`by_bucket` what a context for each plan, bucket and kind of step would be.
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.paths import ROOT
from benchmarks.programs.tensorrt_builds import RECIPES, passed
from benchmarks.shapes import ModelShape
from benchmarks.synthetic import write_checkpoint
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.targets.cuda.program_builder import Shared
from ingot.pipeline.targets.cuda.tiles import TileTable
from ingot.pipeline.targets.cuda.writer import activation_type, recipe_buckets
from ingot.pipeline.targets.segments.segment_calls import SegmentFile, lower_to_calls
from ingot.pipeline.targets.segments.stages import SegmentStage, split_stages
from ingot.pipeline.targets.tensorrt.plan_settings import bucket_profiles, profile_number, segment_profiles
from ingot.pipeline.targets.tensorrt.segment_lowering import is_kernel, lower_segment
from ingot.pipeline.targets.tensorrt.writer import sharing_segments
from ingot.pipeline.targets.writers import kv_geometry

DEEP = ModelShape("32 layers", 256, 32, 8, 2, 704, 4096, tied_head=False)


@dataclass(frozen=True)
class Counts:
    """Counts of one program.

    plan_constants    bytes of the weights within the plans; the others are stored once, next to them
    profiles          optimization profiles of all plans together
    """

    model: str
    form: str
    segments: int
    plans: int
    profiles: int
    buckets: int
    by_bucket: int
    contexts: int
    plan_constants: int


def count(name: str, form: str, checkpoint: Path) -> Counts:
    """Lower the programs of a recipe and count."""
    recipe = load_recipe(RECIPES[form], [f"checkpoint={checkpoint}"])
    model = passed(recipe, checkpoint)
    compute, buckets = activation_type(model, recipe), recipe_buckets(model, recipe)
    stages, profiles = split_stages(model.graph, is_kernel), bucket_profiles(buckets)
    segments = [lower_segment(stage, compute) for stage in stages if isinstance(stage, SegmentStage)]
    groups = sharing_segments(segments)
    names = {index: f"segment-{number:03}.plan" for number, members in enumerate(groups) for index in members}
    of = [segment_profiles(profiles, segment) for segment in segments]
    files = [
        SegmentFile(segment, "tensorrt", names[index], partial(profile_number, of[index]))
        for index, segment in enumerate(segments)
    ]
    shared = Shared.of(compute, kv_geometry(model, recipe), TileTable())
    programs = lower_to_calls(model, stages, files, buckets, shared)
    calls = [(program, call) for program in programs for call in program.segment_calls]
    return Counts(
        model=name,
        form=form,
        segments=len(segments),
        plans=len(groups),
        profiles=sum(len(of[members[0]]) for members in groups),
        buckets=len(buckets),
        by_bucket=len({(call.file, program.attention, *sorted(call.shapes.items())) for program, call in calls}),
        contexts=len({call.context for _, call in calls}),
        plan_constants=sum(segments[members[0]].constant_bytes for members in groups),
    )


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(output: Path | None) -> None:
    """Count, print a table, write the JSON."""
    with TemporaryDirectory() as folder:
        checkpoints = {
            "demo": ROOT / "examples" / "models" / "stdlib-llama-6m",
            DEEP.name: write_checkpoint(DEEP, Path(folder) / "deep"),
        }
        counts = [asdict(count(name, form, path)) for name, path in checkpoints.items() for form in RECIPES]
    click.echo("\n".join(f"| {' | '.join(map(str, row))} |" for row in (counts[0], *(one.values() for one in counts))))
    if output is not None:
        output.write_text(f"{json.dumps(counts, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
