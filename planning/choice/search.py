"""Searches configurations for the cheapest that meets a service level, by successive halving on the simulator.

A configuration meets the level with so many replicas if one of them does with its share of the rate, while each step
takes as long as the upper end of its interval. Before anything is simulated, configurations fall that

    memory      hold no sequence of the load
    alone       serve a request that has the engine to itself too slowly
    rate        need more replicas than are allowed, or cost more, by the throughput of full batches

The others are compared with few requests, then the cheaper half of them with twice as many, and so on. Equal costs are
decided by the bits of weights and KV: what is less quantized wins. All is seeded: a question has one answer.

Successive halving: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization
(2016). Where it compares losses after so many steps, here it compares costs after so many requests.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np

from ingot.errors import UsageError
from ingot.planning.choice.configuration import Configuration
from ingot.planning.fitting import scaled
from ingot.planning.latency import sweep
from ingot.planning.load import Load
from ingot.planning.service_levels import LevelBounds, MissedBound
from ingot.planning.simulation.figures import Figures
from ingot.planning.simulation.traces import RequestLengths, repeated_tokens
from ingot.planning.simulation.traffic import Traffic
from ingot.planning.step_model import StepModel

MOST_REPLICAS = 1024
ALTERNATIVES = 2
_FIRST_CONTESTANTS, _LAST_CONTESTANTS = 16, 4
_FIRST_REQUESTS = 64
_SAMPLE = 200
_IDLE = 0.25
"""Share of time that an engine computes, below which requests hardly meet: what one replica more left, all leave."""
MOST_REQUESTS = 400
_PRECISION = 16
"""Replicas are counted to one in so many."""


@dataclass(frozen=True)
class Limits:
    """What a choice may take: replicas, and dollars an hour for all of them."""

    replicas: int = 64
    budget: float = math.inf

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise UsageError(f"replicas is {self.replicas}; it must be from 1 to {MOST_REPLICAS}")
        if not self.budget > 0:
            raise UsageError(f"budget is {self.budget:g}; it must be above 0 dollars an hour")


@dataclass(frozen=True)
class Question:
    """Requests that arrive over time, and the level that they must meet.

    most_requests   the last round serves so many of the load's first requests
    """

    traffic: Traffic
    level: LevelBounds
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    most_requests: int = MOST_REQUESTS

    def __post_init__(self) -> None:
        if not self.traffic.rate:
            raise UsageError(
                f"the load {self.traffic.name} has no rate; a choice needs requests that arrive over time, such as"
                " poisson:8"
            )

    @cached_property
    def sample(self) -> list[RequestLengths]:
        """Lengths of its first requests."""
        return [each.lengths for each in islice(self.traffic, _SAMPLE)]

    @cached_property
    def repeated_share(self) -> float:
        """Share of the prompts' tokens that a prefix cache without limits would have, of the first requests."""
        first = next(iter(self.traffic))
        total = sum(each.prompt_tokens for each in self.sample)
        return min(0.99, repeated_tokens(self.sample, first.block_tokens) / total)

    @cached_property
    def mean_load(self) -> Load:
        """Mean lengths of its first requests."""
        prompt, output = (
            max(1, round(sum(getattr(each, name) for each in self.sample) / len(self.sample)))
            for name in ("prompt_tokens", "output_tokens")
        )
        return Load(1, prompt, output)

    @cached_property
    def num_requests(self) -> int:
        """Requests of the load that the last round serves."""
        return sum(1 for _ in islice(self.traffic, self.most_requests))

    def head(self, count: int) -> Traffic:
        """The first requests."""
        return Traffic(self.traffic.name, self.traffic.rate, lambda: islice(self.traffic.make(), count))


@dataclass(frozen=True)
class ServingAnswer:
    """A configuration that meets the level with so many replicas.

    expected    figures of one replica at its share of the rate, with the predicted times of steps
    worst       the same with each step at the upper end of its interval
    """

    configuration: Configuration
    replicas: int
    expected: Figures
    worst: Figures

    @property
    def price(self) -> float:
        """Dollars an hour."""
        return self.configuration.price * self.replicas

    @property
    def rate(self) -> float:
        """Requests a second of one replica."""
        return self.worst.offered_rate

    @property
    def rank(self) -> tuple[float, ...]:
        """The order of answers: cost, then bits of weights and KV, then the share of good requests."""
        weights, kv = self.configuration.losslessness
        return round(self.price, 6), -weights, -kv, -self.worst.good_share, self.configuration.tensor


@dataclass(frozen=True)
class Miss:
    """Why a configuration does not serve the load, and what it would take.

    factor    how many times the bound it needs; infinite where it holds no sequence
    nearest   the nearest that passes
    """

    configuration: Configuration
    reason: str
    factor: float
    nearest: str


@dataclass(frozen=True)
class ServingChoice:
    """The cheapest answer and the next ones, or why nothing meets the level.

    answers       the cheapest first, each of another recipe, hardware or number of devices
    misses        the nearest first
    num_tried     configurations that were looked at
    num_pruned    those of them that were not simulated
    num_requests  requests that were simulated
    """

    answers: tuple[ServingAnswer, ...]
    misses: tuple[Miss, ...]
    num_tried: int
    num_pruned: int
    num_requests: int

    @property
    def best(self) -> ServingAnswer | None:
        """The answer."""
        return self.answers[0] if self.answers else None

    def needs(self, other: ServingAnswer) -> str:
        """Say in words by which price or rate another answer would win."""
        assert self.best
        target, configuration = self.best.price, other.configuration
        if other.price - target <= 1e-9:
            return "costs the same; " + _decided_by(self.best, other)
        devices = other.replicas * configuration.tensor
        price = target / devices
        found = f"${price:.2f} a device and hour instead of ${configuration.on.price:.2f}"
        fewer = math.ceil(target / configuration.price - 1e-9) - 1
        if fewer < 1:
            return found
        gain = other.replicas / fewer
        return (
            f"{found}, or {gain:.2f} times the rate of a replica, {other.rate * gain:.3g} requests/s instead of"
            f" {other.rate:.3g}, so that {fewer} suffice{'s' if fewer == 1 else ''}"
        )


def _decided_by(best: ServingAnswer, other: ServingAnswer) -> str:
    names = ("weights", "KV")
    bits = zip(names, best.configuration.losslessness, other.configuration.losslessness, strict=True)
    for name, here, there in bits:
        if here != there:
            return f"the answer has {name} of {here:.3g} bits instead of {there:.3g}"
    here, there = best.worst.good_share, other.worst.good_share
    return f"{here:.1%} of the answer's requests are good at worst, and {there:.1%} of these"


@dataclass
class _Contestant:
    """A configuration in the search: the replicas that it needs, as far as is known."""

    configuration: Configuration
    replicas: int
    least: int
    limits: Limits
    worst: Figures | None = None

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key: candidates beyond the limits come last, and are simulated only if all others fall."""
        (weights, kv), price = self.configuration.losslessness, self.replicas * self.configuration.price
        over = max(1.0, self.replicas / self.limits.replicas, price / self.limits.budget)
        return over, price, -weights, -kv, self.configuration.tensor


Progress = Callable[[str], None]


def choose(found: Iterable[Configuration], question: Question, report: Progress = lambda _: None) -> ServingChoice:
    """Search for the cheapest configuration. UsageError for no configurations at all.

    report   called with a line for each round
    """
    tried = list(found)
    if not tried:
        raise UsageError("there is nothing to choose from: no recipe runs on any of the hardware")
    contestants, over, misses = _pruned(tried, question)
    num_pruned = len(tried) - len(contestants)
    report(f"{len(tried)} configurations, of which {num_pruned} fall by memory, by one request alone, or by the limits")
    simulator, survivors = _Simulator(question), _spread(_ranked(contestants), _FIRST_CONTESTANTS)
    # Without any, what the nearest would take is counted.
    survivors = survivors or _spread(_ranked(over), _LAST_CONTESTANTS)
    count = min(_FIRST_REQUESTS, question.num_requests)
    while survivors:
        for one in survivors:
            simulator.count_replicas(one, count)
        survivors = _ranked(survivors)
        if count >= question.num_requests:
            break
        report(f"{len(survivors)} with {count} requests each")
        survivors = _spread(survivors, max(_LAST_CONTESTANTS, len(survivors) // 2))
        count = question.num_requests if len(survivors) <= _LAST_CONTESTANTS else min(2 * count, question.num_requests)
    answers = []
    for one in survivors:
        miss = simulator.miss(one)
        misses += [miss] if miss else []
        answers += [] if miss else [simulator.answer(one)]
    misses.sort(key=lambda miss: miss.factor)
    return ServingChoice(
        answers=tuple(_of_each_kind(sorted(answers, key=lambda answer: answer.rank)))[: 1 + ALTERNATIVES],
        misses=tuple(misses),
        num_tried=len(tried),
        num_pruned=num_pruned,
        num_requests=simulator.num_requests,
    )


def _ranked(contestants: Iterable[_Contestant]) -> list[_Contestant]:
    return sorted(contestants, key=lambda one: one.rank)


def _of_each_kind(answers: Sequence[ServingAnswer]) -> Iterator[ServingAnswer]:
    seen: set[tuple[object, ...]] = set()
    for answer in answers:
        if answer.configuration.kind not in seen:
            seen.add(answer.configuration.kind)
            yield answer


def _spread(contestants: Sequence[_Contestant], count: int) -> list[_Contestant]:
    """The first `count`, among them the first of each of the first kinds: the answers differ in kind."""
    first: dict[tuple[object, ...], _Contestant] = {}
    for one in contestants:
        first.setdefault(one.configuration.kind, one)
    kept = {id(one): one for one in islice(first.values(), 1 + ALTERNATIVES)}
    for one in contestants:
        if len(kept) < count:
            kept.setdefault(id(one), one)
    return list(kept.values())


def _pruned(
    tried: Sequence[Configuration], question: Question
) -> tuple[list[_Contestant], list[_Contestant], list[Miss]]:
    """Return the candidates to simulate, those beyond the limits even with the fewest replicas, and the misses."""
    contestants: list[_Contestant] = []
    over: list[_Contestant] = []
    misses: list[Miss] = []
    alone = _Alone.of(question)
    for configuration in tried:
        most = configuration.memory.sequences(alone.longest) if configuration.memory.fits else 0
        if most < 1:
            misses.append(Miss(configuration, f"holds no sequence: {configuration.memory.reason}", math.inf, ""))
            continue
        times = _worst(configuration)
        failures = question.level.failures(alone.times(times, configuration))
        if failures:
            misses.append(_too_slow(configuration, failures[0], "even alone, "))
            continue
        least, likely = _replicas(configuration, times, question)
        contestant = _Contestant(configuration, max(least, likely), least, question.limits)
        is_over = _over_limits(contestant, least, question.traffic.rate)
        (over if is_over else contestants).append(contestant)
    return contestants, over, misses


def _worst(configuration: Configuration) -> StepModel:
    """The step model at the upper end of its interval."""
    model = configuration.times
    terms = tuple(scaled(term, 1 + model.relative_error) for term in model.parts)
    return replace(model, parts=terms)


@dataclass(frozen=True)
class _Alone:
    """Requests that have an engine to themselves: bounds that no configuration beats under load."""

    loads: tuple[Load, ...]
    percentile: float
    longest: int

    @classmethod
    def of(cls, question: Question) -> "_Alone":
        cached = question.repeated_share
        loads = tuple(
            Load(
                1, each.prompt_tokens, each.output_tokens, min(int(cached * each.prompt_tokens), each.prompt_tokens - 1)
            )
            for each in question.sample
        )
        return cls(loads, question.level.percentile, max(load.total_tokens for load in loads))

    def times(self, model: StepModel, configuration: Configuration) -> dict[str, float]:
        """The times that the level's share of the requests keeps, each alone; drafts are those of the configuration."""
        ttft, tpot = np.zeros(len(self.loads)), np.zeros(len(self.loads))
        for at, load in enumerate(self.loads):
            drafting = replace(load, drafted_tokens=configuration.drafted, acceptance=configuration.acceptance)
            ttft[at] = model.seconds(load.prefill_step())
            tpot[at] = model.seconds(drafting.decode_step(1)) / drafting.step_tokens
        outputs = np.array([load.output_tokens - 1 for load in self.loads])
        each = {"ttft": ttft, "tpot": tpot, "end_to_end": ttft + outputs * tpot}
        return {name: float(np.quantile(seconds, self.percentile)) for name, seconds in each.items()}


def _replicas(configuration: Configuration, times: StepModel, question: Question) -> tuple[int, int]:
    """The fewest replicas by the throughput of full batches, and how many it likely takes to keep the time a token."""
    load = question.mean_load
    cached = min(int(question.repeated_share * load.prompt_tokens), load.prompt_tokens - 1)
    load = replace(
        load,
        cached_tokens=cached if configuration.prefix_cache else 0,
        drafted_tokens=configuration.drafted,
        acceptance=configuration.acceptance,
    )
    fitting = min(configuration.engine.max_sequences, configuration.memory.sequences(load.total_tokens))
    around = sweep(times, load, float(max(1, fitting)))
    most = max(one.requests_per_second for one in around)
    bound = question.level.tpot or math.inf
    keeping = [one.requests_per_second for one in around if one.tpot <= bound] or [around[0].requests_per_second]
    rate = question.traffic.rate
    return math.ceil(rate / most - 1e-9), max(1, math.ceil(rate / max(keeping) - 1e-9))


def _too_slow(configuration: Configuration, failure: MissedBound, where: str) -> Miss:
    name = str(failure).split(" ")[0]
    nearest = f"a bound on {name} of {failure.seconds * 1e3:.3g} ms"
    return Miss(configuration, f"{where}{failure}", failure.factor, nearest)


def _over_limits(one: _Contestant, replicas: int, rate: float) -> Miss | None:
    configuration, limits = one.configuration, one.limits
    price = replicas * configuration.price
    if replicas > limits.replicas:
        factor = replicas / limits.replicas
        reason = f"needs {replicas} replicas, {factor:.2f} times the {limits.replicas} that are allowed"
        nearest = f"--replicas {replicas}, or {rate / factor:.3g} requests/s with {limits.replicas}"
        return Miss(configuration, reason, factor, nearest)
    if price > limits.budget:
        factor = price / limits.budget
        reason = f"costs ${price:.2f} an hour, {factor:.2f} times the budget of ${limits.budget:.2f}"
        affordable = int(limits.budget / configuration.price)
        less = f", or {rate * affordable / replicas:.3g} requests/s with {affordable} replicas" if affordable else ""
        return Miss(configuration, reason, factor, f"--budget {price:.2f}{less}")
    return None


class _Simulator:
    """Runs replicas of configurations, each at its share of the rate."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self.num_requests = 0

    def count_replicas(self, one: _Contestant, count: int) -> None:
        """Set the fewest replicas that keep the level with so many requests, to one in 16, and their figures."""
        failing, keeping, step, replicas, before = one.least - 1, 0, 1, one.replicas, -1.0
        while True:
            figures = self._run(one.configuration, replicas, count)
            if self._keeps(figures):
                keeping, one.worst = replicas, figures
            else:
                failing, one.worst = replicas, one.worst if keeping else figures
            is_hopeless = figures.busy_share < _IDLE and figures.good_share <= before
            if not keeping and (failing >= MOST_REPLICAS or is_hopeless):
                break
            before = figures.good_share
            if keeping and keeping - failing <= max(1, keeping // _PRECISION):
                break
            step *= 2
            if not keeping:
                replicas = min(MOST_REPLICAS, failing + max(step // 2, failing // 4))
            elif failing < one.least:
                replicas = max(one.least, keeping - max(step // 2, keeping // 8))
            else:
                replicas = (failing + keeping) // 2
        one.replicas = keeping or replicas

    def _run(self, configuration: Configuration, replicas: int, count: int, *, at_worst: bool = True) -> Figures:
        question = self._question
        traffic = question.head(count).at(question.traffic.rate / replicas)
        self.num_requests += count
        deployment = configuration.deployment(1, at_worst=at_worst, seed=question.seed)
        return deployment.run(traffic, question.level)

    def _keeps(self, figures: Figures) -> bool:
        """Report if enough requests are good. Until the last round one more may miss: one of few weighs too much."""
        few = figures.num_requests < self._question.num_requests
        least = self._question.level.percentile - (1 / figures.num_requests if few else 0.0)
        return figures.good_share >= least and not figures.is_saturated

    def miss(self, one: _Contestant) -> Miss | None:
        """Why a contestant fails after all; None where it is an answer."""
        assert one.worst
        question = self._question
        if not self._keeps(one.worst):
            times = {"ttft": one.worst.ttft.p99, "tpot": one.worst.tpot.p99, "end_to_end": one.worst.e2e.p99}
            failures = question.level.failures(times)
            if failures:
                return _too_slow(one.configuration, failures[0], "however few requests each replica gets, p99 of ")
            reason = f"{one.worst.good_share:.1%} of requests are good, and {question.level.percentile:.1%} must be"
            return Miss(one.configuration, reason, question.level.percentile / max(1e-9, one.worst.good_share), "")
        return _over_limits(one, one.replicas, question.traffic.rate)

    def answer(self, one: _Contestant) -> ServingAnswer:
        """The answer of a contestant that keeps the level."""
        assert one.worst
        expected = self._run(one.configuration, one.replicas, self._question.num_requests, at_worst=False)
        return ServingAnswer(one.configuration, one.replicas, expected, one.worst)
