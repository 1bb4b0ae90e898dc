"""Figures of a simulated run: latencies, throughput, goodput under a service level, whether the queue has a bound."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ingot.errors import UsageError
from ingot.planning.data_file import validation_problem
from ingot.planning.service_levels import LevelBounds, find_service_level
from ingot.planning.simulation.replica import EndedRequest, Replica

Counts = NDArray[np.int64]
QUANTILES = (0.5, 0.9, 0.99)
# From the second quarter of the arrivals to the last: a backlog that grows more has no bound.
_GROWTH = 1.5
_TIMES = {"ttft": "ttft", "tpot": "tpot", "end_to_end": "e2e"}


def parse_service_level(text: str) -> LevelBounds:
    """Return the service level of a name, or of limits such as ttft=0.5,tpot=0.05. UsageError for another text."""
    if "=" not in text:
        return find_service_level(text)
    given: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        given[name.strip()] = value.strip()
    try:
        return LevelBounds.model_validate({"words": text, **given})
    except ValidationError as error:
        raise UsageError(
            f"the service level {text!r} is not valid: {validation_problem(error)}; give a name, or limits in seconds"
            f" above 0 of {', '.join(_TIMES)}, and the percentile that must keep them, as in"
            " ttft=0.5,tpot=0.05,percentile=0.9"
        ) from None


@dataclass
class Outcomes:
    """What became of requests: one number of each kind for each. The TPOT of an output of one token is NaN."""

    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    ttft: "array[float]" = field(default_factory=lambda: array("d"))
    tpot: "array[float]" = field(default_factory=lambda: array("d"))
    e2e: "array[float]" = field(default_factory=lambda: array("d"))
    queue: "array[float]" = field(default_factory=lambda: array("d"))
    counts: Counter[str] = field(default_factory=Counter)
    finish_seconds: float = 0.0

    def add(self, ended: EndedRequest) -> None:
        """Record a request that has ended."""
        done = ended.completion
        if done is None:
            self.counts["refused"] += 1
            return
        metrics, counts = done.metrics, self.counts
        arrival, first, finish = metrics.arrival_seconds, metrics.first_token_seconds, metrics.finish_seconds
        counts[done.finish_reason] += 1
        counts["preemptions"] += metrics.num_preemptions
        counts["output_tokens"] += metrics.num_output_tokens
        self.finish_seconds = max(self.finish_seconds, finish)
        if first is None or done.finish_reason != "length":
            return
        counts["prompt_tokens"] += done.prompt_tokens
        counts["cached_tokens"] += done.cached_tokens
        others = metrics.num_output_tokens - 1
        self.arrivals.append(arrival)
        self.ttft.append(first - arrival)
        self.tpot.append((finish - first) / others if others > 0 else math.nan)
        self.e2e.append(finish - arrival)
        self.queue.append(metrics.queue_seconds or 0.0)

    @classmethod
    def of(cls, ended: Iterable[EndedRequest]) -> "Outcomes":
        """Return the outcomes of a run."""
        outcomes = cls()
        for each in ended:
            outcomes.add(each)
        return outcomes

    def backlog(self) -> Counts:
        """Return how many requests are open at each arrival, itself included."""
        arrivals = np.frombuffer(self.arrivals, np.float64) if self.arrivals else np.zeros(0)
        ends = np.sort(arrivals + np.frombuffer(self.e2e, np.float64)) if self.arrivals else np.zeros(0)
        arrivals = np.sort(arrivals)
        open_counts: Counts = np.arange(1, len(arrivals) + 1) - np.searchsorted(ends, arrivals)
        return open_counts

    def num_good(self, level: LevelBounds) -> int:
        """Return how many requests kept a service level."""
        good = np.ones(len(self.ttft), bool)
        for name, limit in level.bounds.items() if len(good) else ():
            good &= ~(np.frombuffer(getattr(self, _TIMES[name]), np.float64) > limit)
        return int(good.sum())


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Seconds of one kind over the requests that ended: mean and quantiles."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Quantiles":
        """Return the figures of some seconds, without NaN; zeros where nothing is left."""
        values = np.asarray(seconds, np.float64)
        values = values[~np.isnan(values)]
        if not len(values):
            return cls(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
        p50, p90, p99 = np.quantile(values, QUANTILES).tolist()
        return cls(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, kw_only=True)
class KVTransferFigures:
    """KV blocks that moved from one pool of replicas to another.

    mean_seconds   from the first token until they have arrived, with the wait for the link
    """

    num_transfers: int
    mean_bytes: float
    mean_seconds: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one run, in seconds, requests and tokens.

    offered_rate    requests a second that arrive; 0 where all arrive at once
    goodput         requests a second that keep the service level
    good_share      their share of all that arrived
    cached_share    share of the prompts' tokens that were in a cache
    busy_share      share of the time in which an engine computes
    is_saturated    whether requests arrive faster than they end: the queue has no bound
    kv_transfer     of disaggregated pools
    abroad_share    share of the requests that another region than their user's served
    """

    num_requests: int
    num_finished: int
    num_refused: int
    num_timeouts: int
    num_preemptions: int
    seconds: float
    offered_rate: float
    output_tokens_per_second: float
    goodput: float
    good_share: float
    ttft: Quantiles
    tpot: Quantiles
    e2e: Quantiles
    queue: Quantiles
    itl_p99: float
    mean_batch: float
    cached_share: float
    busy_share: float
    num_steps: int
    is_saturated: bool
    most_open: int
    kv_transfer: KVTransferFigures | None = None
    abroad_share: float = 0.0


class EngineTotals(NamedTuple):
    """Totals of one simulated engine; `up_seconds` is how long it existed."""

    num_steps: int
    output_tokens: int
    busy_seconds: float
    up_seconds: float
    itl_p99: float

    @classmethod
    def of(cls, replica: Replica, up_seconds: float) -> "EngineTotals":
        """Return the totals of a replica."""
        counts = replica.engine.counts
        itl = counts.itl_seconds.quantile(0.99) or 0.0
        return cls(counts.num_steps, counts.output_tokens, counts.busy_seconds, up_seconds, itl)


def is_saturated(backlog: Counts, places: int) -> bool:
    """Return whether the number of open requests grows without bound: beyond the engines' places, and still at the end.

    backlog   open requests at each arrival
    """
    if len(backlog) < 16:
        return False
    quarter = len(backlog) // 4
    second, last = backlog[quarter : 2 * quarter].mean(), backlog[-quarter:].mean()
    return bool(last > places and last > _GROWTH * second)


def figures_of(
    outcomes: Outcomes,
    engines: Iterable[EngineTotals],
    level: LevelBounds,
    *,
    num_requests: int,
    offered_rate: float,
    places: int,
    kv_transfer: KVTransferFigures | None = None,
    abroad_share: float = 0.0,
) -> Figures:
    """Return the figures of a run from its outcomes and the totals of its engines.

    places   requests that the engines can serve at a time
    """
    totals = list(engines)
    counts, seconds = outcomes.counts, outcomes.finish_seconds
    num_steps = sum(each.num_steps for each in totals)
    backlog, good = outcomes.backlog(), outcomes.num_good(level)
    itl = max((each.itl_p99 for each in totals), default=0.0)
    up_seconds = sum(each.up_seconds for each in totals)
    return Figures(
        num_requests=num_requests,
        num_finished=counts["length"],
        num_refused=counts["refused"],
        num_timeouts=counts["timeout"],
        num_preemptions=counts["preemptions"],
        seconds=seconds,
        offered_rate=offered_rate,
        output_tokens_per_second=counts["output_tokens"] / seconds if seconds else 0.0,
        goodput=good / seconds if seconds else 0.0,
        good_share=good / num_requests if num_requests else 0.0,
        ttft=Quantiles.of(outcomes.ttft),
        tpot=Quantiles.of(outcomes.tpot),
        e2e=Quantiles.of(outcomes.e2e),
        queue=Quantiles.of(outcomes.queue),
        itl_p99=itl,
        mean_batch=sum(each.output_tokens for each in totals) / num_steps if num_steps else 0.0,
        cached_share=counts["cached_tokens"] / counts["prompt_tokens"] if counts["prompt_tokens"] else 0.0,
        busy_share=sum(each.busy_seconds for each in totals) / up_seconds if up_seconds else 0.0,
        num_steps=num_steps,
        is_saturated=offered_rate > 0 and is_saturated(backlog, places),
        most_open=int(backlog.max()) if len(backlog) else 0,
        kv_transfer=kv_transfer,
        abroad_share=abroad_share,
    )
