"""Decides gates: limits on metrics, compared with their confidence intervals.

    PASS       the whole interval is on the right side of the limit, or touches it
    FAIL       the whole interval is on the wrong side
    UNDECIDED  the limit is inside the interval: the sample is too small, and the gate does not pass

A latency metric is measured at several concurrencies; a gate on it must hold at each, and has one outcome per level,
named metric@level.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ingot.artifact import GateOutcome
from ingot.artifact.metrics import METRICS
from ingot.errors import GateFailed, GateUndecided, UsageError, one_of, unknown
from ingot.validation.statistics import Measured

_MOST_TIMES = 1000
_MARGIN = 1.1


@dataclass(frozen=True)
class GateSpec:
    """metric (or metric@level) <= limit for "max", >= limit for "min". An advisory gate is reported, never blocks."""

    metric: str
    bound: Literal["max", "min"]
    limit: float
    advisory: bool = False

    def __post_init__(self) -> None:
        name = self.metric.partition("@")[0]
        if name not in METRICS:
            raise UsageError(f"gate on an {unknown('metric', name, METRICS, 'metrics')}")
        if not math.isfinite(self.limit):
            raise UsageError(f"gate {self.metric}: the limit is {self.limit}; it must be a finite number")


def decide(specs: Sequence[GateSpec], measured: Mapping[str, Measured]) -> list[GateOutcome]:
    """Decide every gate, in order. UsageError when a gate's metric was not measured."""
    return [_outcome(spec, key, measured[key]) for spec in specs for key in _keys(spec, measured)]


def raise_for(outcomes: Sequence[GateOutcome], measured: Mapping[str, Measured] | None = None) -> None:
    """Raise GateFailed when any gate failed, else GateUndecided when any is undecided, with a line per such gate.

    Advisory gates raise nothing. With `measured`, an undecided gate's line estimates the tokens or rounds needed to
    decide it; without, a factor.
    """
    required = [outcome for outcome in outcomes if not outcome.advisory]
    failed = [outcome for outcome in required if outcome.verdict == "FAIL"]
    undecided = [outcome for outcome in required if outcome.verdict == "UNDECIDED"]
    if failed:
        advice = "Use more bits, a smaller block or another recipe, or loosen the limit if the value is acceptable."
        raise GateFailed("\n".join([*map(_failure, failed), *(_undecided(o, measured) for o in undecided), advice]))
    if undecided:
        raise GateUndecided("\n".join(_undecided(outcome, measured) for outcome in undecided))


def describe(outcome: GateOutcome) -> str:
    """One line with the measured value, its interval and the limit."""
    sign = "<=" if outcome.bound == "max" else ">="
    interval = f"95 % interval {outcome.low:.6g} to {outcome.high:.6g}"
    return f"{outcome.name} is {outcome.measured:.6g} ({interval}), the gate requires {sign} {outcome.limit:.6g}"


def _keys(spec: GateSpec, measured: Mapping[str, Measured]) -> list[str]:
    keys = [key for key in measured if spec.metric in (key, measured[key].metric)]
    if not keys:
        raise UsageError(
            f"gate {spec.metric}: this metric was not measured; measured: {one_of(measured)}."
            " Enable the measurement in the recipe, or remove the gate"
        )
    return keys


def _outcome(spec: GateSpec, key: str, measured: Measured) -> GateOutcome:
    estimate = measured.estimate
    return GateOutcome(
        name=key,
        verdict=_verdict(spec, estimate.low, estimate.high),
        measured=estimate.value,
        low=estimate.low,
        high=estimate.high,
        limit=spec.limit,
        bound=spec.bound,
        advisory=spec.advisory,
    )


def _verdict(spec: GateSpec, low: float, high: float) -> Literal["PASS", "FAIL", "UNDECIDED"]:
    best, worst = (low, high) if spec.bound == "max" else (-high, -low)
    limit = spec.limit if spec.bound == "max" else -spec.limit
    if worst <= limit:
        return "PASS"
    return "FAIL" if best > limit else "UNDECIDED"


def _failure(outcome: GateOutcome) -> str:
    return f"gate failed: {describe(outcome)}."


def _undecided(outcome: GateOutcome, measured: Mapping[str, Measured] | None) -> str:
    return f"gate undecided: {describe(outcome)}. {_advice(outcome, (measured or {}).get(outcome.name))}"


def _advice(outcome: GateOutcome, measured: Measured | None) -> str:
    """The sample size at which the interval, shrinking with its square root, would exclude the limit."""
    distance = abs(outcome.measured - outcome.limit)
    beyond = outcome.limit > outcome.measured
    half = outcome.high - outcome.measured if beyond else outcome.measured - outcome.low
    times = (half / distance) ** 2 if distance else math.inf
    if times > _MOST_TIMES:
        return "The value is at the limit, so no sample of a reasonable size decides it: move the limit."
    if measured is None:
        return f"A sample {times * _MARGIN:.1f} times as large might decide it."
    needed = _round_up(times * _MARGIN * measured.sample_size)
    return f"About {needed} {measured.sample_unit} instead of {measured.sample_size} might decide it."


def _round_up(value: float) -> int:
    """Round up to two significant digits, the precision of the estimate."""
    step: int = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / step - 1e-9) * step
