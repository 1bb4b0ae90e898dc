"""Decides gates: limits on metrics, compared with their confidence intervals.

    PASS       the whole interval is on the right side of the limit, or touches it
    FAIL       the whole interval is on the wrong side
    UNDECIDED  the limit is inside the interval: the sample is too small, and the gate does not pass

A latency metric is measured at several concurrencies; a gate on it must hold at each, and has one outcome per level,
named metric@level.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ingot.artifact import GateOutcome
from ingot.artifact.metrics import METRICS, MetricFacts
from ingot.errors import GateFailed, GateUndecided, UsageError, one_of, unknown
from ingot.validation.machine import MachineLoad
from ingot.validation.statistics import Measured

_MOST_TIMES = 1000
_MARGIN = 1.1
_LEAST_TIMES = 2  # a further look at latency takes twice the rounds
_ROUNDS, _TOKENS = "latency rounds", "evaluation tokens"


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

    @property
    def facts(self) -> MetricFacts:
        """The metric's definition."""
        return METRICS[self.metric.partition("@")[0]]


def decide(specs: Sequence[GateSpec], measured: Mapping[str, Measured]) -> list[GateOutcome]:
    """Decide every gate, in order. UsageError when a gate's metric was not measured."""
    return [_outcome(spec, key, measured[key]) for spec in specs for key in _keys(spec, measured)]


@dataclass(frozen=True)
class Rerun:
    """Settings to measure again.

    command  the command line of this measurement; `--set KEY=VALUE` of a larger sample is appended
    seconds  how long the latency rounds took
    load     of other processes during them
    """

    command: tuple[str, ...] = ("ingot", "build", "RECIPE")
    seconds: float = 0.0
    load: MachineLoad | None = None

    def with_settings(self, settings: Mapping[str, int]) -> str:
        """Return the command to paste, where these settings replace its own."""
        words: list[str] = []
        for word in self.command:
            if words and words[-1] == "--set" and word.partition("=")[0] in settings:
                words.pop()
            else:
                words.append(word)
        return shlex.join([*words, *(part for key in settings for part in ("--set", f"{key}={settings[key]}"))])


def raise_for(
    outcomes: Sequence[GateOutcome],
    measured: Mapping[str, Measured] | None = None,
    rerun: Rerun | None = None,
    cause: str | None = None,
) -> None:
    """Raise GateFailed when any gate failed, else GateUndecided when any is undecided, with a line per such gate.

    Advisory gates raise nothing. With `measured`, an undecided gate's line estimates the tokens or rounds needed to
    decide it; without, a factor. With `rerun` too, the last line is the command that measures as much. `cause` says
    what explains the failure and what to do, in place of the advice of the metric.
    """
    required = [outcome for outcome in outcomes if not outcome.advisory]
    failed = [outcome for outcome in required if outcome.verdict == "FAIL"]
    undecided = undecided_lines(required, measured or {}, rerun)
    if failed:
        lines = [line for outcome in failed for line in (_failure(outcome), *_details(outcome, measured or {}))]
        raise GateFailed("\n".join([*lines, *undecided, _failure_advice(failed[0], cause)]))
    if undecided:
        raise GateUndecided("\n".join(undecided))


def advisory_lines(
    outcomes: Sequence[GateOutcome], measured: Mapping[str, Measured], rerun: Rerun | None = None
) -> list[str]:
    """Describe the advisory gates that did not pass: what raise_for says of others, without the machine's load."""
    rerun = replace(rerun, load=None) if rerun else None
    advisory = [outcome for outcome in outcomes if outcome.advisory]
    failed = [_failure(outcome) for outcome in advisory if outcome.verdict == "FAIL"]
    return [f"advisory {line}" for line in failed] + undecided_lines(advisory, measured, rerun)


def undecided_lines(
    outcomes: Sequence[GateOutcome], measured: Mapping[str, Measured], rerun: Rerun | None = None
) -> list[str]:
    """Return a line per undecided gate, the load of a busy machine, and the command that measures more."""
    undecided = [outcome for outcome in outcomes if outcome.verdict == "UNDECIDED"]
    if not undecided:
        return []
    needs = [_need(outcome, measured.get(outcome.name)) for outcome in undecided]
    lines = [
        line
        for outcome, need in zip(undecided, needs, strict=True)
        for line in (_undecided(outcome, need, _details(outcome, measured)))
    ]
    if rerun is None:
        return lines
    if rerun.load and rerun.load.is_busy and any(need.unit == _ROUNDS for need in needs):
        lines.append(f"The machine was busy: {rerun.load}; latency is decided sooner when it is idle.")
    settings = _settings(needs, rerun.seconds)
    return [*lines, f"Measure more: {rerun.with_settings(settings)}"] if settings else lines


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


@dataclass(frozen=True)
class _Need:
    """The sample that would decide a gate: `times` the present one of `size` units; no unit: nothing is known of it."""

    times: float
    unit: str = ""
    size: int = 0
    most: int | None = None

    @property
    def target(self) -> int:
        """Number of units, rounded up to two significant digits, the precision of the estimate."""
        return _round_up(self.times * _MARGIN * self.size)

    @property
    def is_possible(self) -> bool:
        """Whether such a sample is of a reasonable size, and the text has it."""
        return self.times <= _MOST_TIMES and (self.most is None or self.target <= self.most)


def _need(outcome: GateOutcome, measured: Measured | None) -> _Need:
    """The sample at which the interval would exclude the limit.

    It shrinks with the square root of the sample; that of a share of 0 or 1 with the sample.
    """
    distance = abs(outcome.measured - outcome.limit)
    beyond = outcome.limit > outcome.measured
    half = outcome.high - outcome.measured if beyond else outcome.measured - outcome.low
    is_end = METRICS[outcome.name.partition("@")[0]].is_share and outcome.measured in (0, 1)
    times = (half / distance) ** (1 if is_end else 2) if distance else math.inf
    if measured is None:
        return _Need(times)
    return _Need(times, measured.sample_unit, measured.sample_size, measured.most_samples)


def _failure_advice(outcome: GateOutcome, cause: str | None) -> str:
    loosen = "" if "@" in outcome.name else f" (--set gates.{outcome.name}.{outcome.bound}=NUMBER)"
    facts = METRICS[outcome.name.partition("@")[0]]
    advice = f"{cause}, or loosen the limit if the value is acceptable" if cause else facts.advice
    return f"{advice}{loosen if facts.least < facts.most else ''}."


def _details(outcome: GateOutcome, measured: Mapping[str, Measured]) -> tuple[str, ...]:
    return measured[outcome.name].details if outcome.name in measured else ()


def _undecided(outcome: GateOutcome, need: _Need, details: Sequence[str]) -> list[str]:
    """The outcome with what to do: the details, and a larger sample where there is one or nothing else to say."""
    name = "advisory gate" if outcome.advisory else "gate"
    line = f"{name} undecided: {describe(outcome)}."
    return [f"{line} {_advice(need)}" if need.unit or not details else line, *details]


def _advice(need: _Need) -> str:
    if need.times > _MOST_TIMES:
        return "The value is at the limit, so no sample of a reasonable size decides it: move the limit."
    if not need.unit:
        return f"A sample {need.times * _MARGIN:.1f} times as large might decide it."
    text = f"About {need.target} {need.unit} instead of {need.size} might decide it"
    if need.most is None or need.target <= need.most:
        return f"{text}."
    return f"{text}, but the text has {need.most}: use a longer one, or move the limit."


def _settings(needs: Sequence[_Need], seconds: float) -> dict[str, int]:
    """Recipe keys and the values that measure as much as the gates need."""
    settings: dict[str, int] = {}
    for need in needs:
        if need.is_possible and need.unit == _ROUNDS and seconds:
            value = _round_up(seconds * max(_LEAST_TIMES, need.times * _MARGIN))
            settings["latency.max_seconds"] = max(value, settings.get("latency.max_seconds", 0))
        elif need.is_possible and need.unit == _TOKENS:
            settings["evaluation.tokens"] = max(need.target, settings.get("evaluation.tokens", 0))
    return settings


def _round_up(value: float) -> int:
    """Round up to two significant digits."""
    step: int = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / step - 1e-9) * step
