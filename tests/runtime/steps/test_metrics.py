"""The registry: histograms, what a step and a request add to it, and that a snapshot is one moment's."""

import random
import threading
from statistics import quantiles

import pytest

from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.steps.metrics import SECONDS_BUCKETS, TOKENS_BUCKETS, Histogram, HistogramSnapshot
from tests.runtime.engines import token_engine
from tests.runtime.steps.test_deadlines import Clock, engine_of
from tests.simulators.fake_executor import FakeExecutor


def snapshot(values: list[float], bounds: tuple[float, ...] = (1.0, 2.0, 4.0)) -> HistogramSnapshot:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    return histogram.snapshot()


def test_a_value_counts_in_the_first_bucket_that_is_not_below_it() -> None:
    found = snapshot([0, 1, 1, 1.5, 2, 4, 4.5, 100])
    assert found.counts == (3, 2, 1, 2)
    assert (found.num_observed, found.total) == (8, 114)


def test_an_empty_histogram_has_no_mean_and_no_quantile() -> None:
    assert (snapshot([]).mean, snapshot([]).quantile(0.5)) == (None, None)


def test_quantiles_are_interpolated_in_their_bucket_within_what_was_observed() -> None:
    for share in (0, 0.5, 0.99, 1):
        assert snapshot([1.25]).quantile(share) == 1.25
    assert snapshot([0.5, 3]).quantile(0.5) == 1
    assert snapshot([0.5, 3.5]).quantile(0.75) == 2.75
    assert snapshot([0.5, 30]).quantile(1) == 30
    assert snapshot([3, 3]).mean == 3


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_of_latencies_are_within_a_bucket_of_the_exact_ones(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.lognormvariate(-4, 1.5) for _ in range(2000)]
    found = snapshot(values, SECONDS_BUCKETS)
    exact = quantiles(values, n=100, method="inclusive")
    for share in (10, 50, 90, 99):
        assert found.quantile(share / 100) == pytest.approx(exact[share - 1], rel=0.5)


def test_buckets_ascend_without_repeats() -> None:
    for bounds in (SECONDS_BUCKETS, TOKENS_BUCKETS):
        assert list(bounds) == sorted(set(bounds))


def test_times_of_a_request_are_observed_as_they_happen() -> None:
    clock = Clock()

    class SlowExecutor(FakeExecutor):
        def forward(self, batch: object) -> object:  # type: ignore[override]
            clock.now += 2
            return super().forward(batch)  # type: ignore[arg-type]

    with engine_of(SlowExecutor, clock) as engine:
        engine.add([1, 2, 3], SamplingParams(max_tokens=4), arrival_seconds=-1)
        engine.step()
        early = engine.metrics()
        assert (early.ttft_seconds.num_observed, early.itl_seconds.num_observed) == (1, 0)
        assert early.e2e_seconds.num_observed == 0
        while engine.has_unfinished():
            engine.step()
        metrics = engine.metrics()
    assert (metrics.ttft_seconds.total, metrics.queue_seconds.total, metrics.e2e_seconds.total) == (3, 1, 9)
    assert (metrics.itl_seconds.num_observed, metrics.itl_seconds.total) == (3, 6)
    assert (metrics.tpot_seconds.num_observed, metrics.tpot_seconds.total) == (1, 2)
    assert (metrics.prompt_lengths.total, metrics.output_lengths.total) == (3, 4)
    assert (metrics.prompt_tokens, metrics.output_tokens, metrics.finished_by_reason) == (3, 4, {"length": 1})
    assert (metrics.step_lengths.num_observed, metrics.step_lengths.total) == (4, 6)


def test_every_request_counts_once_under_the_reason_of_its_end() -> None:
    with engine_of(FakeExecutor, clock := Clock(), max_sequences=2) as engine:
        engine.add([1], SamplingParams(max_tokens=2))
        aborted = engine.add([2], SamplingParams(max_tokens=50))
        engine.add([3], SamplingParams(max_tokens=50), options=RequestOptions(timeout_seconds=5))
        engine.step()
        engine.abort(aborted)
        clock.now = 10
        while engine.has_unfinished():
            engine.step()
        metrics = engine.metrics()
    assert metrics.finished_by_reason == {"abort": 1, "timeout": 1, "length": 1}
    assert metrics.e2e_seconds.num_observed == metrics.output_lengths.num_observed == 3
    assert metrics.num_failed_requests == 0


def test_prefix_queries_and_hits_are_tokens_of_admissions() -> None:
    with token_engine(block_tokens=4) as engine:
        for _ in range(2):
            engine.generate(list(range(9)), SamplingParams(max_tokens=1))
        metrics = engine.metrics()
    assert (metrics.prefix_query_tokens, metrics.prefix_hit_tokens) == (18, 8)


def test_another_thread_reads_consistent_histograms_while_the_engine_steps() -> None:
    with token_engine() as engine:
        seen: list[tuple[int, int]] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                metrics = engine.metrics()
                seen.append((metrics.itl_seconds.num_observed, sum(metrics.itl_seconds.counts)))

        reader = threading.Thread(target=read)
        reader.start()
        engine.generate([[number] for number in range(8)], SamplingParams(max_tokens=40))
        stop.set()
        reader.join()
        assert engine.metrics().itl_seconds.num_observed == 8 * 39
    assert seen
    assert all(count == total for count, total in seen)
    assert seen == sorted(seen)
