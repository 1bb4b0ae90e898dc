"""Checks of the stages of a CPU program: they fit it, and no stage reads a value that its device lacks.

The operations themselves are those of the model's program, which cpu_program_checks.py checks.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, Attend, CpuProgram, Operation
from ingot.artifact.programs.cpu_program_checks import (
    MOST_ARENA_FLOATS,
    MadeColumns,
    check_weights,
    read_whole_program,
    row_floats,
)
from ingot.artifact.programs.draft_head import DRAFT_HEAD_FILE
from ingot.artifact.programs.operation_row import LANES
from ingot.artifact.programs.stages import (
    GPU,
    LOGITS,
    STAGES_FILE,
    CutProgram,
    StageDevice,
    StagePlan,
    StageRun,
    cut_program,
    read_stage_plan,
    spans_of_stages,
)
from ingot.artifact.reader import Artifact
from ingot.errors import ArtifactError, shown


def read_stages(artifact: Artifact) -> CutProgram:
    """Read and check the artifact's program and its stages. ArtifactError for the first thing that is wrong."""
    program, file = read_whole_program(artifact), artifact.file(STAGES_FILE)
    plan = read_stage_plan(file)
    problem = next(_problems_of_plan(program, plan), None)
    if artifact.has(DRAFT_HEAD_FILE):
        problem = f"the artifact has {DRAFT_HEAD_FILE} too, which needs the program in one piece"
    if problem is None:
        cut = cut_program(program, plan)
        problem = next(_problems_of_cut(program, plan, cut), None)
    if problem is not None:
        raise ArtifactError(
            f"{file}: {problem}; it is damaged, or of another artifact than {OPERATIONS_FILE}: build the artifact again"
        )
    for device in cut.devices:
        if not device.is_gpu:
            check_weights(artifact, device.program)
    return cut


def _problems_of_plan(program: CpuProgram, plan: StagePlan) -> Iterator[str]:
    """Problems that would keep the program from being cut."""
    ends, count = [0, *(stage.end for stage in plan.stages)], len(program.operations)
    if any(later <= end for end, later in pairwise(ends)) or ends[-1] != count:
        yield f"its stages end at operations {shown(ends[1:])}; they must ascend to {count}, the last of the program"
        return
    used = {stage.device for stage in plan.stages}
    if used != set(range(len(plan.devices))):
        yield f"its stages are on the devices {sorted(used)}, and it describes {len(plan.devices)}"
        return
    for device, name in enumerate(one.name for one in plan.devices):
        spans = zip(plan.stages, spans_of_stages(plan.stages), strict=True)
        own = [program.operations[at] for stage, span in spans if stage.device == device for at in span]
        yield from (f"{shown(name)}: {problem}" for problem in _problems_of_device(program, plan.devices[device], own))


def _problems_of_device(program: CpuProgram, device: StageDevice, own: Sequence[Operation]) -> Iterator[str]:
    used = {view.buffer for operation in own for view in operation.views} - {LOGITS}
    unequal = used ^ device.offsets.keys()
    if unequal:
        yield f"its offsets are of other buffers than its operations use: {shown(min(unequal))}"
        return
    if device.arena_floats > MOST_ARENA_FLOATS:
        yield f"arena_floats is {device.arena_floats}; it must be at most {MOST_ARENA_FLOATS}"
    for name, offset in device.offsets.items():
        end = offset + row_floats(program.buffers[name])
        if offset < 0 or offset % LANES or end > device.arena_floats:
            yield (
                f"the buffer {shown(name)} is at {offset} to {end} of {device.arena_floats} floats of a token; it must"
                f" begin at a multiple of {LANES} and end within them"
            )
    layers = {operation.layer for operation in own if isinstance(operation, Attend)}
    apart = next((one for one in layers if program.kv.layers[one].source not in layers), None)
    if apart is not None:
        source = program.kv.layers[apart].source
        yield f"attention of layer {apart} reads keys and values of layer {source}, which another device has"


def _problems_of_cut(program: CpuProgram, plan: StagePlan, cut: CutProgram) -> Iterator[str]:
    """Values that a stage reads and its device lacks: never made, not copied, or overwritten in the arena."""
    if any(device.is_gpu for device in cut.devices):
        yield from _problems_of_gpu(cut)
    of_logits = {run.device for run in cut.runs for one in _of_run(cut, run) if _uses(one, LOGITS)}
    if len(of_logits) > 1:
        yield "its stages compute the logits on several devices"
        return
    made = [MadeColumns(device.program) for device in cut.devices]
    for number, run in enumerate(cut.runs):
        here = made[run.device]
        for crossing in run.crossings:
            here.copy(crossing.buffer, made[crossing.source])
        for operation in _of_run(cut, run):
            for span in operation.spans_read(program.matrices):
                if not here.has(span):
                    lacking = f"stage {number} ({operation.node[:80]}) reads {shown(span.buffer)}"
                    yield f"{lacking}, which its device does not have then"
            here.write(operation.span_written(program.matrices))


def _problems_of_gpu(cut: CutProgram) -> Iterator[str]:
    """One GPU and the host have stages in turn, the GPU the last; what is copied has a row for each token."""
    kinds, names = [cut.devices[run.device].is_gpu for run in cut.runs], [device.name for device in cut.devices]
    take_turns = kinds[::-1] == [at % 2 == 0 for at in range(len(kinds))]
    if sorted(name == GPU for name in names) != [False, True] or not take_turns:
        yield f"its {len(kinds)} stages are on {shown(names)}; the host and {GPU} must take turns, {GPU} the last"
        return
    for number, run in enumerate(cut.runs):
        for crossing in run.crossings:
            if cut.whole.buffers[crossing.buffer].rows != "tokens":
                yield f"{shown(crossing.buffer)} is copied to stage {number}, and has no row for each token"


def _of_run(cut: CutProgram, run: StageRun) -> Sequence[Operation]:
    operations = cut.devices[run.device].program.operations
    return [operations[at] for at in run.operations]


def _uses(operation: Operation, buffer: str) -> bool:
    return any(view.buffer == buffer for view in operation.views)
