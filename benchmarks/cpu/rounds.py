"""Rounds of measurements in which engines take turns, and the figures of a cell. No clock, no process.

Engines take turns: A B C, then C B A, and so on, so that disturbances affect all of them alike.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_RESAMPLES = 2000


@dataclass(frozen=True)
class Figure:
    """One measurement.

    cpu_seconds   processor time of the engine's process for each token; None where it was not measured
    other_cores   cores that other processes kept busy meanwhile
    is_quiet      whether the engine had as many cores to itself as it has threads
    """

    tokens_per_second: float
    cpu_seconds: float | None
    other_cores: float
    is_quiet: bool


def order_of_round(names: Sequence[str], round_index: int) -> list[str]:
    """Names in their order in even rounds, reversed in odd ones."""
    return list(names) if round_index % 2 == 0 else list(reversed(names))


def another_round(done: int, spent_seconds: float, max_rounds: int, budget_seconds: float) -> bool:
    """Whether to measure once more: two rounds unless the first took the budget, then while a mean round fits it."""
    if done < 2:
        return done == 0 or spent_seconds < budget_seconds
    return done < max_rounds and spent_seconds * (done + 1) / done <= budget_seconds


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]
