"""Refused clients, each with its place in the order of those that wait and the time at which it was asked to return.

A client has one ticket from its first refusal until it is served or stays away, however often it returns:

    far     due later than the lookahead, or asked to return before its turn: counts for the times of later ones only
    near    its turn is soon or was a moment ago: a place is kept, so that clients which came later do not take it
    late    it was not seen since, and keeps its rank only

What holds, whatever clients do:

* A return changes no rank. Who comes early, as after a backoff of its own, is given the rest of its time.
* Holders of keys take turns: before the n-th of one wait at most n of each other, however many those send.
* Nobody is asked to wait for more than a minute, which common clients ignore; where a turn comes later, the client
  hears the rest of its time when it returns.
* A client counts as the share of its holder's that return. One that came early is expected again by its longest pause
  so far, which a backoff doubles: those that gave up do not count for long.

A client is recognized by its key, its address and the bytes of its request, which clients send again unchanged. Those
of OpenAI also say whether they send them for the first time; then equal requests are different clients.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ingot.runtime.steps.service_rates import bounded_retry

MOST_RETRY_SECONDS = 60.0  # OpenAI's clients ignore longer times
_LOOKAHEAD_SECONDS = 0.5
_GRACE_SECONDS = 1.0
_LATE_SHARE = 0.25  # of its time, by which a client may add to it so that not all return at once
_GROWTH, _MOST_GROWTH_SECONDS = 2.7, 5.0  # of pauses: a backoff doubles them up to 8 s, and varies them
_MOST_TICKETS = 16384
_MOST_EQUALS = 256  # tickets of equal requests
_SAMPLES = 64  # over which shares of clients are averaged
_LEAST_SHARE = 0.1  # for times: should clients begin to come again, the first ones come little too early


class Client(NamedTuple):
    """Who asks. `begins`: it says that it has not sent this request before."""

    id: bytes = b""
    group: str = ""
    begins: bool = False


ANYONE = Client()


class Held(NamedTuple):
    """Places of requests and waiting prompt tokens."""

    requests: float = 0.0
    tokens: float = 0.0

    def plus(self, requests: float, tokens: float) -> "Held":
        """With so many more, or fewer."""
        return Held(self.requests + requests, self.tokens + tokens)

    def times(self, share: float) -> "Held":
        """This share of it."""
        return Held(self.requests * share, self.tokens * share)


NOTHING = Held()


@dataclass(slots=True)
class _Group:
    """Tickets of the holder of a key.

    ranks     their numbers, in order
    early     what those that come early, by their pauses, will need within the lookahead
    on_time   share of its clients that come when their turn is
    returns   share that come at all
    """

    ranks: list[int] = field(default_factory=list)
    tokens: int = 0
    near: Held = NOTHING
    early: Held = NOTHING
    on_time: float = 1.0
    returns: float = 1.0

    def ahead(self, number: int | None) -> Held:
        """What tickets before one will need; None: all of them."""
        before = len(self.ranks) if number is None else bisect_left(self.ranks, number)
        mean_tokens = self.tokens / len(self.ranks) if self.ranks else 0.0
        return Held(before, before * mean_tokens).times(max(_LEAST_SHARE, self.returns))

    def note_return(self, came: bool) -> None:
        """Take note that a client came again, or did not."""
        self.returns += (came - self.returns) / _SAMPLES

    def note_turn(self, came: bool) -> None:
        """The same of one whose turn it was."""
        self.on_time += (came - self.on_time) / _SAMPLES


@dataclass(slots=True, eq=False)
class _Ticket:
    client: Client
    number: int
    tokens: int
    told_at: float = 0.0
    due_seconds: float = 0.0
    has_turn: bool = True  # when it is due
    longest_pause: float | None = None  # of a client that came early
    stage: Literal["far", "near", "late", "gone"] = "far"
    early: float = 0.0  # what it counts for in `_Group.early`
    version: int = 0

    @property
    def expected_soon(self) -> float:
        """How likely a client that comes early does so within the lookahead."""
        if self.longest_pause is None:
            return 0.0
        return min(1.0, _LOOKAHEAD_SECONDS / max(_LOOKAHEAD_SECONDS, 2 * self.longest_pause))

    @property
    def expires_seconds(self) -> float:
        """When the client is not expected any more."""
        late = max(_GRACE_SECONDS, _LATE_SHARE * (self.due_seconds - self.told_at))
        if self.longest_pause is None:
            return self.due_seconds + late
        pause = min(_GROWTH * self.longest_pause, self.longest_pause + _MOST_GROWTH_SECONDS)
        return min(self.due_seconds + late, self.told_at + pause + _GRACE_SECONDS)

    @property
    def next_seconds(self) -> float:
        """When its stage changes."""
        match self.stage:
            case "far" if self.has_turn:
                return min(self.expires_seconds, self.due_seconds - _LOOKAHEAD_SECONDS)
            case "near":
                return min(self.expires_seconds, self.due_seconds + _GRACE_SECONDS)
        return self.expires_seconds


class Appointments:
    """The tickets of one model. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._by_client: dict[bytes, dict[int, _Ticket]] = {}
        self._by_number: dict[int, _Ticket] = {}
        self._groups: dict[str, _Group] = {}
        self._changes: list[tuple[float, int, int]] = []  # a heap: when, number and version of a ticket
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def number_of(self, group: str) -> int:
        """Tickets of the holder of a key."""
        return len(self._groups[group].ranks) if group in self._groups else 0

    def refuse(self, client: Client, now: float, seconds: float, tokens: int) -> float:
        """Have a client return when its turn is expected, `seconds` from now; returns the time that it is given."""
        self._advance(now)
        ticket = self._returned(client, now) or self._made(client, tokens)
        told = min(bounded_retry(seconds), MOST_RETRY_SECONDS)
        if ticket:
            ticket.has_turn = seconds <= MOST_RETRY_SECONDS
            ticket.told_at, ticket.due_seconds = now, now + told
            self._move_to("far", ticket)
        return told

    def serve(self, client: Client, now: float) -> None:
        """Take note that a client is served."""
        self._advance(now)
        ticket = self._returned(client, now)
        if ticket:
            self._remove(ticket)

    def is_due(self, client: Client, now: float) -> bool:
        """Whether it is the turn of this client."""
        self._advance(now)
        ticket = self._find(client)
        return ticket is not None and ticket.stage == "near"

    def comes_early(self, client: Client, now: float) -> bool:
        """Whether a client has waited, but not for its turn: it is taken before newcomers."""
        self._advance(now)
        ticket = self._find(client)
        return ticket is not None and ticket.stage == "far" and now > ticket.told_at

    def held(self, now: float, *, group: str | None = None) -> Held:
        """What is kept for clients whose turn it is, or for those of one holder."""
        self._advance(now)
        groups = self._groups.values() if group is None else filter(None, [self._groups.get(group)])
        total = NOTHING
        for each in groups:
            total = total.plus(*each.near.times(each.on_time)).plus(*each.early.times(each.returns))
        return total

    def ahead(self, client: Client, now: float) -> Held:
        """What clients that have their turn before this one will need."""
        self._advance(now)
        own, ticket = self._groups.get(client.group), self._find(client)
        total = own.ahead(ticket.number if ticket else None) if own else NOTHING
        turns = total.requests + 1
        for name, each in self._groups.items():
            if each.ranks and name != client.group:
                others = each.ahead(None)
                total = total.plus(*others.times(min(1.0, turns / others.requests)))
        return total

    def _find(self, client: Client) -> _Ticket | None:
        """The ticket of a client; of several that cannot be told apart, the one that is due first."""
        own = self._by_client.get(client.id)
        if not own or (client.begins and len(own) < _MOST_EQUALS):
            return None
        return min(own.values(), key=lambda each: each.due_seconds) if len(own) > 1 else next(iter(own.values()))

    def _returned(self, client: Client, now: float) -> _Ticket | None:
        """The ticket of a client that comes again."""
        ticket = self._find(client)
        if ticket is None:
            return None
        group = self._groups[ticket.client.group]
        group.note_return(True)
        if ticket.stage == "near":
            group.note_turn(True)
        elif ticket.stage == "far" and now < ticket.due_seconds - _LOOKAHEAD_SECONDS:
            ticket.longest_pause = max(ticket.longest_pause or 0.0, now - ticket.told_at)
        return ticket

    def _made(self, client: Client, tokens: int) -> _Ticket | None:
        """A new ticket. Where there are too many, the holder with most of them gives up its last one."""
        if len(self) >= _MOST_TICKETS:
            name, largest = max(self._groups.items(), key=lambda each: len(each[1].ranks))
            if name == client.group:
                return None
            self._remove(self._by_number[largest.ranks[-1]])
        self._last_number += 1
        ticket = _Ticket(client, self._last_number, tokens)
        group = self._groups.setdefault(client.group, _Group())
        insort(group.ranks, ticket.number)
        group.tokens += tokens
        self._by_client.setdefault(client.id, {})[ticket.number] = ticket
        self._by_number[ticket.number] = ticket
        return ticket

    def _advance(self, now: float) -> None:
        while self._changes and self._changes[0][0] <= now:
            _, number, version = heapq.heappop(self._changes)
            ticket = self._by_number.get(number)
            if ticket and ticket.version == version:
                self._change(ticket)

    def _change(self, ticket: _Ticket) -> None:
        group = self._groups[ticket.client.group]
        at_end = ticket.next_seconds >= ticket.expires_seconds
        if ticket.stage == "near":
            group.note_turn(False)
        if at_end:
            group.note_return(False)
            self._remove(ticket)
        else:
            self._move_to("near" if ticket.stage == "far" else "late", ticket)

    def _move_to(self, stage: Literal["far", "near", "late", "gone"], ticket: _Ticket) -> None:
        group = self._groups[ticket.client.group]
        number = (stage == "near") - (ticket.stage == "near")
        group.near = group.near.plus(number, number * ticket.tokens)
        early = ticket.expected_soon if stage == "far" else 0.0
        group.early = group.early.plus(early - ticket.early, (early - ticket.early) * ticket.tokens)
        ticket.stage, ticket.early = stage, early
        ticket.version += 1
        if stage == "gone":
            return
        heapq.heappush(self._changes, (ticket.next_seconds, ticket.number, ticket.version))
        if len(self._changes) > 4 * len(self) + 1024:
            current = ((each.next_seconds, each.number, each.version) for each in self._by_number.values())
            self._changes = sorted(current)

    def _remove(self, ticket: _Ticket) -> None:
        self._move_to("gone", ticket)
        group, own = self._groups[ticket.client.group], self._by_client[ticket.client.id]
        del group.ranks[bisect_left(group.ranks, ticket.number)]
        group.tokens -= ticket.tokens
        del self._by_number[ticket.number], own[ticket.number]
        if not own:
            del self._by_client[ticket.client.id]
