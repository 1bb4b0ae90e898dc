"""Holders of API keys, and what each may use a minute.

A budget of N a minute is a bucket that holds N and is refilled at N / 60 a second. Requests take one each when they
are admitted; tokens are taken when they are known, those of the prompt at the admission and those of the output as they
arrive, so a bucket of tokens may be overdrawn and is then refilled before the next request.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256

from ingot.errors import UsageError, shown, unknown
from ingot.runtime.server.http.api_error import ApiError

_MOST = 1 << 40


@dataclass(frozen=True)
class KeyLimits:
    """Limits of a holder; None: no limit. `priority` is the most urgent of its requests; lower is first.

    `max_output_tokens` are those of an answer: longer ones are cut.

    A key of a file has a priority always: 0, where its line has none.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: int | None = None
    max_output_tokens: int | None = None


def limits_of(settings: Sequence[str], place: str) -> KeyLimits:
    """Limits of a key by words as tokens_per_minute=100000; UsageError, which begins with the place, for others."""
    names = [each.name for each in fields(KeyLimits)]
    given: dict[str, int] = {"priority": 0}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if name not in names:
            raise UsageError(f"{place}: after a key come words NAME=NUMBER; {unknown('limit', name, names, 'limits')}")
        least = -_MOST if name == "priority" else 1
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not separator or not least <= value <= _MOST:
            raise UsageError(f"{place}: {name} is {shown(text)}; it must be a whole number from {least} to {_MOST}")
        given[name] = value
    return KeyLimits(**given)


class TokenBucket:
    """A budget a minute."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._since = clock()

    @property
    def level(self) -> float:
        """What is left now; below 0 when more was taken than there was."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._since) * self.per_minute / 60)
        self._since = now
        return self._level

    def take(self, amount: float) -> None:
        """Use some of it."""
        self._level = self.level - amount

    def resized(self, per_minute: int) -> "TokenBucket":
        """A bucket of another size from which as much is taken."""
        other = TokenBucket(per_minute, self._clock)
        other.take(self.per_minute - self.level)
        return other

    def seconds_until(self, amount: float) -> float:
        """When it will hold this much."""
        return max(0.0, amount - self.level) * 60 / self.per_minute


class Holder:
    """The holder of a key: the name of its group in scheduling, and what is left of its budgets."""

    def __init__(self, group: str, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.group = group
        self.limits = limits
        self._clock = clock
        self._requests = self._resized(None, limits.requests_per_minute)
        self._tokens = self._resized(None, limits.tokens_per_minute)

    def change(self, limits: KeyLimits) -> None:
        """Give it other limits; what was used in the last minute stays used."""
        self.limits = limits
        self._requests = self._resized(self._requests, limits.requests_per_minute)
        self._tokens = self._resized(self._tokens, limits.tokens_per_minute)

    def _resized(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        return bucket.resized(per_minute) if bucket else TokenBucket(per_minute, self._clock)

    def priority(self, asked: int) -> int:
        """The priority that a request gets: not more urgent than the holder may be."""
        return asked if self.limits.priority is None else max(self.limits.priority, asked)

    def cache_salt(self, given: str) -> str:
        """The salt of a request: the given one, apart from the same one of every other holder."""
        if not self.group:
            return given
        return f"{self.group}:{sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()}"

    def require_budget(self) -> None:
        """Raise ApiError 429 when a budget is used up, with the time until it is not."""
        for bucket, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None and bucket.level < 1:
                seconds = bucket.seconds_until(1)
                raise ApiError(
                    429,
                    f"Rate limit reached: this API key has used its {bucket.per_minute} {unit} a minute."
                    f" Please try again in {seconds:.1f}s",
                    code="rate_limit_exceeded",
                    retry_after_seconds=seconds,
                )

    def take_request(self) -> None:
        """Count a request that was admitted."""
        if self._requests:
            self._requests.take(1)

    def take_tokens(self, number: int) -> None:
        """Count tokens of a prompt or of an output."""
        if self._tokens:
            self._tokens.take(number)

    def headers(self) -> dict[str, str]:
        """Remaining budgets, and when they are full again, as OpenAI's headers."""
        found = {}
        for bucket, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None:
                found[f"x-ratelimit-limit-{unit}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{unit}"] = str(max(0, int(bucket.level)))
                found[f"x-ratelimit-reset-{unit}"] = _duration(bucket.seconds_until(bucket.per_minute))
        return found


def _duration(seconds: float) -> str:
    """A time as OpenAI's headers have it: 120ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(round(seconds * 1000, 3))
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
