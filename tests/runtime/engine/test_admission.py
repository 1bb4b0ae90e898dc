"""Requests that an overloaded engine refuses, and the time to retry that it names."""

import pickle
from typing import Any

import pytest

from ingot.errors import EngineBusy, Overloaded
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from tests.runtime.steps.test_deadlines import Clock
from tests.simulators.fake_executor import FakeExecutor


class SlowExecutor(FakeExecutor):
    """Takes one second for a step."""

    clock: Clock

    def forward(self, batch: Any) -> Any:
        self.clock.now += 1
        return super().forward(batch)


def engine_of(clock: Clock, **options: Any) -> Engine:
    executor = SlowExecutor()
    executor.clock = clock
    return Engine(executor, clock=clock, **options)


def test_more_than_max_requests_are_refused_with_the_time_to_retry() -> None:
    with engine_of(Clock(), max_requests=2) as engine:
        for length in (8, 12):
            engine.generate([1], SamplingParams(max_tokens=length))
        for number in range(2):
            engine.add([number], SamplingParams(max_tokens=10))
        with pytest.raises(
            Overloaded, match=r"2 unfinished requests, as many as max_requests allows\. Please try again in \d+\.\ds"
        ) as refusal:
            engine.add([3])
        assert 7 < refusal.value.retry_after_seconds < 12, "one request took 8 s, the next 12 s"
        assert isinstance(refusal.value, EngineBusy)
        assert pickle.loads(pickle.dumps(refusal.value)).retry_after_seconds == refusal.value.retry_after_seconds
        assert engine.metrics().num_refused == 1


def test_waiting_prompt_tokens_are_bounded_but_one_request_alone_may_always_wait() -> None:
    with engine_of(Clock(), max_waiting_tokens=10, max_sequences=1) as engine:
        first = engine.add([1] * 20, SamplingParams(max_tokens=4))
        with pytest.raises(
            Overloaded, match=r"20 prompt tokens wait, and the request has 1; max_waiting_tokens is 10\. Please try"
        ):
            engine.add([1])
        engine.step()
        for _ in range(2):
            engine.add([1] * 5, SamplingParams(max_tokens=4))
        with pytest.raises(Overloaded) as refusal:
            engine.add([1] * 5)
        assert refusal.value.retry_after_seconds == pytest.approx(5 / 20), "5 tokens too many; 20 in the first second"
        assert engine.abort(first)
        engine.step()
        engine.add([1] * 5)
        assert engine.metrics().waiting_prompt_tokens == 10


def test_a_request_that_cannot_be_served_in_time_is_refused_at_once_if_the_option_is_set() -> None:
    late = RequestOptions(timeout_seconds=2)
    for rejects in (True, False):
        with engine_of(Clock(), max_sequences=1, reject_late=rejects) as engine:
            engine.generate([1] * 10, SamplingParams(max_tokens=10))  # 10 prompt tokens in 10 s
            for _ in range(3):
                engine.add([1] * 10, SamplingParams(max_tokens=10))
            engine.add([1], options=RequestOptions(timeout_seconds=60))
            engine.add([1], options=RequestOptions(timeout_seconds=2, priority=-1))
            if not rejects:
                engine.add([1], options=late)
                continue
            message = r"32 prompt tokens wait before the request, about \d\d\.\d s of work; its timeout leaves 2"
            with pytest.raises(Overloaded, match=message) as refusal:
                engine.add([1], options=late)
            assert 20 < refusal.value.retry_after_seconds < 50


def test_a_long_prompt_with_nothing_before_it_is_never_late() -> None:
    with engine_of(Clock(), reject_late=True) as engine:
        engine.generate([1], SamplingParams(max_tokens=10))  # by the rate of arrivals, 30 tokens would take 300 s
        engine.add([1] * 30, options=RequestOptions(timeout_seconds=5))
