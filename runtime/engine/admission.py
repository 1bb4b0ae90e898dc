"""Which requests an engine refuses because it has too much work, and when they should be tried again."""

import threading
from collections.abc import Callable

from ingot.errors import Overloaded
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import Sequence
from ingot.runtime.steps.metrics import MetricsRegistry
from ingot.runtime.steps.service_rates import EngineLoad, Rates, ServingRates, bounded_retry


class AdmissionControl:
    """Limits of an engine's open requests; the options are those of EngineOptions. `require_place` is
    thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        rates: ServingRates,
        metrics: MetricsRegistry,
        *,
        max_requests: int | None,
        max_waiting_tokens: int | None,
        reject_late: bool,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._rates, self._metrics = scheduler, rates, metrics
        self._max_requests = max_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._rejects_late = reject_late
        self._clock = clock
        self._counting = threading.Lock()  # AsyncEngine refuses in other threads

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is, as of its last step. Thread-safe."""
        scheduler = self._scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=scheduler.blocks.usage,
            max_sequences=scheduler.max_sequences,
            max_batch_tokens=scheduler.max_batch_tokens,
            rates=self._rates.now,
        )

    def require_place(self, num_open: int) -> None:
        """Raise Overloaded when `num_open` requests are as many as `max_requests` allows."""
        refusal = full(num_open, self._max_requests, lambda: self._rates.now)
        if refusal:
            raise self._counted(refusal)

    def require_room(self, sequence: Sequence, deadline_seconds: float | None) -> None:
        """Raise Overloaded when too many tokens wait: for a sequence to wait too, or for its deadline."""
        waiting = self._scheduler.waiting
        num_tokens = sequence.num_prompt_tokens
        most, excess = self._max_waiting_tokens, 0
        if most is not None:
            excess = waiting.num_prompt_tokens + num_tokens - most
        if excess > 0 and waiting:
            raise self._overloaded(
                f"{waiting.num_prompt_tokens} prompt tokens wait, and the request has {num_tokens};"
                f" max_waiting_tokens is {most}",
                self._rates.now.retry_seconds(num_tokens=excess),
            )
        if self._rejects_late and deadline_seconds is not None:
            self._require_in_time(sequence, deadline_seconds - self._clock())

    def _require_in_time(self, sequence: Sequence, seconds_left: float) -> None:
        num_tokens = self._scheduler.waiting.tokens_before(sequence.priority)
        needed = self._rates.seconds_to_admit(num_tokens)
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
            self._metrics.num_refused += 1
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
    return Overloaded(f"Rate limit reached: {reason}. Please try again in {seconds:.1f}s", seconds)
