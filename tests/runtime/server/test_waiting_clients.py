"""Populations of clients that wait as promised, as they like, or not at all, at a gate in simulated time."""

import heapq
import itertools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.retry import Appointments, Client
from ingot.runtime.server.models.admission import AdmittedEntry, ModelAdmission
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.steps.service_rates import EngineLoad, Served, ServingRates
from tests.runtime.server.refusals import Refusal, given_and_true

_PLACES, _SERVICE_SECONDS, _RETRIES = 16, 3.0, 6
_RAMP_SECONDS = 40.0  # in which the first rates are measured
_Delay = Callable[[int, float, random.Random], float]


@dataclass
class _Kind:
    """How clients of one holder wait after a refusal, and what became of them."""

    group: str
    delay: _Delay
    pause: float = 0.0
    retries: int = _RETRIES
    same_bodies: bool = False
    refusals: list[Refusal] = field(default_factory=list)
    num_served: int = 0
    num_given_up: int = 0


def _told(turn: int, told: float, rng: random.Random) -> float:
    return told


def _a_little_later(turn: int, told: float, rng: random.Random) -> float:
    return told * (1 + 0.25 * rng.random())


def _backoff(turn: int, told: float, rng: random.Random) -> float:
    return min(0.5 * 2.0**turn, 8.0) * (1 - 0.25 * rng.random())


def _openai(turn: int, told: float, rng: random.Random) -> float:
    return told if told <= 60 else _backoff(turn, told, rng)


def _at_once(turn: int, told: float, rng: random.Random) -> float:
    return 0.05


class _Simulation:
    """A server with a number of places, whose requests take about as long each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends: list[float] = []
        self._rng = random.Random(0)
        self._rates = ServingRates(512)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()
        self._waiting: dict[object, float] = {}
        engine: Any = SimpleNamespace(engine=SimpleNamespace(clock=lambda: self.now, admission=self))
        self.gate = ModelAdmission(engine, ServerOptions(max_requests=_PLACES))

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self.gate.num_open, 0, 0.5, _PLACES, 512, self._rates.now)

    def add(self, kind: _Kind, number: int) -> None:
        """Have so many clients of a kind begin within a second."""
        for _ in range(number):
            self._at(self._rng.random(), self._send, kind, next(self._number), 0, None)

    def run(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            self.now, _, do, arguments = heapq.heappop(self._events)
            do(*arguments)

    def _at(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (seconds, next(self._number), do, arguments))

    def _send(self, kind: _Kind, request: int, turn: int, since: float | None) -> None:
        since = self.now if since is None else since
        body = kind.group if kind.same_bodies else str(request)
        admitted = self.gate.admitted(50, Client(body.encode(), kind.group, begins=kind.same_bodies and turn == 0))
        try:
            entry = admitted.__enter__()
        except ApiError as error:
            told = (error.retry_after_seconds or 0.0) - error.delay_seconds
            self._at(self.now + error.delay_seconds, self._refused, kind, request, turn, since, told)
            return
        self._waiting.pop(request, None)
        kind.num_served += self.now > _RAMP_SECONDS
        if self.gate.num_open == 1:
            self._rates.resume(self.now)
        seconds = _SERVICE_SECONDS * self._rng.uniform(0.5, 1.5)
        self._at(self.now + seconds, self._end, kind, entry, admitted)

    def _refused(self, kind: _Kind, request: int, turn: int, since: float, told: float) -> None:
        if turn == 0:
            kind.refusals.append(Refusal(self.now, told, len(self._waiting)))
        self._waiting[request] = since
        delay = kind.delay(turn, told, self._rng)
        if turn < kind.retries:
            self._at(self.now + delay, self._send, kind, request, turn + 1, since)
            return
        del self._waiting[request]
        kind.num_given_up += self.now > _RAMP_SECONDS
        self._at(self.now + delay, self._send, kind, next(self._number), 0, None)

    def _end(self, kind: _Kind, entry: AdmittedEntry, admitted: AbstractContextManager[AdmittedEntry]) -> None:
        entry.starts()
        admitted.__exit__(None, None, None)
        self.ends.append(self.now)
        self._rates.record(Served(100 * len(self.ends), 50 * len(self.ends), len(self.ends)), self.now)
        self._at(self.now + kind.pause, self._send, kind, next(self._number), 0, None)

    def ratios(self, kind: _Kind) -> list[float]:
        """Told times of first refusals over those until as many requests had ended as clients waited before."""
        return [given / true for given, true in given_and_true(kind.refusals, self.ends, _RAMP_SECONDS)]


@pytest.mark.parametrize(
    ("delay", "same_bodies", "share", "given_up"),
    [
        (_told, False, 0.95, 0.05),
        (_a_little_later, False, 0.95, 0.05),
        (_openai, False, 0.95, 0.05),
        (_openai, True, 0.95, 0.05),  # 150 clients that send the same: they say which are retries
        (_backoff, False, 0.6, 1.0),  # its patience of about 23 s ends before its turn
    ],
)
def test_told_times_are_true_for_all_kinds_of_clients(
    delay: _Delay, same_bodies: bool, share: float, given_up: float
) -> None:
    simulation, kind = _Simulation(), _Kind("", delay, same_bodies=same_bodies)
    simulation.add(kind, 150)
    simulation.run(120.0)
    ratios = simulation.ratios(kind)
    assert len(ratios) > 100
    assert 1 / 1.5 <= median(ratios) <= 1.5
    assert sum(1 / 1.5 <= each <= 1.5 for each in ratios) / len(ratios) >= share
    assert max(each.given for each in kind.refusals) <= 60.0
    assert kind.num_given_up <= given_up * kind.num_served
    assert kind.num_served > 0.85 * 80 * _PLACES / _SERVICE_SECONDS, "no place stays empty"


@pytest.mark.parametrize("retries", [0, 1000])
def test_a_polite_key_is_served_next_to_one_that_never_waits(retries: int) -> None:
    served = []
    for num_hogs in (0, 40):
        simulation, polite = _Simulation(), _Kind("polite", _told, pause=1.0)
        simulation.add(polite, 4)
        simulation.add(_Kind("hog", _at_once, retries=retries), num_hogs)
        simulation.run(90.0)
        served.append(polite.num_served)
    assert served[1] >= 0.9 * served[0] > 30


def test_tickets_keep_their_bounds_whatever_clients_do() -> None:
    rng = random.Random(0)
    for _ in range(5):
        appointments, now = Appointments(), 0.0
        for _step in range(3000):
            now += rng.expovariate(20.0)
            client = Client(bytes([rng.randrange(60)]), rng.choice("aab"), begins=rng.random() < 0.2)
            if rng.random() < 0.3:
                appointments.serve(client, now)
            else:
                wait = rng.choice((0.01, 1.0, 10.0, 500.0))
                assert 0 < appointments.refuse(client, now, wait, rng.randrange(100)) <= 60.0
            held, ahead = appointments.held(now), appointments.ahead(client, now)
            assert 0 <= held.requests <= len(appointments) + 1e-6
            assert 0 <= ahead.requests <= len(appointments)
            assert len(appointments) == sum(appointments.number_of(group) for group in "ab")
        now += 200.0
        assert appointments.held(now).requests == pytest.approx(0.0, abs=1e-6)
        assert len(appointments) == 0, "those that stay away are forgotten"


def test_a_return_neither_adds_a_ticket_nor_changes_a_rank() -> None:
    appointments = Appointments()
    clients = [Client(bytes([number]), "a") for number in range(5)]
    for client in clients:
        appointments.refuse(client, 0.0, 30.0, 10)
    for now in range(1, 10):
        for number in (3, 1, 4, 0, 2):
            appointments.refuse(clients[number], now, 30.0 - now, 10)
        assert [appointments.ahead(each, now).requests for each in clients] == [0, 1, 2, 3, 4]
    assert len(appointments) == 5


def test_holders_take_turns_however_many_tickets_one_has() -> None:
    appointments = Appointments()
    for number in range(500):
        appointments.refuse(Client(b"hog%d" % number, "hog"), 0.0, 30.0, 10)
    assert appointments.ahead(Client(b"new", "polite"), 0.0).requests == pytest.approx(1.0)
    assert appointments.ahead(Client(b"new", "hog"), 0.0).requests == 500
