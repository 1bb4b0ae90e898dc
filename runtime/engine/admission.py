"""Which requests an engine refuses because it has too much work, and when they should be tried again."""

import threading
from collections.abc import Callable

from ingot.errors import Overloaded
from ingot.runtime.requests.request import Request
from ingot.runtime.steps.service_rates import EngineLoad, Rates, bounded_retry
from ingot.runtime.steps.step_loop import StepLoop


class AdmissionControl:
    """Limits of an engine's open requests; the options are those of EngineOptions. `require_place` is
    thread-safe."""

    def __init__(
        self,
        loop: StepLoop,
        *,
        max_requests: int | None,
        max_waiting_tokens: int | None,
        reject_late: bool,
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._max_requests = max_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._rejects_late = reject_late
        self._clock = clock
        self._counting = threading.Lock()  # AsyncEngine refuses in other threads

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is, as of its last step. Thread-safe."""
        scheduler = self._loop.scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=self._loop.kv_usage,
            max_sequences=scheduler.max_sequences,
            max_batch_tokens=scheduler.max_batch_tokens,
            rates=self._loop.requests.rates.now,
        )

    def require_place(self, num_open: int) -> None:
        """Raise Overloaded when `num_open` requests are as many as `max_requests` allows."""
        refusal = full(num_open, self._max_requests, lambda: self._loop.requests.rates.now)
        if refusal:
            raise self._counted(refusal)

    def require_room(self, request: Request) -> None:
        """Raise Overloaded when too many tokens wait: for a request to wait too, or for its timeout."""
        waiting = self._loop.scheduler.waiting
        num_tokens = request.sequence.num_prompt_tokens
        most, excess = self._max_waiting_tokens, 0
        if most is not None:
            excess = waiting.num_prompt_tokens + num_tokens - most
        if excess > 0 and waiting:
            raise self._overloaded(
                f"{waiting.num_prompt_tokens} prompt tokens wait, and the request has {num_tokens};"
                f" max_waiting_tokens is {most}",
                self._loop.requests.rates.now.retry_seconds(num_tokens=excess),
            )
        if self._rejects_late and request.deadline_seconds is not None:
            self._require_in_time(request, request.deadline_seconds - self._clock())

    def _require_in_time(self, request: Request, seconds_left: float) -> None:
        num_tokens = self._loop.scheduler.waiting.tokens_before(request.sequence.priority)
        needed = self._loop.requests.rates.seconds_to_admit(num_tokens)
        if needed is not None and needed > seconds_left:
            raise self._overloaded(
                f"{num_tokens} prompt tokens wait before the request, about {needed:.1f} s of work; its timeout leaves"
                f" {max(0.0, seconds_left):.1f} s",
                needed - seconds_left,
            )

    def _overloaded(self, reason: str, seconds: float) -> Overloaded:
        return self._counted(_refusal(reason, seconds))

    def _counted(self, refusal: Overloaded) -> Overloaded:
        with self._counting:
            self._loop.requests.metrics.num_refused += 1
        return refusal


def full(num_open: int, most: int | None, rates: Callable[[], Rates]) -> Overloaded | None:
    """The refusal of a request next to `num_open` others, if that is as many as `most` allows; None: no limit.

    Rates are read only then: most requests are not refused.
    """
    if most is None or num_open < most:
        return None
    reason = f"the engine has {most} unfinished requests, as many as max_requests allows"
    return _refusal(reason, rates().retry_seconds(num_requests=1))


def _refusal(reason: str, seconds: float) -> Overloaded:
    seconds = bounded_retry(seconds)
    return Overloaded(f"{reason}; try again in about {seconds:.1f} s", seconds)
