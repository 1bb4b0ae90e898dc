"""IR -> launch programs whose segments are plans: one a bucket, over one arena, on one stream.

    carry tokens | look-up | plan | rotary, keys and values | attention | plan | ... | rows of logits | plan | tails

Kernels are lowered as for the targets cuda-smXX; which profile of a plan a bucket runs, profiles.py says.
"""

from collections.abc import Sequence
from typing import Literal

import onnx_ir as ir

from ingot.artifact import ModelFacts
from ingot.artifact.launch_program import BufferArgument, LaunchProgram, SegmentCall, WeightArgument
from ingot.pipeline.targets.cuda.fusions import Fusions
from ingot.pipeline.targets.cuda.lowering import carry_tokens, lower_node, sample_tokens
from ingot.pipeline.targets.cuda.lowering_context import Scope
from ingot.pipeline.targets.cuda.program_builder import Bucket, ProgramBuilder, Shared
from ingot.pipeline.targets.segments.builder import TYPES, dims
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.stages import SegmentStage, Stage
from ingot.pipeline.targets.tensorrt.plan_request import Profile
from ingot.pipeline.targets.tensorrt.profiles import TOKENS, bucket_profiles, profile_number, segment_profiles


def lower_to_calls(
    model: ir.Model,
    stages: Sequence[tuple[Stage, Segment | None, str]],
    buckets: Sequence[Bucket],
    shared: Shared,
    engine: Literal["tensorrt", "onnxruntime"] = "tensorrt",
) -> tuple[LaunchProgram, ...]:
    """The program of every bucket. `stages`: each with its segment and the file of its plan, where it is a segment.

    Plans have profiles; what onnxruntime runs takes any number of rows.
    """
    profiles = bucket_profiles(buckets)
    vocabulary = ModelFacts.model_validate_json(model.metadata_props["ingot.model"]).vocab_size
    programs = []
    for bucket in buckets:
        builder = ProgramBuilder(bucket, shared)
        scope = Scope(builder, Fusions())  # what belongs together is within a segment
        carry_tokens(builder)
        for stage, segment, file in stages:
            if isinstance(stage, SegmentStage):
                assert segment is not None
                call = _call(scope, segment, file)
                if engine == "tensorrt":
                    number = _profile(builder, segment, segment_profiles(profiles, segment))
                    call = call.model_copy(update={"profile": number})
                builder.call(call.model_copy(update={"engine": engine}))
            else:
                lower_node(scope, stage.node)
        sample_tokens(builder, vocabulary)
        programs.append(builder.program())
    return tuple(programs)


def _call(scope: Scope, segment: Segment, file: str) -> SegmentCall:
    inputs: dict[str, BufferArgument | WeightArgument] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for value in segment.model.graph.inputs:
        name = value.name or ""
        inputs[name] = _input(scope, segment, name)
        shapes[name] = tuple(size if isinstance(size, int) else scope.rows for size in dims(value))
    outputs = {name: scope.make(value).buffer for name, value in segment.outputs.items()}
    return SegmentCall(file=file, inputs=inputs, outputs=outputs, shapes=shapes, node=f"... {segment.name}")


def _profile(builder: ProgramBuilder, segment: Segment, profiles: Sequence[Profile]) -> int:
    is_ragged = builder.bucket.attention == "ragged" and segment.row_symbol == TOKENS
    return profile_number(profiles, builder.rows, is_ragged=is_ragged)


def _input(scope: Scope, segment: Segment, name: str) -> BufferArgument | WeightArgument:
    if name in segment.weights:
        weight = segment.weights[name]
        return scope.builder.weight(weight.name, TYPES[weight.dtype], weight.make)
    value = segment.inputs[name]
    if value.is_graph_input():
        return scope.builder.external(name)
    reader = value.consumers()[0]
    rows = scope.read(value, reader)
    assert rows.stride == rows.columns, f"{value.name} is part of a wider buffer"
    return rows.buffer


def stage_files(
    stages: Sequence[Stage], segments: Sequence[Segment], files: Sequence[str]
) -> list[tuple[Stage, Segment | None, str]]:
    """Each stage with what its plan is of, where it has one."""
    given = iter(zip(segments, files, strict=True))
    return [(stage, *next(given)) if isinstance(stage, SegmentStage) else (stage, None, "") for stage in stages]
