"""Clients that were refused, each with the time at which it was asked to come again, when a place is kept for it.

    far    due later than the lookahead: counts only for the times that others are given
    near   due soon or a moment ago: a place is kept for it, so that clients which came later do not take it
    gone   the client came, or did not come within the grace

A client is recognized by its API key and the bytes of its request, which clients send again unchanged. Some never come
again; each appointment counts for the share of the last ones that were kept. No place is kept where none comes: at
ten times the load a tenth of the appointments of a second are as many as all places.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_LOOKAHEAD_SECONDS = 0.5
_GRACE_SECONDS = 1.0
_MOST_APPOINTMENTS = 16384
_SAMPLES = 64  # appointments over which the share of kept ones is averaged
_LEAST_SHARE = 0.1  # for times: should clients begin to come again, the first ones come little too early


class Held(NamedTuple):
    """Places of requests and waiting prompt tokens."""

    requests: float = 0.0
    tokens: float = 0.0

    def plus(self, number: int, tokens: int) -> "Held":
        """With so many more, or fewer."""
        return Held(self.requests + number, self.tokens + tokens)

    def times(self, share: float) -> "Held":
        """This share of it."""
        return Held(self.requests * share, self.tokens * share)


@dataclass(order=True, slots=True)
class _Appointment:
    due_seconds: float
    client: bytes = field(compare=False)
    tokens: int = field(compare=False)
    is_near: bool = field(default=False, compare=False)
    is_gone: bool = field(default=False, compare=False)


class Appointments:
    """The appointments of one model. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._far: list[_Appointment] = []  # a heap
        self._near: deque[_Appointment] = deque()
        self._by_client: dict[bytes, deque[_Appointment]] = {}
        self._all, self._held = Held(), Held()
        self._share_kept = 1.0

    def __len__(self) -> int:
        return round(self._all.requests)

    def make(self, client: bytes, due_seconds: float, tokens: int) -> None:
        """Have a client come again; without effect while there are too many."""
        if len(self._far) >= _MOST_APPOINTMENTS:
            return
        made = _Appointment(due_seconds, client, tokens)
        heapq.heappush(self._far, made)
        self._by_client.setdefault(client, deque()).append(made)
        self._all = self._all.plus(1, tokens)

    def is_due(self, client: bytes, now: float) -> bool:
        """Whether a place is kept for this client."""
        self._advance(now)
        return any(each.is_near for each in self._of(client))

    def keep(self, client: bytes, now: float) -> None:
        """Take note that a client came when it was asked to."""
        self._advance(now)
        for each in self._of(client):
            if each.is_near:
                self._end(each, was_kept=True)
                return

    def held(self, now: float) -> Held:
        """What is kept for clients that are due."""
        self._advance(now)
        return self._held.times(self._share_kept)

    def ahead(self, now: float) -> Held:
        """What all clients that were asked to come again will need."""
        self._advance(now)
        return self._all.times(max(_LEAST_SHARE, self._share_kept))

    def _of(self, client: bytes) -> Iterator[_Appointment]:
        return iter(self._by_client.get(client, ()))

    def _advance(self, now: float) -> None:
        while self._far and self._far[0].due_seconds <= now + _LOOKAHEAD_SECONDS:
            each = heapq.heappop(self._far)
            each.is_near = True
            self._near.append(each)
            self._held = self._held.plus(1, each.tokens)
        while self._near and (self._near[0].is_gone or self._near[0].due_seconds < now - _GRACE_SECONDS):
            each = self._near.popleft()
            if not each.is_gone:
                self._end(each, was_kept=False)

    def _end(self, each: _Appointment, *, was_kept: bool) -> None:
        each.is_gone, each.is_near = True, False
        own = self._by_client[each.client]
        own.remove(each)
        if not own:
            del self._by_client[each.client]
        self._all, self._held = self._all.plus(-1, -each.tokens), self._held.plus(-1, -each.tokens)
        self._share_kept += (was_kept - self._share_kept) / _SAMPLES
