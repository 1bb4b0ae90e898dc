"""Admission: which requests of one model are taken, and when the others should come again.

Everything is counted in the event loop, so a refusal waits neither for the tokenizer nor for a step. Waiting tokens are
those of prompts whose request has no output yet. Before a text is encoded it counts as few tokens as it can have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.retry import ANYONE, NOTHING, Appointments, Client, Held
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.steps.service_rates import LEAST_RETRY_SECONDS

_NEWCOMERS_SHARE, _DUE_SHARE = 0.5, 0.9  # of max_ttft_seconds, up to which expected times are taken
_PROMISED_SHARE = 0.7  # the same that a time to retry aims at: rates that were wrong by a little leave a place then
_LATE = 1.02  # times that aim at the very moment would be too early for half of the clients
_SPARE = 8  # one place in so many is for holders of keys that have fewer places than others
_SHARE_OF_ONE = 2  # a request with many prompts generates one sequence in so many that the engine computes at a time
_MOST_DELAY_SECONDS, _DELAY_SHARE = 1.0, 0.5  # of a refusal to a client that did not wait
_RECENT_SECONDS = 10.0  # for which a holder counts, and its places are kept, after its last request


@dataclass(frozen=True)
class _Shortage:
    """Why a request is not taken, and what has to end or to be admitted first."""

    reason: str
    requests: float | None = None
    tokens: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class _Use:
    """Places of the holder of a key: in use, of those the waiting ones with their tokens, and the most lately asked for
    at a time.
    """

    num_open: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    peak: int = 0
    peak_seconds: float = 0.0
    seen_seconds: float = 0.0

    def is_recent(self, now: float) -> bool:
        """Whether the holder has asked lately."""
        return self.seen_seconds >= now - _RECENT_SECONDS

    def counts(self, now: float) -> bool:
        """Whether places are kept for the holder, or in use by it."""
        return self.num_open > 0 or self.is_recent(now)

    def ask(self, wanted: int, now: float) -> None:
        """Take note that so many places are wanted at a time."""
        self.seen_seconds = now
        if wanted >= self.peak or now - self.peak_seconds > _RECENT_SECONDS:
            self.peak, self.peak_seconds = wanted, now


class ModelAdmission:
    """Open requests and waiting tokens of one engine, within limits.

    A request takes a place for each sequence that it generates at a time: `max_requests` bounds sequences, whatever the
    number of prompts and choices in a request.

    A refused client is given a time at which there should be room for it after those that were refused before it, by
    the rates at which the engine ends requests and admits tokens; otherwise all would return at once. A place is kept
    for it then. One that comes much earlier gets its next refusal late: a client that retries in a loop would else keep
    the server busy with refusals.

    The holder of a key alone may have all places. While others ask too, one with more than its equal share leaves them
    as many as they lately had or asked for, up to theirs, and an eighth at least.
    """

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._appointments = Appointments()
        self._uses: dict[str, _Use] = {}
        self.num_open = 0
        self.num_waiting = 0
        self.waiting_tokens = 0
        self.num_refused = 0

    def prompts_at_once(self, num_prompts: int, num_choices: int) -> int:
        """For how many of its prompts a request generates at a time, each with so many choices; at least one."""
        most = min(self._options.max_requests, self._engine.engine.admission.load.max_sequences)
        return min(num_prompts, max(1, most // _SHARE_OF_ONE // num_choices))

    @contextmanager
    def admitted(self, least_tokens: int, client: Client = ANYONE, num_places: int = 1) -> Iterator["AdmittedEntry"]:
        """Count a request, whose prompts have at least this many tokens, as open, or raise ApiError 429."""
        self.require_place(least_tokens, client, num_places)
        self._appointments.serve(client, self._now())
        use = self._uses[client.group]
        entry = AdmittedEntry(self, client, use, num_places)
        self.num_open += num_places
        self.num_waiting += num_places
        use.num_open += num_places
        use.num_waiting += num_places
        try:
            entry.count(least_tokens)
            yield entry
        finally:
            self.num_open -= num_places
            use.num_open -= num_places
            entry.starts()

    def require_place(self, least_tokens: int, client: Client, num_places: int = 1) -> None:
        """Raise ApiError 429 if a request would not be taken now."""
        now = self._now()
        use = self._use_of(client.group, num_places, now)
        is_due = self._appointments.is_due(client, now)
        has_waited = is_due or self._appointments.comes_early(client, now)
        held = NOTHING if has_waited else self._appointments.held(now)
        shortage = (
            self._of_requests(use, client, num_places, has_waited, now)
            or self._of_tokens(use, self.waiting_tokens, least_tokens, held)
            or self._of_time(least_tokens, held, use, is_due)
        )
        if shortage:
            raise self._refusal(shortage, least_tokens, client)

    def require_room(self, num_tokens: int, counted: int, client: Client) -> None:
        """Raise ApiError 429 if waiting tokens would exceed the limit, `counted` of them being this request's own."""
        shortage = self._of_tokens(self._uses[client.group], self.waiting_tokens - counted, num_tokens, NOTHING)
        if shortage:
            raise self._refusal(shortage, num_tokens, client)

    def _use_of(self, group: str, num_places: int, now: float) -> _Use:
        """The places of the holder of a new request. Holders without recent requests are forgotten."""
        use = self._uses.get(group)
        if use is None:
            self._uses = {name: each for name, each in self._uses.items() if each.counts(now)}
            use = self._uses[group] = _Use()
        use.ask(use.num_open + max(num_places, self._appointments.number_of(group)), now)
        return use

    def _of_requests(
        self, use: _Use, client: Client, num_places: int, has_waited: bool, now: float
    ) -> _Shortage | None:
        most = self._options.max_requests
        kept = self._kept(use, num_places, now)
        due = NOTHING if has_waited else self._appointments.held(now, group=client.group)
        missing = self.num_open + kept + num_places - most
        if missing + due.requests <= 0 or not self.num_open:
            return None
        reason = f"{self.num_open} requests are open, as many as max_requests allows"
        if self.num_open < most:
            reason = f"{self.num_open} requests are open, and further places are kept for others"
        if num_places > 1:
            reason += f", and this one takes {num_places} places (prompts at a time, times choices)"
        return _Shortage(reason, requests=missing)

    def _kept(self, use: _Use, num_places: int, now: float) -> int:
        """Places that are free and for other holders."""
        most = self._options.max_requests
        others = [each for each in self._uses.values() if each is not use and each.counts(now)]
        fair = max(1, most // (1 + len(others)))
        if not others or use.num_open + num_places <= fair:
            return 0
        asked = sum(max(0, min(each.peak, fair) - each.num_open) for each in others if each.is_recent(now))
        return max(asked, most // _SPARE)

    def _of_tokens(self, use: _Use, others: int, num_tokens: int, held: Held) -> _Shortage | None:
        """Whether too many tokens would wait; one request alone may always wait."""
        most = self._options.max_waiting_tokens
        if use.waiting_tokens * len(self._uses) > most:
            most -= most // _SPARE
        if not others or others + held.tokens + num_tokens <= most:
            return None
        reason = f"{others} prompt tokens wait and the request has {num_tokens}; max_waiting_tokens is {most}"
        return _Shortage(reason, tokens=others + held.tokens + num_tokens - most)

    def _of_time(self, num_tokens: int, held: Held, use: _Use, is_due: bool) -> _Shortage | None:
        """Whether the first token would come later than `max_ttft_seconds`, by the rates so far."""
        bound = self._options.max_ttft_seconds
        if bound is None or not self.num_waiting:
            return None
        num_turns = sum(each is use or each.num_waiting > 0 for each in self._uses.values())
        own_share = min(1.0, (use.num_waiting + 1) * num_turns / (self.num_waiting + 1))
        waiting = (self.num_waiting + held.requests) * own_share
        seconds = self._engine.engine.admission.load.ttft_seconds(
            num_open=self.num_open - self.num_waiting + waiting,
            num_waiting=waiting,
            num_tokens=(self.waiting_tokens + held.tokens) * own_share + num_tokens,
        )
        if seconds <= bound * (_DUE_SHARE if is_due else _NEWCOMERS_SHARE):
            return None
        reason = f"the first token would take about {seconds:.1f} s; max_ttft_seconds is {bound:g}"
        return _Shortage(reason, seconds=max(LEAST_RETRY_SECONDS, seconds - bound * _PROMISED_SHARE))

    def _refusal(self, shortage: _Shortage, num_tokens: int, client: Client) -> ApiError:
        now, rates = self._now(), self._engine.engine.admission.load.rates
        ahead = self._appointments.ahead(client, now)
        if shortage.seconds:
            others = rates.retry_seconds(num_requests=ahead.requests, num_tokens=ahead.tokens)
            seconds = shortage.seconds + (others if ahead.requests else 0.0)
        else:
            seconds = rates.retry_seconds(
                num_requests=0 if shortage.requests is None else max(1, shortage.requests + ahead.requests),
                num_tokens=shortage.tokens and shortage.tokens + ahead.tokens,
            )
        comes_early = self._appointments.comes_early(client, now)
        seconds = self._appointments.refuse(client, now, _LATE * seconds, num_tokens)
        self.num_refused += 1
        return ApiError(
            429,
            f"Rate limit reached: {shortage.reason}. Please try again in {seconds:.1f}s",
            code="overloaded",
            retry_after_seconds=seconds,
            delay_seconds=min(_MOST_DELAY_SECONDS, _DELAY_SHARE * seconds) if comes_early else 0.0,
        )

    def _now(self) -> float:
        return self._engine.engine.clock()


class AdmittedEntry:
    """A request that was admitted."""

    def __init__(self, gate: ModelAdmission, client: Client, use: _Use, num_places: int) -> None:
        self._gate = gate
        self._client = client
        self._use = use
        self._num_places = num_places
        self._tokens = 0
        self._waits = True

    def count(self, num_tokens: int) -> None:
        """Replace the number of its waiting tokens; ApiError 429 if that is too many."""
        self._gate.require_room(num_tokens, self._tokens, self._client)
        self._count(num_tokens)

    def starts(self) -> None:
        """Record that it has an output, or ended: its prompt does not wait any more."""
        if self._waits:
            self._waits = False
            self._count(0)
            self._gate.num_waiting -= self._num_places
            self._use.num_waiting -= self._num_places

    def _count(self, num_tokens: int) -> None:
        self._gate.waiting_tokens += num_tokens - self._tokens
        self._use.waiting_tokens += num_tokens - self._tokens
        self._tokens = num_tokens
