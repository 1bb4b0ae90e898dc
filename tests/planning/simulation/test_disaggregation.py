"""Prompts and decoding in two pools: every token once, times in order, bytes of the geometry, and when it pays."""

from collections import Counter
from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.planning.simulation.deployment import Deployment
from ingot.planning.simulation.disaggregation import ReplicaPools
from ingot.planning.simulation.figures import Figures, parse_service_level
from ingot.planning.simulation.fleet import Autoscaling, ReplicaFailure
from ingot.planning.simulation.simulated_tiers import CopyLink
from ingot.planning.simulation.timed_request import EndedRequest, TimedRequest
from ingot.planning.simulation.traffic import RequestSizes, parse_traffic
from ingot.runtime.options import EngineOptions
from tests.each_case import each_case
from tests.planning.simulation.engines import KV, LinearTimes, request, shape_of

LINK = CopyLink(1e6, 1e-3)


def pools(prefill: int = 1, decode: int = 1, link: CopyLink = LINK, **options: Any) -> Deployment:
    return Deployment(
        shape=shape_of(), times=LinearTimes(), disaggregation=ReplicaPools(prefill, decode, link), **options
    )


def served(deployment: Deployment, load: list[TimedRequest]) -> list[EndedRequest]:
    return list(deployment.fleet().serve(load))


def test_a_lone_request_takes_its_prompt_the_transfer_and_its_steps() -> None:
    (ended,) = served(pools(), [request(0.0, 100, 11)])
    assert ended.completion
    metrics = ended.completion.metrics
    prompt = LinearTimes()
    first = prompt.fixed + prompt.sequence + 100 * prompt.token + prompt.context * 100 * 101 / 2
    transfer = LINK.seconds(7 * KV.block_bytes)
    decoding = 10 * (prompt.fixed + prompt.sequence) + prompt.context * sum(range(101, 111))
    assert metrics.first_token_seconds == pytest.approx(first)
    assert metrics.finish_seconds == pytest.approx(first + transfer + decoding)
    assert metrics.num_output_tokens == 11
    assert (ended.request.lengths.prompt_tokens, ended.completion.prompt_tokens) == (100, 100)


def test_transfers_of_a_replica_wait_for_each_other() -> None:
    fleet = pools().fleet()
    ended = list(fleet.serve([request(0.0, 100, 5, line) for line in range(1, 4)]))
    totals = fleet.transfers.totals  # type: ignore[union-attr]
    assert len(ended) == totals.count == 3
    assert totals.num_bytes == 3 * 7 * KV.block_bytes
    assert totals.seconds == pytest.approx((1 + 2 + 3) * LINK.seconds(7 * KV.block_bytes))


def test_each_request_ends_once_with_all_its_tokens_also_when_replicas_fail() -> None:
    sizes = RequestSizes(prompt_tokens=150, output_tokens=30)
    load = list(parse_traffic("poisson:40", sizes=sizes, count=200, context_tokens=8192))
    for failures in ((), (ReplicaFailure(1.0, 0, 0.5), ReplicaFailure(2.0, 2, 0.5))):
        ended = served(pools(2, 2, failures=failures), load)
        assert Counter(each.request.lengths.line for each in ended) == Counter(range(1, 201))
        for each in ended:
            assert each.completion
            metrics = each.completion.metrics
            assert metrics.num_output_tokens == each.request.lengths.output_tokens
            assert metrics.first_scheduled_seconds is not None
            assert metrics.first_token_seconds is not None
            times = (each.request.seconds, metrics.first_scheduled_seconds, metrics.first_token_seconds)
            assert [*times, metrics.finish_seconds] == sorted([*times, metrics.finish_seconds])


def test_a_timeout_counts_from_the_first_arrival() -> None:
    slow = pools(link=CopyLink(1e6, 5.0), timeout_seconds=3.0)
    (ended,) = served(slow, [request(1.0, 100, 20)])
    assert ended.completion
    assert ended.completion.finish_reason == "timeout"
    assert ended.completion.metrics.num_output_tokens == 1


def figures(deployment: Deployment, rate: float, **sizes: int) -> Figures:
    traffic = parse_traffic(f"poisson:{rate}", sizes=RequestSizes(**sizes), count=400, context_tokens=8192)
    return deployment.run(traffic, parse_service_level("ttft=2,tpot=0.012,percentile=0.9"))


def test_it_pays_where_prompts_delay_tokens_and_not_over_a_slow_link() -> None:
    # A chunk of 512 prompt tokens takes 15 ms, a step that decodes 5 to 8 ms.
    sizes = {"prompt_tokens": 1500, "output_tokens": 100}
    apart = pools(2, 2, link=CopyLink(1e9))
    split, together = figures(apart, 20, **sizes), figures(apart.together(), 20, **sizes)
    assert split.tpot.p90 < 0.8 * together.tpot.p90
    assert split.good_share > together.good_share
    slow = figures(pools(2, 2, link=CopyLink(1e5)), 20, **sizes)
    assert slow.good_share < together.good_share


@each_case("text", ["2", "0:1", "1:0", "a:b", "1:2:3", "5000:1", "-1:2", "1.5:2"])
def test_pools_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"must be PREFILL:DECODE, .* as 2:6"):
        ReplicaPools.parse(text, LINK)
    assert ReplicaPools.parse("2:6", LINK) == ReplicaPools(2, 6, LINK)


def test_what_is_not_simulated_with_pools_is_refused() -> None:
    with pytest.raises(UsageError, match="leave out autoscaling"):
        pools(autoscaling=Autoscaling())
    with pytest.raises(UsageError, match="a slow part are not simulated with disaggregation"):
        pools(options=EngineOptions(kv_host_bytes=1 << 30))
