"""Placements of chains are those of exhaustive search, and fit."""

import itertools

import numpy as np
import pytest

from ingot.passes.numerics import chain_placement
from ingot.passes.numerics.chain_placement import Chain, bytes_of, place_chain, seconds_of
from tests.each_case import each_case


def random_chain(seed: int) -> Chain:
    """Up to 11 units on two devices, or 8 on three: layers of attention and experts or of random sizes."""
    rng = np.random.default_rng(seed)
    devices = 2 + int(seed % 4 == 3)
    units = int(rng.integers(4, 12 if devices == 2 else 9))
    if seed % 2:
        kinds = rng.integers(1, 1000, 2)
        sizes = [int(kinds[at % 2]) for at in range(units)]
        share = [1.0 if at % 2 else float(rng.uniform(0.05, 0.5)) for at in range(units)]
    else:
        sizes = rng.integers(1, 1000, units).tolist()
        share = rng.uniform(0.05, 1.0, units).tolist()
    rates = np.sort(rng.uniform(1, 20, devices))[::-1]
    seconds = np.array([[size * part / rate for rate in rates] for size, part in zip(sizes, share, strict=True)])
    crossings = rng.uniform(0, 60, (units, devices, devices)) * (1 - np.eye(devices))
    memory = [int(sum(sizes) * rng.uniform(0.2, 0.8)) for _ in range(devices)]
    if seed % 3:
        memory[-1] = sum(sizes)
    together = ((0, units - 1),) if seed % 5 == 1 else ()
    shared = ((1, units - 2, min(sizes[1], sizes[units - 2])),) if seed % 5 == 2 else ()
    return Chain(tuple(sizes), seconds, crossings, tuple(memory), together, shared)


def exhaustive(chain: Chain) -> float | None:
    """The seconds of the fastest placement that fits, by trying all."""
    best: float | None = None
    for devices in itertools.product(range(len(chain.memory)), repeat=len(chain.sizes)):
        if any(len({devices[unit] for unit in group}) > 1 for group in chain.together):
            continue
        if all(used <= memory for used, memory in zip(bytes_of(chain, devices), chain.memory, strict=True)):
            seconds = seconds_of(chain, devices)
            best = seconds if best is None else min(best, seconds)
    return best


@each_case("seed", range(50))
def test_no_placement_that_fits_is_faster(seed: int) -> None:
    chain = random_chain(seed)
    found, best = place_chain(chain), exhaustive(chain)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.is_exact
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.seconds == pytest.approx(seconds_of(chain, found.devices), rel=1e-9)
    assert all(used <= memory for used, memory in zip(bytes_of(chain, found.devices), chain.memory, strict=True))
    assert all(len({found.devices[unit] for unit in group}) == 1 for group in chain.together)


def test_most_of_the_random_chains_fit_and_use_several_devices() -> None:
    found = [place_chain(random_chain(seed)) for seed in range(50)]
    assert sum(one is not None and len(set(one.devices)) > 1 for one in found) >= 35


def test_bytes_that_two_units_share_may_decide_what_fits() -> None:
    chain = Chain((10, 5, 10), np.array([[1.0, 9.0]] * 3), np.zeros((3, 2, 2)), (15, 10), shared=((0, 2, 10),))
    found = place_chain(chain)
    assert found is not None
    assert found.devices == (0, 0, 0)
    without = place_chain(Chain(chain.sizes, chain.seconds, chain.crossings, chain.memory))
    assert without is not None
    assert without.seconds > found.seconds


def test_a_model_of_eighty_layers_is_placed_exactly() -> None:
    sizes = (100, *(700, 1300) * 80, 100)
    seconds = np.array([[size / 20, size / 1.5] for size in sizes])
    crossings = np.full((len(sizes), 2, 2), 5.0) * (1 - np.eye(2))
    found = place_chain(Chain(sizes, seconds, crossings, (100_000, sum(sizes))))
    assert found is not None
    assert found.is_exact
    used = [sum(size for size, device in zip(sizes, found.devices, strict=True) if device == one) for one in (0, 1)]
    assert used[0] > 99_000


def test_a_search_with_too_many_states_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_placement, "MOST_STATES", 4)
    rng = np.random.default_rng(0)
    sizes = tuple(rng.integers(1, 10**6, 24).tolist())
    seconds = np.stack([rng.uniform(0, 1, 24), rng.uniform(1, 2, 24)], axis=1)
    chain = Chain(sizes, seconds, np.zeros((24, 2, 2)), (sum(sizes) // 2, sum(sizes)))
    found = place_chain(chain)
    assert found is not None
    assert not found.is_exact
    assert bytes_of(chain, found.devices)[0] <= chain.memory[0]
