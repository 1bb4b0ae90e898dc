"""Adds samples until a decision is possible, without making a wrong decision likelier by looking more than once.

Who looks at a 95 % interval again and again while the sample grows, and stops as soon as it decides, is wrong in far
more than 5 of 100 cases. So the looks share the 5 %: each spends half of what is left, at twice the sample of the look
before, and the last spends all that is left. By Bonferroni's inequality all intervals together contain the truth in at
least 95 of 100 cases, however the looks depend on each other: these are repeated confidence intervals (Jennison and
Turnbull 1989) with an error-spending function (Lan and DeMets 1983). Time alone decides whether a look is the last.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ingot.validation.statistics import CONFIDENCE

_GROWTH = 2


@dataclass(frozen=True)
class Stop:
    """End of sampling.

    samples  drawn in all
    looks    times that the intervals were computed, the last included
    error    the share of wrong intervals that the last look was allowed: its intervals have confidence 1 - error
    seconds  from the first sample to the last
    """

    samples: int
    looks: int = 1
    error: float = 1 - CONFIDENCE
    seconds: float = 0.0


def look_error(looks_before: int, is_last: bool) -> float:
    """Return the share of the 5 % that a look spends: half of what earlier looks left, or all of it."""
    left = (1 - CONFIDENCE) * 0.5**looks_before
    return left if is_last else left / 2


def sample_until_decided(
    draw: Callable[[int, int], None],
    is_decided: Callable[[Stop], bool] | None,
    least: int,
    max_seconds: float,
    clock: Callable[[], float],
) -> Stop:
    """Draw at least `least` samples, until `is_decided` or the next one would exceed `max_seconds`.

    draw(number, planned) draws sample `number` of the `planned` ones before the next look; there may be time for fewer.
    With `is_decided` None, or without time for at least half as many samples again, there is one look at the full 95 %.
    """
    start = clock()
    samples = looks = 0

    def room() -> float:
        """Estimate how many more samples fit into the time."""
        spent = clock() - start
        return (max_seconds - spent) / (spent / samples) if spent else float("inf")

    target = least
    while True:
        while samples < least or (samples < target and room() >= 1):
            draw(samples, target)
            samples += 1
        is_last = is_decided is None or room() < 1
        if not is_last and room() < samples / _GROWTH:
            target = samples * _GROWTH  # too little time for another look worth its share
            continue
        stop = Stop(samples, looks + 1, look_error(looks, is_last), clock() - start)
        if is_last or (is_decided is not None and is_decided(stop)):
            return stop
        looks, target = looks + 1, samples * _GROWTH
