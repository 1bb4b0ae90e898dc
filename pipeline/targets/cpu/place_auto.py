"""`place: auto`: the placement of a program on devices with the least predicted time of a step, and its reasons.

A unit is what is placed together: the mixer of a layer (attention with its KV, or a recurrent layer with its state),
its feed-forward, its experts, and what is before and after the layers. The time of a step is the sum over the units,
as one stage runs after another. A unit reads its weights (of experts, the share that the step's rows reach), its KV and
its state at the bandwidth that programs reach, or multiplies at their flops, whichever takes longer
(planning/roofline.py). A step has a row for each sequence that decodes.
Where the device changes, the values that are alive are copied over the slower link.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.artifact.programs.cpu_program import Attend, CpuProgram, Embed, Experts, Linear, Operation, Recurrent
from ingot.artifact.programs.expert_choices import ExpertChoices, Reach, even_reach, reached
from ingot.artifact.programs.recurrent import kind_of
from ingot.artifact.programs.stages import LOGITS, alive_before
from ingot.passes.numerics.chain_placement import Chain, bytes_of, place_chain, seconds_of
from ingot.pipeline.targets.cpu.place_rules import layer_in, name_of, split_by_layers
from ingot.planning.hardware import FlopType, Hardware
from ingot.planning.roofline import MEASURED, RELATIVE_ERRORS, DeviceChange
from ingot.sizes import ceil_div, format_bytes

_FLOAT_BYTES = 4
_UNIT_PARTS = 3
"""Parts of the name of a unit, such as layers.2.mlp."""
_MOST_TIES = 3
"""Ties that the search enumerates; more of them make larger units."""


@dataclass(frozen=True)
class PlaceDevice:
    """A device, the memory that the model may take there, and its speed."""

    name: str
    memory: int
    hardware: Hardware


@dataclass(frozen=True)
class PlaceUnit:
    """Operations that are placed together; figures are of one sequence.

    operations      their number
    size            bytes on its device: weights, KV of the whole context, side state
    read_bytes      bytes of weights that a step reads, whatever its rows
    token_kv        pairs: bytes of KV that a row reads for each token of context, and the window; 0: no window
    flops           multiplications and additions of a row, by the type of the inputs
    entry_bytes     bytes of a row that are alive when it begins
    layers          1 for the mixer of a layer, else 0
    expert_layers   1 for experts of a layer, else 0
    row_bytes       bytes of side state and of tables that a row reads
    experts         pairs: bytes of a layer's experts, and the share that rows reach
    """

    name: str
    operations: int
    size: int
    read_bytes: float
    token_kv: tuple[tuple[float, int], ...] = ()
    flops: Mapping[FlopType, float] | None = None
    entry_bytes: int = 0
    layers: int = 0
    expert_layers: int = 0
    row_bytes: float = 0.0
    experts: tuple[tuple[float, Reach], ...] = ()

    def seconds(self, hardware: Hardware, context: int, rows: int = 1) -> float:
        """Return the predicted seconds of a step of so many rows, each with this many tokens of context."""
        shares = MEASURED[hardware.kind]
        kv = sum(size * min(context, window or context) for size, window in self.token_kv)
        weights = self.read_bytes + sum(size * reached(reach, rows) for size, reach in self.experts)
        read = (weights + rows * (self.row_bytes + kv)) / (hardware.bandwidth * shares.bandwidth)
        flops = (self.flops or {}).items()
        computed = rows * sum(count / (hardware.peak(kind)[1] * shares.flops) for kind, count in flops)
        fixed = self.layers * shares.layer_seconds + self.expert_layers * shares.expert_layer_seconds
        return max(read, computed) + fixed


@dataclass(frozen=True)
class ChosenDevices:
    """The device of each operation, and in words the split, the predictions and the reason."""

    devices: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class PlaceSteps:
    """The steps whose time is predicted: their rows, and counted choices of experts, or None for equal likelihood."""

    rows: int = 1
    choices: ExpertChoices | None = None

    def reach(self, operation: Experts) -> Reach:
        """Return the share of a layer's experts that rows reach."""
        if self.choices is None:
            return even_reach(operation.count, operation.chosen)
        return self.choices.layers[operation.node].reach

    def __str__(self) -> str:
        """The time that is predicted."""
        return "TPOT" if self.rows == 1 else f"time of a step of {self.rows} sequences"


ONE_ROW = PlaceSteps()


def choose_devices(
    program: CpuProgram, devices: Sequence[PlaceDevice], arena: int, steps: PlaceSteps = ONE_ROW
) -> ChosenDevices | None:
    """Return the placement with the least predicted time at half of the context; None where none fits.

    arena   bytes that are set aside on each device for the values of a step
    """
    units, together, shared = units_of(program, steps)
    contexts = (1, program.context_tokens // 2, program.context_tokens)
    chain = chain_of(units, devices, contexts[1], arena, together, shared, steps.rows)
    found = place_chain(chain)
    if found is None:
        return None
    placed = [device for unit, device in zip(units, found.devices, strict=True) for _ in range(unit.operations)]
    return ChosenDevices(
        tuple(placed),
        f"{_predicted_in_words(units, found.devices, devices, contexts, steps)}"
        f" {_others_in_words(chain, units, devices, found.seconds)}"
        + ("" if found.is_exact else " The search was cut short: a faster placement may exist."),
    )


def rank_splits(
    program: CpuProgram, devices: Sequence[PlaceDevice], steps: PlaceSteps = ONE_ROW
) -> Iterator[ChosenDevices]:
    """Yield the splits of a GPU and the host, the fastest at half of the context first. Memory is not checked.

    The last device has all but the last layers, of which the first device has one or more; or experts of first layers.
    """
    units, *_ = units_of(program, steps)
    contexts = (1, program.context_tokens // 2, program.context_tokens)
    layers = [layer_in(unit.name.split(".")) for unit in units]
    chain, last = chain_of(units, devices, contexts[1], 0, rows=steps.rows), len(devices) - 1
    total = max((layer for layer in layers if layer is not None), default=-1) + 1
    splits = [tuple(split_by_layers(layers, total - count, last)) for count in range(1, total + 1)]
    experts = [at for at, unit in enumerate(units) if unit.expert_layers == unit.operations]
    for count in range(1, len(experts) + 1):
        splits.append(tuple(last if at in experts[:count] else 0 for at in range(len(units))))
    for split in sorted(splits, key=lambda split: seconds_of(chain, split)):
        placed = [device for unit, device in zip(units, split, strict=True) for _ in range(unit.operations)]
        yield ChosenDevices(tuple(placed), _predicted_in_words(units, split, devices, contexts, steps))


def least_streamed_rows(
    units: Sequence[PlaceUnit], devices: Sequence[PlaceDevice], buckets: Sequence[int]
) -> int | None:
    """Return the smallest bucket in which a GPU is predicted to compute the host's experts faster than the host.

    Their weights are copied to the GPU in each step, while it computes the layer before. A bucket's time is that of the
    fewest rows that it takes: one more than the bucket before. None where the host is faster in all.

    devices   the GPU and the host
    buckets   rows of each, ascending
    """
    experts = [unit for unit in units if unit.expert_layers == unit.operations]
    gpu, host = (one.hardware for one in devices)
    copied = sum(unit.size for unit in experts) / DeviceChange.between((gpu, host)).bandwidth
    for fewer, bucket in itertools.pairwise([0, *buckets]):
        on_gpu, on_host = (sum(unit.seconds(one, 0, fewer + 1) for unit in experts) for one in (gpu, host))
        if max(copied, on_gpu) < on_host:
            return bucket
    return None


# Units


def units_of(
    program: CpuProgram, steps: PlaceSteps = ONE_ROW
) -> tuple[list[PlaceUnit], tuple[tuple[int, ...], ...], tuple[tuple[int, int, int], ...]]:
    """Return the units in order, those that must be together, and pairs that share bytes of a matrix."""
    runs = [range(run[0], run[-1] + 1) for run in _runs(program)]
    alive = alive_before(program.operations, program.matrices, runs)
    made = [_unit(program, run, entry, steps) for run, entry in zip(runs, alive, strict=True)]
    return made, _together(program, runs), _shared(program, runs)


def _runs(program: CpuProgram) -> list[list[int]]:
    """Operations in a row whose names begin alike; those between two of layers that must be together join them."""
    keys = [_unit_name(one) for one in program.operations]
    runs = [list(run) for _, run in itertools.groupby(range(len(keys)), key=keys.__getitem__)]
    ties = _together(program, [range(run[0], run[-1] + 1) for run in runs])
    if len(ties) <= _MOST_TIES:
        return runs
    joined, at = list[list[int]](), 0
    ends = {min(tie): max(tie) for tie in ties}
    while at < len(runs):
        end = at
        for begin in range(at, len(runs)):
            if begin > end:
                break
            end = max(end, ends.get(begin, begin))
        joined.append([place for run in runs[at : end + 1] for place in run])
        at = end + 1
    return joined


def _unit_name(operation: Operation) -> str:
    name = name_of(operation)
    return ".".join(name if isinstance(operation, Experts) else name[:_UNIT_PARTS])


def _together(program: CpuProgram, runs: Sequence[range]) -> tuple[tuple[int, ...], ...]:
    """Units of layers that share keys and values, and units that make the logits."""
    groups: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        for at in run:
            one = program.operations[at]
            if isinstance(one, Attend):
                groups.setdefault(program.kv.layers[one.layer].source, []).append(number)
            if any(view.buffer == LOGITS for view in one.views):
                groups.setdefault(LOGITS, []).append(number)
    unique = (tuple(dict.fromkeys(group)) for group in groups.values())
    return tuple(group for group in unique if len(group) > 1)


def _shared(program: CpuProgram, runs: Sequence[range]) -> tuple[tuple[int, int, int], ...]:
    """The first pairs of units that read one matrix, such as a table that is the head too."""
    readers: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        for name in {name for at in run for name in program.operations[at].matrix_names()}:
            readers.setdefault(name, []).append(number)
    pairs = [(units[0], units[1], program.matrices[name].num_bytes) for name, units in readers.items() if units[1:]]
    return tuple(sorted(pairs, key=lambda pair: -pair[2])[:1])


def _unit(program: CpuProgram, run: range, alive: Mapping[str, int], steps: PlaceSteps) -> PlaceUnit:
    own = [program.operations[at] for at in run]
    names = {name for one in own for name in one.matrix_names()}
    layers = {one.layer for one in own if isinstance(one, Attend)}
    kept = tuple(sorted(layer for layer in layers if program.kv.layers[layer].source == layer))
    state = program.kv.part((), {(one.layer, kind_of(one)) for one in own if isinstance(one, Recurrent)}).state_bytes
    blocks = ceil_div(program.context_tokens, program.kv.block_tokens)
    kv = blocks * program.kv.part(kept).block_bytes
    flops = Counter[FlopType]()
    for one in own:
        flops.update(_flops(program, one))
    return PlaceUnit(
        name=_unit_name(own[0]),
        operations=len(own),
        size=sum(program.matrices[name].num_bytes for name in names) + kv + state,
        read_bytes=sum(_bytes(program, one) for one in own if not isinstance(one, Embed | Experts)),
        token_kv=tuple(_token_kv(program, layer) for layer in sorted(layers)),
        flops=flops,
        entry_bytes=sum(bits.bit_count() for bits in alive.values()) * _FLOAT_BYTES,
        layers=len({one.layer for one in own if isinstance(one, Attend | Recurrent)}),
        expert_layers=sum(isinstance(one, Experts) for one in own),
        row_bytes=sum(_bytes(program, one) / program.matrices[one.table].n for one in own if isinstance(one, Embed))
        + 2 * state,
        experts=tuple((_bytes(program, one), steps.reach(one)) for one in own if isinstance(one, Experts)),
    )


def _token_kv(program: CpuProgram, layer: int) -> tuple[float, int]:
    facts = program.kv.layers[layer]
    return program.kv.part((facts.source,)).block_bytes / program.kv.block_tokens, facts.window


def _bytes(program: CpuProgram, operation: Operation) -> float:
    """Bytes of all of an operation's matrices."""
    return float(sum(program.matrices[name].num_bytes for name in operation.matrix_names()))


def _flops(program: CpuProgram, operation: Operation) -> Mapping[FlopType, float]:
    if isinstance(operation, Linear):
        matrix = program.matrices[operation.matrix]
        return {_flop_type(operation.rounding): 2.0 * matrix.n * matrix.k}
    if isinstance(operation, Experts):
        elements = sum(program.matrices[one.matrix].n * program.matrices[one.matrix].k for one in operation.layers)
        return {_flop_type(operation.up[0].rounding): 2.0 * elements * operation.chosen / operation.count}
    return {}


def _flop_type(rounding: str) -> FlopType:
    return "fp32" if rounding == "none" else "int8"


# Times


def chain_of(
    units: Sequence[PlaceUnit],
    devices: Sequence[PlaceDevice],
    context: int,
    arena: int,
    together: tuple[tuple[int, ...], ...] = (),
    shared: tuple[tuple[int, int, int], ...] = (),
    rows: int = 1,
) -> Chain:
    """Return the units with their times on each device, in a step of so many rows."""
    kinds = [one.hardware for one in devices]
    entry_bytes = rows * np.array([unit.entry_bytes for unit in units])
    crossings = np.zeros((len(units), len(devices), len(devices)))
    for one, other in itertools.permutations(range(len(devices)), 2):
        change = DeviceChange.between((kinds[one], kinds[other]))
        crossings[:, one, other] = change.seconds + entry_bytes / change.bandwidth
    return Chain(
        sizes=tuple(unit.size for unit in units),
        seconds=np.array([[unit.seconds(kind, context, rows) for kind in kinds] for unit in units]),
        crossings=crossings,
        memory=tuple(max(0, one.memory - arena) for one in devices),
        together=together,
        shared=shared,
    )


# Words


def _interval(seconds: float, error: float) -> str:
    low, high = seconds * max(0.0, 1 - error), seconds * (1 + error)
    return f"{seconds * 1e3:.3g} ms ({low * 1e3:.3g} to {high * 1e3:.3g})"


def _predicted_in_words(
    units: Sequence[PlaceUnit],
    placed: Sequence[int],
    devices: Sequence[PlaceDevice],
    contexts: Sequence[int],
    steps: PlaceSteps,
) -> str:
    error = max(RELATIVE_ERRORS[devices[one].hardware.kind] for one in set(placed))
    times = ", ".join(
        f"{_interval(seconds_of(chain_of(units, devices, context, 0, rows=steps.rows), tuple(placed)), error)}"
        f" with {context:,}"
        for context in contexts
    )
    has_experts = steps.rows > 1 and any(unit.experts for unit in units)
    counted = "equally likely" if steps.choices is None else f"counted on {steps.choices}"
    experts = f" Experts are taken as {counted}." if has_experts else ""
    return f"{_split_in_words(units, placed, devices)}. Predicted {steps} by tokens of context: {times}.{experts}"


def _split_in_words(units: Sequence[PlaceUnit], placed: Sequence[int], devices: Sequence[PlaceDevice]) -> str:
    """The names on each device, with numbers as ranges: as patterns of `place` are written."""
    words = []
    for number, device in enumerate(devices):
        names = dict.fromkeys(unit.name for unit, one in zip(units, placed, strict=True) if one == number)
        size = sum(unit.size for unit, one in zip(units, placed, strict=True) if one == number)
        words.append(f"{device.name} has {', '.join(_as_ranges(names)) or 'nothing'} ({format_bytes(size)})")
    return "; ".join(words)


def _as_ranges(names: Iterable[str]) -> list[str]:
    """Names that differ in the number of their layer alone as one for each range of numbers."""
    numbers: dict[tuple[str, str], list[int]] = {}
    found = list[str]()
    for name in names:
        head, _, rest = name.partition("layers.")
        number, _, after = rest.partition(".")
        if number.isdecimal():
            numbers.setdefault((head, after), []).append(int(number))
        else:
            found.append(name)
    for (head, after), layers in numbers.items():
        for _, run in itertools.groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0]):
            (_, first), *_, (_, last) = [*run] * 2
            found.append(f"{head}layers.{first}{f'-{last}' if last > first else ''}.{after}".rstrip("."))
    return found


def _others_in_words(chain: Chain, units: Sequence[PlaceUnit], devices: Sequence[PlaceDevice], best: float) -> str:
    """The best of the simple rules: their times, or the bytes that they lack."""
    last = len(devices) - 1
    layers = [layer_in(unit.name.split(".")) for unit in units]
    total = max((layer for layer in layers if layer is not None), default=-1) + 1
    rules = {"all on " + devices[0].name: tuple([0] * len(units))}
    splits = {count: tuple(split_by_layers(layers, total - count, last)) for count in range(total + 1)}
    fitting = [count for count, devices_ in splits.items() if not _lacks(chain, devices_)]
    if fitting:
        rules[f"gpu_layers: {max(fitting)}"] = splits[max(fitting)]
    if any(unit.expert_layers for unit in units):
        rules["host: experts"] = tuple(last if unit.expert_layers else 0 for unit in units)
    told = []
    for name, placed in rules.items():
        lacks = _lacks(chain, placed)
        ratio = f"{seconds_of(chain, placed) / best:.2f} times the time"
        told.append(f"{name}: {f'{lacks} bytes are missing' if lacks else ratio}")
    return f"By comparison, {'; '.join(told)}."


def _lacks(chain: Chain, placed: tuple[int, ...]) -> int:
    used = bytes_of(chain, placed)
    return sum(max(0, size - memory) for size, memory in zip(used, chain.memory, strict=True))
