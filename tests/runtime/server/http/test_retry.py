"""Times to retry under a load of several times the capacity, in simulated time: they are right, and they are kept."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.serve.load import Attempt, Load, around
from benchmarks.serve.overload import figures_of, promises_of

from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.retry import Client
from ingot.runtime.server.models.admission import AdmittedEntry, ModelAdmission
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.steps.service_rates import EngineLoad, Served, ServingRates

_PLACES, _BATCH_TOKENS = 64, 512
_STEP_SECONDS, _TOKEN_SECONDS = 0.002, 0.00006
_MEAN_TOKENS = 128  # of prompts and of outputs
_TTFT_SECONDS = 2.0


@dataclass
class _Request:
    attempt: Attempt
    entry: AdmittedEntry
    admitted: AbstractContextManager[AdmittedEntry]
    prompt_tokens: int
    output_tokens: int
    at_end: Callable[[], None] | None


class _Simulation:
    """An engine with continuous batching, and its gate. Steps take a time for each, and for each token.

    `slowness` multiplies it while a load is sent: its requests and refusals take the engine's processors.
    """

    def __init__(self, slowness: float = 1.0) -> None:
        self.now = 0.0
        self.attempts: list[Attempt] = []
        self.rng = random.Random(0)
        self._slowness, self._slow_until = slowness, 0.0
        self._rates = ServingRates(_BATCH_TOKENS)
        self._totals = [0, 0, 0]
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._is_idle = True
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()
        engine: Any = SimpleNamespace(engine=SimpleNamespace(clock=lambda: self.now, admission=self))
        self.gate = ModelAdmission(engine, ServerOptions(max_ttft_seconds=_TTFT_SECONDS))

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(len(self._running), len(self._waiting), 0.5, _PLACES, _BATCH_TOKENS, self._rates.now)

    def capacity(self, seconds: float = 6.0) -> float:
        """Requests a second of as many streams as there are places."""
        numbers = itertools.count(-1, -1)

        def next_one() -> None:
            if self.now < seconds:
                self._send(
                    next(numbers), 0, 0, around(_MEAN_TOKENS, self.rng), around(_MEAN_TOKENS, self.rng), next_one
                )

        for _ in range(_PLACES):
            self._at(0.0, next_one)
        self._run(seconds)
        rate = self._totals[2] / seconds
        self._run()
        self.attempts.clear()
        return rate

    def serve(self, per_second: float, seconds: float, retries: int) -> list[Attempt]:
        """Requests by a Poisson process, and the retries of those that are refused."""
        due = started = self.now + 2.0
        self._slow_until = started + seconds
        while (due := due + self.rng.expovariate(per_second)) < started + seconds:
            lengths = around(_MEAN_TOKENS, self.rng), around(_MEAN_TOKENS, self.rng)
            self._at(due, self._send, next(self._number), 0, retries, *lengths)
        self._run()
        for each in self.attempts:
            assert each.begun is not None
            assert each.ended is not None
            each.sent, each.begun, each.ended = each.sent - started, each.begun - started, each.ended - started
        return self.attempts

    def _at(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (seconds, next(self._number), do, arguments))

    def _run(self, until: float = float("inf")) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, do, arguments = heapq.heappop(self._events)
            do(*arguments)

    def _send(
        self,
        number: int,
        turn: int,
        retries: int,
        prompt_tokens: int,
        output_tokens: int,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        attempt = Attempt(number, turn, output_tokens, self.now)
        self.attempts.append(attempt)
        admitted = self.gate.admitted(prompt_tokens, Client(str(number).encode()))
        try:
            entry = admitted.__enter__()
        except ApiError as error:
            attempt.status, attempt.begun, attempt.ended = error.status, self.now, self.now
            attempt.retry_seconds = error.retry_after_seconds
            if turn < retries:
                assert attempt.retry_seconds is not None
                again = (number, turn + 1, retries, prompt_tokens, output_tokens)
                self._at(self.now + attempt.retry_seconds, self._send, *again)
            return
        attempt.status = 200
        self._waiting.append(_Request(attempt, entry, admitted, prompt_tokens, output_tokens, at_end))
        if self._is_idle:
            self._is_idle = False
            self._rates.resume(self.now)
            self._at(self.now, self._begin_step)

    def _begin_step(self) -> None:
        num_tokens, begun = len(self._running), list[_Request]()
        while self._waiting and len(self._running) + len(begun) < _PLACES and num_tokens < _BATCH_TOKENS:
            first = self._waiting[0]
            computed = min(_BATCH_TOKENS - num_tokens, first.prompt_tokens)
            first.prompt_tokens -= computed
            num_tokens += computed
            self._totals[1] += computed
            if not first.prompt_tokens:
                begun.append(self._waiting.popleft())
        seconds = _STEP_SECONDS + _TOKEN_SECONDS * num_tokens
        slowness = self._slowness if self.now < self._slow_until else 1.0
        self._at(self.now + slowness * seconds, self._end_step, num_tokens, begun)

    def _end_step(self, num_tokens: int, begun: list[_Request]) -> None:
        running, self._running = self._running + begun, []
        self._totals[0] += num_tokens
        for each in running:
            each.attempt.begun = each.attempt.begun or self.now
            each.entry.starts()
            each.output_tokens -= 1
            if each.output_tokens:
                self._running.append(each)
                continue
            each.attempt.ended, each.attempt.is_whole = self.now, True
            each.admitted.__exit__(None, None, None)
            self._totals[2] += 1
            if each.at_end:
                self._at(self.now, each.at_end)
        self._rates.record(Served(*self._totals), self.now)
        self._is_idle = not (self._running or self._waiting)
        if not self._is_idle:
            self._begin_step()


@pytest.mark.parametrize(
    ("factor", "seconds", "slowness"), [(1.5, 40.0, 1.0), (1.5, 40.0, 1.2), (3.0, 10.0, 1.15), (10.0, 6.7, 1.2)]
)
def test_refused_clients_that_return_when_they_were_asked_to_get_in(
    factor: float, seconds: float, slowness: float
) -> None:
    simulation = _Simulation(slowness)
    attempts = simulation.serve(factor * simulation.capacity(), seconds, retries=1)
    found = promises_of(attempts)
    assert len(attempts) > 2000
    assert float(str(found["share_admitted_at_first_retry"])) >= 0.95
    assert float(str(found["median_error_of_promise"])) <= 0.2
    assert simulation.gate.num_open == simulation.gate.waiting_tokens == 0


def test_overload_costs_no_goodput_and_first_tokens_come_in_time() -> None:
    goodputs = []
    for factor in (1.0, 10.0):
        simulation = _Simulation()
        rate = simulation.capacity()
        load = Load("", factor * rate, 15.0, _MEAN_TOKENS, _MEAN_TOKENS, 1)
        found = figures_of(simulation.serve(load.per_second, load.seconds, 0), load, _TTFT_SECONDS)
        assert float(str(found["share_of_ttft_within_bound"])) >= 0.99
        goodputs.append(float(str(found["goodput_tokens_per_second"])))
    assert goodputs[1] >= 0.95 * goodputs[0]


def test_places_are_not_kept_for_clients_that_never_come_again() -> None:
    simulation = _Simulation()
    load = Load("", 10 * simulation.capacity(), 15.0, _MEAN_TOKENS, _MEAN_TOKENS, 1)
    found = figures_of(simulation.serve(load.per_second, load.seconds, 0), load, _TTFT_SECONDS)
    assert float(str(found["ttft_seconds_p50"])) >= _TTFT_SECONDS / 4, "as many wait as the bound allows"
