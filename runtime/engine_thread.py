"""The thread that steps an engine for coroutines: commands come in through a queue, outputs leave through a queue each.

Commands are executed between steps. Outputs return to each stream's own queue, with at most one wake-up of an event
loop per step, so a slow reader delays no other: its outputs wait, and its max_tokens bounds them.
"""

import asyncio
import math
import queue
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

from ingot.errors import EngineError, IngotError
from ingot.runtime.beam_search import BeamParams
from ingot.runtime.constraints.compiler import Grammar
from ingot.runtime.engine import Engine
from ingot.runtime.outputs import RequestOutput
from ingot.runtime.request_options import RequestOptions
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.steps.batch import Int64Array


@dataclass(eq=False, slots=True)
class Stream:
    """One reader: its request, and the queue that it reads in its event loop."""

    prompt: Int64Array
    params: SamplingParams | BeamParams
    options: RequestOptions
    keep_logits: bool
    arrival_seconds: float
    loop: asyncio.AbstractEventLoop
    grammar: Grammar | None = None
    outputs: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    request_id: int | None = None
    finished: bool = False
    cancelled: bool = False
    has_last: bool = False  # the output that ends it has arrived
    _resting: asyncio.Future[None] | None = None

    async def next(self) -> RequestOutput:
        """Wait for the next output, which may have the error of a choice; raises what ends the stream otherwise."""
        output = await self.outputs.get()
        self.finished = isinstance(output, Exception) or output.finished
        if isinstance(output, Exception):
            raise output
        return output

    async def next_all(self) -> list[RequestOutput]:
        """As `next`, with all outputs that have arrived, oldest first."""
        outputs = [await self.next()]
        while not self.finished and not self.outputs.empty():
            output = self.outputs.get_nowait()
            if isinstance(output, Exception):
                self.outputs.put_nowait(output)  # for the next call: nothing follows an exception
                break
            self.finished = output.finished
            outputs.append(output)
        return outputs

    async def rest(self, seconds: float) -> None:
        """Let outputs gather for this long, or until the last one has arrived."""
        if self.has_last:
            return
        self._resting = self.loop.create_future()
        timer = self.loop.call_later(seconds, self._wake) if seconds < math.inf else None
        try:
            await self._resting
        finally:
            self._resting = None
            if timer:
                timer.cancel()

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, in the loop that reads it."""
        self.outputs.put_nowait(output)
        if isinstance(output, Exception) or output.finished:
            self.has_last = True
            self._wake()

    def _wake(self) -> None:
        if self._resting and not self._resting.done():
            self._resting.set_result(None)


class EngineThread:
    """Steps an engine, which it owns, until it is stopped or fails, and closes it then.

    lock     held while `ended` and `stopped` are read or set together with what must agree with them
    ended    why no more streams are opened; None while they are
    stopped  whether the thread takes no more commands
    """

    def __init__(self, engine: Engine) -> None:
        self.lock = threading.Lock()
        self.ended: str | None = None
        self.stopped = False
        self._engine = engine
        self._commands: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._streams: dict[int, Stream] = {}  # used by the thread only
        self._flush_seconds: float | None = None  # of `Engine.close`
        self._thread = threading.Thread(target=self._run, name="ingot-engine", daemon=True)
        self._thread.start()

    def send(self, stream: Stream) -> None:
        """Have a stream served. EngineError once the thread is stopped."""
        with self.lock:
            if self.stopped:
                raise EngineError(self.ended)
            self._commands.put(stream)

    def cancel(self, stream: Stream) -> None:
        """Abort the request of a stream that is not read any more."""
        stream.cancelled = True
        self._commands.put(stream)

    def stop(self, reason: str, flush_seconds: float | None = None) -> None:
        """End the thread after the commands that were sent; no command may follow."""
        with self.lock:
            self.ended = self.ended or reason
            if not self.stopped:
                self.stopped = True
                self._flush_seconds = flush_seconds
                self._commands.put(None)

    def join(self) -> None:
        """Wait until the thread has ended, and the engine is closed."""
        self._thread.join()

    # All methods from here on run in the thread.

    def _run(self) -> None:
        try:
            while self._execute_commands():
                self._deliver(self._engine.step())
                if self._engine.error:
                    raise self._engine.error
        except BaseException as error:  # noqa: BLE001 (not swallowed: every reader raises it)
            self._fail(error)
        finally:
            self._abort_all()
            self._engine.close(flush_seconds=self._flush_seconds)

    def _execute_commands(self) -> bool:
        """Execute waiting commands, or wait for one when the engine is idle. False once the engine is to end."""
        while not (self._commands.empty() and self._engine.has_unfinished()):
            stream = self._commands.get()
            if stream is None:
                return False
            if stream.cancelled:
                self._abort(stream)
            else:
                self._add(stream)
        return True

    def _add(self, stream: Stream) -> None:
        try:
            request_id = self._engine.add(
                stream.prompt,
                stream.params,
                options=stream.options,
                keep_logits=stream.keep_logits,
                arrival_seconds=stream.arrival_seconds,
                grammar=stream.grammar,
            )
        except Exception as error:  # noqa: BLE001 (its reader raises it)
            _post(stream.loop, [(stream, _refusal(error))])
            return
        stream.request_id = request_id
        self._streams[request_id] = stream

    def _abort(self, stream: Stream) -> None:
        if stream.request_id is not None:
            self._engine.abort(stream.request_id)
            self._streams.pop(stream.request_id, None)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Send outputs to their readers, with one wake-up for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput | Exception]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream:
                by_loop[stream.loop].append((stream, output))
            if output.finished:
                self._streams.pop(output.request_id, None)
        for loop, items in by_loop.items():
            if not _post(loop, items):
                for stream, _ in items:
                    self._abort(stream)

    def _fail(self, error: BaseException) -> None:
        known = str(error) if error is self._engine.error else None
        self.stop(known or f"the engine failed and takes no more requests: {error}; load it again")
        for stream in self._streams.values():
            failure = EngineError(f"the engine failed while it served this request: {error}")
            failure.__cause__ = error
            _post(stream.loop, [(stream, failure)])
        self._streams.clear()

    def _abort_all(self) -> None:
        """Abort running requests, and refuse those that were sent but not added."""
        for request_id, stream in self._streams.items():
            outputs = self._engine.end(request_id)
            _post(stream.loop, [(stream, output) for output in outputs])
        self._streams.clear()
        while not self._commands.empty():
            waiting = self._commands.get()
            if waiting and not waiting.cancelled and self.ended:
                _post(waiting.loop, [(waiting, EngineError(self.ended))])


def _refusal(error: Exception) -> IngotError:
    """The error of a request that could not be added."""
    if isinstance(error, IngotError):
        return error
    failure = EngineError(f"the request could not be added: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _post(loop: asyncio.AbstractEventLoop, items: list[tuple[Stream, RequestOutput | Exception]]) -> bool:
    """Put outputs into their streams' queues, in the loop that reads them. False when that loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_put_all, items)
        return True
    return False


def _put_all(items: list[tuple[Stream, RequestOutput | Exception]]) -> None:
    for stream, output in items:
        stream.put(output)
