"""Lowers the IR to launch programs that call segments: one per bucket, over one arena, on one stream.

    carry tokens | gather | segment | rotary, keys and values | attention | segment | ... | gather | segment | sampling

Kernels are lowered as for the targets cuda-smXX.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from ingot.artifact.programs.launch_program import BufferArgument, LaunchProgram, SegmentCall, WeightArgument
from ingot.passes.model_facts import MODEL
from ingot.pipeline.targets.cuda.lowering import carry_tokens, lower_node, sample_tokens
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext
from ingot.pipeline.targets.cuda.program_builder import Bucket, ProgramBuilder, Shared
from ingot.pipeline.targets.fusions import Fusions
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_builder import ELEMENT_TYPES, dims
from ingot.pipeline.targets.segments.stages import KernelStage, SegmentStage, Stage

TOKENS = "T"  # the row symbol of activations
MOST_CAPTURED_ROWS = 64  # rows of a prompt's bucket; more rows are computed for longer than they are queued


def _only_profile(_rows: int) -> int:
    return 0


@dataclass(frozen=True)
class SegmentFile:
    """The file that an engine runs for a segment.

    profile    rows -> number of the optimization profile
    """

    segment: Segment
    engine: Literal["tensorrt", "onnxruntime"]
    file: str
    profile: Callable[[int], int] = _only_profile


def lower_to_calls(
    model: ir.Model, stages: Sequence[Stage], files: Iterable[SegmentFile], buckets: Sequence[Bucket], shared: Shared
) -> tuple[LaunchProgram, ...]:
    """Return the program of every bucket. `files` are those of the segments among the stages, in the same order.

    BuildError for a model whose layers differ, share keys and values, or store latents: cuda-smXX computes them.
    """
    shared.kv.uniform("a target that runs segments between kernels of attention")
    given = iter(files)
    steps = [next(given) if isinstance(stage, SegmentStage) else stage for stage in stages]
    vocabulary = MODEL.of(model).vocab_size
    return tuple(_program(steps, ProgramBuilder(bucket, shared), vocabulary) for bucket in buckets)


def _program(steps: Sequence[KernelStage | SegmentFile], builder: ProgramBuilder, vocabulary: int) -> LaunchProgram:
    context = LaunchContext(builder, Fusions())  # ops that one kernel would compute are within a segment
    carry_tokens(builder)
    for step in steps:
        if isinstance(step, SegmentFile):
            builder.call(_call(context, step))
        else:
            lower_node(context, step.node)
    sample_tokens(builder, vocabulary)
    return builder.program()


def _call(context: LaunchContext, file: SegmentFile) -> SegmentCall:
    segment = file.segment
    inputs: dict[str, BufferArgument | WeightArgument] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for value in segment.model.graph.inputs:
        name = value.name or ""
        inputs[name] = _input(context, segment, name)
        shapes[name] = tuple(size if isinstance(size, int) else context.rows for size in dims(value))
    bucket = context.builder.bucket
    return SegmentCall(
        engine=file.engine,
        file=file.file,
        profile=file.profile(context.rows),
        captured=bucket.attention == "decode" or bucket.rows <= MOST_CAPTURED_ROWS,
        inputs=inputs,
        outputs={name: context.make(value).buffer for name, value in segment.outputs.items()},
        shapes=shapes,
        node=f"... {segment.name}",
    )


def _input(context: LaunchContext, segment: Segment, name: str) -> BufferArgument | WeightArgument:
    if name in segment.weights:
        weight = segment.weights[name]
        return context.builder.weight(weight.name, ELEMENT_TYPES[weight.dtype], weight.make)
    value = segment.inputs[name]
    if value.is_graph_input():
        return context.builder.external(name)
    reader = value.consumers()[0]
    rows = context.read(value, reader)
    assert rows.stride == rows.columns, f"{value.name} is part of a wider buffer"
    return rows.buffer
