"""Placement of a chain of units on devices, solved exactly: the least seconds within the memory of each device.

    minimize    sum_i seconds[i, d_i] + crossings[i, d_(i-1), d_i]
    subject to  sum of sizes[i] over the units of a device <= memory[device]

Dynamic programming along the chain: a state is the last unit's device, the bytes used on each device, and the seconds.
Of two states with the same last device, the one that is no faster and uses no less of any device is dropped. Memory
that holds all units does not count as a resource. States that cannot improve on a known placement, even if every later
unit ran on its fastest device without a crossing, are dropped too; the known one comes from the same search with at
most BEAM states per device. Units that must be on one device, or that share bytes there, are enumerated.

A model of equal layers has few distinct sums, so that two devices take milliseconds. See knapsack.py for a choice
without neighbours.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

BEAM = 256
MOST_STATES = 200_000
"""Of a device and unit. A search with more keeps the fastest, and says that it is not exact."""
_MARGIN = 1e-12  # share of the seconds: more than the rounding of float64 sums

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Chain:
    """Units in their order, and the devices.

    sizes      bytes of each unit [units]
    seconds    [units, devices]
    crossings  seconds to go from a device to another before a unit [units, devices, devices]; of the first unit unused
    memory     bytes of each device
    together   units that must be on one device
    shared     pairs of units with bytes that a device which has both holds once
    """

    sizes: tuple[int, ...]
    seconds: Floats
    crossings: Floats
    memory: tuple[int, ...]
    together: tuple[tuple[int, ...], ...] = ()
    shared: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class ChainPlacement:
    """The device of each unit, the seconds of all, and whether no placement is faster."""

    devices: tuple[int, ...]
    seconds: float
    is_exact: bool = True


def place_chain(chain: Chain) -> ChainPlacement | None:
    """Return the fastest placement; None where none fits."""
    best: ChainPlacement | None = None
    is_exact = True
    for one, allowed in _fixed_choices(chain):
        for most in (BEAM, MOST_STATES):
            found, is_whole = _search(one, allowed, np.inf if best is None else best.seconds, most)
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
        is_exact &= is_whole
    return None if best is None else replace(best, is_exact=is_exact)


def seconds_of(chain: Chain, devices: tuple[int, ...]) -> float:
    """Return the seconds of a placement, whether it fits or not."""
    total = float(chain.seconds[0, devices[0]])
    for at in range(1, len(devices)):
        total += float(chain.crossings[at, devices[at - 1], devices[at]] + chain.seconds[at, devices[at]])
    return total


def bytes_of(chain: Chain, devices: tuple[int, ...]) -> list[int]:
    """Return the bytes that a placement uses on each device."""
    used = [0] * len(chain.memory)
    for size, device in zip(chain.sizes, devices, strict=True):
        used[device] += size
    for first, second, size in chain.shared:
        if devices[first] == devices[second]:
            used[devices[first]] -= size
    return used


def _fixed_choices(chain: Chain) -> Iterator[tuple[Chain, list[tuple[int, ...]]]]:
    """Yield the chain and the devices that each unit may have, for every choice of the units that depend on others."""
    everywhere = tuple(range(len(chain.memory)))
    groups = [*chain.together, *((unit,) for pair in chain.shared for unit in pair[:2])]
    for choice in itertools.product(everywhere, repeat=len(groups)):
        allowed, sizes = [everywhere] * len(chain.sizes), list(chain.sizes)
        for group, device in zip(groups, choice, strict=True):
            for unit in group:
                allowed[unit] = tuple({device} & {*allowed[unit]})
        if not all(allowed):
            continue
        for first, second, size in chain.shared:
            sizes[second] -= size if allowed[first] == allowed[second] else 0
        yield replace(chain, sizes=tuple(sizes)), allowed


@dataclass(frozen=True)
class _States:
    """States after a unit, whose last device they share: bytes used [states, resources], seconds and parents [states].

    A parent is a device and the index of a state there.
    """

    used: Integers
    seconds: Floats
    device: Integers
    index: Integers


def _search(
    chain: Chain, allowed: list[tuple[int, ...]], limit: float, most: int
) -> tuple[ChainPlacement | None, bool]:
    """Return the fastest placement of at most `limit` seconds, if any is found; and whether no state was left out."""
    total = sum(chain.sizes)
    bound = [device for device, memory in enumerate(chain.memory) if memory < total]
    memory = np.array([chain.memory[device] for device in bound], np.int64)
    fastest = np.array([chain.seconds[at, list(devices)].min() for at, devices in enumerate(allowed)])
    rest = np.append(np.cumsum(fastest[::-1])[::-1][1:], 0.0)  # seconds of the later units at least
    layers, is_exact = list[dict[int, _States]](), True
    for at, size in enumerate(chain.sizes):
        states: dict[int, _States] = {}
        for device in allowed[at]:
            own = np.array([size if one == device else 0 for one in bound], np.int64)
            made = _extended(chain, layers[-1] if layers else None, at, device, own)
            if made is None:
                continue
            fits = (made.used <= memory).all(axis=1) & (made.seconds + rest[at] <= limit * (1 + _MARGIN))
            kept = _undominated(_taken(made, np.flatnonzero(fits)))
            if len(kept.seconds) > most:
                is_exact, kept = False, _taken(kept, np.argsort(kept.seconds, kind="stable")[:most])
            if len(kept.seconds):
                states[device] = kept
        layers.append(states)
    ends = [(one.seconds.min(), device, int(one.seconds.argmin())) for device, one in layers[-1].items()]
    if not ends:
        return None, is_exact
    seconds, device, index = min(ends)
    return ChainPlacement(_traced(layers, device, index), float(seconds)), is_exact


def _extended(chain: Chain, before: dict[int, _States] | None, at: int, device: int, own: Integers) -> _States | None:
    """The states that a unit on a device makes of those before it; None where no state comes before."""
    if before is None:
        start = np.array([chain.seconds[at, device]])
        return _States(own[None], start, np.zeros(1, np.int64), np.zeros(1, np.int64))
    parts = [
        _States(
            one.used + own,
            one.seconds + (chain.crossings[at, last, device] + chain.seconds[at, device]),
            np.full(len(one.seconds), last),
            np.arange(len(one.seconds)),
        )
        for last, one in before.items()
    ]
    if not parts:
        return None
    return _States(*(np.concatenate([getattr(part, name) for part in parts]) for name in _States.__annotations__))


def _taken(states: _States, index: Integers) -> _States:
    return _States(states.used[index], states.seconds[index], states.device[index], states.index[index])


def _undominated(states: _States) -> _States:
    """The fastest of the states that use the same bytes; with one resource, none that uses more and is no faster."""
    if not len(states.seconds):
        return states
    order = np.lexsort((states.seconds, *states.used.T[::-1]))
    ordered = _taken(states, order)
    if ordered.used.shape[1] < 2:  # sorted by bytes, then seconds: each must be faster than all before it
        before = np.minimum.accumulate(np.append(np.inf, ordered.seconds[:-1]))
        kept = ordered.seconds < before
        return _taken(ordered, np.flatnonzero(kept))
    is_new = np.append(True, (ordered.used[1:] != ordered.used[:-1]).any(axis=1))
    return _taken(ordered, np.flatnonzero(is_new))


def _traced(layers: list[dict[int, _States]], device: int, index: int) -> tuple[int, ...]:
    devices = []
    for states in reversed(layers):
        devices.append(device)
        one = states[device]
        device, index = int(one.device[index]), int(one.index[index])
    return tuple(reversed(devices))
