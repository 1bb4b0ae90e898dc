"""Advice for a model, hardware and load: optimizations in the order that pays most, and own devices against an API.

Every candidate is the same plan with other bytes or another load: nothing is built, so accuracy is not predicted, and
whether a recipe passes its gates is for a build to say. Times are those of the data sheet before and after, so that
a gain is never the difference of two sources.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ingot.artifact.kv_geometry import KVType
from ingot.planning import formulas
from ingot.planning.latency import Latency
from ingot.planning.model_shape import ModelShape
from ingot.planning.plan import PlannedModel, ServingPlan, make_plan

Effort = Literal["a setting", "a build", "training"]
DataClass = Literal["public", "internal", "restricted"]
HostingChoice = Literal["own devices", "API", "either"]

_DRAFTED, _ACCEPTANCE = 4, 0.7
_PRUNED = 0.75
_MOST_BATCH = 4096
_LEAST_GAIN = 1.02
"""A smaller gain of throughput is not worth a step of the order."""
_BUSY_SHARE = 0.5
"""Mean load of own replicas over what they serve at most: the peak of a day is about twice its mean."""
_BANDS = (1e6, 1e7, 1e8, 1e9, 1e10)
_DAY = 86400
_LEAST_TEAM = 2


@dataclass(frozen=True)
class Advice:
    """One optimization. Gains are factors: of tokens a second at the load, of TPOT, of sequences that fit.

    step       its place in the order, from 1; 0 where it gains nothing more after those of the order
    together   tokens a second after this and all before it, over those of the plan; 0 outside of the order
    why        the part of a step that shrinks most, or why it is not in the order
    needs      what it takes, and what the prediction assumes
    """

    name: str
    effort: Effort
    throughput: float
    tpot: float
    sequences: float
    needs: str
    why: str = ""
    step: int = 0
    together: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "step": self.step or None,
            "name": self.name,
            "effort": self.effort,
            "throughput_gain": self.throughput,
            "tpot_gain": self.tpot,
            "sequences_gain": self.sequences,
            "throughput_gain_together": self.together or None,
            "why": self.why,
            "needs": self.needs,
        }


Change = Callable[[ServingPlan], ServingPlan | None]


@dataclass(frozen=True)
class _Candidate:
    name: str
    effort: Effort
    needs: str
    change: Change


def advise(plan: ServingPlan) -> list[Advice]:
    """Order the optimizations: settings and builds before training, of each the largest gain on top of those before.

    After the order come those that gain nothing more, or would miss the service level. [] where a plan has no times.
    """
    start = _replan(plan, plan.subject)
    if start.latency is None or start.parallelism is None:
        return []
    alone = {one.name: found for one in _CANDIDATES if (found := _alone(one, start)) is not None}
    order: list[Advice] = []
    now, left = start, [one for one in _CANDIDATES if one.name in alone]
    for with_training in (False, True):
        while True:
            allowed = [one for one in left if with_training or one.effort != "training"]
            best = _best(allowed, now)
            if best is None:
                break
            candidate, after = best
            left.remove(candidate)
            why, together = _shrinks(now, after), _gain(start, after)[0]
            order.append(replace(alone[candidate.name], why=why, step=len(order) + 1, together=together))
            now = after
    rest = [replace(alone[one.name], why=_why_not(one, now, order)) for one in left]
    return [*order, *sorted(rest, key=lambda advice: -advice.throughput)]


def _best(candidates: list[_Candidate], now: ServingPlan) -> tuple[_Candidate, ServingPlan] | None:
    """The candidate with the largest gain over a plan, and its plan; None where none gains enough."""
    found = [(one, after) for one in candidates if (after := _changed(one, now)) is not None and _keeps(after, now)]
    gaining = [(one, after) for one, after in found if _gain(now, after)[0] >= _LEAST_GAIN]
    return max(gaining, key=lambda pair: _gain(now, pair[1])[0], default=None)


def _alone(candidate: _Candidate, plan: ServingPlan) -> Advice | None:
    changed = _changed(candidate, plan)
    return Advice(candidate.name, candidate.effort, *_gain(plan, changed), candidate.needs) if changed else None


def _changed(candidate: _Candidate, plan: ServingPlan) -> ServingPlan | None:
    """The plan after an optimization; None where it does not apply, or leaves no times."""
    changed = candidate.change(plan)
    return changed if changed and changed.latency and changed.parallelism else None


def _gain(before: ServingPlan, after: ServingPlan) -> tuple[float, float, float]:
    """Factors of throughput, of TPOT and of sequences that fit."""
    old, new = _latency(before), _latency(after)
    assert before.parallelism
    assert after.parallelism
    sequences = after.parallelism.sequences / before.parallelism.sequences
    return new.tokens_per_second / old.tokens_per_second, old.tpot / new.tpot, sequences


def _latency(plan: ServingPlan) -> Latency:
    assert plan.latency
    return plan.latency


def _keeps(after: ServingPlan, before: ServingPlan) -> bool:
    """Return False where a change misses a service level that the plan before it meets."""
    if after.level is None:
        return True
    failures = after.level[1].failures
    return bool(failures(_latency(before).upper)) or not failures(_latency(after).upper)


def _shrinks(before: ServingPlan, after: ServingPlan) -> str:
    """The term of a step that falls most for each token, in words."""
    old, new = _token_seconds(before), _token_seconds(after)
    name = max(old, key=lambda term: old[term] - new.get(term, 0.0))
    resource = next(term.resource for term in before.terms if term.name == name)
    return (
        f"{name} ({resource}): {old[name] * 1e3:,.3g} of {sum(old.values()) * 1e3:,.3g} ms a token, then"
        f" {new.get(name, 0.0) * 1e3:,.3g}"
    )


def _token_seconds(plan: ServingPlan) -> dict[str, float]:
    """Seconds of each term of the average step for a token of output."""
    tokens = _latency(plan).running * plan.load.step_tokens
    return {term.name: term.seconds / tokens for term in plan.terms}


def _why_not(candidate: _Candidate, now: ServingPlan, order: list[Advice]) -> str:
    after = _changed(candidate, now)
    if after is None:
        return f"nothing left to gain after step {len(order)}" if order else "nothing to gain"
    if not _keeps(after, now):
        assert after.level
        return f"misses {after.level[0]}: {after.level[1].failures(_latency(after).upper)[0]}"
    binding = now.terms[0]
    return (
        f"{_gain(now, after)[0]:.2f} times on top: {binding.name} ({binding.resource}) are"
        f" {binding.seconds / sum(term.seconds for term in now.terms):.0%} of a step by then"
    )


def _replan(plan: ServingPlan, subject: PlannedModel) -> ServingPlan:
    devices = plan.parallelism.devices if plan.parallelism else None
    return make_plan(subject, plan.hardware_name, plan.hardware, plan.load, level=plan.level, devices=devices)


def _with_shape(plan: ServingPlan, shape: ModelShape) -> ServingPlan:
    """The plan with another shape, whose weights' file changes by as much as its matmuls."""
    subject = plan.subject
    saved = subject.shape.matmul_bytes - shape.matmul_bytes
    program = replace(subject.program, weight_bytes=max(0, subject.program.weight_bytes - saved))
    return _replan(plan, replace(subject, shape=shape, program=program))


def _changed_shape(change: Callable[[ModelShape], ModelShape]) -> Change:
    """Change a plan by its shape; None where that stays as it is."""

    def changed(plan: ServingPlan) -> ServingPlan | None:
        shape = change(plan.subject.shape)
        return None if shape == plan.subject.shape else _with_shape(plan, shape)

    return changed


def _weights(bits: int) -> Change:
    return _changed_shape(lambda shape: shape.with_weight_bits(bits))


def _kv(dtype: KVType) -> Change:
    return _changed_shape(lambda shape: shape.with_kv_type(dtype))


def _batch(plan: ServingPlan) -> ServingPlan | None:
    """Twice as many requests at a time, if they fit."""
    count = 2 * plan.load.concurrency
    fits = count <= min(plan.most_sequences, _MOST_BATCH)
    return replace(plan, load=replace(plan.load, concurrency=count)) if fits else None


def _drafts(plan: ServingPlan) -> ServingPlan | None:
    if plan.load.drafted_tokens:
        return None
    return replace(plan, load=replace(plan.load, drafted_tokens=_DRAFTED, acceptance=_ACCEPTANCE))


def _half_as_deep(plan: ServingPlan) -> ServingPlan | None:
    """Half of the layers, with their KV where all layers' KV is alike: a student, or a smaller model of the family."""
    shape = plan.subject.shape
    half = shape.num_layers // 2
    if not half:
        return None
    matmuls = tuple(
        one if one.role == "head" else replace(one, count=-(-one.count // 2), bytes=one.bytes // 2)
        for one in shape.matmuls
    )
    kv, heads = shape.kv, shape.query_heads
    differ = any(isinstance(sizes, tuple) for sizes in (kv.num_kv_heads, kv.head_dim, kv.value_dim, kv.window))
    if not differ and not kv.shares and not kv.state_bytes and len(heads) == kv.num_layers > 1:
        heads = heads[: kv.num_layers // 2]
        kv = kv.model_copy(update={"num_layers": len(heads)})
    return _with_shape(plan, replace(shape, num_layers=half, matmuls=matmuls, kv=kv, query_heads=heads))


_CANDIDATES = (
    _Candidate("twice the batch", "a setting", "requests that arrive at the same time", _batch),
    _Candidate(
        "speculation", "a setting", f"drafts that are right {_ACCEPTANCE:.0%} of the time, {_DRAFTED} a step", _drafts
    ),
    _Candidate("weights in 8 bits", "a build", "quantize-weights or gptq: {bits: 8}", _weights(8)),
    _Candidate("weights in 4 bits", "a build", "gptq or awq: {bits: 4}; or 8 bits by the gates", _weights(4)),
    _Candidate("KV in 8 bits", "a build", "quantize-kv-cache: {precision: int8}", _kv("int8")),
    _Candidate(
        "KV in 4 bits", "a build", "quantize-kv-cache: {precision: int4}; where gates fail, 8 bits", _kv("int4")
    ),
    _Candidate(
        "prune",
        "training",
        f"prune-structure: {{ffn: {_PRUNED}, kv_groups: ...}} to {_PRUNED:.0%}, tuned after",
        _changed_shape(lambda shape: shape.with_scaled_matmuls(_PRUNED)),
    ),
    _Candidate("smaller model", "training", "half of the layers: one of the family, or distilled into", _half_as_deep),
)


@dataclass(frozen=True)
class Band:
    """Tokens of output a day, with the dollars of a month by own devices and by the API; None without its price."""

    tokens_a_day: float
    replicas: int
    own: float
    api: float | None

    @property
    def cheaper(self) -> str:
        """The side that costs less: "own", "API", or "" without a price of an API."""
        return "" if self.api is None else "own" if self.own < self.api else "API"

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "tokens_a_day": self.tokens_a_day,
            "replicas": self.replicas,
            "own_per_month": self.own,
            "api_per_month": self.api,
            "cheaper": self.cheaper or None,
        }


@dataclass(frozen=True)
class Hosting:
    """Own devices against an API: the advice, its reasons, and the costs by tokens a day."""

    choice: HostingChoice
    reasons: tuple[str, ...]
    bands: tuple[Band, ...]

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {"choice": self.choice, "reasons": list(self.reasons), "bands": [one.as_json() for one in self.bands]}


def advise_hosting(
    plan: ServingPlan,
    tokens_a_day: float | None = None,
    data: DataClass | None = None,
    team: int | None = None,
) -> Hosting:
    """Advise own devices or an API.

    tokens_a_day   of output; with prices it decides by cost
    data           restricted: may not leave own machines. internal: only by a contract. public: any
    team           engineers who run servers among other work

    Data decides before the team, and the team before cost. Prices are those of the plan.
    """
    volumes = sorted({*_BANDS, *([tokens_a_day] if tokens_a_day else [])})
    bands = tuple(band for each in volumes if (band := _band(plan, each)) is not None)
    own = next((band for band in bands if band.tokens_a_day == tokens_a_day), None)
    found = [*_by_data(data), *_by_team(team), *_by_cost(plan, own)]
    choice: HostingChoice = next((choice for choice, _ in found if choice != "either"), "either")
    return Hosting(choice, tuple(reason for _, reason in found), bands)


_Reason = tuple[HostingChoice, str]


def _by_data(data: DataClass | None) -> Iterator[_Reason]:
    if data == "restricted":
        yield "own devices", "restricted data may not leave own machines, whatever an API costs"
    elif data == "internal":
        yield "either", "internal data needs a contract on storage and training with the API's provider"
    elif data == "public":
        yield "either", "public data may go anywhere"


def _by_team(team: int | None) -> Iterator[_Reason]:
    if team == 0:
        yield "API", "own devices need someone who answers their alerts, and the team has none"
    elif team is not None and team < _LEAST_TEAM:
        yield "either", "one engineer cannot answer alerts around the clock: take one replica kind and managed machines"
    elif team is not None:
        yield "either", f"{team} engineers can take turns with the alerts of own devices"


def _by_cost(plan: ServingPlan, band: Band | None) -> Iterator[_Reason]:
    if plan.price_per_hour is None:
        yield "either", "cost does not count: the hardware has no price; give --price"
    elif plan.api_price is None:
        yield "either", "cost does not count: give the price of an API with --api-price"
    elif band is None:
        yield "either", "cost does not count: give --tokens-a-day, or find yours in the table"
    else:
        assert band.api is not None
        text = (
            f"{band.tokens_a_day:,.0f} tokens a day cost ${band.own:,.0f} a month on {band.replicas} replica(s), busy"
            f" {_BUSY_SHARE:.0%} of the day on average, and ${band.api:,.0f} by the API; salaries are in neither"
        )
        yield "own devices" if band.cheaper == "own" else "API", text


def _rate(latency: Latency) -> float:
    return latency.tokens_per_second


def _band(plan: ServingPlan, tokens_a_day: float) -> Band | None:
    """Costs of so many tokens a day; None where the model has no times or the devices no price.

    A replica has as many requests at a time as keep the service level, or as give the most tokens without one.
    """
    if plan.latency is None or plan.parallelism is None or plan.price_per_hour is None:
        return None
    rate = (plan.best or plan.latency if plan.level else max(plan.sweep, key=_rate)).tokens_per_second
    replicas = max(1, math.ceil(tokens_a_day / (rate * _DAY * _BUSY_SHARE)))
    own = formulas.cost_per_month(plan.price_per_hour, replicas * plan.parallelism.devices)
    api = formulas.api_cost_per_month(tokens_a_day, plan.api_price) if plan.api_price else None
    return Band(tokens_a_day, replicas, own, api)
