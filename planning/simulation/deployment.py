"""A deployment and one run of traffic through it; the highest rate that keeps a service level, and the knee of goodput.

The capacity is found by bisection: below it enough requests are good and the queue has a bound. Its interval is that of
the bisection, and wider by what the step model may be wrong: the capacities with all steps longer, and shorter, by its
relative error.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from ingot.errors import UsageError
from ingot.planning.service_levels import LevelBounds
from ingot.planning.simulation.disaggregation import DisaggregatedFleet, KVTransfers, ReplicaPools
from ingot.planning.simulation.figures import Figures, Outcomes, figures_of
from ingot.planning.simulation.fleet import Autoscaling, Fleet, ReplicaDrain, ReplicaFailure
from ingot.planning.simulation.regions import RegionalFleet, UserRegion
from ingot.planning.simulation.replica import Replica, keeps_lengths_alone
from ingot.planning.simulation.routers import make_router
from ingot.planning.simulation.simulated_executor import EngineShape, StepPredictor
from ingot.planning.simulation.timed_request import EndedRequest, StepWatch
from ingot.planning.simulation.traffic import Traffic
from ingot.planning.step_model import StepShape
from ingot.runtime.options import EngineOptions

_PRECISION = 0.02  # a share of the capacity
_MOST_DOUBLINGS = 24
# Beyond it the requests of the traffic are too few to show the end of the interval.
_MOST_GAIN = 100.0
_KNEE_SHARES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.6)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Engines of one shape, and what is in front of them.

    disaggregation   pools for prompts and for decoding, instead of `replicas`; failures count the first pool's replicas
                     before the second's
    regions          places with users and replicas, instead of `replicas`; failures count replicas in their order
    watch            makes what is called with each step of a replica, from the replica's number
    """

    shape: EngineShape
    times: StepPredictor
    options: EngineOptions = field(default_factory=EngineOptions)
    timeout_seconds: float | None = None
    replicas: int = 1
    router: str = "least-connections"
    autoscaling: Autoscaling | None = None
    failures: Sequence[ReplicaFailure] = ()
    drains: Sequence[ReplicaDrain] = ()
    disaggregation: ReplicaPools | None = None
    regions: tuple[UserRegion, ...] = ()
    seed: int = 0
    watch: Callable[[int], StepWatch] | None = None

    def __post_init__(self) -> None:
        if self.disaggregation and self.autoscaling:
            raise UsageError("the pools of a disaggregated deployment have fixed sizes: leave out autoscaling")
        if self.disaggregation and not keeps_lengths_alone(self.shape, self.options):
            raise UsageError(
                "speculation, a host tier and a slow part are not simulated with disaggregation: leave out one of them"
            )

        if self.regions and (self.disaggregation or self.autoscaling):
            raise UsageError("regions have fixed numbers of replicas for whole requests: leave out what changes that")
        if self.regions and make_router(self.router).is_blind:
            raise UsageError(f"the router {self.router} does not look at replicas, and regions need to: give another")

    def fleet(self, *, shares_prefixes: bool = True) -> Fleet | DisaggregatedFleet | RegionalFleet:
        """Start it at second 0, for requests of which some begin alike, or none."""
        pools = self.disaggregation
        if self.regions:
            ends = accumulate(each.replicas for each in self.regions)
            fleets = [
                self._pool(shares_prefixes, end - each.replicas, each.replicas)
                for each, end in zip(self.regions, ends, strict=True)
            ]
            return RegionalFleet(self.regions, fleets, seed=self.seed)
        if pools:
            return DisaggregatedFleet(
                self._pool(shares_prefixes, 0, pools.prefill, places=True),
                self._pool(False, pools.prefill, pools.decode),
                KVTransfers(self.shape.kv, pools.link, self.shape.context_tokens),
            )
        return Fleet(
            partial(self._replica, shares_prefixes, 0),
            self.replicas,
            router=self.router,
            autoscaling=self.autoscaling,
            failures=self.failures,
            drains=self.drains,
        )

    def _pool(self, shares_prefixes: bool, first: int, count: int, *, places: bool = False) -> Fleet:
        """Return the fleet of some replicas, whose failures and drains are numbered from the first of them."""
        numbers = range(first, first + count)
        return Fleet(
            partial(self._replica, shares_prefixes, first),
            count,
            router=self.router,
            failures=[replace(each, replica=each.replica - first) for each in self.failures if each.replica in numbers],
            drains=[replace(each, replica=each.replica - first) for each in self.drains if each.replica in numbers],
            places=places,
        )

    def together(self) -> "Deployment":
        """Return the same replicas without pools: each serves whole requests."""
        assert self.disaggregation
        return replace(self, disaggregation=None, replicas=self.disaggregation.replicas)

    def _replica(self, shares_prefixes: bool, first: int, number: int, start: float) -> Replica:
        return Replica(
            self.shape,
            self.times,
            self.options,
            timeout_seconds=self.timeout_seconds,
            start=start,
            seed=self.seed + number,
            shares_prefixes=shares_prefixes,
            reports_load=bool(self.regions) or make_router(self.router).reads_load,
            watch=self.watch(first + number) if self.watch else None,
        )

    def run(
        self, traffic: Traffic, level: LevelBounds, on_end: Callable[[EndedRequest], object] | None = None
    ) -> Figures:
        """Serve traffic to its end. `on_end` is called with each request that has ended."""
        fleet, outcomes, count = self.fleet(shares_prefixes=traffic.shares_prefixes), Outcomes(), 0
        for ended in fleet.serve(traffic):
            outcomes.add(ended)
            count += 1
            if on_end:
                on_end(ended)
        return figures_of(
            outcomes,
            fleet.totals,
            level,
            num_requests=count,
            offered_rate=traffic.rate,
            places=self.shape.max_sequences * fleet.most_replicas,
            kv_transfer=fleet.transfers.totals.figures if isinstance(fleet, DisaggregatedFleet) else None,
            abroad_share=fleet.num_abroad / count if isinstance(fleet, RegionalFleet) and count else 0.0,
        )

    def slower(self, factor: float) -> "Deployment":
        """Return the same with steps that take so many times as long."""
        return replace(self, times=_Scaled(self.times, factor))


@dataclass(frozen=True)
class _Scaled:
    times: StepPredictor
    factor: float

    def seconds(self, step: StepShape) -> float:
        return self.times.seconds(step) * self.factor


@dataclass(frozen=True)
class Capacity:
    """The highest rate of requests that keeps a service level: it does at `low`, and does not at `high`.

    least, most   by the error of the step model; `low` and `high` where it states none
    runs          the figures of each rate that was tried, by rate
    """

    low: float
    high: float
    least: float
    most: float
    runs: tuple[Figures, ...]


def capacity(deployment: Deployment, traffic: Traffic, level: LevelBounds) -> Capacity:
    """Find the capacity of a deployment. UsageError where no rate keeps the level, with the bound that fails."""
    if not traffic.rate:
        raise UsageError(f"the traffic {traffic.name} has no rate; a capacity needs requests that arrive over time")
    low, high, runs = _bisect(deployment, traffic, level)
    if not low:
        raise UsageError(_never(runs[0], level))
    if high == float("inf"):
        raise UsageError(
            f"{runs[-1].num_requests:,} requests keep the service level even all at once, so they show no capacity;"
            " give more of them with --requests"
        )
    error = min(0.9, float(getattr(deployment.times, "relative_error", 0.0)))
    least = _bisect(deployment.slower(1 + error), traffic.at(low), level)[0] if error else low
    most = min(_bisect(deployment.slower(1 - error), traffic.at(high), level)[1], _MOST_GAIN * high) if error else high
    return Capacity(low, high, least, most, tuple(sorted(runs, key=lambda each: each.offered_rate)))


def _bisect(deployment: Deployment, traffic: Traffic, level: LevelBounds) -> tuple[float, float, list[Figures]]:
    """Return the highest rate that keeps the level, 0 for none, the lowest that does not, and all runs."""
    runs: list[Figures] = []

    def keeps(rate: float) -> bool:
        found = deployment.run(traffic.at(rate), level)
        runs.append(found)
        return found.good_share >= level.percentile and not found.is_saturated

    low, high, rate = 0.0, float("inf"), traffic.rate
    for _ in range(_MOST_DOUBLINGS):
        low, high = (rate, high) if keeps(rate) else (low, rate)
        if low and high < float("inf"):
            break
        rate = 2 * low if low else high / 2
    while low and low * (1 + _PRECISION) < high < float("inf"):
        rate = (low * high) ** 0.5
        low, high = (rate, high) if keeps(rate) else (low, rate)
    runs.sort(key=lambda each: each.offered_rate)
    return low, high, runs


def _never(slowest: Figures, level: LevelBounds) -> str:
    times = {"ttft": slowest.ttft.p90, "tpot": slowest.tpot.p90, "end_to_end": slowest.e2e.p90}
    failures = level.failures(times)
    why = f"; {failures[0]}, at p90" if failures else ""
    return (
        f"no rate keeps the service level {level.words}: at {slowest.offered_rate:.3g} requests a second, where they"
        f" hardly meet, {slowest.good_share:.0%} are good and {level.percentile:.0%} must be{why}. Take faster"
        " hardware, a smaller model, or a longer bound"
    )


def sweep(deployment: Deployment, traffic: Traffic, level: LevelBounds, rates: Iterable[float]) -> list[Figures]:
    """Run the same requests at several rates."""
    return [deployment.run(traffic.at(rate), level) for rate in rates]


def sweep_rates(capacity_rate: float) -> list[float]:
    """Return the rates around a capacity at which goodput is looked at."""
    return [capacity_rate * share for share in _KNEE_SHARES]


def knee(runs: Sequence[Figures]) -> Figures:
    """Return the run at the knee of goodput over offered load: the farthest above the line from zero to the last."""
    assert runs
    most = max(each.offered_rate for each in runs)
    best = max(each.goodput for each in runs) or 1.0
    return max(runs, key=lambda each: each.goodput / best - each.offered_rate / most)
