"""Times of an engine's steps with tiers, compared with those of engines without.

The quantiles of the times themselves (milliseconds) are what a client sees. But two engines do not make the same steps:
with tier hits, a step has fewer tokens, or is made for the other sequences while one is loading. So a step's time is
also divided by that which it takes without tiers, in two ways:

    composition    the median of the steps without tiers that have as many sequences and about as many tokens. Steps of
                   a composition that is rare without tiers are left out, and a composition has steps of other contexts
    work           seconds that are linear in tokens, sequences, prompts, tokens of the contexts, and pairs of a query
                   and a key, fitted to the steps without tiers. No step is left out
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_TOKENS_PER_CLASS = 16  # steps whose tokens differ by less are of one composition
_ROUNDS = 8  # of the fit, in each of which steps that are far from it count less


@dataclass(frozen=True)
class Work:
    """The work of a step: tokens of each sequence, and tokens in its context after the step."""

    queries: NDArray[np.int32]  # [sequences]
    contexts: NDArray[np.int32]  # [sequences]

    @property
    def composition(self) -> tuple[int, int]:
        """Equal for steps that take about the same time."""
        return len(self.queries), -(-int(self.queries.sum()) // _TOKENS_PER_CLASS)

    @cached_property
    def terms(self) -> NDArray[np.float64]:
        """The terms of the linear fit: 1, tokens, sequences, prompts, tokens of the contexts, pairs."""
        pairs = (self.queries * (self.contexts - (self.queries - 1) / 2)).sum()
        sums = (self.queries.sum(), len(self.queries), (self.queries > 1).sum(), self.contexts.sum(), pairs)
        return np.array([1, *sums], np.float64)


class Step(NamedTuple):
    """One step: seconds, what it computed, and whether blocks moved meanwhile."""

    seconds: float
    work: Work
    moved: bool


def usual_seconds(steps: Sequence[Step], least_steps: int = 5) -> dict[tuple[int, int], float]:
    """Median time of each composition that has at least so many steps."""
    times = defaultdict(list)
    for step in steps:
        times[step.work.composition].append(step.seconds)
    return {key: float(np.median(each)) for key, each in times.items() if len(each) >= least_steps}


def fit_work(steps: Sequence[Step]) -> NDArray[np.float64]:
    """Seconds for each of `Work.terms`, by least squares of relative errors; steps that were disturbed count little."""
    terms = np.array([step.work.terms for step in steps])  # [steps, terms]
    seconds = np.array([step.seconds for step in steps])
    scale = terms.max(axis=0)
    weights = 1 / seconds
    for _ in range(_ROUNDS):
        rows = terms / scale * weights[:, None]
        fitted = np.linalg.lstsq(rows, seconds * weights, rcond=None)[0] / scale
        errors = np.abs(terms @ fitted / seconds - 1)
        weights = 1 / seconds / np.sqrt(np.maximum(errors, 0.05))
    return np.asarray(fitted, np.float64)


def by_composition(steps: Sequence[Step], usual: Mapping[tuple[int, int], float]) -> list[float]:
    """Each step's time over the usual one of its composition, where that is known."""
    return [step.seconds / usual[step.work.composition] for step in steps if step.work.composition in usual]


def by_work(steps: Sequence[Step], fitted: NDArray[np.float64]) -> list[float]:
    """Each step's time over that of its work."""
    return [step.seconds / float(step.work.terms @ fitted) for step in steps]


def compare_steps(plain: Sequence[Step], tiered: Sequence[Step], again: Sequence[Step]) -> dict[str, Any]:
    """Quantiles of the slowdown: of steps while blocks moved, of the others, and of both engines without tiers."""
    usual = usual_seconds(plain)
    groups = {
        "without tiers": plain,
        "without tiers, again": again,
        "tiers, nothing moved": [step for step in tiered if not step.moved],
        "tiers, blocks moved": [step for step in tiered if step.moved],
    }
    compared = _summary({name: by_composition(steps, usual) for name, steps in groups.items()})
    fitted = fit_work(plain)
    of_work = _summary({name: by_work(steps, fitted) for name, steps in groups.items()})
    times = _summary({name: [1000 * step.seconds for step in steps] for name, steps in groups.items()}, "milliseconds")
    return {**compared, "compositions": len(usual), "by_work": of_work, "by_time": times}


def _summary(groups: Mapping[str, Sequence[float]], name: str = "slowdown") -> dict[str, Any]:
    rows = {group: {"steps": len(each), **quantiles(each)} for group, each in groups.items() if each}
    plain_p99 = np.mean([rows[group]["p99"] for group in ("without tiers", "without tiers, again") if group in rows])
    moved = rows.get("tiers, blocks moved")
    excess = round(moved["p99"] / float(plain_p99) - 1, 4) if moved else None
    return {name: rows, "p99_excess_while_blocks_move": excess}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Some quantiles, and the mean."""
    shares = {f"p{share}": round(float(np.percentile(values, share)), 4) for share in (50, 90, 99, 100)}
    return {"mean": round(float(np.mean(values)), 4), **shares}
