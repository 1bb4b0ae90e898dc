"""Checks a recipe's keys against each other.

Gates need the section that measures their metric and a limit that decides, calibrated passes need `calibration`,
assigned bits need a pass that applies them, weights are rounded once, and the target limits GPUs, key-value precisions
and 8-bit floats. Serving stays within the sizes that the program is built for.
"""

import math
from collections.abc import Iterator, Sequence

from ingot.artifact.metrics import METRICS, MetricFacts
from ingot.artifact.programs.launch_program import DEPENDENT_FROM
from ingot.artifact.serving import MOST_STEP_TOKENS
from ingot.errors import Problem, UsageError, one_of, shown, unknown
from ingot.passes.base import Pass
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import (
    AUTO,
    DEFAULT_CPU_ENGINE,
    GPU_LAYERS,
    HOST,
    EngineSizes,
    GpuOptions,
    PassEntry,
    device_of,
)
from ingot.pipeline.recipe.yaml import Located
from ingot.pipeline.targets.table import FLOAT8_FROM, NATIVE, Target, get_target, require_kv_type
from ingot.planning.hardware import hardware_rows
from ingot.validation.options import LatencyLoad

_LONGEST_LEVEL = 20
_LEAST_DEVICES = 2
_MOST_LEVELS = 16  # the schema refuses more


def consistency_problems(recipe: Located, entries: Sequence[PassEntry]) -> Iterator[Problem]:
    """Every contradiction between keys, at the line of one of them. `entries` are the valid passes of the recipe."""
    passes = [entry.make() for entry in entries]
    yield from _target_problems(recipe, passes)
    yield from _gate_problems(recipe, passes)
    messages = (*_calibration_messages(recipe, passes), *_unapplied_bits(passes), *_rounded_twice(passes))
    yield from (recipe.entries["passes"].problem(f"passes: {message}") for message in messages)


def _target_problems(recipe: Located, passes: Sequence[Pass]) -> Iterator[Problem]:
    given = recipe.entries.get("target")
    name = Recipe.model_fields["target"].default if given is None else given.value
    if not isinstance(name, str):
        return
    try:
        target = get_target(name)
    except UsageError as error:
        assert given is not None
        yield given.problem(str(error))
        return
    yield from _sm_problems(recipe, target)
    yield from _invariance_problems(recipe, target)
    yield from _dependence_problems(recipe, target)
    yield from _adapter_problems(recipe, target)
    yield from _serving_problems(recipe, target)
    yield from _place_problems(recipe, target)
    yield from _streaming_problems(recipe, target)
    messages = (*_kv_messages(target, passes), *_float8_messages(recipe, target, passes))
    yield from (recipe.entries["passes"].problem(f"passes: {message}") for message in messages)


def _sm_problems(recipe: Located, target: Target) -> Iterator[Problem]:
    """gpu.sms must be set exactly where the target has a choice of GPUs, and within that choice."""
    sms, given = _given_sms(recipe)
    place = sms or recipe.entries.get("target") or recipe
    choice = ", ".join(map(str, target.sm_choice))
    if given and not target.sm_choice:
        fixed = f"builds for SM {target.sms[0]} only" if target.sms else "does not build for a GPU"
        yield place.problem(f"gpu.sms is {shown(list(given))}, but target {target.name} {fixed}; remove it")
    elif target.sm_choice and not given:
        yield place.problem(f"target {target.name} requires gpu.sms, the GPUs to build for; choose from {choice}")
    for sm in given if target.sm_choice else ():
        if sm not in target.sm_choice:
            yield place.problem(f"gpu.sms names {sm}; target {target.name} builds for {choice}.{_other_target(sm)}")


def _serving_problems(recipe: Located, target: Target) -> Iterator[Problem]:
    """Limits of a step above the sizes that the program is built for."""
    built_for = {"max_batch_tokens": ("engine.max_batch_tokens", _numbers(recipe, "engine", "max_batch_tokens"))}
    if target.sms or target.sm_choice:
        built_for["max_sequences"] = "the largest of gpu.decode_rows", _numbers(recipe, "gpu", "decode_rows")
    yield from _affinity_problems(recipe, target)
    for name, (limit, numbers) in built_for.items():
        given = _numbers(recipe, "serving", name)
        if given and numbers and max(numbers) < given[0] <= MOST_STEP_TOKENS:
            place = recipe.at(("serving", name))
            yield place.problem(f"serving.{name} is {given[0]}, but {limit} is {max(numbers)}; lower it, or raise that")


def _affinity_problems(recipe: Located, target: Target) -> Iterator[Problem]:
    """serving.cpu_affinity needs the engine whose threads are Ingot's own."""
    serving, cpu = recipe.entries.get("serving"), recipe.entries.get("cpu")
    given = serving.entries.get("cpu_affinity") if serving else None
    if given is None or given.value is None:
        return
    chosen = cpu.entries.get("engine") if cpu else None
    engine = chosen.value if chosen else DEFAULT_CPU_ENGINE
    if target.sms or target.sm_choice:
        yield given.problem(f"serving.cpu_affinity pins threads on a CPU, and target {target.name} is a GPU; remove it")
    elif engine != "native":
        yield given.problem(
            f"serving.cpu_affinity pins the threads of the native engine, and cpu.engine is {engine}; set cpu.engine: "
            "native, or remove it"
        )


def _place_problems(recipe: Located, target: Target) -> Iterator[Problem]:
    """`place` needs devices, which need it, and the engine that runs stages; patterns name devices of the list."""
    place, devices = recipe.entries.get("place"), recipe.entries.get("devices")
    count = len(devices.items) if devices else 0
    if place is None or place.value is None:
        if devices is not None and count:
            yield devices.problem("devices are given, but no place; set place, such as {gpu_layers: 4}, or remove them")
        return
    cpu = recipe.entries.get("cpu")
    engine = cpu.entries.get("engine") if cpu else None
    able = NATIVE if target.name == NATIVE.name else target
    if not able.stages_on or (engine is not None and engine.value == "onnxruntime"):
        yield place.problem(
            "place divides programs of the native CPU engine and of cuda targets: set target to cpu or cuda-smXX, and"
            " cpu.engine to native"
        )
    if count < _LEAST_DEVICES:
        yield place.problem(f"place needs {_LEAST_DEVICES} devices or more, and devices has {count}; list them there")
        return
    assert devices is not None
    kinds = [_kind_of(device) for device in devices.items]
    yield from _kind_problems(place, devices, kinds, able)
    if _is_auto(place):
        yield from _hardware_problems(devices)
        return
    names = [f"{kind}:{kinds[:at].count(kind)}" for at, kind in enumerate(kinds)]
    for pattern, given in place.entries.items():
        if pattern in (GPU_LAYERS, HOST) or not isinstance(given.value, str):
            continue
        try:
            device_of(given.value, names)
        except ValueError as error:
            yield given.problem(f"place: {shown(pattern)}: {error}")


def _streaming_problems(recipe: Located, target: Target) -> Iterator[Problem]:
    """Rows of `stream_experts` need a GPU next to the host; experts on both have other bits in other batches."""
    given, gpu = recipe.entries.get("stream_experts"), recipe.entries.get("gpu")
    if given is None or not isinstance(given.value, int) or given.value == 0:
        return
    place, invariant = recipe.entries.get("place"), gpu.entries.get("batch_invariant") if gpu else None
    if place is None or place.value is None or "cuda" not in target.stages_on:
        yield given.problem(
            f"stream_experts is {given.value}, and no experts are on the host next to a GPU: set place, such as"
            " {host: experts}, and a target such as cuda-sm90, or remove it"
        )
    elif invariant is not None and invariant.value is True:
        yield given.problem(
            f"stream_experts is {given.value}, and the host's experts would have other bits in steps of fewer rows,"
            " which gpu.batch_invariant excludes; remove one of the two"
        )


def _is_auto(place: Located) -> bool:
    return place.value == AUTO or AUTO in place.entries


def _kind_of(device: Located) -> str:
    return next((key for key, size in device.entries.items() if key != "hardware" and size.value is not None), "")


def _kind_problems(place: Located, devices: Located, kinds: Sequence[str], target: Target) -> Iterator[Problem]:
    """A program for a GPU is divided among that GPU and the host; one for the CPU among parts of the host."""
    if "cuda" in target.stages_on:
        if list(kinds) != list(target.stages_on):
            yield devices.problem(
                f"devices are {', '.join(kinds)}; a program for {target.name} is divided among that GPU and the host:"
                " [{cuda: 16GiB}, {cpu: 64GiB}]"
            )
    elif target.stages_on and "cuda" in kinds:
        yield devices.problem(
            f"devices have the kind cuda, and target {target.name} builds no kernels for a GPU; set target to cuda-smXX"
        )


def _hardware_problems(devices: Located) -> Iterator[Problem]:
    """`place: auto` predicts the speed of each device by a row of hardware."""
    for number, device in enumerate(devices.items):
        row = device.entries.get("hardware")
        if row is None or not isinstance(row.value, str):
            example = "[{cpu: 8GiB, hardware: epyc-9654}, ...]"
            yield device.problem(f"place: auto predicts speeds, and devices.{number} names no hardware: {example}")
            continue
        rows = hardware_rows()
        if row.value not in rows:
            yield row.problem(f"devices.{number}: {unknown('hardware', row.value, sorted(rows))}")


def _numbers(recipe: Located, section: str, key: str) -> tuple[int, ...]:
    """The numbers of a key, or its default; empty for anything else, which the schema refuses."""
    sections = {"engine": EngineSizes(), "gpu": GpuOptions()}
    outer = recipe.entries.get(section)
    value = outer.entries[key].plain() if outer and key in outer.entries else getattr(sections.get(section), key, None)
    listed = value if isinstance(value, tuple) else (value,)
    return tuple(int(number) for number in listed if isinstance(number, int | float))


def _invariance_problems(recipe: Located, target: Target) -> Iterator[Problem]:
    """gpu.batch_invariant needs a target whose matmuls are all Ingot's, and one tile for all numbers of rows."""
    gpu = recipe.entries.get("gpu")
    given = gpu.entries.get("batch_invariant") if gpu else None
    if gpu is None or given is None or given.value is not True:
        return
    if target.sm_choice:
        yield given.problem(
            f"gpu.batch_invariant is true, but another engine computes the segments of target {target.name}, in an "
            "order that depends on the rows; build for a target such as cuda-sm90, or remove it"
        )
    tiles = gpu.entries.get("tiles")
    if tiles is not None and tiles.value is not None:
        yield tiles.problem(
            "gpu.tiles chooses a tile for each number of rows, and gpu.batch_invariant has one for all; remove "
            "one of them"
        )


def _dependence_problems(recipe: Located, target: Target) -> Iterator[Problem]:
    """gpu.dependent_launches needs kernels that are all Ingot's, for GPUs that have it."""
    gpu = recipe.entries.get("gpu")
    given = gpu.entries.get("dependent_launches") if gpu else None
    if given is None or given.value is not True:
        return
    if target.sm_choice:
        yield given.problem(
            f"gpu.dependent_launches is true, but another engine computes the segments of target {target.name}; build "
            f"for a target such as cuda-sm{DEPENDENT_FROM}, or remove it"
        )
    elif any(sm < DEPENDENT_FROM for sm in target.sms):
        yield given.problem(
            f"gpu.dependent_launches is true, and target {target.name} is for a GPU without them; build for "
            f"cuda-sm{DEPENDENT_FROM} or newer, or remove it"
        )


def _adapter_problems(recipe: Located, target: Target) -> Iterator[Problem]:
    """gpu.adapters needs linear layers that Ingot's kernels compute."""
    gpu = recipe.entries.get("gpu")
    given = gpu.entries.get("adapters") if gpu else None
    if given is not None and given.value is True and target.sm_choice:
        yield given.problem(
            f"gpu.adapters is true, but another engine computes the linear layers of target {target.name}; build for a "
            "target such as cuda-sm90, or merge the adapter at build time (adapter: in the recipe)"
        )
    elif given is not None and given.value is True and "place" in recipe.entries:
        yield given.problem(
            "gpu.adapters is true, and place leaves some layers to the host, which computes none of the adapters; leave"
            " out one of the two"
        )


def _given_sms(recipe: Located) -> tuple[Located | None, tuple[int, ...]]:
    """gpu.sms, and its numbers where it holds numbers."""
    gpu = recipe.entries.get("gpu")
    sms = gpu.entries.get("sms") if gpu else None
    if sms is None or not all(isinstance(item.value, int) for item in sms.items):
        return sms, ()
    return sms, tuple(int(str(item.value)) for item in sms.items)


def _other_target(sm: int) -> str:
    try:
        return f" Target {get_target(f'cuda-sm{sm}').name} builds for SM {sm}"
    except UsageError:
        return ""


def _kv_messages(target: Target, passes: Sequence[Pass]) -> Iterator[str]:
    for made in passes:
        if made.kv_precision is not None:
            try:
                require_kv_type(target, made.kv_precision, made.kv_group)
            except UsageError as error:
                yield str(error)


def _float8_messages(recipe: Located, target: Target, passes: Sequence[Pass]) -> Iterator[str]:
    """Weights or activations in 8-bit floats for GPUs that do not support them."""
    too_old = [sm for sm in target.sms or _given_sms(recipe)[1] if sm < FLOAT8_FROM]
    for made in passes if too_old else ():
        if made.needs_float8:
            yield (
                f"{made.name} produces 8-bit floats, which require SM {FLOAT8_FROM} or newer, but target "
                f"{target.name} builds for SM {too_old[0]}; use 8-bit or 4-bit integers, or newer GPUs"
            )


def _gate_problems(recipe: Located, passes: Sequence[Pass]) -> Iterator[Problem]:
    gates = recipe.entries.get("gates")
    for metric, gate in gates.entries.items() if gates else ():
        name, separator, level = metric.partition("@")
        if name not in METRICS:
            yield gate.problem(f"gates: {unknown('metric', name, METRICS, 'metrics')}")
        else:
            yield from _limit_problems(recipe, METRICS[name], _cut(level) if separator else None, gate)
            yield from _count_problems(recipe, METRICS[name], passes, gate)


def _limit_problems(recipe: Located, facts: MetricFacts, level: str | None, gate: Located) -> Iterator[Problem]:
    """A bound on the wrong side, or a metric that the recipe does not measure."""
    metric = facts.name if level is None else f"{facts.name}@{level}"
    wrong, right = ("min", "max") if facts.better == "lower" else ("max", "min")
    if wrong in gate.entries:
        message = f"gates: for {metric}, {facts.better} is better; write {right} instead of {wrong}"
        yield gate.entries[wrong].problem(message)
    elif right in gate.entries:
        yield from _range_problems(metric, facts, right, gate.entries[right])
    if _is_set(gate, "if_measured"):
        return
    if facts.section and not _has(recipe, facts.section):
        yield gate.problem(
            f"gates: {metric} requires the section `{facts.section}`, which the recipe does not have; add it, or "
            "remove the gate with null"
        )
    elif level is not None:
        yield from _level_problems(recipe, facts, level, gate)


def _count_problems(recipe: Located, facts: MetricFacts, passes: Sequence[Pass], gate: Located) -> Iterator[Problem]:
    """A metric whose count is 0, or null where no pass starts its measurement."""
    if facts.count is None or facts.section is None or not _has(recipe, facts.section) or _is_set(gate, "if_measured"):
        return
    given = recipe.entries[facts.section].entries.get(facts.count)
    value = None if given is None else given.value
    if facts.count == "slo":
        if value is None:
            yield gate.problem(
                f"gates: {facts.name} requires latency.slo, the limits that a request has to meet; set it, as in"
                " latency.slo=chat or latency.slo={ttft_seconds: 0.5, tpot_seconds: 0.05}, or remove the gate with null"
            )
    elif value == 0 or (value is None and not any(made.compares_generations for made in passes)):
        yield gate.problem(
            f"gates: {facts.name} requires {facts.section}.{facts.count} of 2 or more; set it, or remove the gate with "
            "null"
        )


def _is_set(gate: Located, key: str) -> bool:
    return key in gate.entries and gate.entries[key].value is True


def _range_problems(metric: str, facts: MetricFacts, bound: str, given: Located) -> Iterator[Problem]:
    """A limit that no artifact can meet, or that every artifact meets."""
    limit = given.value
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not -math.inf < limit < math.inf:
        return  # the schema refuses it
    if facts.least <= limit <= facts.most:
        return
    if facts.is_share and 1 < limit <= 100:
        hint = f" Did you mean {limit / 100:g}? It is a share, not a percentage."
    elif facts.comparison == "ratio":
        hint = " It is a ratio to the baseline: 1 is equal, 1.05 is 5 % more."
    else:
        hint = ""
    allowed = f"it must be from {facts.least} to {facts.most}"
    yield given.problem(f"gates: {metric}: {bound} is {shown(limit)}; {allowed}.{hint}")


def _level_problems(recipe: Located, facts: MetricFacts, level: str, gate: Located) -> Iterator[Problem]:
    """metric@level is for metrics measured per concurrency, at a concurrency of the recipe."""
    if facts.section != "latency":
        yield gate.problem(f"gates: {facts.name} is not measured per concurrency; write it without @{level}")
        return
    default = LatencyLoad.concurrency
    given = recipe.entries["latency"].entries.get("concurrency")
    levels = [str(value) for value in (default if given is None else [item.value for item in given.items])]
    if level not in levels:
        yield gate.problem(
            f"gates: {facts.name}@{level}: latency is not measured at concurrency {level}; allowed: "
            f"{one_of(levels[:_MOST_LEVELS])}"
        )


def _calibration_messages(recipe: Located, passes: Sequence[Pass]) -> Iterator[str]:
    needing = [made.name for made in passes if made.needs_calibration]
    if needing and not _has(recipe, "calibration"):
        yield (
            f"{needing[0]} requires the section `calibration`, which the recipe does not have; "
            "add it (calibration: {text: FILE}), or remove the pass"
        )


def _unapplied_bits(passes: Sequence[Pass]) -> Iterator[str]:
    """A pass that assigns bits to weights without a later one that rounds by them."""
    for at, made in enumerate(passes):
        if made.assigns_schemes and not any(later.applies_schemes for later in passes[at + 1 :]):
            yield f"{made.name} assigns bits that no later pass applies; add gptq or quantize-weights after it"


def _rounded_twice(passes: Sequence[Pass]) -> Iterator[str]:
    """A pass that rounds weights after another has rounded all of them."""
    first: Pass | None = None
    for made in passes:
        if first is not None and made.rounds_weights != "none":
            other = f"{first.name} if {made.name} is to round them, else {made.name}"
            yield (
                f"{made.name} has no weight left to round, because {first.name} before it rounds all of them; remove "
                f"{'one of them' if made.name == first.name else other}"
            )
        if first is None and made.rounds_weights == "all":
            first = made


def _cut(level: str) -> str:
    """A concurrency for messages and comparison: a longer one is none."""
    return level if len(level) <= _LONGEST_LEVEL else f"{level[:_LONGEST_LEVEL]}..."


def _has(recipe: Located, section: str) -> bool:
    if section not in recipe.entries:
        return Recipe.model_fields[section].default is not None
    return recipe.entries[section].value is not None
