"""The engine: texts or token ids in, completions out. `Engine.step` is schedule -> execute -> sample -> finish.

    engine = Engine.load("artifacts/demo")
    print(engine.generate("def read_file(path):", SamplingParams(max_tokens=64)).text)
    for output in engine.stream("import"):
        print(output.text, end="")

Output depends on prompt, parameters and seed alone (batch invariance): the rest of the batch, chunked prefill, prefix
hits and preemption do not change it. An Engine belongs to one thread; `AsyncEngine` serves many callers.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self, overload

import numpy as np

from ingot.artifact import Artifact, open_artifact
from ingot.errors import EngineError, RequestError, UsageError
from ingot.runtime.batch import BatchBuilder, FloatArray
from ingot.runtime.blocks import BlockManager, root_hash
from ingot.runtime.executors import DeviceFacts, Executor, PipelinedExecutor, load_executor
from ingot.runtime.options import EngineOptions, takes_options
from ingot.runtime.outputs import Completion, EngineMetrics, OutputQueues, RequestOutput, StepCounters
from ingot.runtime.prompt_logits import PromptLogits, iterate_prompt_logits
from ingot.runtime.prompts import (
    ParamsList,
    Prompt,
    PromptList,
    TokenIds,
    checked_params,
    checked_prompt,
    each_with_params,
    is_single,
)
from ingot.runtime.request import Request
from ingot.runtime.sampler import SampledToken
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.scheduler import ScheduledBatch, Scheduler
from ingot.runtime.step_pipeline import StepInFlight, StepPipeline
from ingot.runtime.text.chat_template import Message
from ingot.runtime.text.tokenizer import TOKENIZER, Tokenizer


class Engine:
    """Serves generation requests with one executor, which it owns and closes. A context manager.

    tokenizer       None serves token ids only
    max_sequences   most sequences in a step; by default what the executor allows
    prefix_cache    keep the KV blocks of finished requests, and share those of common prompts
    identity        identifies the artifact in the hashes of cached blocks
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        *,
        max_sequences: int | None = None,
        prefix_cache: bool = True,
        identity: str = "",
    ) -> None:
        max_sequences = executor.max_sequences if max_sequences is None else max_sequences
        if max_sequences < 1:
            raise UsageError(f"max_sequences is {max_sequences}; it must be at least 1")
        self.tokenizer = tokenizer
        self.model = executor.model
        self.max_batch_tokens = executor.max_batch_tokens
        kv = executor.kv_geometry
        root = root_hash(identity, kv.model_dump_json())
        self._executor = executor
        self._limits = {"max_batch_tokens": executor.max_batch_tokens, "max_sequences": max_sequences}
        self._blocks = BlockManager(executor.num_blocks, kv.block_tokens, root=root, prefix_cache=prefix_cache)
        self._scheduler = Scheduler(self._blocks, **self._limits)
        self._builder = BatchBuilder(self._blocks, **self._limits)
        self._pipeline: StepPipeline | None = None
        if isinstance(executor, PipelinedExecutor):
            self._pipeline = StepPipeline(executor, self._scheduler, self._builder)
        self._eos_token_ids = frozenset(self.model.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else set())
        self._ids = itertools.count()
        self._requests: dict[int, Request] = {}
        self._outputs = OutputQueues()
        self._counters = StepCounters()
        self._closed = False

    @classmethod
    @takes_options(EngineOptions)
    def load(cls, artifact: Artifact | Path | str, options: EngineOptions) -> "Engine":
        """Open an artifact, verify it unless it is open already, and load its engine. Options: see EngineOptions.

        Raises ArtifactError, EngineError, and UsageError for an option that is out of range.
        """
        opened = artifact if isinstance(artifact, Artifact) else open_artifact(artifact)
        files = opened.files_below("tokenizer")
        tokenizer = Tokenizer.load(opened.path / "tokenizer", files) if TOKENIZER in files else None
        executor = load_executor(opened, options)
        return cls(executor, tokenizer, prefix_cache=options.prefix_cache, identity=opened.manifest.identity)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort unfinished requests, free memory and threads. Idempotent."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._outputs.take()
        if self._pipeline:
            self._pipeline.take()
        if not self._closed:
            self._closed = True
            self._executor.close()

    def encode(self, prompt: Prompt) -> TokenIds:
        """Tokens of a text; token ids are returned unchanged. RequestError for a text if there is no tokenizer."""
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("the artifact has no tokenizer, so it takes no text; give the prompt as token ids")
        return self.tokenizer.encode(prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to the start of the model's answer."""
        if self.tokenizer is None:
            raise RequestError("the artifact has no tokenizer, so it takes no messages; give a prompt of token ids")
        return self.tokenizer.encode_chat(messages)

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, keep_logits: bool = False) -> int:
        """Queue a request and return its id; `step` returns its outputs. `keep_logits` adds them to the completion.

        Raises RequestError when it can never be served: an empty prompt, one that fills the model's context, a token
        outside the vocabulary, or more KV blocks than the pool has. Output that would exceed the context ends there,
        with the reason "length".
        """
        self._require_open()
        tokens = checked_prompt(self.encode(prompt), self.model)
        request = Request(
            next(self._ids),
            tokens,
            checked_params(params),
            self.model,
            self.tokenizer,
            self._eos_token_ids,
            keep_logits=keep_logits,
            now=time.perf_counter(),
        )
        self._scheduler.add(request.sequence)
        self._requests[request.sequence.id] = request
        return request.sequence.id

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, a step is in flight, or `step` has an output to return."""
        return bool(self._requests or self._in_flight or self._outputs.has_any)

    def step(self) -> list[RequestOutput]:
        """Advance by one step; return the outputs of requests made by `add`. `stream` and `generate` get their own.

        A pipelined executor queues this step and the outputs are those of the one before: the first call returns none.
        When the executor or the sampler fails, the requests of that step are aborted and the error is raised; the next
        call returns their last outputs. EngineError, with nothing aborted, when an open `iterate_prompt_logits` holds
        the blocks that the next request needs.
        """
        self._require_open()
        self._advance()
        return self._outputs.take()

    def _advance(self) -> None:
        """One step; queue its outputs. A step that the host samples first waits for the one in flight."""
        batch = self._scheduler.schedule()
        self._require_progress(batch)
        if self._pipeline and not self._needs_logits(batch):
            self._advance_ahead(self._pipeline, batch)
            return
        with self._aborting_on_failure(batch):
            self._prepare(batch)
        self._finish_in_flight()
        batch.drop_ended()
        if batch.entries:
            with self._aborting_on_failure(batch):
                logits = self._execute(batch)
                tokens = self._sample(batch, logits)
                self._finish(tokens)

    def _advance_ahead(self, pipeline: StepPipeline, batch: ScheduledBatch) -> None:
        """Queue a step that samples on the device, and only then wait for the one before it; see `step_pipeline`."""
        with self._aborting_on_failure(batch):
            try:
                self._prepare(batch)
                previous = pipeline.submit(batch, self._sampling(batch)) if batch.entries else pipeline.take()
            except BaseException:
                self._finish_in_flight()  # its tokens can no longer be carried
                raise
        if previous:
            self._finish_step(previous)

    def _prepare(self, batch: ScheduledBatch) -> None:
        """Copy blocks on write. Tables and pool agree from here on, even if the step fails later."""
        now = time.perf_counter()
        for entry in batch.entries:
            request = self._requests[entry.sequence.id]
            if request.first_scheduled_seconds is None:
                request.first_scheduled_seconds = now
        for source, target in batch.copies:
            self._executor.copy_block(source, target)

    def _execute(self, batch: ScheduledBatch) -> FloatArray:
        """Logits [sampling sequences, vocab] of the step; afterwards its tokens are in the pool."""
        logits = self._executor.forward(self._builder.build(batch))
        self._scheduler.complete(batch)
        self._counters.count(batch.num_tokens)
        return logits

    def _sample(self, batch: ScheduledBatch, logits: FloatArray) -> list[tuple[Request, SampledToken]]:
        return [(request, request.sample(row)) for request, row in zip(self._sampling(batch), logits, strict=True)]

    def _finish(self, tokens: list[tuple[Request, SampledToken]]) -> None:
        """Append the tokens to their requests, queue the outputs, and remove requests that end."""
        now = time.perf_counter()
        self._counters.output_tokens += len(tokens)
        for request, token in tokens:
            output = request.push(token, now)
            self._outputs.put(output)
            if output.finished:
                self._remove(request)

    def _finish_in_flight(self) -> None:
        """Wait for the step in flight, if there is one, and finish it."""
        step = self._pipeline.take() if self._pipeline else None
        if step:
            self._finish_step(step)

    def _finish_step(self, step: StepInFlight) -> None:
        with self._aborting_on_failure(step.batch):
            tokens = step.tokens()
            self._scheduler.retire(step.batch)
            self._counters.count(step.batch.num_tokens, step.num_discarded_tokens)
            self._finish(tokens)

    @contextmanager
    def _aborting_on_failure(self, batch: ScheduledBatch) -> Iterator[None]:
        """Abort the requests of a step that fails; none of its blocks has entered the prefix index."""
        try:
            yield
        except BaseException:
            for entry in batch.entries:
                output = self.end(entry.sequence.id)
                if output:
                    self._outputs.put(output)
            raise

    def _sampling(self, batch: ScheduledBatch) -> list[Request]:
        """Requests that the step samples a token for, one for each row of its logits."""
        return [self._requests[entry.sequence.id] for entry in batch.entries if entry.samples]

    def _needs_logits(self, batch: ScheduledBatch) -> bool:
        return any(request.needs_logits for request in self._sampling(batch))

    @property
    def _in_flight(self) -> StepInFlight | None:
        return self._pipeline.in_flight if self._pipeline else None

    def _require_progress(self, batch: ScheduledBatch) -> None:
        """Raise EngineError when nothing can run and no step in flight could change that."""
        if self._requests and not batch.entries and not self._in_flight:
            raise EngineError(
                f"no block is free for the next step: an open iteration over prompt logits holds"
                f" {self._blocks.num_in_use} of {self._blocks.num_blocks}; finish or close it first"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; load it again to continue")

    def abort(self, request_id: int) -> Completion | None:
        """End a request and free its blocks; returns its output so far, or None when it is finished or unknown."""
        output = self.end(request_id)
        if output and request_id in self._outputs:
            self._outputs.put(output)
        return output.completion if output else None

    def end(self, request_id: int) -> RequestOutput | None:
        """As `abort`, for a caller that streams: returns the last output, with the text that was held back."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._remove(request)
        return request.abort(time.perf_counter())

    def _remove(self, request: Request) -> None:
        del self._requests[request.sequence.id]
        self._scheduler.remove(request.sequence)

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, keep_logits: bool = False
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: PromptList, params: SamplingParams | ParamsList | None = None, *, keep_logits: bool = False
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | PromptList,
        params: SamplingParams | ParamsList | None = None,
        *,
        keep_logits: bool = False,
    ) -> Completion | list[Completion]:
        """Complete a prompt, or a list of prompts together, with one set of parameters or one for each.

        A prompt is a text or a list of token ids. The completions of a list are in its order.
        """
        ids: list[int] = []
        try:
            for one, its_params in each_with_params(prompt, params):
                ids.append(self._open_queue(one, its_params, keep_logits))
            completions = [self._complete(request_id) for request_id in ids]
        finally:
            for request_id in ids:
                self._close_queue(request_id)
        return completions[0] if is_single(prompt) else completions

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, keep_logits: bool = False
    ) -> Iterator[RequestOutput]:
        """Yield a request's outputs as they arrive; the last has the completion. Closing the iterator aborts it.

        The prompt is checked now, and queued when the first output is read.
        """
        return self._stream(checked_prompt(self.encode(prompt), self.model), checked_params(params), keep_logits)

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, keep_logits: bool = False
    ) -> Completion:
        """Complete a conversation by the model's chat template. RequestError when it has none, or refuses it."""
        return self.generate(self.encode_chat(messages), params, keep_logits=keep_logits)

    def _stream(self, prompt: Prompt, params: SamplingParams | None, keep_logits: bool) -> Iterator[RequestOutput]:
        request_id = self._open_queue(prompt, params, keep_logits)
        try:
            while True:
                output = self._next_output(request_id)
                yield output
                if output.finished:
                    return
        finally:
            self._close_queue(request_id)

    def _open_queue(self, prompt: Prompt, params: SamplingParams | None, keep_logits: bool) -> int:
        request_id = self.add(prompt, params, keep_logits=keep_logits)
        self._outputs.open(request_id)
        return request_id

    def _close_queue(self, request_id: int) -> None:
        self.end(request_id)
        self._outputs.close(request_id)

    def _next_output(self, request_id: int) -> RequestOutput:
        while (output := self._outputs.next(request_id)) is None:
            self._require_open()
            self._advance()
        return output

    def _complete(self, request_id: int) -> Completion:
        while (completion := self._next_output(request_id).completion) is None:
            pass
        return completion

    def prompt_logits(self, token_ids: TokenIds) -> FloatArray:
        """Logits [tokens, vocab] float32 at every position of one sequence, at most the model's context long."""
        return np.concatenate([part.logits.copy() for part in self.iterate_prompt_logits([token_ids])])

    def iterate_prompt_logits(self, prompts: Iterable[TokenIds]) -> Iterator[PromptLogits]:
        """Yield the logits of many sequences in chunks, in order, several sequences to a step.

        A chunk is valid until the next one is read or the engine steps; at most `max_batch_tokens` rows exist at a
        time. EngineError when the engine stepped while chunks of one step were still unread: they are overwritten.
        """
        self._require_open()
        numbered = ((next(self._ids), checked_prompt(prompt, self.model, room=0)) for prompt in prompts)
        scheduler = Scheduler(self._blocks, **self._limits)
        return iterate_prompt_logits(self._executor, scheduler, self._builder, numbered, self._finish_in_flight)

    @property
    def device(self) -> DeviceFacts | None:
        """The GPU that it computes on, and its memory use; None on the CPU."""
        return self._executor.device

    def metrics(self) -> EngineMetrics:
        """What runs now, and counters since the engine was made."""
        return EngineMetrics(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            blocks_in_use=self._blocks.num_in_use,
            blocks_cached=self._blocks.num_cached,
            blocks_total=self._blocks.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            **asdict(self._counters),
        )

    def check(self) -> None:
        """Assert that no block is leaked, every request is scheduled, and exactly those in flight await a token."""
        self._blocks.check()
        scheduled = {*self._scheduler.running, *(sequence.id for sequence in self._scheduler.waiting)}
        assert scheduled == {*self._requests}
        rows = self._in_flight.rows if self._in_flight else {}
        assert all(request.sequence.num_in_flight == (number in rows) for number, request in self._requests.items())
