"""The engine for services: one thread steps it, and any number of coroutines read from it.

    async with AsyncEngine.load("artifacts/demo") as engine:
        async for output in engine.stream("import", SamplingParams(max_tokens=64)):
            print(output.text, end="")

Coroutines send commands through a queue, and the thread executes them between steps. Outputs return through a queue
per stream, with at most one wake-up of the event loop per step. A slow reader delays no other: its outputs wait in its
own queue, which its max_tokens bounds. Cancelling a reader aborts its request. A request that fails raises
RequestFailed for its own reader. When the executor is broken, every stream raises the error, and the engine takes no
more requests.
"""

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from ingot.artifact import Artifact
from ingot.errors import EngineError, IngotError
from ingot.runtime.batch import Int64Array
from ingot.runtime.engine import Engine
from ingot.runtime.options import EngineOptions, takes_options
from ingot.runtime.outputs import Completion, EngineMetrics, RequestOutput, raise_failure
from ingot.runtime.prompts import Prompt, checked_params, checked_prompt
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.text.messages import Message


@dataclass(eq=False, slots=True)
class _Stream:
    """One reader: its request, and the queue that it reads in its event loop."""

    prompt: Int64Array
    params: SamplingParams
    keep_logits: bool
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    request_id: int | None = None
    cancelled: bool = False


class AsyncEngine:
    """Wraps an Engine and takes ownership: no other caller may use it. `close` closes both."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model = engine.model
        self._commands: queue.SimpleQueue[_Stream | None] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}  # used by the thread only
        self._lock = threading.Lock()  # no command may follow the one that ends the thread
        self._ended: str | None = None  # why no further request is taken
        self._thread = threading.Thread(target=self._run, name="ingot-engine", daemon=True)
        self._thread.start()

    @classmethod
    @takes_options(EngineOptions)
    def load(cls, artifact: Artifact | Path | str, options: EngineOptions) -> "AsyncEngine":
        """As `Engine.load`, with the same options."""
        return cls(Engine.load(artifact, **vars(options)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, keep_logits: bool = False
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's outputs as they arrive; the last has the completion.

        Leaving the iteration, by `aclose` or cancellation, aborts the request and frees its blocks. Raises RequestError
        as `Engine.add` does, and EngineError when the engine is closed or has failed.
        """
        tokens = checked_prompt(self.engine.encode(prompt), self.model)
        stream = _Stream(tokens, checked_params(params), keep_logits, asyncio.get_running_loop())
        self._send(stream)
        finished = False
        try:
            while not finished:
                output = await stream.outputs.get()
                finished = isinstance(output, Exception) or output.finished
                if isinstance(output, Exception):
                    raise output
                if output.completion:
                    raise_failure([output.completion])
                yield output
        finally:
            if not finished:
                stream.cancelled = True
                self._commands.put(stream)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, keep_logits: bool = False
    ) -> Completion:
        """Complete one prompt. Cancelling the task aborts the request."""
        completion = None
        async for output in self.stream(prompt, params, keep_logits=keep_logits):
            completion = output.completion
        assert completion is not None, "a stream ends with a completion or an error"
        return completion

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Complete a conversation by the model's chat template."""
        return await self.generate(self.engine.encode_chat(messages), params)

    def metrics(self) -> EngineMetrics:
        """What runs now, and counters since the engine was made; a step may run meanwhile, so a moment old."""
        return self.engine.metrics()

    async def close(self) -> None:
        """Abort what is unfinished (its streams end with the reason "abort") and close the engine. Idempotent."""
        self._end("the engine is closed; load it again to continue")
        await asyncio.to_thread(self._thread.join)

    def _send(self, stream: _Stream) -> None:
        with self._lock:
            if self._ended:
                raise EngineError(self._ended)
            self._commands.put(stream)

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = reason
                self._commands.put(None)

    # All methods from here on run in the engine's thread.

    def _run(self) -> None:
        try:
            while self._execute_commands():
                self._deliver(self.engine.step())
                if self.engine.error:
                    raise self.engine.error
        except BaseException as error:  # noqa: BLE001 (not swallowed: every reader raises it)
            self._fail(error)
        finally:
            self._abort_all()
            self.engine.close()

    def _execute_commands(self) -> bool:
        """Execute waiting commands, or wait for one when the engine is idle. False once the engine is to end."""
        while not (self._commands.empty() and self.engine.has_unfinished()):
            stream = self._commands.get()
            if stream is None:
                return False
            if stream.cancelled:
                self._abort(stream)
            else:
                self._add(stream)
        return True

    def _add(self, stream: _Stream) -> None:
        try:
            request_id = self.engine.add(stream.prompt, stream.params, keep_logits=stream.keep_logits)
        except IngotError as error:  # its reader raises it
            _post(stream.loop, [(stream, error)])
            return
        stream.request_id = request_id
        self._streams[request_id] = stream

    def _abort(self, stream: _Stream) -> None:
        if stream.request_id is not None:
            self.engine.abort(stream.request_id)
            self._streams.pop(stream.request_id, None)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Send outputs to their readers, with one wake-up for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput | Exception]]] = defaultdict(list)
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
        self._end(f"the engine failed and takes no more requests: {error}; load it again to continue")
        for stream in self._streams.values():
            failure = EngineError(f"the engine failed while it served this request: {error}")
            failure.__cause__ = error
            _post(stream.loop, [(stream, failure)])
        self._streams.clear()

    def _abort_all(self) -> None:
        """Abort running requests, and refuse those that were sent but not added."""
        for request_id, stream in self._streams.items():
            output = self.engine.end(request_id)
            if output:
                _post(stream.loop, [(stream, output)])
        self._streams.clear()
        while not self._commands.empty():
            waiting = self._commands.get()
            if waiting and not waiting.cancelled and self._ended:
                _post(waiting.loop, [(waiting, EngineError(self._ended))])


def _post(loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, RequestOutput | Exception]]) -> bool:
    """Put outputs into their streams' queues, in the loop that reads them. False when that loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_put_all, items)
        return True
    return False


def _put_all(items: list[tuple[_Stream, RequestOutput | Exception]]) -> None:
    for stream, output in items:
        stream.outputs.put_nowait(output)
