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
import os
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from ingot.artifact import Artifact
from ingot.errors import EngineError, IngotError
from ingot.runtime.beam_search import BeamParams, checked_beam_params
from ingot.runtime.engine import Engine
from ingot.runtime.metrics import EngineMetrics
from ingot.runtime.options import EngineOptions, checked_seconds, takes_options
from ingot.runtime.outputs import Completion, RequestOutput, raise_failure
from ingot.runtime.prompt_encoder import Tools, Variables
from ingot.runtime.prompts import Prompt, TokenIds, checked_params, checked_prompt
from ingot.runtime.request_options import RequestOptions, checked_options
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.steps.batch import Int64Array
from ingot.runtime.text.messages import Message

_Tokens = TypeVar("_Tokens")
_ENCODING_THREADS = 4  # a prompt that takes long to encode delays others only when this many do at a time


@dataclass(eq=False, slots=True)
class _Stream:
    """One reader: its request, and the queue that it reads in its event loop."""

    prompt: Int64Array
    params: SamplingParams | BeamParams
    options: RequestOptions
    keep_logits: bool
    arrival_seconds: float
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    request_id: int | None = None
    finished: bool = False
    cancelled: bool = False

    async def next(self) -> RequestOutput:
        """Wait for the next output, which may have the error of a choice; raises what ends the stream otherwise."""
        output = await self.outputs.get()
        self.finished = isinstance(output, Exception) or output.finished
        if isinstance(output, Exception):
            raise output
        return output


class AsyncEngine:
    """Wraps an Engine and takes ownership: no other caller may use it. `close` closes both.

    Texts and conversations are encoded in threads of its own, so the event loop never waits for a long prompt.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model = engine.model
        self.tokenizer = engine.tokenizer
        self._process = os.getpid()
        self._commands: queue.SimpleQueue[_Stream | None] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}  # used by the thread only
        self._lock = threading.Lock()  # no command may follow the one that ends the thread
        self._ended: str | None = None  # why no more streams are opened
        self._flush_seconds: float | None = None  # of `close`
        self._stopped = False  # whether the thread takes no more commands
        self._num_open = 0  # streams that are being encoded, served or read
        self._idle: Future[None] | None = None  # what `close` waits for, until no stream is open
        self._encoders = ThreadPoolExecutor(_ENCODING_THREADS, "ingot-encode")
        self._thread = threading.Thread(target=self._run, name="ingot-engine", daemon=True)
        self._thread.start()

    @classmethod
    @takes_options(EngineOptions)
    def load(cls, artifact: Artifact, options: EngineOptions) -> "AsyncEngine":
        """As `Engine.load`, with the same options."""
        return cls(Engine.load(artifact, **vars(options)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def encode(self, prompt: Prompt) -> TokenIds:
        """As `Engine.encode`, in a thread."""
        return await self._in_thread(partial(self.engine.encode, prompt))

    async def encode_chat(
        self, messages: Sequence[Message], *, tools: Tools | None = None, variables: Variables | None = None
    ) -> list[int]:
        """As `Engine.encode_chat`, in a thread."""
        return await self._in_thread(partial(self.engine.encode_chat, messages, tools=tools, variables=variables))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as they arrive; the last has the result. See `Engine.stream` for several choices.

        Leaving the iteration, by `aclose` or cancellation, aborts the request and frees its blocks. The first output
        raises RequestError and Overloaded as `Engine.add` does; any may raise RequestFailed, and EngineError when the
        engine is closed or broken.
        """
        return self._stream(partial(self.engine.encode, prompt), params, options, keep_logits)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        variables: Variables | None = None,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a conversation's answer; see `Engine.encode_chat` and `stream`."""
        encode = partial(self.engine.encode_chat, messages, tools=tools, variables=variables)
        return self._stream(encode, params, options, keep_logits)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
    ) -> Completion:
        """Complete one prompt. Cancelling the task aborts the request."""
        return await _completion(self.stream(prompt, params, options=options, keep_logits=keep_logits))

    async def beam_search(
        self, prompt: Prompt, params: BeamParams | None = None, *, options: RequestOptions | None = None
    ) -> Completion:
        """As `Engine.beam_search`. Cancelling the task aborts the request."""
        encode = partial(self.engine.encode, prompt)
        return await _completion(self._stream(encode, checked_beam_params(params), options, keep_logits=False))

    async def generate_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        variables: Variables | None = None,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
    ) -> Completion:
        """Complete a conversation; see `Engine.encode_chat` and `generate`."""
        return await _completion(
            self.stream_chat(
                messages, params, tools=tools, variables=variables, options=options, keep_logits=keep_logits
            )
        )

    def metrics(self) -> EngineMetrics:
        """What runs now, and counters since the engine was made; a step may run meanwhile, so a moment old."""
        return self.engine.metrics()

    @property
    def error(self) -> EngineError | None:
        """Why no request is taken: the engine is closed, broken or another process's. None while it serves."""
        if os.getpid() != self._process:
            return EngineError(
                f"this engine runs in process {self._process}; process {os.getpid()} was forked from it and has none of"
                " its threads: load an engine in each process, after the fork"
            )
        return EngineError(self._ended) if self._ended else None

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken; see `error`."""
        return self.error is None

    async def close(self, *, drain: bool = False, flush_seconds: float | None = None) -> None:
        """Take no more requests, end those that are open and close the engine. Idempotent.

        With `drain` the open ones are served first; cancel the call to stop waiting. Otherwise they end with "abort".
        `flush_seconds` is that of `Engine.close`.
        """
        checked_seconds("flush_seconds", flush_seconds)
        if os.getpid() != self._process:
            return  # the engine is the other process's
        with self._lock:
            self._ended = self._ended or "the engine is closed; load it again to continue"
            if drain and self._num_open and self._idle is None:
                self._idle = Future()
                self._idle.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
        if drain and self._idle:
            await asyncio.wrap_future(self._idle)
        self._flush_seconds = flush_seconds
        self._stop(self._ended)
        await asyncio.to_thread(self._thread.join)
        self._encoders.shutdown(wait=False)

    async def _stream(
        self,
        encode: Callable[[], TokenIds],
        params: SamplingParams | BeamParams | None,
        options: RequestOptions | None,
        keep_logits: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        arrival, options = self.engine.clock(), checked_options(options)
        params = params if isinstance(params, BeamParams) else checked_params(params)
        self._enter()
        try:
            prompt = await self._in_thread(lambda: checked_prompt(encode(), self.model))
            stream = _Stream(prompt, params, options, keep_logits, arrival, asyncio.get_running_loop())
            self._send(stream)
            try:
                while not stream.finished:
                    output = await stream.next()
                    if not output.error:
                        yield output
                    if output.result:
                        raise_failure(output.result.choices)
            finally:
                if not stream.finished:
                    stream.cancelled = True
                    self._commands.put(stream)
        finally:
            self._leave()

    async def _in_thread(self, encode: Callable[[], _Tokens]) -> _Tokens:
        """What `encode` returns. tokenizers releases the GIL, so the event loop and the engine run meanwhile."""
        self._require_process()
        with self._lock:
            if self._stopped:
                raise EngineError(self._ended)
            future = self._encoders.submit(encode)
        return await asyncio.wrap_future(future)

    def _enter(self) -> None:
        """Count a stream as open, or refuse it."""
        self._require_process()
        with self._lock:
            if self._ended:
                raise EngineError(self._ended)
            self.engine.admission.require_place(self._num_open)
            self._num_open += 1

    def _leave(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._idle and not self._num_open:
                self._idle.set_result(None)

    def _send(self, stream: _Stream) -> None:
        with self._lock:
            if self._stopped:
                raise EngineError(self._ended)
            self._commands.put(stream)

    def _stop(self, reason: str) -> None:
        """End the thread after the commands that were sent."""
        with self._lock:
            self._ended = self._ended or reason
            if not self._stopped:
                self._stopped = True
                self._commands.put(None)

    def _require_process(self) -> None:
        if os.getpid() != self._process and self.error:  # the locks are the other process's too
            raise self.error

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
            self.engine.close(flush_seconds=self._flush_seconds)

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
            request_id = self.engine.add(
                stream.prompt,
                stream.params,
                options=stream.options,
                keep_logits=stream.keep_logits,
                arrival_seconds=stream.arrival_seconds,
            )
        except Exception as error:  # noqa: BLE001 (its reader raises it)
            _post(stream.loop, [(stream, _refusal(error))])
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
        known = str(error) if error is self.engine.error else None
        self._stop(known or f"the engine failed and takes no more requests: {error}; load it again")
        for stream in self._streams.values():
            failure = EngineError(f"the engine failed while it served this request: {error}")
            failure.__cause__ = error
            _post(stream.loop, [(stream, failure)])
        self._streams.clear()

    def _abort_all(self) -> None:
        """Abort running requests, and refuse those that were sent but not added."""
        for request_id, stream in self._streams.items():
            outputs = self.engine.end(request_id)
            _post(stream.loop, [(stream, output) for output in outputs])
        self._streams.clear()
        while not self._commands.empty():
            waiting = self._commands.get()
            if waiting and not waiting.cancelled and self._ended:
                _post(waiting.loop, [(waiting, EngineError(self._ended))])


def _refusal(error: Exception) -> IngotError:
    """The error of a request that could not be added."""
    if isinstance(error, IngotError):
        return error
    failure = EngineError(f"the request could not be added: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


async def _completion(outputs: AsyncGenerator[RequestOutput, None]) -> Completion:
    """The completion at the end of a stream, which is closed if the caller is cancelled."""
    result = None
    async with aclosing(outputs):
        async for output in outputs:
            result = output.result
    assert result is not None, "a stream ends with a result or an error"
    return result


def _post(loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, RequestOutput | Exception]]) -> bool:
    """Put outputs into their streams' queues, in the loop that reads them. False when that loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_put_all, items)
        return True
    return False


def _put_all(items: list[tuple[_Stream, RequestOutput | Exception]]) -> None:
    for stream, output in items:
        stream.outputs.put_nowait(output)
