"""Threads that call a store: what takes too long is noticed, and holds up nothing that ends them."""

import logging
import threading
import time

import pytest

from ingot.errors import EngineError
from ingot.runtime.kv.disk import threads
from ingot.runtime.kv.disk.threads import Answers, DiskThreads
from ingot.runtime.kv.transfers.transfer import Workers


def test_a_call_that_takes_too_long_is_noticed_until_it_returns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    answers = Answers()
    for _ in range(2):
        assert not answers.are_missing
        with answers.awaited():
            assert not answers.are_missing
            now[0] += threads.HANG_SECONDS
            assert answers.are_missing
        assert not answers.are_missing
    assert len(caplog.records) == 1
    assert "the file system of the KV folder has not answered for 5 seconds" in caplog.text


def test_a_thread_looks_again_and_again_until_it_is_closed() -> None:
    looked = threading.Semaphore(0)
    disk = DiskThreads(Workers, looked.release)
    for _ in range(3):
        assert looked.acquire(timeout=60)
    disk.check()
    assert disk.close()


def test_a_look_that_fails_is_reported() -> None:
    failed = threading.Event()

    def look() -> None:
        failed.set()
        raise ValueError("a bug")

    disk = DiskThreads(Workers, look)
    assert failed.wait(60)
    while disk._watch and disk._watch.thread.is_alive():
        time.sleep(0.001)
    with pytest.raises(EngineError, match=r"the thread that looks for KV blocks has died \(a bug\)"):
        disk.check()
    assert disk.close()


def test_a_thread_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "HANG_SECONDS", 0.05)
    looking, may_end = threading.Event(), threading.Event()

    def look() -> None:
        looking.set()
        may_end.wait()

    disk = DiskThreads(Workers, look)
    assert looking.wait(60)
    assert not disk.close()
    may_end.set()
    assert disk.close()
