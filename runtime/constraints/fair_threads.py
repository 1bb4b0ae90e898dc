"""`FairThreads`: threads that compile the constraints of several groups in turn, so that none holds up the others."""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from ingot.errors import EngineError

_T = TypeVar("_T")
COMPILE_THREADS = 2


class _Work(NamedTuple):
    outcome: "Future[Any]"
    do: Callable[[], object]


class FairThreads:
    """Work of each group is done in its order, and groups take turns. Threads end when nothing waits.

    A group with a name, which is one user of several, has at most all threads but one: constraints that take long leave
    a thread to those of others.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._lock = threading.Lock()
        self._num_started = 0
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()  # the group whose turn is next first
        self._running: Counter[str] = Counter()
        self._ended = ""

    def submit(self, do: Callable[[], _T], group: str = "") -> "Future[_T]":
        """Do some work of a group in a thread. RuntimeError, as the outcome, where the system has no thread for it."""
        outcome: Future[_T] = Future()
        work = _Work(outcome, do)
        with self._lock:
            if self._ended:
                raise EngineError(self._ended)
            self._waiting.setdefault(group, deque()).append(work)
            starts = self._num_started < self._num_threads and self._has_turn(group)
            self._num_started += starts
        if starts:
            self._start()
        return outcome

    def close(self, reason: str) -> None:
        """Fail what waits, and all that is submitted later, with an EngineError. Idempotent."""
        with self._lock:
            self._ended = self._ended or reason
            waiting = self._take_all()
        _fail(waiting, EngineError(reason))

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._num_started -= 1
                # A thread that runs, or that is being started, does what waits; without one nothing ever would.
                waiting = [] if self._num_started else self._take_all()
            _fail(waiting, error)

    def _take_all(self) -> list[_Work]:
        waiting = [work for each in self._waiting.values() for work in each]
        self._waiting.clear()
        return waiting

    def _run(self) -> None:
        while taken := self._next():
            group, work = taken
            if work.outcome.set_running_or_notify_cancel():
                try:
                    work.outcome.set_result(work.do())
                except BaseException as error:  # noqa: BLE001 (the caller gets it)
                    work.outcome.set_exception(error)
            with self._lock:
                self._running[group] -= 1
            del taken, work  # while it waits for nothing, a thread keeps no request

    def _next(self) -> tuple[str, _Work] | None:
        """The work whose turn it is; None, which ends the thread, if no group has a turn."""
        with self._lock:
            group = next((each for each in self._waiting if self._has_turn(each)), None)
            if group is None:
                self._num_started -= 1
                self._running += Counter()  # without groups of which nothing runs
                return None
            work = self._waiting[group].popleft()
            self._waiting.move_to_end(group)
            if not self._waiting[group]:
                del self._waiting[group]
            self._running[group] += 1
            return group, work

    def _has_turn(self, group: str) -> bool:
        most = max(1, self._num_threads - 1) if group else self._num_threads
        return bool(self._waiting.get(group)) and self._running[group] < most


def _fail(waiting: list[_Work], error: Exception) -> None:
    for work in waiting:
        if work.outcome.set_running_or_notify_cancel():
            work.outcome.set_exception(error)
