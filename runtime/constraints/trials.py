"""Trials of constraints in processes that may die of them (`worker`), and the bounds that a constraint must keep.

A trial compiles a constraint, computes its first masks, and follows it for some tokens. What crashes there, or takes
more processor time or memory than is allowed, is refused, and never reaches the engine's process.
"""

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from ingot.errors import EngineError, shown
from ingot.runtime.constraints import worker
from ingot.runtime.constraints.fair_threads import COMPILE_THREADS
from ingot.runtime.constraints.worker import LENGTH, MEMORY_BYTES, OUT_OF_MEMORY, SECONDS, ConstraintSource, Spelling

_PATIENCE_SECONDS = 60.0  # for an answer, on processors that others use too
_MOST_COMPILE_SECONDS = 0.5  # it is compiled again in the engine's process
_MOST_MASK_SECONDS = 0.1  # all requests of a step wait for it
_MOST_RESIDENT_BYTES = 128 << 20
_STDERR_BYTES = 1 << 16
_START = (
    "import sys; sys.path[:] = {path!r}; from ingot.wall_clock import bound_wall_clock; bound_wall_clock();"
    " import runpy; runpy.run_path({file!r}, run_name='__main__')"
)
_OUT_OF_STACK = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
_NO_TOKEN = "NoExtensionBias"  # the parser's reason where characters may follow, but none that a token begins with


class Refused(Exception):
    """A constraint that no engine follows, with the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Cost(NamedTuple):
    """Processor time and memory of a constraint that was tried."""

    compile_seconds: float
    forced_seconds: float
    mask_seconds: float
    resident_bytes: int


def without_state(reason: str) -> str:
    """llguidance's reason without the state of its parser, which follows it."""
    return reason.partition("\n<")[0].strip()


def lacks_tokens(reason: str) -> bool:
    """Whether llguidance stopped because the vocabulary spells nothing that may follow."""
    return without_state(reason) == _NO_TOKEN


class TrialProcesses:
    """Processes that try the constraints of one vocabulary, started when they are needed. Any thread may call it."""

    def __init__(self, spelling: Callable[[], Spelling]) -> None:
        self._spelling = spelling
        self._places = threading.Semaphore(COMPILE_THREADS)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._end = weakref.finalize(self, _end_all, self._idle)

    def run(self, source: ConstraintSource) -> Cost:
        """Try a constraint. Refused for one that cannot be followed; EngineError where no process can be started."""
        with self._places:
            answer = self._answer(source)
        if "reason" not in answer:
            cost = Cost(**answer)  # type: ignore[arg-type]
            _require_cheap(cost)
            return cost
        reason = str(answer["reason"])
        if reason == OUT_OF_MEMORY:
            raise _out_of_memory()
        if "forced" in answer and lacks_tokens(reason):
            forced = str(answer["forced"])
            beginning = f"{shown(forced)}, which all its texts begin with" if forced else "the beginning of its texts"
            raise Refused(f"no token of the model's vocabulary spells {beginning}")
        raise Refused(reason)

    def close(self) -> None:
        """End the processes. Idempotent; a later trial starts one again."""
        _end_all(self._idle)

    def _answer(self, source: ConstraintSource) -> dict[str, object]:
        process = self._idle_worker() or _Worker(self._spelling())
        try:
            answer = process.ask(source)
        except BaseException:
            process.close()
            raise
        with self._lock:
            self._idle.append(process)
        return answer

    def _idle_worker(self) -> "_Worker | None":
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.close()
        return None


class _Worker:
    """One process."""

    def __init__(self, spelling: Spelling) -> None:
        command = [sys.executable, "-c", _START.format(path=sys.path, file=worker.__file__)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # One arena: each further one would take 128 MiB of the addresses that the process may have.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        except OSError as error:
            raise _cannot_start(str(error)) from error
        try:
            self._exchange(spelling)
        except _Ended as ended:
            said = ended.said.strip().rpartition("\n")[2]
            self.close()
            raise _cannot_start(said or f"it ended with code {ended.code}") from ended

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def ask(self, source: ConstraintSource) -> dict[str, object]:
        """Try a constraint. Refused for one that it died of."""
        try:
            return self._exchange(source)
        except _Ended as ended:
            raise ended.refusal() from None

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _exchange(self, message: tuple[object, ...]) -> dict[str, object]:
        assert self._process.stdin
        data = pickle.dumps(tuple(message))
        try:
            self._process.stdin.write(LENGTH.pack(len(data)) + data)
            self._process.stdin.flush()
            until = time.monotonic() + _PATIENCE_SECONDS
            (length,) = LENGTH.unpack(self._read(LENGTH.size, until))
            found: dict[str, object] = json.loads(self._read(length, until))
        except (EOFError, BrokenPipeError) as error:
            raise self._ended() from error
        return found

    def _read(self, size: int, until: float) -> bytes:
        assert self._process.stdout
        descriptor = self._process.stdout.fileno()
        poll, data = select.poll(), b""
        poll.register(descriptor, select.POLLIN)
        while len(data) < size:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                self._process.kill()
                raise EOFError
            piece = os.read(descriptor, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def _ended(self) -> "_Ended":
        assert self._process.stderr
        code = self._process.wait()
        return _Ended(code, self._process.stderr.read(_STDERR_BYTES).decode(errors="replace"))


class _Ended(Exception):
    """A process has ended: its code, and what it wrote on standard error."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(code)
        self.code = code
        self.said = said

    def refusal(self) -> Refused:
        """The reason for the constraint that it was given."""
        if "memory allocation" in self.said or "MemoryError" in self.said:
            return _out_of_memory()
        if -self.code in (signal.SIGPROF, signal.SIGKILL):
            return Refused(f"it takes more than {SECONDS:g} s of processor time to compile; make it simpler")
        if -self.code in _OUT_OF_STACK:
            return Refused(
                "it is nested too deep, refers through too many steps, or has a number too large for the compiler;"
                " make it flatter"
            )
        return Refused(f"the compiler ended by it (code {self.code}); express it otherwise")


def _end_all(processes: list[_Worker]) -> None:
    while processes:
        processes.pop().close()


def _cannot_start(reason: str) -> EngineError:
    return EngineError(
        f"the process that compiles constraints could not be started ({reason}); let this program start processes, or"
        " send requests without a constraint"
    )


def _out_of_memory() -> Refused:
    return Refused(f"it takes more than {MEMORY_BYTES >> 20} MiB of memory to compile; make it smaller")


def _require_cheap(cost: Cost) -> None:
    """Raise Refused for what would hold up the requests of others."""
    if cost.compile_seconds > _MOST_COMPILE_SECONDS:
        took, most = f"{cost.compile_seconds:.2f} s of processor time to compile", f"{_MOST_COMPILE_SECONDS:g} s"
    elif cost.mask_seconds > _MOST_MASK_SECONDS:
        took, most = f"{cost.mask_seconds:.2f} s of processor time for one token", f"{_MOST_MASK_SECONDS:g} s"
    elif cost.resident_bytes > _MOST_RESIDENT_BYTES:
        took, most = f"{cost.resident_bytes >> 20} MiB of memory", f"{_MOST_RESIDENT_BYTES >> 20} MiB"
    else:
        return
    raise Refused(f"it takes {took}; at most {most} are allowed; make it simpler")
