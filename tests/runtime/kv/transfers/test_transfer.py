"""Threads that move blocks: order, failures, cancelling, and a thread that dies."""

import threading
from functools import partial

import pytest

from ingot.errors import EngineError
from ingot.runtime.kv.transfers.transfer import Cancelled, Task, TransferGate, Workers


def finished(task: Task) -> Task:
    """Wait for a task, for at most a minute."""
    moment = threading.Event()
    for _ in range(60_000):
        if task.done:
            return task
        moment.wait(0.001)
    raise AssertionError("the task never ended")


def test_tasks_run_in_order_and_report_their_end() -> None:
    order: list[int] = []
    ended = threading.Event()
    workers = Workers("test", 1, when_done=ended.set)
    tasks = [workers.submit(partial(order.append, number)) for number in range(5)]
    workers.close()
    assert order == [0, 1, 2, 3, 4]
    assert all(task.done and task.error is None and task.seconds >= 0 for task in tasks)
    assert ended.is_set()
    workers.check()


def test_closing_leaves_a_thread_that_hangs_behind() -> None:
    may_end = threading.Event()
    workers = Workers("test", 2)
    hanging = workers.submit(lambda: may_end.wait())
    assert finished(workers.submit(lambda: None)).error is None
    assert not workers.close(0.01)
    assert not hanging.done
    may_end.set()
    assert workers.close()
    assert finished(hanging).error is None


def test_no_task_begins_while_the_gate_is_closed_unless_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, is_computing = TransferGate(), True
    workers = Workers("test", 1, admit=gate.pass_through)
    assert finished(workers.submit(lambda: None)).done, "it is open at first"
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer._CLOSED_SECONDS", 3600.0)
    gate.close()
    task = workers.submit(lambda: None)
    assert not _ends_soon(task)
    gate.open(lambda: is_computing)
    finished(task)
    is_computing = False
    task = workers.submit(lambda: None)
    assert not _ends_soon(task), "the step had ended, and the engine's thread had yet to close the gate"
    gate.open()
    finished(task)
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer._CLOSED_SECONDS", 0.001)
    gate.close()
    finished(workers.submit(lambda: None))
    workers.close()


def test_what_can_wait_begins_in_a_step_that_is_long_or_after_many_that_were_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer._SHORT_SECONDS", 3600.0)
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer._PATIENCE_SECONDS", 3600.0)
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer.time.sleep", lambda _: threading.Event().wait(0.001))
    gate = TransferGate()
    workers = Workers("test", 1, admit=gate.pass_in_long_step)
    finished(workers.submit(lambda: None))
    gate.open(lambda: True)
    task = workers.submit(lambda: None)
    assert not _ends_soon(task), "the step is short so far"
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer._SHORT_SECONDS", 0.0)
    finished(task)
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer._SHORT_SECONDS", 3600.0)
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer._PATIENCE_SECONDS", 0.0)
    finished(workers.submit(lambda: None))
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer._PATIENCE_SECONDS", 3600.0)
    finished(workers.submit(lambda: None))
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer._SHORT_SECONDS", 0.0)
    finished(workers.submit(lambda: None))
    monkeypatch.setattr("ingot.runtime.kv.transfers.transfer._SHORT_SECONDS", 3600.0)
    task = workers.submit(lambda: None)
    assert not _ends_soon(task), "one step was long, so it waits for such again"
    gate.open()
    finished(task)
    workers.close()


def _ends_soon(task: Task) -> bool:
    moment = threading.Event()
    for _ in range(20):
        moment.wait(0.001)
    return task.done


def test_an_exception_is_the_tasks_own() -> None:
    workers = Workers("test", 1)
    failed = finished(workers.submit(lambda: 1 // 0))
    assert isinstance(failed.error, ZeroDivisionError)
    assert finished(workers.submit(lambda: None)).error is None
    workers.check()
    workers.close()
    workers.close()


def test_a_task_that_has_begun_is_not_cancelled_and_one_that_has_not_is() -> None:
    begun, may_end, ran = threading.Event(), threading.Event(), list[int]()
    workers = Workers("test", 1)

    def run() -> None:
        begun.set()
        may_end.wait()

    first, second = workers.submit(run), workers.submit(lambda: ran.append(1))
    begun.wait()
    assert not first.cancel()
    assert second.cancel()
    assert second.done
    assert isinstance(second.error, Cancelled)
    assert not second.cancel()
    may_end.set()
    workers.close()
    assert first.error is None
    assert not ran


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_reported() -> None:
    def die() -> None:
        raise SystemExit("killed")

    died = threading.Event()
    workers = Workers("reader", 1)
    workers.submit(die)
    for _ in range(60_000):
        if not workers.threads[0].is_alive():
            break
        died.wait(0.001)
    with pytest.raises(EngineError, match=r"thread that moves KV blocks \(reader\) has died \(SystemExit: killed\)"):
        workers.check()
