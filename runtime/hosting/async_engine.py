"""The engine for services: one thread or process steps it, and any number of coroutines read from it.

    async with AsyncEngine.load("artifacts/demo") as engine:
        async for output in engine.stream("import", SamplingParams(max_tokens=64)):
            print(output.text, end="")

Coroutines send commands to the thread (`engine_thread`) and read outputs from a queue per stream. Cancelling a reader
aborts its request. A request that fails raises RequestFailed for its own reader. When the executor is broken, every
stream raises the error, and the engine takes no more requests.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from ingot.artifact import Artifact
from ingot.errors import EngineError, explain_threads
from ingot.runtime.asking.outputs import Completion, RequestOutput, raise_failure
from ingot.runtime.asking.prompts import ChatPrompt, Prompt, TokenIds, Tools, Variables, checked_prompt
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints.compiler import Grammar
from ingot.runtime.constraints.fair_threads import COMPILE_THREADS, FairThreads
from ingot.runtime.engine.adapter_registry import AdapterFacts
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import Int64Array
from ingot.runtime.hosting.engine_process import EngineProcess, RemoteEngine
from ingot.runtime.hosting.engine_process_messages import LoadAdapter, UnloadAdapter
from ingot.runtime.hosting.engine_thread import EngineThread, LoopOutlet, RequestStream
from ingot.runtime.options import EngineOptions, checked_seconds, takes_options
from ingot.runtime.requests.beam_search import BeamParams, checked_beam_params
from ingot.runtime.requests.engine_request import EngineRequest
from ingot.runtime.steps.metrics import EngineMetrics
from ingot.runtime.text.messages import Message

_T = TypeVar("_T")
_CHECKED_AT_ONCE = 1024  # tokens; a thread would take longer to wake up than their check
_THREAD_SECONDS = 0.05  # until the system is asked again for a thread that `close` cannot do without
_ENCODING_THREADS = 4  # a prompt that takes long to encode delays others only when this many do at a time


class AsyncEngine:
    """Wraps an Engine and takes ownership: no other caller may use it. `close` closes both.

    Texts are encoded and constraints compiled in threads of its own, so neither the event loop nor a step of the engine
    waits for a long prompt or a large schema.
    """

    def __init__(self, engine: Engine | RemoteEngine) -> None:
        self.engine = engine
        self.model = engine.model
        self.tokenizer = engine.tokenizer
        self._process = os.getpid()
        self._num_open = 0  # streams that are being encoded, served or read
        self._idle: Future[None] | None = None  # what `close` waits for, until no stream is open
        self._outlet: LoopOutlet | None = None  # of the loop that opened the last stream
        self._encoders = ThreadPoolExecutor(_ENCODING_THREADS, "ingot-encode")
        self._compilers = FairThreads(COMPILE_THREADS, "ingot-compile")
        self._steps = engine.process if isinstance(engine, RemoteEngine) else EngineThread(engine)

    @classmethod
    @takes_options(EngineOptions)
    def load(cls, artifact: Artifact, options: EngineOptions) -> "AsyncEngine":
        """As `Engine.load`, with the same options."""
        engine = Engine.load(artifact, **vars(options))
        try:
            with explain_threads("the engine"):
                return cls(engine)
        except BaseException:
            engine.close()
            raise

    @classmethod
    @takes_options(EngineOptions)
    def load_in_process(cls, artifact: Artifact, options: EngineOptions) -> "AsyncEngine":
        """As `load`, with the engine in a process of its own.

        Its steps and this process do not wait for each other's interpreter. If the process dies, every stream raises
        EngineError, and the engine takes no more requests. Metrics are as of the last `refresh_metrics`.
        """
        return cls(RemoteEngine(artifact, options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def encode(self, prompt: Prompt) -> TokenIds:
        """As `Engine.encode`, in a thread."""
        return await self._in_thread(partial(self.engine.encode, prompt))

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """As `Tokenizer.encode`, in a thread; a text of any length. EngineError where there is no tokenizer."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise EngineError("the artifact has no tokenizer; give token ids")
        return await self._in_thread(partial(tokenizer.encode, text, add_special_tokens))

    async def encode_chat(
        self, messages: Sequence[Message], *, tools: Tools | None = None, variables: Variables | None = None
    ) -> list[int]:
        """As `Engine.encode_chat`, in a thread."""
        return list(await self._in_thread(partial(self.engine.encode, ChatPrompt(messages, tools, variables))))

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
        return self._stream(EngineRequest.of(prompt, params, options, keep_logits))

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
        return self._stream(EngineRequest.of(ChatPrompt(messages, tools, variables), params, options, keep_logits))

    def stream_joined(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        interval_seconds: float = 0.0,
        arrival_seconds: float | None = None,
        direct: Callable[[RequestOutput], bool] | None = None,
        ended: "asyncio.Future[Completion] | None" = None,
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """As `stream`, for a reader that may be slower than the engine: yield all outputs that arrived, oldest first.

        After each list the next is gathered for `interval_seconds` at least, so that outputs wake the reader less often
        than they arrive; the first list and the end do not wait. Outputs before a failure are yielded before it is
        raised. `arrival_seconds` is when the request arrived, by the engine's `clock`; None: now. `direct` may take
        outputs in place of the reader (see `RequestStream`), where the engine's own process gathers them or nothing
        does. `ended` gets the result of the request, also when the reader leaves before the end, soon after that. It is
        cancelled where a request has no result.
        """
        request = EngineRequest.of(prompt, params, options, arrival_seconds=arrival_seconds)
        return self.stream_request(request, interval_seconds=interval_seconds, direct=direct, ended=ended)

    async def stream_request(
        self,
        request: EngineRequest,
        *,
        interval_seconds: float = 0.0,
        direct: Callable[[RequestOutput], bool] | None = None,
        ended: "asyncio.Future[Completion] | None" = None,
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """As `stream_joined`, of a request that is one value."""
        stream = None
        try:
            async with self._opened(request, interval_seconds, ended) as stream:
                stream.direct = direct if self.process or not interval_seconds else None
                while not stream.finished:
                    outputs = await stream.next_all()
                    yield [output for output in outputs if not output.error]
                    if outputs[-1].result:
                        raise_failure(outputs[-1].result.choices)
                    if interval_seconds and not stream.finished and not self.process:  # a process gathers them there
                        await stream.rest(interval_seconds)
        finally:
            if ended and stream is None:  # it was refused
                ended.cancel()

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
        return await _completion(self._stream(EngineRequest.of(prompt, checked_beam_params(params), options)))

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

    @property
    def adapters(self) -> Mapping[str, AdapterFacts]:
        """LoRA adapters that requests can name (`RequestOptions.adapter`)."""
        return self.engine.adapters

    async def load_adapter(
        self, name: str, path: Path | str | os.PathLike[str], *, replace: bool = False
    ) -> AdapterFacts:
        """As `Engine.load_adapter`; steps go on while its files are read."""
        folder = Path(path)
        if isinstance(self._steps, EngineProcess):
            await asyncio.wrap_future(
                self._steps.change_adapters(lambda key: LoadAdapter(key, name, folder.absolute(), replace))
            )
            return self.adapters[name]
        assert isinstance(self.engine, Engine)
        adapter = await self._in_thread(partial(self.engine.read_adapter, name, folder))
        return await asyncio.wrap_future(
            self._steps.call(lambda engine: engine.register_adapter(adapter, folder, replace=replace))
        )

    async def unload_adapter(self, name: str) -> None:
        """As `Engine.unload_adapter`: refuse the name from now on; open requests keep their adapter."""
        if isinstance(self._steps, EngineProcess):
            await asyncio.wrap_future(self._steps.change_adapters(lambda key: UnloadAdapter(key, name)))
        else:
            await asyncio.wrap_future(self._steps.call(lambda engine: engine.unload_adapter(name)))

    def metrics(self) -> EngineMetrics:
        """What runs now, and counters since the engine was made; a step may run meanwhile, so a moment old."""
        return self.engine.metrics()

    async def refresh_metrics(self, seconds: float = 1.0) -> None:
        """Have an engine in a process of its own send its metrics, for at most this long; nothing for others."""
        if self.process:
            with suppress(EngineError, TimeoutError):  # `error` and `unanswered_seconds` tell
                async with asyncio.timeout(seconds):
                    await asyncio.shield(asyncio.wrap_future(self.process.ask_metrics()))

    @property
    def process(self) -> EngineProcess | None:
        """The engine's own process; None where a thread of this one steps it."""
        return self._steps if isinstance(self._steps, EngineProcess) else None

    @property
    def error(self) -> EngineError | None:
        """Why no request is taken: the engine is closed, broken or another process's. None while it serves."""
        if os.getpid() != self._process:
            return EngineError(
                f"this engine runs in process {self._process}; process {os.getpid()} was forked from it and has none of"
                " its threads: load an engine in each process, after the fork"
            )
        return EngineError(self._steps.ended) if self._steps.ended else None

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
        reason = "the engine is closed; load it again to continue"
        with self._steps.lock:
            self._steps.ended = self._steps.ended or reason
            if drain and self._num_open and self._idle is None:
                self._idle = Future()
                self._idle.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
        if drain and self._idle:
            await asyncio.wrap_future(self._idle)
        self._steps.stop(reason, flush_seconds)
        while True:
            try:
                await asyncio.to_thread(self._steps.join)
                break
            except RuntimeError:  # the system starts no thread now
                await asyncio.sleep(_THREAD_SECONDS)
        self._encoders.shutdown(wait=False)
        self._compilers.close(reason)

    async def _stream(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        async with self._opened(request) as stream:
            while not stream.finished:
                output = await stream.next()
                if not output.error:
                    yield output
                if output.result:
                    raise_failure(output.result.choices)

    @asynccontextmanager
    async def _opened(
        self,
        request: EngineRequest,
        interval_seconds: float = 0.0,
        ended: "asyncio.Future[Completion] | None" = None,
    ) -> AsyncIterator[RequestStream]:
        """A stream that is counted as open and sent to the thread; it is cancelled unless it is read to its end."""
        request = request.arrived(self.engine.clock())
        self._enter()
        try:
            request = await self._encoded(request)
            grammar = await self._compiled(request)
            stream = RequestStream(
                request=request,
                outlet=self._outlet_here(),
                interval_seconds=interval_seconds,
                reports_end=ended is not None,
                grammar=grammar,
                ended=ended,
            )
            self._steps.send(stream)
            try:
                yield stream
            finally:
                if not stream.finished:
                    self._steps.cancel(stream)
        finally:
            self._leave()

    def _outlet_here(self) -> LoopOutlet:
        """The outlet of the running loop, which all of its streams share, so that a step wakes it once."""
        loop, outlet = asyncio.get_running_loop(), self._outlet
        if outlet is None or outlet.loop is not loop:  # readers may be in several loops, each in its thread
            outlet = self._outlet = LoopOutlet(loop)
        return outlet

    async def _encoded(self, request: EngineRequest) -> EngineRequest:
        """Encode and check the prompt, in a thread where that takes long."""

        def checked() -> Int64Array:
            return checked_prompt(self.engine.encode(request.prompt), self.model)

        is_short = isinstance(request.prompt, list) and len(request.prompt) <= _CHECKED_AT_ONCE
        return request.encoded(checked() if is_short else await self._in_thread(checked))

    async def _compiled(self, request: EngineRequest) -> Grammar | None:
        """Return the compiled constraint, in turn with those of other groups unless it is known."""
        params = request.params
        if params.constraint is None or isinstance(self.engine, RemoteEngine):  # whose process compiles it
            return None
        if self.engine.constraints.is_known(params.constraint):
            return self.engine.compile(params)
        in_turn = partial(self._compilers.submit, group=request.options.group)
        return await self._in_thread(partial(self.engine.compile, params), in_turn)

    async def _in_thread(
        self, work: Callable[[], _T], submit: "Callable[[Callable[[], _T]], Future[_T]] | None" = None
    ) -> _T:
        """Do some work in a thread: one that encodes, or where `submit` has it done. tokenizers and llguidance release
        the GIL, so the event loop and the engine run meanwhile.
        """
        self._require_process()
        with self._steps.lock:
            if self._steps.stopped:
                raise EngineError(self._steps.ended)
            with explain_threads("the request"):
                future = submit(work) if submit else self._encoders.submit(work)
        try:
            with explain_threads("the request"):  # to compile a constraint
                return await asyncio.wrap_future(future)
        finally:
            del future  # its error has a traceback with this frame

    def _enter(self) -> None:
        """Count a stream as open, or refuse it."""
        self._require_process()
        with self._steps.lock:
            if self._steps.ended:
                raise EngineError(self._steps.ended)
            self.engine.admission.require_place(self._num_open)
            self._num_open += 1

    def _leave(self) -> None:
        with self._steps.lock:
            self._num_open -= 1
            if self._idle and not self._num_open:
                self._idle.set_result(None)

    def _require_process(self) -> None:
        if os.getpid() != self._process and self.error:  # the locks are the other process's too
            raise self.error


async def _completion(outputs: AsyncGenerator[RequestOutput, None]) -> Completion:
    """The completion at the end of a stream, which is closed if the caller is cancelled."""
    result = None
    async with aclosing(outputs):
        async for output in outputs:
            result = output.result
    assert result is not None, "a stream ends with a result or an error"
    return result
