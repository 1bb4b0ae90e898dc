"""The reader's side of an engine in a process of its own: starts the process, talks to it, and learns when it dies.

`RemoteEngine` is what `AsyncEngine` has in place of an Engine: tokenizer, admission and metrics on this side.
"""

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ingot.artifact import Artifact
from ingot.errors import EngineError, Overloaded
from ingot.runtime.asking.prompt_encoder import PromptEncoder
from ingot.runtime.asking.prompts import ChatPrompt, Prompt, TokenIds
from ingot.runtime.engine.adapter_registry import AdapterFacts
from ingot.runtime.engine.admission import full
from ingot.runtime.hosting.engine_process_messages import (
    MOST_WAITING_BYTES,
    Adapters,
    AskMetrics,
    Cancel,
    Connection,
    Ended,
    LoadAdapter,
    LoadArtifact,
    Loaded,
    Log,
    Metrics,
    NotLoaded,
    Open,
    Outputs,
    StopProcess,
    UnloadAdapter,
    unpack,
)
from ingot.runtime.hosting.engine_thread import Item, Outlet, RequestHandle, is_last
from ingot.runtime.options import EngineOptions
from ingot.runtime.steps.metrics import EngineMetrics
from ingot.runtime.steps.service_rates import EngineLoad
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.runtime.thread_scheduling import all_cores, shorten_slices

_log = logging.getLogger(__name__)
_MAIN = (
    "import sys; sys.path[:] = {path!r}; from ingot.wall_clock import bound_wall_clock; bound_wall_clock();"
    " from ingot.runtime.hosting.engine_process_child import main; main({descriptor})"
)
_CLOSE_SECONDS = 10.0  # beyond the time for blocks on their way to disk, before the process is killed
_LEAST_PRIORITY = 19
_EXIT_SECONDS = 5.0  # from the end of the connection to that of the process
_LOOK_SECONDS = 0.5  # between two looks at whether the loop that reads is closed


class ProcessUsage(NamedTuple):
    """Processor time and resident memory of a process."""

    cpu_seconds: float
    resident_bytes: int


class EngineProcess:
    """A process that serves requests with an engine of its own; it takes them as `EngineThread` does.

    lock     held while `ended` and `stopped` are read or set together with what must agree with them
    ended    why no more requests are opened; None while they are
    stopped  whether it takes no more commands
    load     of the engine, as of the last outputs
    metrics  of the engine, as of the last answer
    adapters of the engine, as of the last answer
    core     on which the engine's thread ran at the last outputs; None where the system does not say
    on_move  called with `core` when it has changed, where messages are read

    A thread reads messages, until an event loop does (`read_in`).
    """

    def __init__(self, artifact: Artifact, options: EngineOptions) -> None:
        """Start it and wait until its engine is loaded. Raises what `Engine.load` raises."""
        self.lock = threading.Lock()
        self.ended: str | None = None
        self.stopped = False
        self.load: EngineLoad
        self.metrics: EngineMetrics
        self.adapters: Mapping[str, AdapterFacts]
        self.core: int | None = None
        self.on_move: Callable[[int], object] = lambda core: None
        self._changes: dict[int, Future[None]] = {}  # of adapters, by key
        self._keys = itertools.count()
        self._open: dict[int, RequestHandle] = {}
        self._cancelled: dict[int, RequestHandle] = {}  # that report their end
        self._loop: asyncio.AbstractEventLoop | None = None  # that reads messages
        self._handed_back = threading.Event()  # by the loop to the thread
        self._reason: str | None = None  # for which the process ended, by its own word
        self._failure: Exception | None = None
        self._loaded: Future[Loaded] = Future()
        self._asked: Future[EngineMetrics] | None = None
        self._asked_at = 0.0
        self._flush_seconds: float | None = None
        with _starting() as undo:
            self._start(undo)
            self._connection.send(LoadArtifact(artifact, options, logging.getLogger("ingot").getEffectiveLevel()))
            self._reader = threading.Thread(target=self._read_all, name="ingot-outputs", daemon=True)
            self._reader.start()
        loaded = self._loaded.result()
        self.model, self.max_batch_tokens = loaded.model, loaded.max_batch_tokens

    def _start(self, undo: ExitStack) -> None:
        ours, theirs = socket.socketpair()
        undo.callback(ours.close)
        with theirs, all_cores():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN.format(path=sys.path, descriptor=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,  # nothing but this process writes results
                pass_fds=[theirs.fileno()],
            )
        undo.callback(self._process.wait)
        undo.callback(self._process.kill)
        self._connection = Connection(ours)
        undo.callback(self._connection.close)

    @property
    def pid(self) -> int:
        """Its number in the system."""
        return self._process.pid

    def usage(self) -> "ProcessUsage | None":
        """Its processor time and memory; None where the system has no /proc, and once it has ended."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])  # utime, stime, rss of proc(5)
        return ProcessUsage(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))

    def give_way(self, nice: int) -> None:
        """Lower the priority of its threads by this much (nice(2)), so that those of this process go before them.

        On Linux priorities are those of threads; threads that start later have that of the thread which starts them.
        Processes of stages, which have started already, are lowered too.
        """
        with suppress(OSError):  # it has ended, or the system does not let it
            tasks = [*Path(f"/proc/{self.pid}/task").glob("*")]
            lists = [each / "children" for each in tasks]
            stages = [stage for each in lists if each.is_file() for stage in each.read_text().split()]
            tasks += [each for stage in stages for each in Path(f"/proc/{stage}/task").glob("*")]
            for number in [int(each.name) for each in tasks] or [self.pid]:
                lowered = os.getpriority(os.PRIO_PROCESS, number) + nice
                os.setpriority(os.PRIO_PROCESS, number, min(lowered, _LEAST_PRIORITY))

    @property
    def unanswered_seconds(self) -> float:
        """How long it has not answered a question for metrics."""
        asked = self._asked
        return time.monotonic() - self._asked_at if asked and not asked.done() else 0.0

    def send(self, handle: RequestHandle) -> None:
        """Have a request served. EngineError once the process is stopped."""
        with self.lock:
            if self.stopped:
                raise EngineError(self.ended)
            key = handle.request_id = next(self._keys)
            self._open[key] = handle
            try:
                opening = Open(key, handle.request, handle.interval_seconds, handle.reports_end)
                if not self._connection.offer(opening):
                    raise Overloaded(
                        f"{MOST_WAITING_BYTES:,} bytes of requests wait for the engine's process {self.pid}, which does"
                        " not read them: no more are taken until it does; try again later"
                    )
            except BaseException:
                self._open.pop(key, None)
                raise

    def cancel(self, handle: RequestHandle) -> None:
        """Abort a request that is not read any more."""
        handle.cancelled = True
        key = handle.request_id
        if key is None:
            return
        if handle.reports_end:
            self._cancelled[key] = handle  # first: another thread may read the last output now
        if self._open.pop(key, None) is None:
            self._cancelled.pop(key, None)  # that output has arrived
        else:
            self._connection.send(Cancel(key))

    def ask_metrics(self) -> "Future[EngineMetrics]":
        """Ask for metrics; they are in `metrics` when the future ends."""
        with self.lock:
            if self._asked is None or self._asked.done():
                self._asked, self._asked_at = Future(), time.monotonic()
                self._connection.send(AskMetrics())
            asked = self._asked
        if not self._reader.is_alive():
            _settle(asked, EngineError(self.ended))
        return asked

    def change_adapters(self, change: Callable[[int], LoadAdapter | UnloadAdapter]) -> "Future[None]":
        """Load or unload an adapter: the message of a key. `adapters` has the outcome when the future ends."""
        with self.lock:
            if self.stopped:
                raise EngineError(self.ended)
            key = next(self._keys)
            asked: Future[None] = Future()
            self._changes[key] = asked
            self._connection.send(change(key))
        return asked

    def stop(self, reason: str, flush_seconds: float | None = None) -> None:
        """End the process after the commands that were sent; no command may follow."""
        with self.lock:
            self.ended = self.ended or reason
            if not self.stopped:
                self.stopped = True
                self._flush_seconds = flush_seconds
                self._connection.send(StopProcess(reason, flush_seconds))

    def join(self) -> None:
        """Wait until the process has ended; one that takes longer than it was given is killed."""
        limit = None if self._flush_seconds is None else self._flush_seconds + _CLOSE_SECONDS
        self._reader.join(limit)
        if self._reader.is_alive():
            self.kill()
            self._reader.join()

    def kill(self) -> None:
        """End the process at once; its requests get an error."""
        self._process.kill()

    def read_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have messages read in this event loop, until it is closed: outputs then wake no thread on their way to it.

        For a loop that nothing blocks. The thread hands over once the process has answered a question for metrics.
        """
        self._loop = loop
        self.ask_metrics()

    def _read_all(self) -> None:
        shorten_slices()  # displaced, it would hold the interpreter that the reader of the outputs waits for
        try:
            while self._reason is None and self._failure is None:
                self._take(self._connection.receive())
                if self._loop:
                    self._hand_over(self._loop)
        except EOFError:
            pass
        except Exception as error:  # noqa: BLE001 (the requests end with it)
            self._failure = error
        self._end(self._reason)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop read; returns when it has read the last message or is closed."""
        self._handed_back.clear()
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(self._begin_in_loop, loop)
        while not self._handed_back.wait(_LOOK_SECONDS) and not loop.is_closed():
            pass
        if self._loop is loop:
            self._loop = None

    def _begin_in_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.add_reader(self._connection, self._read_some, loop)
        except Exception:  # noqa: BLE001 (the thread reads on)
            _log.exception("the event loop cannot read the messages of the engine's process; a thread does")
            self._loop = None
            self._handed_back.set()
        else:
            self._read_some(loop)  # what the thread had read

    def _read_some(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for message in self._connection.receive_some():
                self._take(message)
        except EOFError:
            pass  # the thread finds the same
        except Exception as error:  # noqa: BLE001 (the thread ends the requests with it)
            self._failure = error
        else:
            if self._reason is None:
                return
        loop.remove_reader(self._connection)
        self._handed_back.set()

    def _take(self, message: object) -> None:
        match message:
            case Outputs(items, load, core):
                self.load = load
                if core is not None and core != self.core:
                    self.core = core
                    self.on_move(core)
                self._deliver(items)
            case Metrics(metrics):
                self.metrics = metrics
                if self._asked:
                    _settle(self._asked, metrics)
            case Adapters(key, adapters, error):
                self.adapters = adapters
                _settle(self._changes.pop(key), error)
            case Log(name, level, text):
                logging.getLogger(name).log(level, "%s", text)
            case Loaded():
                self.load, self.metrics = message.load, message.metrics
                self.adapters = message.adapters
                self._loaded.set_result(message)
            case NotLoaded(error):
                self._loaded.set_exception(error)
            case Ended(reason):
                self._reason = reason

    def _deliver(self, items: Sequence[tuple[int, object]]) -> None:
        by_outlet: dict[Outlet, list[Item]] = defaultdict(list)
        ended: list[int] = []
        for key, packed in items:
            handle = self._open.get(key) or self._cancelled.get(key)
            if handle is None:
                continue  # it was cancelled
            output = packed if isinstance(packed, Exception) else unpack(packed)  # type: ignore[arg-type]
            if is_last(output):
                ended.append(key)
            if is_last(output) or not handle.cancelled:
                by_outlet[handle.outlet].append((handle, output))
        for outlet, of_outlet in by_outlet.items():
            if not outlet.post(of_outlet):
                for handle, _ in of_outlet:
                    self.cancel(handle)
        # last, because `_end` reports a failure to what is open
        for key in ended:
            self._open.pop(key, None)
            self._cancelled.pop(key, None)

    def _end(self, reason: str | None) -> None:
        """End what is open: the connection has ended, with a reason if the process said so, or has failed."""
        self._connection.close()
        failure = self._failure or self._connection.failure
        if failure:
            _log.error("the connection to the engine's process %d failed", self.pid, exc_info=failure)
            self._process.kill()
            shown = str(failure) or type(failure).__name__
            reason = f"the connection to the engine's process {self.pid} failed: {shown}; load it again"
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if reason is None:
            reason = f"the engine's process {self.pid} ended by {_ending(code)}; load it again"
        with self.lock:
            self.ended = self.ended or reason
            self.stopped = True
            asked = self._asked
        unfinished = EngineError(f"the request was not finished: {reason}")
        for handle in [*self._open.values(), *self._cancelled.values()]:
            handle.outlet.post([(handle, unfinished)])
        self._open.clear()
        self._cancelled.clear()
        for waiting in (asked, *self._changes.values()):
            if waiting:
                _settle(waiting, EngineError(reason))
        if not self._loaded.done():
            self._loaded.set_exception(EngineError(reason))


class RemoteAdmission:
    """Refuses requests beyond `max_requests` without asking the engine."""

    def __init__(self, process: EngineProcess, max_requests: int | None) -> None:
        self.num_refused = 0
        self._process = process
        self._max_requests = max_requests

    @property
    def load(self) -> EngineLoad:
        """How busy the engine was after its last outputs."""
        return self._process.load

    def require_place(self, num_open: int) -> None:
        """Raise Overloaded when `num_open` requests are as many as `max_requests` allows."""
        refusal = full(num_open, self._max_requests, lambda: self.load.rates)
        if refusal:
            self.num_refused += 1
            raise refusal


class RemoteEngine:
    """What a reader sees of an engine in a process of its own. Prompts are encoded here, constraints compiled there."""

    def __init__(self, artifact: Artifact, options: EngineOptions) -> None:
        """Start the process and load the engine. Raises what `Engine.load` raises."""
        self.tokenizer = Tokenizer.of_artifact(artifact, options.chat_template_file)
        self.clock = time.perf_counter  # one for all processes of a machine
        self.process = EngineProcess(artifact, options)
        self.model, self.max_batch_tokens = self.process.model, self.process.max_batch_tokens
        self.admission = RemoteAdmission(self.process, options.max_requests)
        self._prompts = PromptEncoder(self.tokenizer, self.model, options.max_prompt_chars)

    def encode(self, prompt: Prompt | ChatPrompt) -> TokenIds:
        """As `Engine.encode`."""
        return self._prompts.encode(prompt)

    @property
    def adapters(self) -> Mapping[str, AdapterFacts]:
        """As `Engine.adapters`, as of the last change."""
        return self.process.adapters

    def metrics(self) -> EngineMetrics:
        """As of the last answer of the process."""
        metrics = self.process.metrics
        return replace(metrics, num_refused=metrics.num_refused + self.admission.num_refused)


@contextmanager
def _starting() -> Iterator[ExitStack]:
    """Undo what was started if not all of it can be. EngineError where the system does not let it."""
    with ExitStack() as undo:
        try:
            yield undo
        except (OSError, RuntimeError, MemoryError) as error:
            raise EngineError(
                f"the engine's process could not be started: {str(error) or type(error).__name__}; free memory,"
                " descriptors (ulimit -n) or processes (ulimit -u), and load it again"
            ) from error
        undo.pop_all()


def _settle(future: "Future[Any]", result: EngineMetrics | Exception | None) -> None:
    """End a future, unless it has ended."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"
