"""Rules of the recipe's `place`: {gpu_layers: N}, {host: experts}, patterns -> the device of each operation.

An operation has the name of the IR's node that it computes, such as layers.3.mlp.down_proj; a layer's experts are
layers.3.mlp.experts here, whatever the last of their nodes is called.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ingot.artifact.programs.cpu_program import Experts, Operation
from ingot.errors import UsageError, shown
from ingot.pipeline.recipe.sections import EXPERTS, GPU_LAYERS, HOST, PlaceRules, device_of

_LAYERS = "layers"


def assign_devices(operations: Sequence[Operation], place: PlaceRules, names: Sequence[str]) -> list[int]:
    """Return the index of each operation's device."""
    if GPU_LAYERS in place:
        count = place[GPU_LAYERS]
        assert isinstance(count, int)
        return _last_layers(operations, count, len(names) - 1)
    if HOST in place:
        return [len(names) - 1 if isinstance(one, Experts) else 0 for one in _require_experts(operations)]
    rules = {pattern: names.index(device_of(str(device), names)) for pattern, device in place.items()}
    unused = next((pattern for pattern in rules if not any(matches(pattern, one) for one in operations)), None)
    if unused is not None:
        raise UsageError(
            f"place: {shown(unused)} matches no operation of the model. A pattern is the beginning of a name, such as"
            f" layers.2.mlp, with numbers as ranges, such as layers.0-3; the names are {_all_names(operations)}"
        )
    found = list[int]()
    for operation in operations:
        chosen = [device for pattern, device in rules.items() if matches(pattern, operation)]
        found.append(chosen[-1] if chosen else 0)
    return found


def _all_names(operations: Sequence[Operation]) -> str:
    """The names that patterns can begin, those of all layers as one."""
    last = count_layers(operations) - 1
    parts = ([f"0-{last}" if part.isdecimal() else part for part in name_of(one)[:4]] for one in operations)
    return ", ".join(dict.fromkeys(map(".".join, parts)))


def _require_experts(operations: Sequence[Operation]) -> Sequence[Operation]:
    if not any(isinstance(one, Experts) for one in operations):
        raise UsageError("place: the model has no experts, so {host: experts} places nothing; leave place out")
    return operations


def _last_layers(operations: Sequence[Operation], count: int, host: int) -> list[int]:
    """The last `count` layers, and what follows them, on the first device; the rest on the host."""
    total = count_layers(operations)
    if count > total:
        raise UsageError(f"place: {GPU_LAYERS} is {count}; the model has {total} layers: set it to that or less")
    return split_by_layers(map(layer_of, operations), total - count, host)


def split_by_layers(layers: Iterable[int | None], first: int, host: int) -> list[int]:
    """Layers from `first` on, and what follows them, on the first device, the others on the host."""
    found, device = list[int](), host
    for layer in layers:
        if layer is not None:
            device = 0 if layer >= first else host
        found.append(device)
    return found


def name_of(operation: Operation) -> tuple[str, ...]:
    """Return the parts of an operation's name, by which it is placed."""
    parts = tuple(operation.node.split("."))
    return (*parts[:-1], EXPERTS) if isinstance(operation, Experts) else parts


def layer_of(operation: Operation) -> int | None:
    """Return the layer that an operation is of; None before and after the layers."""
    return layer_in(name_of(operation))


def layer_in(parts: Sequence[str]) -> int | None:
    """Return the layer that the parts of a name are of; None before and after the layers."""
    at = parts.index(_LAYERS) + 1 if _LAYERS in parts else len(parts)
    return int(parts[at]) if at < len(parts) and parts[at].isdecimal() else None


def count_layers(operations: Iterable[Operation]) -> int:
    """Return the number of layers of the model."""
    return max((layer for one in operations if (layer := layer_of(one)) is not None), default=-1) + 1


def matches(pattern: str, operation: Operation) -> bool:
    """Return whether an operation's name begins with the pattern, part by part."""
    parts, name = pattern.split("."), name_of(operation)
    return len(parts) <= len(name) and all(map(_is_part, parts, name))


def _is_part(pattern: str, part: str) -> bool:
    first, is_range, last = pattern.partition("-")
    if is_range and first.isdecimal() and last.isdecimal():
        return part.isdecimal() and int(first) <= int(part) <= int(last)
    return fnmatchcase(part, pattern)
