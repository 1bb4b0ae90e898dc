"""IR -> launch programs whose segments are plans: one a bucket, over one arena, on one stream.

    carry tokens | look-up | plan | rotary, keys and values | attention | plan | ... | rows of logits | plan | tails

Kernels are lowered as for the targets cuda-smXX. Every decode bucket has a profile of its own; all buckets of other
steps share one, which ranges over their rows.
"""

from collections.abc import Sequence

import onnx_ir as ir

from ingot.artifact import ModelFacts
from ingot.artifact.launch_program import BufferArgument, LaunchProgram, SegmentCall, WeightArgument
from ingot.pipeline.cuda.lowering import NodeLowering, carry_tokens, sample_tokens
from ingot.pipeline.cuda.program_builder import Bucket, ProgramBuilder, Shared
from ingot.pipeline.tensorrt.plan_request import Profile
from ingot.pipeline.tensorrt.segment_builder import TYPES, dims
from ingot.pipeline.tensorrt.segment_lowering import Segment
from ingot.pipeline.tensorrt.stages import SegmentStage, Stage

TOKENS, LOGITS = "T", "R"


def bucket_profiles(buckets: Sequence[Bucket]) -> dict[str, tuple[Profile, ...]]:
    """Profiles of plans over T tokens, and of plans over R rows of logits."""
    decode = [Profile.of(bucket.rows) for bucket in buckets if bucket.attention == "decode"]
    ragged = [bucket.rows for bucket in buckets if bucket.attention == "ragged"]
    ranges = [Profile(min(ragged), max(ragged), max(ragged))] if ragged else []
    logits = sorted({bucket.logits_rows for bucket in buckets})
    return {TOKENS: (*decode, *ranges), LOGITS: tuple(map(Profile.of, logits))}


def lower_to_calls(
    model: ir.Model,
    stages: Sequence[tuple[Stage, Segment | None, str]],
    buckets: Sequence[Bucket],
    shared: Shared,
) -> tuple[LaunchProgram, ...]:
    """The program of every bucket. `stages`: each with its segment and the file of its plan, where it is a segment."""
    profiles = bucket_profiles(buckets)
    vocabulary = ModelFacts.model_validate_json(model.metadata_props["ingot.model"]).vocab_size
    programs = []
    for bucket in buckets:
        builder = ProgramBuilder(bucket, shared)
        kernels = NodeLowering(model, builder)
        carry_tokens(builder)
        for stage, segment, file in stages:
            if isinstance(stage, SegmentStage):
                assert segment is not None
                profile = _profile(profiles[segment.row_symbol], builder.rows, bucket)
                builder.call(_call(builder, segment, file, profile))
            else:
                kernels.lower(stage.node)
        sample_tokens(builder, vocabulary)
        programs.append(builder.program())
    return tuple(programs)


def _profile(profiles: Sequence[Profile], rows: int, bucket: Bucket) -> int:
    """The number of the profile for so many rows: the exact one, but the range for ragged tokens."""
    exact = Profile.of(rows)
    if exact in profiles and not (bucket.attention == "ragged" and rows == bucket.rows and len(profiles) > 1):
        return profiles.index(exact)
    fitting = (number for number, profile in enumerate(profiles) if profile.least <= rows <= profile.most)
    return max(fitting)


def _call(builder: ProgramBuilder, segment: Segment, file: str, profile: int) -> SegmentCall:
    inputs: dict[str, BufferArgument | WeightArgument] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for value in segment.model.graph.inputs:
        name = value.name or ""
        inputs[name] = _input(builder, segment, name)
        shapes[name] = tuple(size if isinstance(size, int) else builder.rows for size in dims(value))
    outputs = {name: _output(builder, value) for name, value in segment.outputs.items()}
    return SegmentCall(
        file=file, profile=profile, inputs=inputs, outputs=outputs, shapes=shapes, node=f"... {segment.name}"
    )


def _input(builder: ProgramBuilder, segment: Segment, name: str) -> BufferArgument | WeightArgument:
    if name in segment.weights:
        weight = segment.weights[name]
        return builder.weight(weight.name, TYPES[weight.dtype], weight.make)
    value = segment.inputs[name]
    return builder.external(name) if value.is_graph_input() else builder.buffer(value.name or "", 0)


def _output(builder: ProgramBuilder, value: ir.Value) -> BufferArgument:
    if value.is_graph_output():
        return builder.external("logits")
    columns = dims(value)[-1]
    assert isinstance(columns, int), f"{value.name} has no fixed width"
    return builder.buffer(value.name or "", builder.rows * columns)


def stage_files(
    stages: Sequence[Stage], segments: Sequence[Segment], files: Sequence[str]
) -> list[tuple[Stage, Segment | None, str]]:
    """Each stage with what its plan is of, where it has one."""
    given = iter(zip(segments, files, strict=True))
    return [(stage, *next(given)) if isinstance(stage, SegmentStage) else (stage, None, "") for stage in stages]
