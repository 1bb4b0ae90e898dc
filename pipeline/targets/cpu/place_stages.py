"""Placement of a CPU program on devices: the recipe's `place` -> a device for each operation -> stages and arenas.

Operations in a row on one device are a stage.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from ingot.artifact.programs.cpu_program import Attend, CpuProgram, Experts, Recurrent, layers_of
from ingot.artifact.programs.expert_choices import ExpertChoices
from ingot.artifact.programs.stages import (
    LOGITS,
    CutProgram,
    ProgramStage,
    StageDevice,
    StagePlan,
    cut_program,
    find_crossings,
    spans_of_stages,
)
from ingot.errors import PassError, UsageError
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import GPU_LAYERS, auto_rows, device_names
from ingot.pipeline.targets.arena import arena_bytes, lifetimes, plan_arena
from ingot.pipeline.targets.cpu.place_auto import PlaceDevice, PlaceSteps, choose_devices, rank_splits
from ingot.pipeline.targets.cpu.place_rules import assign_devices, count_layers, layer_in, name_of
from ingot.planning.hardware import FlopType, find_hardware
from ingot.planning.memory import DevicePart
from ingot.planning.model_shape import MatmulRole, Matmuls, ModelShape, PlacedShape
from ingot.progress import note
from ingot.sizes import format_bytes, round_up

_FLOAT_BYTES = 4
_ROW_FLOATS = 16  # rows of a buffer begin at multiples of it
_MOST_TRIES = 4


MeasureParts = Callable[[StagePlan | None, int], tuple[DevicePart, ...]]
"""The part of each device of a plan; see `parts_of`."""


def place_program(
    program: CpuProgram,
    recipe: Recipe,
    measure: MeasureParts | None = None,
    choices: ExpertChoices | None = None,
) -> StagePlan | None:
    """Return the stages of the recipe's `place`; None where one device has all.

    measure   the parts of a plan; None: as programs of the CPU have them
    choices   choices of experts as they were counted, for `auto`; None: all experts are equally likely

    UsageError for a pattern that matches nothing, for layers apart that share keys and values, and for a part that does
    not fit its device, with what is missing and the nearest split by layers that fits.
    """
    assert recipe.place is not None
    if (rows := auto_rows(recipe.place)) is not None:
        steps = PlaceSteps(rows, choices)
        if measure is None:
            return _place_auto(program, recipe, steps)
        return _place_by_layers(program, recipe, steps, measure)
    assert not isinstance(recipe.place, str)
    names = device_names(recipe.devices)
    devices = assign_devices(program.operations, recipe.place, names)
    problem = _problem_of_shares(program, devices, names)
    if problem is not None:
        raise UsageError(f"place: {problem}")
    _check_logits(program, devices, names)
    plan = plan_stages(program, devices, names)
    measure = measure or (lambda plan, alone: parts_of(program, plan, alone, recipe))
    missing = missing_in_words(measure(plan, devices[0]), recipe)
    if missing:
        raise UsageError(f"place: {missing}. {_nearest_fit(program, recipe, measure)}")
    return plan


def _place_auto(program: CpuProgram, recipe: Recipe, steps: PlaceSteps) -> StagePlan | None:
    """The stages with the least predicted time of a step. Memory is set aside for arenas before they are planned."""
    names, devices = device_names(recipe.devices), placed_devices(recipe)
    arena = program.arena_floats * _FLOAT_BYTES * recipe.engine.max_batch_tokens
    for _ in range(_MOST_TRIES):
        chosen = choose_devices(program, devices, arena, steps)
        if chosen is None:
            break
        plan = plan_stages(program, chosen.devices, names)
        parts = parts_of(program, plan, chosen.devices[0], recipe)
        if not missing_in_words(parts, recipe):
            note(f"place: auto: {chosen.reason}")
            return plan
        arena = max(part.arena for part in parts) + 1
    (whole,) = parts_of(program, None, 0, recipe)
    given = sum(device.memory for device in recipe.devices)
    raise UsageError(
        f"place: auto: no placement fits the devices. The model needs {format_bytes(whole.total)} on one device, with"
        f" an arena of {format_bytes(whole.arena)} on each of several, and the devices have {format_bytes(given)}."
        f" {_nearest_fit(program, recipe, lambda plan, alone: parts_of(program, plan, alone, recipe))}"
    )


def _place_by_layers(program: CpuProgram, recipe: Recipe, steps: PlaceSteps, measure: MeasureParts) -> StagePlan:
    """The split by layers or experts with the least predicted time of a step, of those whose measured parts fit."""
    names = device_names(recipe.devices)
    for chosen in rank_splits(program, placed_devices(recipe), steps):
        if _problem_of_shares(program, chosen.devices, names) is not None:
            continue
        plan = plan_stages(program, chosen.devices, names)
        if plan is not None and _fits(plan, recipe, measure):
            note(f"place: auto: {chosen.reason}")
            return plan
    raise UsageError(
        f"place: auto: no layer fits on {names[0]}, with the rest on {names[-1]}: raise the memory of `devices`, or"
        f" build for the target cpu. {_nearest_fit(program, recipe, measure)}"
    )


def _fits(plan: StagePlan, recipe: Recipe, measure: MeasureParts) -> bool:
    try:
        return not missing_in_words(measure(plan, 0), recipe)
    except PassError:  # a stage that its device cannot have
        return False


def placed_devices(recipe: Recipe) -> list[PlaceDevice]:
    """Return the devices that name their hardware."""
    return [
        PlaceDevice(name, device.memory, find_hardware(device.hardware))
        for name, device in zip(device_names(recipe.devices), recipe.devices, strict=True)
        if device.hardware is not None
    ]


def _problem_of_shares(program: CpuProgram, devices: Sequence[int], names: Sequence[str]) -> str | None:
    """Return which layer reads keys and values of a layer on another device, or None."""
    own = {
        one.layer: device for one, device in zip(program.operations, devices, strict=True) if isinstance(one, Attend)
    }
    for number, device in own.items():
        source = program.kv.layers[number].source
        if own[source] != device:
            return (
                f"attention of layer {number} is on {names[device]} and reads the keys and values of layer {source},"
                f" which is on {names[own[source]]}; place both on one device"
            )
    return None


def _check_logits(program: CpuProgram, devices: Sequence[int], names: Sequence[str]) -> None:
    """Raise UsageError for operations on several devices that write or read the logits."""
    of_logits = {
        device: one
        for one, device in zip(program.operations, devices, strict=True)
        if any(view.buffer == LOGITS for view in one.views)
    }
    if len(of_logits) > 1:
        first, second, *_ = of_logits
        raise UsageError(
            f"place: {of_logits[first].node} on {names[first]} and {of_logits[second].node} on {names[second]} both"
            " compute the logits; place them on one device"
        )


# Stages and arenas


def plan_stages(program: CpuProgram, devices: Sequence[int], names: Sequence[str]) -> StagePlan | None:
    """Cut the program where the device changes, and plan an arena for each device; None for a single device."""
    used = sorted(set(devices))
    if len(used) < 2:
        return None
    ends = [(used.index(device), len(list(run))) for device, run in groupby(devices)]
    stages, end = list[ProgramStage](), 0
    for device, count in ends:
        end += count
        stages.append(ProgramStage(device=device, end=end))
    placed = (_plan_arena(program, stages, index, names[device]) for index, device in enumerate(used))
    return StagePlan(devices=tuple(placed), stages=tuple(stages))


def _plan_arena(program: CpuProgram, stages: Sequence[ProgramStage], device: int, name: str) -> StageDevice:
    """Places of the buffers that a device's stages use: those of values that cross are kept from stage to stage."""
    uses = list[list[str]]()
    crossings = find_crossings(program.operations, program.matrices, stages)
    for stage, span, crossing in zip(stages, spans_of_stages(stages), crossings, strict=True):
        is_own = stage.device == device
        uses.append([one.buffer for one in crossing if is_own or one.source == device])
        uses += [sorted({view.buffer for view in program.operations[at].views}) if is_own else [] for at in span]
    sizes = {
        buffer: round_up(program.buffers[buffer].columns, _ROW_FLOATS) * _FLOAT_BYTES
        for names in uses
        for buffer in names
        if buffer != LOGITS
    }
    alive = lifetimes(uses, sizes)
    offsets = plan_arena(alive)
    return StageDevice(
        name=name,
        arena_floats=arena_bytes(alive, offsets) // _FLOAT_BYTES,
        offsets={buffer: offset // _FLOAT_BYTES for buffer, offset in offsets.items()},
    )


# Memory


def parts_of(program: CpuProgram, plan: StagePlan | None, alone: int, recipe: Recipe) -> tuple[DevicePart, ...]:
    """Return the part of each device; `alone` is the device that has all where there is no plan."""
    tokens = recipe.engine.max_batch_tokens
    if plan is None:
        return (part_of(device_names(recipe.devices)[alone], program, tokens),)
    return cut_parts(cut_program(program, plan), tokens)


def cut_parts(cut: CutProgram, max_batch_tokens: int) -> tuple[DevicePart, ...]:
    """Return the part of each device of a program that is cut."""
    return tuple(part_of(device.name, device.program, max_batch_tokens) for device in cut.devices)


def part_of(name: str, program: CpuProgram, max_batch_tokens: int) -> DevicePart:
    """Return the part of a device from its program."""
    weights = sum(matrix.num_bytes for matrix in program.matrices.values())
    arena = program.arena_floats * _FLOAT_BYTES * max_batch_tokens
    return DevicePart.of(name, weights, arena, program.kv, program.context_tokens)


def placed_shapes(cut: CutProgram, recipe: Recipe, whole: ModelShape) -> tuple[PlacedShape, ...]:
    """Return the shape of each device's part; () for a program in one piece. Stored forms are those of the CPU."""
    if len(cut.devices) == 1:
        return ()
    hardware = {name: one.hardware for name, one in zip(device_names(recipe.devices), recipe.devices, strict=True)}
    shapes = []
    for number, part in enumerate(cut.devices):
        entries = [run.crossings for run in cut.runs if run.device == number and run.crossings]
        columns = sum(cut.whole.buffers[value.buffer].columns for values in entries for value in values)
        shape = _shape_of(part.program, whole)
        shapes.append(PlacedShape(part.name, hardware.get(part.name), shape, len(entries), _FLOAT_BYTES * columns))
    return tuple(shapes)


def _shape_of(program: CpuProgram, whole: ModelShape) -> ModelShape:
    kinds = Counter[Matmuls]()
    for one in program.operations:
        is_head = any(view.buffer == LOGITS for view in one.views)
        experts = (one.count, one.chosen) if isinstance(one, Experts) else (0, 0)
        role: MatmulRole = "expert" if isinstance(one, Experts) else "head" if is_head else "linear"
        for layer in layers_of(one):
            matrix = program.matrices[layer.matrix]
            inputs: FlopType = "fp16" if layer.rounding == "none" else "int8"
            kinds[Matmuls(role, matrix.n, matrix.k, 1, matrix.num_bytes, *experts, inputs)] += 1
    attending = {one.layer: one.num_heads for one in program.operations if isinstance(one, Attend)}
    mixed = {layer_in(name_of(one)) for one in program.operations if isinstance(one, Attend | Recurrent)}
    return replace(
        whole,
        num_layers=len(mixed),
        matmuls=tuple(replace(one, count=count, bytes=one.bytes * count) for one, count in kinds.items()),
        query_heads=tuple(attending[layer] for layer in sorted(attending)),
        kv=program.kv,
    )


def _memory(recipe: Recipe) -> Mapping[str, int]:
    names = device_names(recipe.devices)
    return {name: device.memory for name, device in zip(names, recipe.devices, strict=True)}


def missing_in_words(parts: Sequence[DevicePart], recipe: Recipe) -> str:
    """Return the parts that are larger than their device's memory, in words; "" if all fit."""
    memory = _memory(recipe)
    return "; ".join(
        f"{part} and has {format_bytes(memory[part.name])}: {part.total - memory[part.name]} bytes are missing"
        for part in parts
        if part.total > memory[part.name]
    )


def _nearest_fit(program: CpuProgram, recipe: Recipe, measure: MeasureParts) -> str:
    """The split by layers with the most layers on the first device that fits, or the one that lacks least."""
    memory, lacks = _memory(recipe), dict[int, int]()
    names = list(memory)
    for count in range(count_layers(program.operations), -1, -1):
        devices = assign_devices(program.operations, {GPU_LAYERS: count}, names)
        if _problem_of_shares(program, devices, names) is not None:
            continue
        try:
            parts = measure(plan_stages(program, devices, names), devices[0])
        except PassError:  # a stage that its device cannot have
            continue
        lacks[count] = sum(max(0, part.total - memory[part.name]) for part in parts)
        if not lacks[count]:
            return f"The nearest split by layers that fits is {{{GPU_LAYERS}: {count}}}"
    least = min(lacks, key=lambda count: lacks[count])
    return (
        f"No split by layers fits; {{{GPU_LAYERS}: {least}}} lacks least, {lacks[least]} bytes: raise the memory of"
        " `devices`, quantize more, or build for a shorter context_tokens"
    )
