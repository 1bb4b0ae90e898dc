"""A server's threads keep off the core of the engine's thread, and have short time slices where they ask for them."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ingot.runtime.thread_scheduling import (
    ThreadsElsewhere,
    avoid_core,
    current_core,
    shorten_slices,
    slice_nanoseconds,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads")
CORES = sorted(os.sched_getaffinity(0))
TWO_CORES = pytest.mark.skipif(len(CORES) < 2, reason="a thread cannot keep off the only core")

_START = f"""
import json, os, subprocess, sys, threading
from ingot.runtime.thread_scheduling import all_cores, avoid_core

first, second = {CORES[0]}, {CORES[-1]}
os.sched_setaffinity(0, {{first, second}})
engine = subprocess.Popen(["sleep", "60"])
stop = threading.Event()
other = threading.Thread(target=stop.wait)
other.start()

def cores():
    return [sorted(os.sched_getaffinity(thread)) for thread in (0, other.native_id)]

def of_child():
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
"""


def outcome(code: str) -> Any:
    """Run `code` in a process of its own, as it changes the cores of all threads; returns the JSON that it prints."""
    code = (
        f"{_START}\ntry:\n    "
        + "\n    ".join(code.strip().splitlines())
        + "\nfinally:\n    stop.set()\n    engine.kill()\n"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@TWO_CORES
def test_all_threads_keep_off_the_core_and_follow_when_it_changes() -> None:
    both, first, second = [CORES[0], CORES[-1]], [CORES[0]], [CORES[-1]]
    found = outcome("""
found = [cores()]
for core in (first, second, second):
    avoid_core(engine.pid, core)
    found.append(cores())
print(json.dumps(found))
""")
    assert found == [[both, both], [second, second], [first, first], [first, first]]


@TWO_CORES
def test_a_process_that_is_started_has_all_cores_even_if_the_core_changes_meanwhile() -> None:
    both, first, second = [CORES[0], CORES[-1]], [CORES[0]], [CORES[-1]]
    found = outcome("""
with all_cores():
    found = [of_child()]
avoid_core(engine.pid, first)
found.append(of_child())
with all_cores():
    found.append(of_child())
    avoid_core(engine.pid, second)
    found.append(of_child())
print(json.dumps([*found, *cores()]))
""")
    assert found == [both, second, both, both, first, first]


def test_threads_follow_an_engine_that_has_one_core_alone() -> None:
    found = outcome("""
os.sched_setaffinity(engine.pid, {first})
avoid_core(engine.pid, first)
with all_cores():
    pass
print(json.dumps(cores()))
""")
    assert found == [[CORES[0]], [CORES[0]]]


def test_an_engine_that_has_ended_changes_nothing() -> None:
    found = outcome("""
engine.kill()
engine.wait()
before = cores()
avoid_core(engine.pid, first)
print(json.dumps([before == cores()]))
""")
    assert found == [True]


@TWO_CORES
def test_threads_leave_the_core_of_the_engines_and_follow_when_it_moves() -> None:
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    others = ThreadsElsewhere(threads)

    def cores() -> list[set[int]]:
        return [os.sched_getaffinity(thread.native_id or 0) for thread in threads]

    try:
        others.leave(None)
        assert cores() == [set(CORES)] * 3, "where the system does not say on which core a thread runs"
        for core in (CORES[0], CORES[-1], CORES[-1]):
            others.leave(core)
            assert cores() == [set(CORES) - {core}] * 3
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    others.leave(CORES[0])  # they have ended
    assert os.sched_getaffinity(0) == set(CORES)


def test_threads_stay_on_the_only_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {CORES[0]})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("a thread was left without a core"))
    ThreadsElsewhere([threading.current_thread()]).leave(CORES[0])


def test_a_thread_knows_its_core() -> None:
    assert current_core() in CORES


def test_a_system_that_pins_no_threads_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    avoid_core(os.getpid(), CORES[0])
    monkeypatch.setattr("sys.platform", "darwin")
    assert current_core.__globals__["_sched_getcpu"].__wrapped__() is None


def in_thread(task: Callable[[], object]) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(task()))
    thread.start()
    thread.join()
    return found


def test_a_thread_gets_short_slices_and_keeps_its_priority() -> None:
    def shorten() -> tuple[bool, int | None, list[object], int]:
        done = shorten_slices()
        return done, slice_nanoseconds(), in_thread(slice_nanoseconds), os.getpriority(os.PRIO_PROCESS, 0)

    own, nice = slice_nanoseconds(), os.getpriority(os.PRIO_PROCESS, 0)  # another test may have shortened this thread's
    (usual,) = in_thread(slice_nanoseconds)
    (found,) = in_thread(shorten)
    assert isinstance(found, tuple)
    if not found[0]:
        pytest.skip("this system has no time slices of threads: Linux 6.12 is the first")
    assert found == (True, 100_000, [usual], nice)
    assert slice_nanoseconds() == own
