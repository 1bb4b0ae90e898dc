"""The cut of a program into stages of about equal work, between layers: for artifacts that were built in one piece."""

import re
from collections.abc import Sequence
from itertools import accumulate

from ingot.artifact.programs.cpu_program import Attend, CpuProgram, Experts, Operation, layers_of
from ingot.artifact.programs.stages import (
    LOGITS,
    MOST_DEVICES,
    CutProgram,
    ProgramStage,
    StageDevice,
    StagePlan,
    cut_program,
    spans_of_stages,
)
from ingot.errors import UsageError

_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")


def cut_evenly(program: CpuProgram, count: int) -> CutProgram:
    """Cut a program into `count` stages, each on a device of its own, so that the slowest has the least work.

    Work is multiplications by weights for a token; of experts, those that a token reaches. An arena has the places of
    the whole program, where values that are alive at once never overlap. UsageError for more stages than there are
    layers that can be apart.
    """
    places = [0, *_places(program)]
    if not 2 <= count <= min(len(places), MOST_DEVICES):
        raise UsageError(
            f"stages is {count}; the model can be cut into at most {min(len(places), MOST_DEVICES)}: stages have whole"
            " layers, and layers that share keys and values stay together"
        )
    ends = [*_split([*places, len(program.operations)], _work(program), count)]
    stages = tuple(ProgramStage(device=number, end=end) for number, end in enumerate(ends))
    devices = (
        StageDevice(name=f"cpu:{number}", arena_floats=program.arena_floats, offsets=_offsets(program, span))
        for number, span in enumerate(spans_of_stages(stages))
    )
    return cut_program(program, StagePlan(devices=tuple(devices), stages=stages))


def _places(program: CpuProgram) -> list[int]:
    """Indices of operations before which the program may be cut: the first of each layer but the first."""
    found, layer = list[int](), None
    for at, operation in enumerate(program.operations):
        match = _LAYER.search(operation.node)
        if match and int(match[1]) != layer:
            found += [] if layer is None else [at]
            layer = int(match[1])
    first = {one.layer: at for at, one in reversed([*enumerate(program.operations)]) if isinstance(one, Attend)}
    logits = next(at for at, one in enumerate(program.operations) if any(view.buffer == LOGITS for view in one.views))
    together = [(first[program.kv.layers[layer].source], at) for layer, at in first.items()]
    return [at for at in found if at <= logits and not any(begin < at <= end for begin, end in together)]


def _work(program: CpuProgram) -> list[int]:
    """Multiplications of the operations before each, for a token."""
    sizes = {name: matrix.n * matrix.k for name, matrix in program.matrices.items()}
    return [0, *accumulate(_work_of(one, sizes) for one in program.operations)]


def _work_of(operation: Operation, sizes: dict[str, int]) -> int:
    total = sum(sizes[layer.matrix] for layer in layers_of(operation))
    return total * operation.chosen // operation.count if isinstance(operation, Experts) else total


def _split(places: Sequence[int], work: Sequence[int], count: int) -> list[int]:
    """The ends of `count` stages with the least largest work, by dynamic programming over the places."""
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}  # place -> largest work of the stages before it, their ends
    for stage in range(1, count + 1):
        found: dict[int, tuple[int, list[int]]] = {}
        for place in range(stage, len(places) - count + stage):
            options = (
                (max(largest, work[places[place]] - work[places[before]]), [*ends, places[place]])
                for before, (largest, ends) in best.items()
                if before < place
            )
            found[place] = min(options)
        best = found
    return best[len(places) - 1][1]


def _offsets(program: CpuProgram, span: range) -> dict[str, int]:
    used = {view.buffer for at in span for view in program.operations[at].views} - {LOGITS}
    return {name: program.buffers[name].offset for name in sorted(used)}


def split_work(cut: CutProgram) -> list[float]:
    """The share of each device in the multiplications of a token."""
    totals = [_work(device.program)[-1] for device in cut.devices]
    return [each / max(1, sum(totals)) for each in totals]
