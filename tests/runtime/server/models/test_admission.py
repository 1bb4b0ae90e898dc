"""Overload: refusals at once with a time to retry, accepted requests served to their ends, appointments in order."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2
import openai
import pytest

from ingot.runtime.engine.engine import Engine
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.retry import Client
from ingot.runtime.server.models.admission import ModelAdmission
from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import demo_tokenizer, token_engine
from tests.runtime.hosting.test_async_engine import GatedExecutor
from tests.runtime.server.servers import Running, running


def gated_engine() -> tuple[Engine, GatedExecutor]:
    """An engine with the demo model's tokenizer, whose steps wait while its gate is closed."""
    tokenizer = demo_tokenizer()
    executor = GatedExecutor(vocab_size=tokenizer.vocab_size, num_blocks=500)
    return Engine(executor, tokenizer), executor


def complete(server: Running, prompt: Any, max_tokens: int = 5) -> openai.types.Completion | openai.RateLimitError:
    with server.client() as client:
        try:
            return client.completions.create(
                model="fake", prompt=prompt, max_tokens=max_tokens, extra_body={"ignore_eos": True}
            )
        except openai.RateLimitError as error:
            return error


def test_requests_above_the_limit_are_refused_while_the_engine_is_in_a_step() -> None:
    engine, executor = gated_engine()
    with running(engine, ServerOptions(max_requests=3)) as server, ThreadPoolExecutor(3) as threads:
        executor.gate.clear()
        accepted = [threads.submit(complete, server, [number]) for number in range(3)]
        server.until(lambda: server.model().gate.num_open == 3)
        refused = [complete(server, "import os") for _ in range(20)]  # all answered while no step can end
        executor.gate.set()
        finished = [future.result() for future in accepted]
        for error in refused:
            assert isinstance(error, openai.RateLimitError)
            assert (
                "Rate limit reached: 3 requests are open, as many as max_requests allows. Please try again in "
                in error.message
            )
            assert (error.type, error.code) == ("rate_limit_error", "overloaded")
            milliseconds = float(error.response.headers["retry-after-ms"])
            assert int(error.response.headers["retry-after"]) >= milliseconds / 1000 > 0
        for done in finished:
            assert isinstance(done, openai.types.Completion)
            assert done.usage
            assert done.usage.completion_tokens == 5
        assert isinstance(complete(server, [1]), openai.types.Completion)
        assert server.model().gate.num_refused == 20
        server.require_nothing_left()


def test_waiting_tokens_are_bounded_before_a_prompt_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor = gated_engine()
    with running(engine, ServerOptions(max_waiting_tokens=50)) as server, ThreadPoolExecutor(2) as threads:
        executor.gate.clear()
        first = threads.submit(complete, server, [1] * 60)  # one alone may always wait
        server.until(lambda: engine.metrics().num_running == 1)
        assert server.model().gate.waiting_tokens == 60
        encoded: list[object] = []
        monkeypatch.setattr(engine, "encode", encoded.append)
        refused = complete(server, "import os\n" * 20)
        assert isinstance(refused, openai.RateLimitError)
        assert "60 prompt tokens wait and the request has" in refused.message
        assert not encoded
        monkeypatch.undo()
        executor.gate.set()
        assert isinstance(first.result(), openai.types.Completion)
        assert isinstance(complete(server, "import os\n" * 20), openai.types.Completion)
        server.require_nothing_left()


def test_a_prompt_counts_with_its_exact_length_once_it_is_encoded() -> None:
    engine, executor = gated_engine()
    text = "a b c d e f g h i j k l m n o p"
    exact = len(demo_tokenizer().encode(text))
    with running(engine, ServerOptions(max_waiting_tokens=exact + 5)) as server, ThreadPoolExecutor(2) as threads:
        executor.gate.clear()
        first = threads.submit(complete, server, text)
        server.until(lambda: server.model().gate.waiting_tokens == exact)
        assert isinstance(complete(server, text), openai.RateLimitError)
        assert isinstance(complete(server, [1] * 6), openai.RateLimitError)
        executor.gate.set()
        assert isinstance(first.result(), openai.types.Completion)
        server.require_nothing_left()


class Rates:
    """An engine that ends 2 requests and admits 100 prompt tokens a second; its clock is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.is_full = True
        self.max_sequences = 8

    def clock(self) -> float:
        return self.now

    @property
    def load(self) -> "Rates":
        return self

    @property
    def rates(self) -> "Rates":
        return self

    def ttft_seconds(self, *, num_open: float, num_waiting: float, num_tokens: float) -> float:
        return max(num_waiting / 2, num_tokens / 100) if self.is_full else 0.0

    def retry_seconds(self, *, num_requests: float = 0, num_tokens: float = 0) -> float:
        return max(num_requests / 2, num_tokens / 100)


@pytest.fixture
def rates() -> Rates:
    return Rates()


@pytest.fixture
def gate_of(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> Iterator[Callable[..., ModelAdmission]]:
    engine = AsyncEngine(token_engine())
    monkeypatch.setattr(engine.engine, "clock", rates.clock)
    monkeypatch.setattr(engine.engine, "admission", rates)
    yield lambda **limits: ModelAdmission(engine, ServerOptions(**limits))
    asyncio.run(engine.close())


def refusal(gate: ModelAdmission, num_tokens: int, client: bytes = b"", group: str = "") -> float:
    """The time after which a place should be free; a client is given 1.02 of it."""
    with pytest.raises(ApiError) as caught, gate.admitted(num_tokens, Client(client, group)):
        pass
    assert caught.value.status == 429
    assert caught.value.retry_after_seconds is not None
    return round(caught.value.retry_after_seconds / 1.02, 9)


def test_each_refused_client_gets_the_next_free_place(gate_of: Callable[..., ModelAdmission], rates: Rates) -> None:
    gate = gate_of(max_requests=1)
    with gate.admitted(10):
        assert [refusal(gate, 10, bytes([number])) for number in range(4)] == [0.5, 1.0, 1.5, 2.0]
        assert [refusal(gate, 10, bytes([number])) for number in range(4)] == [0.5, 1.0, 1.5, 2.0]  # each has its turn
        rates.now += 100.0  # none of them came again
        assert refusal(gate, 10) == 0.5
    with gate.admitted(10):
        pass


def test_a_request_takes_a_place_for_each_sequence_at_a_time(
    gate_of: Callable[..., ModelAdmission], rates: Rates
) -> None:
    gate = gate_of(max_requests=16)
    assert [gate.prompts_at_once(100, choices) for choices in (1, 2, 4, 128)] == [4, 2, 1, 1]
    assert gate.prompts_at_once(3, 1) == 3
    with gate.admitted(10, num_places=10):
        with pytest.raises(ApiError, match="this one takes 8 places") as caught, gate.admitted(10, num_places=8):
            pass
        assert caught.value.retry_after_seconds == pytest.approx(1.02 * 2 / 2)  # two too many, of two a second
        with gate.admitted(10, num_places=6):
            assert (gate.num_open, gate.num_waiting) == (16, 16)
            refusal(gate, 10)
    assert (gate.num_open, gate.num_waiting, gate.waiting_tokens) == (0, 0, 0)
    with gate.admitted(10, num_places=128):  # alone
        pass


def test_refused_tokens_are_given_times_one_after_the_other(
    gate_of: Callable[..., ModelAdmission], rates: Rates
) -> None:
    gate = gate_of(max_waiting_tokens=100)
    with gate.admitted(80) as first:
        assert refusal(gate, 90) == 0.7  # 70 too many
        assert refusal(gate, 70, b"other") == 0.5 + 0.9
        with gate.admitted(20) as second:
            with pytest.raises(ApiError, match="80 prompt tokens wait and the request has 21"):
                second.count(21)
            assert gate.waiting_tokens == 100
            first.starts()
            second.count(90)
            assert gate.waiting_tokens == 90
        assert gate.waiting_tokens == 0
    rates.now += 10
    with gate.admitted(1000):  # alone
        assert gate.num_open == 1
        assert refusal(gate, 1) > 9


def test_a_place_is_kept_for_a_client_that_comes_when_it_was_asked_to(
    gate_of: Callable[..., ModelAdmission], rates: Rates
) -> None:
    gate = gate_of(max_requests=2)
    with gate.admitted(1), ExitStack() as second:
        second.enter_context(gate.admitted(1))
        seconds = refusal(gate, 1, b"first") * 1.02
        second.close()  # a place is free, for the client that is due
        rates.now += seconds
        with pytest.raises(ApiError, match="1 requests are open, and further places are kept for others"):
            gate.require_place(1, Client(b"other"))
        with gate.admitted(1, Client(b"first")):
            assert gate.num_open == 2
        with gate.admitted(1, Client(b"other")):  # it came, so no place is kept any more
            pass


def test_a_client_that_was_due_and_found_no_place_is_next(gate_of: Callable[..., ModelAdmission], rates: Rates) -> None:
    gate = gate_of(max_requests=1)
    with gate.admitted(1):
        seconds = [refusal(gate, 1, name) for name in (b"first", b"second", b"third", b"fourth")]
        assert seconds == [0.5, 1.0, 1.5, 2.0]
        rates.now += 0.5 * 1.02
        assert refusal(gate, 1, b"first") == 0.5  # and not after the three others
        assert refusal(gate, 1, b"fifth") == 2.5  # it still counts, once, and as one that returns


def test_a_client_that_comes_much_too_early_hears_so_late_and_the_rest_of_its_time(
    gate_of: Callable[..., ModelAdmission], rates: Rates
) -> None:
    gate = gate_of(max_requests=1)

    def refused() -> tuple[float, float]:
        with pytest.raises(ApiError) as raised:
            gate.require_place(1, Client(b"loop"))
        delay = raised.value.delay_seconds
        return round(delay, 2), round(((raised.value.retry_after_seconds or 0) - delay) / 1.02, 2)

    with gate.admitted(1):
        for number in range(9):
            refusal(gate, 1, b"%d" % number)
        assert refused() == (0.0, 5.0), "the first refusal is at once"
        rates.now += 0.05
        assert refused() == (1.0, 4.02)
        rates.now += 4.9
        assert refused()[0] == 0.0, "it came as asked"


@pytest.mark.parametrize("is_read", [False, True])
def test_refusals_to_a_client_that_retries_in_a_loop_are_sent_late(
    is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.runtime.steps.service_rates.Rates.retry_seconds", lambda rates, **needed: 1.5)
    engine, executor = gated_engine()
    with running(engine, ServerOptions(max_requests=1)) as server, ThreadPoolExecutor(1) as threads:
        executor.gate.clear()
        accepted = threads.submit(complete, server, [1])
        server.until(lambda: server.model().gate.num_open == 1)
        if is_read:  # as with several models
            monkeypatch.setattr(server.service.models, "require_place", lambda client: None)
        delays: list[float] = []
        delay = server.service.delay

        async def noted(error: ApiError) -> None:
            delays.append(error.delay_seconds)
            await delay(error)

        server.service.delay = noted  # type: ignore[method-assign]
        body = {"model": "fake", "prompt": [2]}
        answers = [httpx2.post(f"{server.url}/v1/completions", json=body) for _ in range(3)]
        executor.gate.set()
        accepted.result()
        assert [answer.status_code for answer in answers] == [429] * 3
        assert delays[0] == 0 < min(delays[1:]) <= max(delays[1:]) <= 1
        told = [float(answer.headers["retry-after-ms"]) / 1000 for answer in answers]
        assert [a + b for a, b in zip(told, delays, strict=True)] == pytest.approx([1.53] * 3, abs=0.002)


def test_a_place_is_kept_for_a_moment_only(gate_of: Callable[..., ModelAdmission], rates: Rates) -> None:
    gate = gate_of(max_requests=2)
    with gate.admitted(1):
        with gate.admitted(1):
            seconds = refusal(gate, 1, b"first")
        rates.now += seconds + 5
        with gate.admitted(1, Client(b"other")):
            pass


def test_a_first_token_that_would_come_too_late_is_refused(
    gate_of: Callable[..., ModelAdmission], rates: Rates
) -> None:
    gate = gate_of(max_ttft_seconds=2)
    with ExitStack() as opened:
        entries = [opened.enter_context(gate.admitted(1)) for _ in range(3)]  # 1.5 s of requests, above half of 2 s
        with pytest.raises(ApiError, match=r"the first token would take about 1\.5 s; max_ttft_seconds is 2"):
            gate.require_place(1, Client())
        rates.is_full = False
        opened.enter_context(gate.admitted(1)).starts()
        rates.is_full = True
        entries[0].starts()
        entries[1].count(200)  # 2 s of tokens
        with pytest.raises(ApiError, match=r"about 2\.0 s"):
            gate.require_place(1, Client())
        entries[1].starts()
        opened.enter_context(gate.admitted(1))


def test_a_key_with_few_requests_waits_for_its_turn_and_not_for_the_requests_of_others(
    gate_of: Callable[..., ModelAdmission],
) -> None:
    gate = gate_of(max_ttft_seconds=2, max_requests=8)
    with ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(gate.admitted(1, Client(group="busy")))
        assert refusal(gate, 1, group="busy") > 0
        opened.enter_context(gate.admitted(1, Client(group="quiet")))


def test_a_key_with_more_than_its_share_leaves_places_to_others(gate_of: Callable[..., ModelAdmission]) -> None:
    gate = gate_of(max_requests=8)
    with ExitStack() as opened:
        opened.enter_context(gate.admitted(1, Client(group="quiet"))).starts()
        for _ in range(6):
            opened.enter_context(gate.admitted(1, Client(group="busy"))).starts()
        assert refusal(gate, 1, group="busy") > 0
        opened.enter_context(gate.admitted(1, Client(group="quiet")))
    assert gate.num_open == gate.num_waiting == 0
