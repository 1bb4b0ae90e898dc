"""Admission: which requests of one model are taken, and when the others should come again.

Everything is counted in the event loop, so a refusal waits neither for the tokenizer nor for a step. Waiting tokens are
those of prompts whose request has no output yet. Before a text is encoded it counts as few tokens as it can have.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ingot.runtime.async_engine import AsyncEngine
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.options import ServerOptions

_MOST_APPOINTMENTS = 4096


class _Appointment(NamedTuple):
    """A client that was refused, and when it was asked to come again."""

    due_seconds: float
    num_tokens: int


class Gate:
    """Open requests and waiting tokens of one engine, within limits.

    A refused client is given a time at which there should be room for it after those that were refused before it, by
    the rates at which the engine ends requests and admits tokens; otherwise all would return at once.
    """

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._appointments: deque[_Appointment] = deque()
        self._appointed_tokens = 0
        self.num_open = 0
        self.waiting_tokens = 0
        self.num_refused = 0

    @contextmanager
    def admitted(self, least_tokens: int) -> Iterator["Entry"]:
        """Count a request, whose prompt has at least this many tokens, as open, or raise ApiError 429."""
        options = self._options
        if self.num_open >= options.max_requests:
            reason = f"{self.num_open} requests are open, as many as max_requests allows"
            raise self._refusal(reason, least_tokens, excess_requests=1)
        entry = Entry(self)
        self.num_open += 1
        try:
            entry.count(least_tokens)
            yield entry
        finally:
            self.num_open -= 1
            entry.starts()

    def require_room(self, num_tokens: int, counted: int) -> None:
        """Raise ApiError 429 if waiting tokens would exceed the limit; one request alone may always wait."""
        others, most = self.waiting_tokens - counted, self._options.max_waiting_tokens
        if others and others + num_tokens > most:
            reason = f"{others} prompt tokens wait and the request has {num_tokens}; max_waiting_tokens is {most}"
            raise self._refusal(reason, num_tokens, excess_tokens=others + num_tokens - most)

    def _refusal(self, reason: str, num_tokens: int, *, excess_requests: int = 0, excess_tokens: int = 0) -> ApiError:
        now = self._engine.engine.clock()
        appointments = self._appointments
        while appointments and (appointments[0].due_seconds <= now or len(appointments) >= _MOST_APPOINTMENTS):
            self._appointed_tokens -= appointments.popleft().num_tokens
        seconds = self._engine.engine.admission.retry_seconds(
            num_requests=excess_requests and excess_requests + len(appointments),
            num_tokens=excess_tokens and excess_tokens + self._appointed_tokens,
        )
        appointments.append(_Appointment(now + seconds, num_tokens))
        self._appointed_tokens += num_tokens
        self.num_refused += 1
        return ApiError(
            429,
            f"{reason}; try again in about {seconds:.1f} s",
            code="overloaded",
            retry_after_seconds=seconds,
        )


class Entry:
    """A request that was admitted."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._tokens = 0

    def count(self, num_tokens: int) -> None:
        """Replace the number of its waiting tokens; ApiError 429 if that is too many."""
        self._gate.require_room(num_tokens, self._tokens)
        self._gate.waiting_tokens += num_tokens - self._tokens
        self._tokens = num_tokens

    def starts(self) -> None:
        """Record that it has an output, or ended: its prompt does not wait any more."""
        self._gate.waiting_tokens -= self._tokens
        self._tokens = 0
