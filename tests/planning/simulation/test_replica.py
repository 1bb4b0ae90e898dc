"""A simulated engine: decode runs change nothing, time passes as the step model says, and all of it is the engine's."""

import random
from typing import Any

import pytest

from ingot.planning.simulation.length_engine import LengthEngine
from ingot.planning.simulation.replica import Replica, serve
from ingot.planning.simulation.simulated_executor import EngineShape
from ingot.planning.simulation.stepped_engine import SteppedEngine
from ingot.planning.simulation.timed_request import EndedRequest, TimedRequest
from ingot.planning.simulation.traces import RequestLengths
from ingot.runtime.options import EngineOptions
from tests.planning.simulation.engines import LinearTimes, request, shape_of

Case = tuple[list[TimedRequest], EngineShape, EngineOptions, float | None]


def random_case(rng: random.Random, shares_prefixes: bool) -> Case:
    """A small engine under a load that is too much for it now and then."""
    now, requests = 0.0, []
    rate = rng.choice([1, 5, 20, 100])
    for line in range(1, rng.randrange(2, 30)):
        now += rng.expovariate(rate) if rng.random() < 0.9 else 0
        blocks = (rng.randrange(3), 10 + line % 4) if shares_prefixes and rng.random() < 0.5 else ()
        prompt = rng.randrange(65, 128) if blocks else rng.randrange(1, 300)
        requests.append(TimedRequest(now, RequestLengths(line, prompt, rng.randrange(1, 120), blocks), 64))
    shape = shape_of(
        num_blocks=rng.choice([24, 30, 60, 500]),
        max_batch_tokens=rng.choice([32, 64, 512]),
        max_sequences=rng.choice([1, 3, 8, 32]),
    )
    batching: Any = rng.choice(["continuous", "static", "dynamic"])
    options = EngineOptions(
        batching=batching,
        prefix_cache=rng.random() < 0.7,
        max_requests=rng.choice([None, 3, 10]),
        reject_late=rng.random() < 0.2,
    )
    return requests, shape, options, rng.choice([None, None, 0.3, 2.0])


def outcome(each: EndedRequest) -> tuple[Any, ...]:
    done = each.completion
    if done is None:
        return (each.request.lengths.line,)
    metrics = done.metrics
    times = (metrics.finish_seconds, metrics.first_scheduled_seconds or 0, metrics.first_token_seconds or 0)
    counts = (metrics.num_output_tokens, done.cached_tokens, metrics.num_preemptions)
    return each.request.lengths.line, done.finish_reason, *counts, *times


COUNTS = ("num_steps", "computed_tokens", "output_tokens", "num_preemptions", "prefix_hit_tokens", "finished_by_reason")


def served(case: Case, *, skips: bool, shares_prefixes: bool) -> tuple[list[tuple[Any, ...]], list[Any]]:
    requests, shape, options, timeout = case
    replica = Replica(
        shape, LinearTimes(), options, timeout_seconds=timeout, skips=skips, shares_prefixes=shares_prefixes
    )
    ended = []
    for each in serve(replica, requests):
        ended.append(outcome(each))
        replica.engine.check()
    counts = replica.engine.counts
    assert type(replica.engine) is (LengthEngine if skips else SteppedEngine)
    return sorted(ended), [*(getattr(counts, name) for name in COUNTS), counts.itl_seconds.num_observed]


@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_lengths_alone_change_no_time_and_no_count(shares_prefixes: bool) -> None:
    preemptions, hits = 0, 0
    for seed in range(60):
        case = random_case(random.Random(seed), shares_prefixes)
        fast, counts = served(case, skips=True, shares_prefixes=shares_prefixes)
        slow, same = served(case, skips=False, shares_prefixes=shares_prefixes)
        assert dict(zip(COUNTS, counts, strict=False)) == dict(zip(COUNTS, same, strict=False)), seed
        assert counts == same, seed
        assert len(fast) == len(case[0])
        for one, other in zip(fast, slow, strict=True):
            assert one[:5] == other[:5], seed
            assert one[5:] == pytest.approx(other[5:], abs=1e-7), seed
        preemptions += counts[COUNTS.index("num_preemptions")]
        hits += counts[COUNTS.index("prefix_hit_tokens")]
    assert preemptions > 10
    assert hits > 100


def test_a_lone_request_takes_the_seconds_that_its_steps_add_up_to() -> None:
    replica = Replica(shape_of(), LinearTimes(fixed=1.0, sequence=0, token=0.01, context=0))
    (done,) = serve(replica, [request(3.0, 100, 5)])
    assert done.completion
    assert done.completion.metrics.ttft_seconds == pytest.approx(2.0)
    assert done.completion.metrics.e2e_seconds == pytest.approx(6.0)
    assert replica.clock.now == pytest.approx(9.0)


def test_a_prompt_longer_than_a_step_is_computed_in_chunks() -> None:
    replica = Replica(shape_of(max_batch_tokens=64), LinearTimes(fixed=1.0, sequence=0, token=0, context=0))
    (done,) = serve(replica, [request(0.0, 200, 1)])
    assert done.completion
    assert done.completion.metrics.e2e_seconds == pytest.approx(4.0)


def test_a_full_engine_refuses_and_time_ends_what_takes_too_long() -> None:
    options = EngineOptions(max_requests=2)
    replica = Replica(shape_of(), LinearTimes(), options, timeout_seconds=0.5)
    ended = list(serve(replica, [request(0.0, 10, 1000, 1), request(0.0, 10, 2, 2), request(0.001, 10, 2, 3)]))
    assert [each.request.lengths.line for each in ended if not each.completion] == [3]
    reasons = {each.request.lengths.line: each.completion.finish_reason for each in ended if each.completion}
    assert reasons == {1: "timeout", 2: "length"}
    assert replica.num_refused == 1
    assert replica.clock.now < 0.6


def test_drafts_are_accepted_by_the_curve_and_shorten_what_is_bound_by_steps() -> None:
    seconds = {}
    for acceptance in ((), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)):
        replica = Replica(shape_of(acceptance=acceptance), LinearTimes())
        (done,) = serve(replica, [request(0.0, 10, 400)])
        assert done.completion
        assert done.completion.metrics.num_output_tokens == 400
        seconds[acceptance] = done.completion.metrics.e2e_seconds
    assert seconds[(1.0, 1.0, 1.0)] < 0.4 * seconds[()]
    assert seconds[()] < seconds[(0.0, 0.0, 0.0)] < 1.1 * seconds[()]


def test_host_memory_keeps_prefixes_that_the_pool_evicts_and_moving_them_takes_time() -> None:
    load = [request(10.0 * turn, 1024, 4, turn, (turn % 6, 6 + turn % 6)) for turn in range(1, 37)]
    cached = {}
    for host_bytes in (0, 1 << 26):
        options = EngineOptions(kv_host_bytes=host_bytes, kv_restore="always")
        replica = Replica(shape_of(num_blocks=200), LinearTimes(), options, skips=False)
        assert isinstance(replica.engine, SteppedEngine)
        ended = list(serve(replica, load))
        assert all(each.completion for each in ended)
        replica.engine.check()
        cached[host_bytes] = replica.engine.metrics().prefix_hit_tokens_by_tier
        replica.engine.close()
    assert not cached[0].get("host")
    assert cached[1 << 26]["host"] > 20_000


def test_a_replica_that_fails_gives_back_what_it_had() -> None:
    replica = Replica(shape_of(), LinearTimes())
    for line in (1, 2):
        replica.add(request(0.0, 10, 100, line))
    list(replica.advance(0.1))
    assert [each.lengths.line for each in replica.take_all()] == [1, 2]
    assert not replica
    replica.engine.check()


def test_a_request_that_the_whole_pool_cannot_hold_is_refused_alone() -> None:
    replica = Replica(shape_of(num_blocks=10), LinearTimes())
    ended = list(serve(replica, [request(0.0, 500, 10, 1), request(0.0, 50, 10, 2)]))
    assert {each.request.lengths.line: each.completion is not None for each in ended} == {1: False, 2: True}
