"""How fast an engine serves, measured, and what follows for a request that it has no room for.

Rates are over the time in which the engine has work, so an idle hour does not make it look slow. Older measurements
count half after `HALF_LIFE_SECONDS` of such time.
"""

from typing import NamedTuple

HALF_LIFE_SECONDS = 10.0
LEAST_RETRY_SECONDS = 0.1
MOST_RETRY_SECONDS = 600.0
_FIRST_RETRY_SECONDS = 1.0  # before anything is measured
_FULL_KV = 0.9  # share of the pool: the rest is often too little for one more prompt


class Served(NamedTuple):
    """Tokens that steps computed, prompt tokens that were admitted, requests that ended."""

    computed_tokens: float = 0
    admitted_tokens: float = 0
    ended_requests: float = 0


class Rates(NamedTuple):
    """What an engine serves in a second, 0 where nothing is measured yet.

    tokens_of_large_steps   tokens a second of steps of at least half of `max_batch_tokens`
    seconds_without_end     busy time since a request ended
    """

    served: Served = Served()
    tokens_of_large_steps: float = 0.0
    seconds_without_end: float = 0.0

    def retry_seconds(self, *, num_requests: float = 0, num_tokens: float = 0) -> float:
        """When to try again: once this many requests have ended and waiting prompt tokens were admitted.

        Before anything is measured, as long as the engine has been busy with its first requests, at least a second.
        """
        amounts = ((num_requests, self.served.ended_requests), (num_tokens, self.served.admitted_tokens))
        needed = [(amount, rate) for amount, rate in amounts if amount > 0]
        if all(rate for _, rate in needed):
            seconds = max((amount / rate for amount, rate in needed), default=0.0)
        else:
            seconds = max(_FIRST_RETRY_SECONDS, self.seconds_without_end)
        return bounded_retry(seconds)


class ServingRates:
    """Rates of what an engine serves, in busy time. One thread records, any may read.

    A step of at least half of `max_batch_tokens` is a large one: its rate is what the engine can do, and not what it
    was asked to.
    """

    def __init__(self, max_batch_tokens: int = 1) -> None:
        self._large_step = max_batch_tokens / 2
        self._large_tokens = self._large_seconds = 0.0
        self._totals = Served()
        self._recent = (0.0, 0.0, 0.0)  # the same as `_totals`, in the recent seconds
        self._seconds = 0.0
        self._since: float | None = None
        self._seconds_without_end = 0.0

    def resume(self, now: float) -> None:
        """Record that work arrives after idle time."""
        self._since = now

    def record(self, totals: Served, now: float, num_steps: int = 1) -> None:
        """Record, at the end of a step, or of several equal ones, what was served since the engine was made."""
        elapsed = now - self._since if self._since is not None else 0.0
        kept = 0.5 ** (elapsed / HALF_LIFE_SECONDS)
        (computed, admitted, ended), before = self._recent, self._totals
        self._recent = (
            computed * kept + totals.computed_tokens - before.computed_tokens,
            admitted * kept + totals.admitted_tokens - before.admitted_tokens,
            ended * kept + totals.ended_requests - before.ended_requests,
        )
        self._seconds = self._seconds * kept + elapsed
        step_tokens = totals.computed_tokens - before.computed_tokens
        if step_tokens >= self._large_step * num_steps and elapsed > 0:
            self._large_tokens = self._large_tokens * kept + step_tokens
            self._large_seconds = self._large_seconds * kept + elapsed
        has_ended = totals.ended_requests > before.ended_requests
        self._seconds_without_end = 0.0 if has_ended else self._seconds_without_end + elapsed
        self._totals, self._since = totals, now

    @property
    def now(self) -> Rates:
        """The rates of recent busy time."""
        seconds = self._seconds
        return Rates(
            Served(*(amount / seconds for amount in self._recent)) if seconds > 0 else Served(),
            self._large_tokens / self._large_seconds if self._large_seconds else 0.0,
            self._seconds_without_end,
        )

    def seconds_to_admit(self, num_tokens: int) -> float | None:
        """Time until this many waiting prompt tokens are admitted, by the rate so far; None before it is measured.

        It is for tokens that wait: where none do, arrivals set the rate, and a long prompt takes less than it says.
        """
        rate = self.now.served.admitted_tokens
        return num_tokens / rate if rate else None


class EngineLoad(NamedTuple):
    """How busy an engine is, as of its last step, and how fast it serves."""

    num_running: int
    num_waiting: int
    kv_usage: float
    max_sequences: int
    max_batch_tokens: int
    rates: Rates

    def ttft_seconds(self, *, num_open: float, num_waiting: float, num_tokens: float) -> float:
        """Expected time until a request that arrives now has its first token.

        `num_open` requests are before it, of which `num_waiting` have no output yet, with `num_tokens` in their prompts
        and its own. Prompts share each step with the requests that decode, and requests for which the batch or the KV
        pool has no room wait for others to end.
        """
        served = self.rates.served
        room = 1 - self.num_running / max(self.max_batch_tokens, self.num_running + 1)
        waits = [(num_tokens, self.rates.tokens_of_large_steps * room)]
        if self.num_waiting and self.kv_usage >= _FULL_KV:
            waits += [(num_waiting, served.ended_requests), (num_tokens, served.admitted_tokens)]
        else:
            waits += [(max(0.0, num_open - self.max_sequences), served.ended_requests)]
        return max(amount / rate if rate else 0.0 for amount, rate in waits)


def bounded_retry(seconds: float) -> float:
    """A time to try again that is neither at once nor never."""
    return min(max(seconds, LEAST_RETRY_SECONDS), MOST_RETRY_SECONDS)
