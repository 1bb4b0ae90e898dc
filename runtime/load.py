"""How fast an engine serves, measured, and what follows for a request that it has no room for.

Rates are over the time in which the engine has work, so an idle hour does not make it look slow. Older measurements
count half after `HALF_LIFE_SECONDS` of such time.
"""

from typing import NamedTuple

HALF_LIFE_SECONDS = 10.0
LEAST_RETRY_SECONDS = 0.1
MOST_RETRY_SECONDS = 600.0
_FIRST_RETRY_SECONDS = 1.0  # before anything is measured


class Served(NamedTuple):
    """Tokens that steps computed, prompt tokens that were admitted, requests that ended."""

    computed_tokens: float = 0
    admitted_tokens: float = 0
    ended_requests: float = 0


class ServingRates:
    """Rates of what an engine serves, in busy time. One thread records, any may read.

    A step of at least half of `max_batch_tokens` is a large one: its rate is what the engine can do, and not what it
    was asked to.
    """

    def __init__(self, max_batch_tokens: int = 1) -> None:
        self._large_step = max_batch_tokens / 2
        self._large_tokens = self._large_seconds = 0.0
        self._totals = Served()
        self._recent = Served()  # in the recent seconds
        self._seconds = 0.0
        self._since: float | None = None
        self._seconds_without_end = 0.0

    def resume(self, now: float) -> None:
        """Record that work arrives after idle time."""
        self._since = now

    def record(self, totals: Served, now: float) -> None:
        """Record, at the end of a step, what was served since the engine was made."""
        elapsed = now - self._since if self._since is not None else 0.0
        kept = 0.5 ** (elapsed / HALF_LIFE_SECONDS)
        (computed, admitted, ended), before = self._recent, self._totals
        self._recent = Served(
            computed * kept + totals.computed_tokens - before.computed_tokens,
            admitted * kept + totals.admitted_tokens - before.admitted_tokens,
            ended * kept + totals.ended_requests - before.ended_requests,
        )
        self._seconds = self._seconds * kept + elapsed
        step_tokens = totals.computed_tokens - before.computed_tokens
        if step_tokens >= self._large_step and elapsed > 0:
            self._large_tokens = self._large_tokens * kept + step_tokens
            self._large_seconds = self._large_seconds * kept + elapsed
        has_ended = totals.ended_requests > before.ended_requests
        self._seconds_without_end = 0.0 if has_ended else self._seconds_without_end + elapsed
        self._totals, self._since = totals, now

    @property
    def per_second(self) -> Served:
        """Rates; 0 where nothing is measured yet."""
        seconds = self._seconds
        return Served(*(amount / seconds for amount in self._recent)) if seconds > 0 else Served()

    @property
    def tokens_per_large_step_second(self) -> float:
        """Tokens a second of large steps; 0 before there was one."""
        return self._large_tokens / self._large_seconds if self._large_seconds else 0.0

    def seconds_to_admit(self, num_tokens: int) -> float | None:
        """Time until this many waiting prompt tokens are admitted, by the rate so far; None before it is measured.

        It is for tokens that wait: where none do, arrivals set the rate, and a long prompt takes less than it says.
        """
        rate = self.per_second.admitted_tokens
        return num_tokens / rate if rate else None

    def retry_seconds(self, *, num_requests: float = 0, num_tokens: float = 0) -> float:
        """When to try again: once this many requests have ended and prompt tokens were admitted.

        Before anything is measured, as long as the engine has been busy with its first requests, at least a second.
        """
        rates = self.per_second
        amounts = ((num_requests, rates.ended_requests), (num_tokens, rates.admitted_tokens))
        needed = [(amount, rate) for amount, rate in amounts if amount > 0]
        if all(rate for _, rate in needed):
            seconds = max((amount / rate for amount, rate in needed), default=0.0)
        else:
            seconds = max(_FIRST_RETRY_SECONDS, self._seconds_without_end)
        return bounded_retry(seconds)


def bounded_retry(seconds: float) -> float:
    """A time to try again that is neither at once nor never."""
    return min(max(seconds, LEAST_RETRY_SECONDS), MOST_RETRY_SECONDS)
