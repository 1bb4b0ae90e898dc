"""Looks at a growing sample: how many, when, and that looking again does not make wrong verdicts likelier."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.validation.gates import GateSpec, decide
from ingot.validation.latency.sequential import Stop, look_error, sample_until_decided
from ingot.validation.statistics import CONFIDENCE, Measured, ratio_interval
from tests.each_case import each_case
from tests.validation.fake_subject import Clock

Noise = Callable[[np.random.Generator], NDArray[np.float64]]  # log ratios of all rounds of a trial
_TRIALS = 3000
_ROUNDS = 100
_LIMIT = 1.1


@dataclass
class Timed:
    """Draws take a second each; looks are recorded, and `decided_at` samples decide."""

    decided_at: int = 10**9
    clock: Clock = field(default_factory=Clock)
    planned: list[int] = field(default_factory=list)
    looks: list[Stop] = field(default_factory=list)

    def draw(self, number: int, planned: int) -> None:
        assert number == len(self.planned)
        self.clock.now += 1
        self.planned.append(planned)

    def is_decided(self, stop: Stop) -> bool:
        self.looks.append(stop)
        return stop.samples >= self.decided_at

    def run(self, least: int, max_seconds: float) -> Stop:
        return sample_until_decided(self.draw, self.is_decided, least, max_seconds, self.clock)


def test_each_look_has_twice_the_samples_of_the_one_before() -> None:
    timed = Timed(decided_at=35)
    stop = timed.run(5, 1000)
    assert [look.samples for look in timed.looks] == [5, 10, 20, 40]
    assert (stop, stop.looks, stop.seconds) == (timed.looks[-1], 4, 40)
    assert timed.planned[4:11] == [5, 10, 10, 10, 10, 10, 20]


def test_sampling_ends_with_the_time_and_a_last_look() -> None:
    timed = Timed()
    stop = timed.run(5, 33.5)
    assert [look.samples for look in timed.looks] == [5, 10, 20]
    assert (stop.samples, stop.looks) == (33, 4)


def test_without_time_for_half_as_many_samples_again_there_is_one_look_at_95_percent() -> None:
    timed = Timed()
    assert timed.run(10, 14.5) == Stop(samples=14, looks=1, error=1 - CONFIDENCE, seconds=14)
    assert timed.looks == []


def test_the_least_number_is_drawn_whatever_the_time() -> None:
    assert Timed().run(7, 0.1).samples == 7


def test_without_anything_to_decide_there_is_one_look() -> None:
    timed = Timed()
    assert sample_until_decided(timed.draw, None, 5, 1000, timed.clock) == Stop(5, 1, 1 - CONFIDENCE, 5)


@pytest.mark.parametrize("looks", [1, 2, 3, 10])
def test_all_looks_together_spend_five_percent(looks: int) -> None:
    spent = [look_error(before, is_last=before == looks - 1) for before in range(looks)]
    assert sum(spent) == pytest.approx(1 - CONFIDENCE)


def outcome(rng: np.random.Generator, noise: Noise, seconds: float, looks_share: bool = True) -> str:
    """The verdict on a gate whose limit is the true value, after at most `seconds` rounds of a second."""
    clock, logs = Clock(), math.log(_LIMIT) + noise(rng)
    [gate] = [GateSpec("tpot_ratio", "max", _LIMIT)]

    def draw(number: int, planned: int) -> None:
        clock.now += 1

    def verdict(stop: Stop) -> str:
        estimate = ratio_interval(logs[: stop.samples], 1 - stop.error if looks_share else CONFIDENCE)
        return decide([gate], {"tpot_ratio": Measured("tpot_ratio", estimate)})[0].verdict

    stop = sample_until_decided(draw, lambda stop: verdict(stop) != "UNDECIDED", 5, seconds, clock)
    return verdict(stop)


def rates(noise: Noise, seconds: float, looks_share: bool = True) -> tuple[float, float]:
    """Shares of wrong PASS and wrong FAIL, where the truth is on the limit: the likeliest case for both."""
    rng = np.random.default_rng(11)
    verdicts = [outcome(rng, noise, seconds, looks_share) for _ in range(_TRIALS)]
    return verdicts.count("PASS") / _TRIALS, verdicts.count("FAIL") / _TRIALS


def bursts(rng: np.random.Generator) -> NDArray[np.float64]:
    """One round in ten is measured while the machine is busy."""
    return rng.normal(0, np.where(rng.random(_ROUNDS) < 0.1, 0.4, 0.03))


NOISES: dict[str, Noise] = {
    "normal": lambda rng: rng.normal(0, 0.08, _ROUNDS),
    "many outliers": lambda rng: rng.standard_t(3, _ROUNDS) * 0.05,
    "bursts": bursts,
}


@each_case("name", NOISES)
@each_case("seconds", [12, 100])
def test_a_wrong_pass_is_not_likelier_than_one_in_forty(name: str, seconds: float) -> None:
    passed, failed = rates(NOISES[name], seconds)
    chance = 2 * math.sqrt(0.025 * 0.975 / _TRIALS)  # two standard errors of the simulation
    assert passed <= 0.025 + chance
    assert failed <= 0.025 + chance
    assert passed + failed <= 0.05


def test_without_sharing_the_error_wrong_verdicts_are_likelier_than_allowed() -> None:
    passed, _ = rates(NOISES["normal"], 100, looks_share=False)
    assert passed > 0.05
