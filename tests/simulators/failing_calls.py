"""Fail the n-th call of the system, for every n, in a process of its own with failing_calls.c before libc.

    python -m tests.simulators.failing_calls MODULE:SCENARIO FOLDER STEP FAILURE...    -> one JSON object

A scenario does something once while a call fails, and checks what is left. It is repeated with n = 1, 2, ... until its
calls are fewer than n; after each n no descriptor and no thread may be left open. Of many calls everyday tests fail
some, each STEP-th from another first one for each failure; `pytest --every-call` fails all.
"""

import ctypes
import faulthandler
import gc
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.data_paths import ROOT

SOURCE = ROOT / "tests" / "simulators" / "failing_calls.c"
SECONDS = 300
EVERY_CALL: list[bool] = []
"""Not empty with the option --every-call."""
_STUCK_SECONDS = 60
_LEAVE_SECONDS = 10  # for threads and descriptors


@dataclass(frozen=True)
class Failure:
    """An error number (0: transfers are cut short), of one call or of all from it on."""

    error: int
    forever: bool

    def __str__(self) -> str:
        return f"{self.error}{'+' if self.forever else ''}"

    @classmethod
    def parse(cls, text: str) -> "Failure":
        """Read one as `str` writes it."""
        return cls(int(text.removesuffix("+")), text.endswith("+"))


class FailingCalls:
    """The n-th call, of the process that failing_calls.c is preloaded into."""

    def __init__(self, number: int, failure: Failure) -> None:
        self.number, self.failure = number, failure
        self.num_calls = 0
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.stop_failing.restype = ctypes.c_long

    @property
    def has_failed(self) -> bool:
        """Whether there were so many calls."""
        return self.num_calls >= self.number

    @contextmanager
    def on(self, path: "Path | str") -> Iterator[None]:
        """Fail it among those on files of a path, on sockets ("socket:") or at the start of threads ("thread:")."""
        number, (error, forever) = ctypes.c_long(self.number), (self.failure.error, self.failure.forever)
        self._library.fail_calls(os.fsencode(path), number, error, int(forever))
        try:
            yield
        finally:
            self.num_calls = max(self.num_calls, self._library.stop_failing())

    def of_children(self, path: str) -> dict[str, str]:
        """The environment in which it fails in processes that are started."""
        failure = {"ERROR": self.failure.error, "FOREVER": int(self.failure.forever), "NUMBER": self.number}
        return {"FAILING_PATH": path, **{f"FAILING_{name}": str(value) for name, value in failure.items()}}


Scenario: TypeAlias = Callable[[Path, FailingCalls], None]


def fail_each_call(
    scenario: Scenario, folder: Path, failures: Sequence[Failure], *, step: int = 1, seconds: int = SECONDS
) -> dict[str, int]:
    """The largest n of each failure, in a process for all of them; a pytest failure if a check fails.

    step   of n, without --every-call
    """
    if EVERY_CALL:
        step, seconds = 1, 20 * seconds
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    library = folder / "failing_calls.so"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", library, SOURCE, "-ldl", "-pthread"], check=True)
    name = f"{scenario.__module__}:{scenario.__name__}"
    found = subprocess.run(
        [sys.executable, "-m", "tests.simulators.failing_calls", name, folder, str(step), *map(str, failures)],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
    )
    if found.returncode:
        pytest.fail(f"{name}\n{found.stdout[-2000:]}\n{found.stderr[-6000:]}", pytrace=False)
    counts: dict[str, int] = json.loads(found.stdout.splitlines()[-1])
    return counts


def _run(scenario: Scenario, folder: Path, failure: Failure, first: int, step: int) -> int:
    for number in itertools.count(first, step):
        calls = FailingCalls(number, failure)
        here = folder / f"{failure}-{number}"
        here.mkdir()
        before = _open_now()
        faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True)
        try:
            scenario(here, calls)
            _require_as_before(before)
        except BaseException:
            print(f"call {number} with failure {failure}", file=sys.stderr, flush=True)
            raise
        shutil.rmtree(here)
        if not calls.has_failed:
            return number - step
    raise AssertionError


def _open_now() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _require_as_before(before: tuple[int, int]) -> None:
    end = time.monotonic() + _LEAVE_SECONDS
    while (now := _open_now()) > before and time.monotonic() < end:
        time.sleep(0.01)
    if now > before:
        files = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
        raise AssertionError(f"descriptors, threads: {before} before, {now} after; {files}; {threading.enumerate()}")


def main(name: str, folder: str, step: str, *failures: str) -> None:
    """Run a scenario with each failure."""
    module, _, function = name.partition(":")
    scenario = getattr(importlib.import_module(module), function)
    scenario(_made(Path(folder, "warm")), FailingCalls(0, Failure(0, False)))  # imports what it needs
    gc.freeze()
    largest = {}
    for index, text in enumerate(failures):
        largest[text] = _run(scenario, Path(folder), Failure.parse(text), 1 + index % int(step), int(step))
    print(json.dumps(largest))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main(*sys.argv[1:])
