"""Checks of a launch program against its artifact: the arguments of a kernel must exist, and fit their place.

Compiled kernels and TensorRT plans are native code: nothing here makes an artifact of an unknown maker safe to run on a
GPU. The checks find programs and manifests that do not belong together.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise, zip_longest
from typing import get_args

from ingot.artifact.programs.launch_program import (
    DEPENDENT_FROM,
    ELEMENT_BYTES,
    EXTERNAL,
    ActivationType,
    Argument,
    CudaProgram,
    HostCopy,
    Launch,
    LaunchProgram,
    LibraryMatmul,
    SegmentCall,
    Step,
    WeightCopy,
    read_cuda_program,
)
from ingot.artifact.programs.operation_row import Span
from ingot.artifact.programs.stage_checks import read_stages
from ingot.artifact.programs.stages import STAGES_FILE, STREAMED_WEIGHTS_FILE, CutProgram
from ingot.artifact.reader import Artifact
from ingot.artifact.safetensors import StoredTensor, read_header
from ingot.errors import ArtifactError, did_you_mean, one_of, shown

_MAX_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # CUDA Programming Guide, Technical Specifications
_MAX_ARENA_BYTES = 2**48
_FLOATS = get_args(ActivationType)
_REMEDY = "build the artifact again"


def read_launches(artifact: Artifact) -> CudaProgram:
    """Read and check the artifact's launches. ArtifactError when it has none, or for the first thing that is wrong."""
    name = artifact.manifest.program.launches
    if name is None:
        raise ArtifactError(f"{artifact.path}: has no launch program for a GPU; build it for a CUDA target")
    file = artifact.file(name)
    program = read_cuda_program(file)
    problem = next(_problems(artifact, program), None)
    if problem is not None:
        raise ArtifactError(f"{file}: {problem}; {_REMEDY}")
    return program


def _problems(artifact: Artifact, program: CudaProgram) -> Iterator[str]:
    manifest = artifact.manifest
    cut = read_stages(artifact) if artifact.has(STAGES_FILE) else None
    part = None if cut is None else cut.on_gpu
    if program.kv != (manifest.kv if part is None else part.program.kv):
        yield "its KV geometry is not the manifest's"
    for name in ("context_tokens", "vocab_size"):  # the width of block tables, and of logits
        own, models = getattr(program, name), getattr(manifest.model, name)
        if own != models:
            yield f"it was lowered for {name} {own}, and the model has {models}"
    for key, kernel in program.kernels.items():
        if kernel.is_dependent != program.dependent:
            waits = "does not wait for the launch before it" if program.dependent else "waits for the launch before it"
            launches = "dependent" if program.dependent else "not dependent"
            yield f"its launches are {launches}, and the kernel {shown(key)} {waits}"
    too_old = [sm for sm in program.cubins if program.dependent and sm < DEPENDENT_FROM]
    if too_old:
        yield f"its launches are dependent, which SM {too_old[0]} cannot; it can from SM {DEPENDENT_FROM} on"
    for sm, facts in program.cubins.items():
        missing = program.kernels.keys() - facts.keys()
        if missing:
            yield f"it has no code of the kernel {shown(min(missing))} for SM {sm}"
        unknown = facts.keys() - program.kernels.keys()
        if unknown:
            yield f"it has code for SM {sm} of {shown(min(unknown))}, which is not one of its kernels"
    yield from _problems_of_adapters(program)
    has_streamed = artifact.has(STREAMED_WEIGHTS_FILE)
    tensors = read_header(artifact.file(STREAMED_WEIGHTS_FILE), ArtifactError, _REMEDY) if has_streamed else {}
    for bucket in program.all_programs:
        problems = _problems_of_bucket(artifact, program, bucket)
        of_copies = _problems_of_host_copies(bucket, None if part is None else cut)
        for problem in (*problems, *of_copies, *_problems_of_weight_copies(bucket, tensors)):
            yield f"{bucket.name}: {problem}"


def _problems_of_adapters(program: CudaProgram) -> Iterator[str]:
    if any(one.adapter_units for one in program.programs):
        yield "a program that computes adapters is among those that compute none"
    if program.adapters is None:
        return
    if not all(one.adapter_units for one in program.adapters.programs):
        yield "a program that computes no adapters is among those that do"
    layers = {layer.node: layer for layer in program.adapters.layers}
    for projection in program.adapters.projections:
        layer = layers.get(projection.node)
        if layer is None:
            yield f"the module {shown(projection.module)} is in {shown(projection.node)}, which no adapter changes"
        elif projection.columns != layer.columns or projection.first_row + projection.rows > layer.outputs:
            yield f"the module {shown(projection.module)} does not fit {shown(projection.node)}"


def _problems_of_bucket(artifact: Artifact, program: CudaProgram, bucket: LaunchProgram) -> Iterator[str]:
    if bucket.arena_bytes > _MAX_ARENA_BYTES:
        yield f"arena_bytes is {bucket.arena_bytes}; it must be at most {_MAX_ARENA_BYTES}"
    if bucket.head_start > len(bucket.launches):
        yield f"head_start is {bucket.head_start}, and it has {len(bucket.launches)} launches"
    if bucket.attention == "decode" and bucket.rows != bucket.sequences:
        yield f"it has {bucket.rows} rows for {bucket.sequences} sequences; a decode step has one row for each"
    for name, place in bucket.places.items():
        if place.offset + place.bytes > bucket.arena_bytes:
            yield f"the buffer {shown(name)} ends at {place.offset + place.bytes} of {bucket.arena_bytes} arena bytes"
        if name in EXTERNAL:
            yield f"the buffer {shown(name)} has the name of one that the runtime provides"
    steps = [*bucket.launches, *(step for steps in bucket.samplers.values() for step in steps)]
    for number, step in enumerate(steps):
        for problem in _problems_of_step(artifact, program, bucket, step):
            yield f"step {number} ({step.node[:80]}): {problem}"


def _problems_of_host_copies(bucket: LaunchProgram, cut: CutProgram | None) -> Iterator[str]:
    """Copies to and from the host are those of its stages, in order, and stay within the buffers of both.

    A stage of experts has copies of its weights instead, where the GPU computes them.
    """
    streamed = {one.stage for one in bucket.weight_copies}
    found = [(one.stage, one.direction, sorted({value.buffer for value in one.values})) for one in bucket.host_copies]
    expected = [] if cut is None else list(_expected_copies(cut, streamed))
    differing = next((pair for pair in zip_longest(found, expected) if pair[0] != pair[1]), None)
    if differing is not None:
        given, needed = (shown(one, 200) if one else "nothing" for one in differing)
        yield f"it copies {given} to or from the host where {STAGES_FILE} needs {needed}"
    elif cut is not None:
        if any(isinstance(step, HostCopy) for step in bucket.launches[bucket.head_start :]):
            yield "its head waits for the host, and is run again for more rows of logits"
        for copy in bucket.host_copies:
            yield from _problems_of_host_copy(bucket, cut, copy)


def _expected_copies(cut: CutProgram, streamed: Collection[int]) -> Iterator[tuple[int, str, list[str]]]:
    """Stage, direction and the host's buffers of each copy that the stages of the host need, but for streamed ones."""
    for number, (run, following) in enumerate(pairwise(cut.runs)):
        is_streamed = number in streamed and bool(run.crossings)
        if not cut.devices[run.device].is_gpu and not is_streamed:
            if run.crossings:
                yield number, "send", sorted(crossing.buffer for crossing in run.crossings)
            yield number, "receive", sorted(crossing.buffer for crossing in following.crossings)


def _problems_of_weight_copies(bucket: LaunchProgram, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Weights are those of the file and fit their place; each copy is waited for before a launch reads its weights."""
    pending, done = dict[str, WeightCopy](), set[str]()
    for number, step in enumerate(bucket.launches):
        if not isinstance(step, WeightCopy):
            early = next((one for one in pending.values() if one.weights.name in step.buffers), None)
            if early is not None:
                yield f"step {number} ({step.node[:80]}): reads {shown(early.tensor)}, whose copy may not have ended"
            continue
        name = shown(step.tensor)
        yield from _problems_of_weight_copy(bucket, step, tensors)
        if number >= bucket.head_start:
            yield f"its head copies {name}, and is run again for more rows of logits"
        if step.action == "begin":
            if step.tensor in pending or step.tensor in done:
                yield f"it copies {name} twice"
            pending[step.tensor] = step
        elif pending.pop(step.tensor, None) != step.model_copy(update={"action": "begin"}):
            yield f"it waits for a copy of {name} that did not begin"
        else:
            done.add(step.tensor)
    for tensor in pending:
        yield f"it does not wait for the copy of {shown(tensor)}"


def _problems_of_weight_copy(
    bucket: LaunchProgram, copy: WeightCopy, tensors: Mapping[str, StoredTensor]
) -> Iterator[str]:
    stored, place, name = tensors.get(copy.tensor), bucket.places.get(copy.weights.name), shown(copy.tensor)
    if stored is None:
        yield f"it copies {name}, which {STREAMED_WEIGHTS_FILE} does not have.{did_you_mean(copy.tensor, tensors)}"
    elif stored.num_bytes != copy.bytes:
        yield f"it copies {copy.bytes} bytes of {name}, which has {stored.num_bytes}"
    begin = copy.weights.offset * ELEMENT_BYTES.get(copy.weights.type, 1)
    if begin + copy.bytes > (place.bytes if place else 0):
        end, most = begin + copy.bytes, place.bytes if place else 0
        yield f"the copy of {name} ends at byte {end} of {most} of {shown(copy.weights.name)}"


def _problems_of_host_copy(bucket: LaunchProgram, cut: CutProgram, copy: HostCopy) -> Iterator[str]:
    for value in copy.values:
        name, rows, place = shown(value.buffer), value.rows, bucket.places.get(value.rows.name)
        columns, end = cut.whole.buffers[value.buffer].columns, value.column + value.columns
        if end > columns:
            yield f"the copy of {name} ends at column {end} of {columns}"
        if rows.type not in _FLOATS:
            yield f"the copy of {name} has rows of {shown(rows.type)}; they must be of {one_of(_FLOATS)}"
            return
        size, most = (rows.offset + bucket.rows * value.columns) * ELEMENT_BYTES[rows.type], place.bytes if place else 0
        if size > most:
            yield f"the copy of {name} ends at byte {size} of {most} of {shown(rows.name)}"
    if copy.direction == "send":
        run, copied = cut.runs[copy.stage], [Span(one.buffer, one.column, one.columns) for one in copy.values]
        for operation in (cut.devices[run.device].program.operations[at] for at in run.operations):
            for span in operation.spans_read(cut.whole.matrices):
                if not any(span.is_within(one) for one in copied):
                    yield f"{shown(operation.node)} reads columns of {shown(span.buffer)} that are not copied"


def _problems_of_step(artifact: Artifact, program: CudaProgram, bucket: LaunchProgram, step: Step) -> Iterator[str]:
    if isinstance(step, Launch):
        yield from _problems_of_launch(program, step)
    if isinstance(step, SegmentCall) and not artifact.has(step.file):
        yield f"runs {shown(step.file)}, which the manifest does not list"
    for argument in _arguments(step):
        if argument.kind == "number":
            continue
        if argument.type not in ELEMENT_BYTES:
            near = did_you_mean(argument.type, ELEMENT_BYTES)
            yield f"has an argument of the unknown type {shown(argument.type)}.{near}"
        elif argument.kind == "buffer" and argument.name in bucket.places:
            begin = argument.offset * ELEMENT_BYTES[argument.type]
            if begin >= bucket.places[argument.name].bytes:
                yield f"reads {shown(argument.name)} from byte {begin} of {bucket.places[argument.name].bytes}"
        elif (
            argument.kind == "buffer"
            and argument.name == "state_pool"
            and argument.offset * 4 >= program.kv.state_bytes
        ):
            yield f"reads side state from float {argument.offset} on, and a sequence has {program.kv.state_bytes} bytes"
        elif argument.kind == "buffer" and argument.name == "counters" and argument.offset >= program.counters:
            yield f"counts from place {argument.offset} of {program.counters} counters on"
        elif argument.kind == "buffer" and argument.name not in EXTERNAL:
            yield f"reads the buffer {shown(argument.name)}, which neither the arena nor the runtime has"


def _problems_of_launch(program: CudaProgram, step: Launch) -> Iterator[str]:
    kernel = program.kernels.get(step.kernel)
    if kernel is None:
        yield f"launches {shown(step.kernel)}, which is not one of the program's kernels"
        return
    if len(kernel.types) != len(step.arguments):
        yield f"passes {len(step.arguments)} arguments to {shown(step.kernel)}, which takes {len(kernel.types)}"
    for number, (kind, argument) in enumerate(zip(kernel.types, step.arguments, strict=False)):
        if not _is_of(argument, kind):
            given = argument.value if argument.kind == "number" else f"a pointer to {argument.type}"
            yield f"passes {given} as argument {number} of {shown(step.kernel)}, which takes {kind}"
    if not all(1 <= size <= most for size, most in zip(step.grid, _MAX_GRID, strict=True)):
        yield f"has a grid of {list(step.grid)}; each size must be from 1 to {list(_MAX_GRID)}"


def _is_of(argument: Argument, kind: str) -> bool:
    """Whether an argument is what a kernel's parameter of this type takes; its size follows (cubin_parameters.py)."""
    if argument.kind != "number":
        # An unknown type has a message of its own.
        return kind == f"*{argument.type}" or argument.type not in ELEMENT_BYTES
    if kind == "fp32":
        return True
    bits = {"i32": 32, "i64": 64}.get(kind, 0)
    return bits > 0 and isinstance(argument.value, int) and -(2 ** (bits - 1)) <= argument.value < 2 ** (bits - 1)


def _arguments(step: Step) -> Iterator[Argument]:
    if isinstance(step, Launch):
        yield from step.arguments
    elif isinstance(step, LibraryMatmul):
        yield from step.operands.values()
    elif isinstance(step, HostCopy):
        yield from (value.rows for value in step.values)
    elif isinstance(step, WeightCopy):
        yield step.weights
    else:
        yield from (*step.inputs.values(), *step.outputs.values())
