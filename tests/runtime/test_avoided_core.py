"""A server's threads keep off the core of the engine's thread; processes that they start have all cores."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ingot.runtime.avoided_core import current_core, usable_cores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads")
CORES = sorted(os.sched_getaffinity(0))
TWO_CORES = pytest.mark.skipif(len(CORES) < 2, reason="a thread cannot keep off the only core")

_START = f"""
import json, os, subprocess, sys, threading
from ingot.runtime.avoided_core import all_cores, avoid_core, usable_cores

first, second = {CORES[0]}, {CORES[-1]}
os.sched_setaffinity(0, {{first, second}})
asked, stop = threading.Event(), threading.Event()
other = threading.Thread(target=stop.wait)
other.start()

def cores():
    return [sorted(os.sched_getaffinity(thread)) for thread in (0, other.native_id)]

def of_child():
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
"""


def outcome(code: str) -> Any:
    """What a process prints that runs `code`, whose threads' cores are its own."""
    code = f"{_START}\ntry:\n    " + "\n    ".join(code.strip().splitlines()) + "\nfinally:\n    stop.set()\n"
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@TWO_CORES
def test_all_threads_keep_off_the_core_and_follow_when_it_changes() -> None:
    both, first, second = [CORES[0], CORES[-1]], [CORES[0]], [CORES[-1]]
    found = outcome("""
found = [cores()]
for core in (first, second, second):
    avoid_core(core)
    found.append(cores())
print(json.dumps([found, usable_cores()]))
""")
    assert found == [[[both, both], [second, second], [first, first], [first, first]], 2]


@TWO_CORES
def test_a_process_that_is_started_has_all_cores_even_if_the_core_changes_meanwhile() -> None:
    both, first, second = [CORES[0], CORES[-1]], [CORES[0]], [CORES[-1]]
    found = outcome("""
avoid_core(first)
found = [of_child()]
with all_cores():
    found.append(of_child())
    avoid_core(second)
    found.append(of_child())
print(json.dumps([*found, *cores()]))
""")
    assert found == [second, both, both, first, first]


def test_threads_that_may_run_on_one_core_keep_it() -> None:
    found = outcome("""
for thread in (0, other.native_id):
    os.sched_setaffinity(thread, {first})
avoid_core(first)
with all_cores():
    pass
print(json.dumps([*cores(), usable_cores()]))
""")
    assert found == [[CORES[0]], [CORES[0]], 1]


def test_a_thread_knows_its_core() -> None:
    assert current_core() in CORES
    assert usable_cores() == len(CORES)


def test_a_system_that_pins_no_threads_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == (os.cpu_count() or 1)
    monkeypatch.setattr("sys.platform", "darwin")
    assert current_core.__globals__["_sched_getcpu"].__wrapped__() is None
