"""Work of several groups is done in turn, and one group's work does not hold up that of another."""

import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import pytest

from ingot.errors import EngineError
from ingot.runtime.constraints.fair_threads import FairThreads

SECONDS = 60


def raised(error: BaseException) -> Any:
    raise error


def test_work_is_done_and_what_it_raises_is_raised() -> None:
    threads = FairThreads(2, "test")
    assert [threads.submit(partial(pow, n, 2)).result(SECONDS) for n in range(20)] == [n * n for n in range(20)]
    with pytest.raises(ValueError, match="no"):
        threads.submit(lambda: raised(ValueError("no"))).result(SECONDS)


def test_a_group_that_floods_leaves_a_thread_to_another() -> None:
    threads, free = FairThreads(2, "test"), threading.Event()
    order: list[int] = []

    def slow(number: int) -> None:
        free.wait(SECONDS)
        order.append(number)

    flood = [threads.submit(partial(slow, n), "hostile") for n in range(50)]
    assert threads.submit(lambda: "served", "other").result(SECONDS) == "served"
    assert not any(each.done() for each in flood)
    free.set()
    for each in flood:
        each.result(SECONDS)
    assert order == list(range(50))


def test_groups_take_turns() -> None:
    threads, free = FairThreads(1, "test"), threading.Event()
    order: list[str] = []
    first = threads.submit(lambda: free.wait(SECONDS), "a")
    work: list[Future[Any]] = [first]
    for group, number in (("a", 3), ("b", 2), ("c", 1)):
        work += [threads.submit(partial(order.append, group), group) for _ in range(number)]
    free.set()
    for each in work:
        each.result(SECONDS)
    assert "".join(order) in ("abcaba", "bcabaa")


def test_requests_without_a_group_use_all_threads_and_threads_end() -> None:
    threads, both = FairThreads(2, "test-ends"), threading.Barrier(2)
    for each in [threads.submit(lambda: both.wait(SECONDS)) for _ in range(4)]:
        each.result(SECONDS)
    for thread in [thread for thread in threading.enumerate() if thread.name == "test-ends"]:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not threads._running
    assert not threads._waiting


def test_what_was_cancelled_is_not_done() -> None:
    threads, free = FairThreads(1, "test"), threading.Event()
    first = threads.submit(lambda: free.wait(SECONDS))
    second = threads.submit(lambda: raised(AssertionError()))
    assert second.cancel()
    free.set()
    assert first.result(SECONDS)
    with pytest.raises(CancelledError):
        second.result(SECONDS)
    assert threads.submit(lambda: 5).result(SECONDS) == 5


def test_closing_fails_what_waits_and_all_that_comes() -> None:
    threads, free = FairThreads(1, "test"), threading.Event()
    first, second = threads.submit(lambda: free.wait(SECONDS)), threads.submit(lambda: True)
    threads.close("the engine is closed")
    with pytest.raises(EngineError, match="the engine is closed"):
        second.result(SECONDS)
    with pytest.raises(EngineError, match="the engine is closed"):
        threads.submit(lambda: True)
    free.set()
    assert first.result(SECONDS)


def test_work_without_a_thread_fails_and_later_work_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = FairThreads(2, "test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: raised(RuntimeError("can't start new thread")))
        failed = threads.submit(lambda: True, "a")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        failed.result(SECONDS)
    assert threads.submit(lambda: 4, "b").result(SECONDS) == 4
    assert threads.submit(lambda: 5, "a").result(SECONDS) == 5


def test_work_whose_thread_does_not_start_is_done_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, free = FairThreads(2, "test"), threading.Event()
    first = threads.submit(partial(free.wait, SECONDS))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: raised(RuntimeError("can't start new thread")))
        second = threads.submit(lambda: 2)
    free.set()
    assert first.result(SECONDS)
    assert second.result(SECONDS) == 2


def test_all_that_waits_fails_when_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = FairThreads(1, "test")
    more: list[Future[int]] = []

    def fail(self: threading.Thread) -> None:
        if not more:
            more.append(threads.submit(lambda: 1, "b"))  # it waits for the thread that does not start
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        failed = threads.submit(lambda: 2, "a")
    for each in (failed, *more):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            each.result(SECONDS)
    assert threads.submit(lambda: 3, "b").result(SECONDS) == 3
