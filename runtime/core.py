"""The engine's heart: one step is schedule -> execute -> sample -> finish. `Engine` and `AsyncEngine` drive it."""

import itertools
import time
from collections.abc import Iterable, Iterator

from ingot.errors import EngineError, UsageError
from ingot.runtime.batch import Executor, FloatArray, Int64Array
from ingot.runtime.batching import BatchBuilder
from ingot.runtime.blocks import BlockManager
from ingot.runtime.metrics import EngineMetrics
from ingot.runtime.outputs import RequestOutput
from ingot.runtime.prefix_index import root_hash
from ingot.runtime.prompt_logits import PromptLogits, iterate_prompt_logits
from ingot.runtime.request import Request
from ingot.runtime.sampler import SampledToken
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.scheduler import ScheduledBatch, Scheduler
from ingot.runtime.tokenizer import Tokenizer


class EngineCore:
    """Token ids in, outputs out, with one executor that it owns and closes."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        *,
        max_sequences: int,
        prefix_cache: bool,
        identity: str,
    ) -> None:
        if max_sequences < 1:
            raise UsageError(f"max_sequences is {max_sequences}; it must be at least 1")
        self.model = executor.model
        self._executor = executor
        self._tokenizer = tokenizer
        self._limits = {"max_batch_tokens": executor.max_batch_tokens, "max_sequences": max_sequences}
        kv = executor.kv_geometry
        root = root_hash(identity, kv.model_dump_json())
        self._blocks = BlockManager(executor.num_blocks, kv.block_tokens, root=root, prefix_cache=prefix_cache)
        self._scheduler = Scheduler(self._blocks, **self._limits)
        self._builder = BatchBuilder(self._blocks, **self._limits)
        self._eos_token_ids = frozenset(self.model.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else set())
        self._requests: dict[int, Request] = {}
        self._outputs: list[RequestOutput] = []
        self._ids = itertools.count()
        self._num_steps = self._num_computed_tokens = self._num_output_tokens = 0
        self._closed = False

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one step."""
        return self._limits["max_batch_tokens"]

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or an output waits to be returned by `step`."""
        return bool(self._requests or self._outputs)

    def add(self, prompt: Int64Array, params: SamplingParams, *, keep_logits: bool) -> int:
        """Queue a request of a checked prompt; RequestError when the pool could never hold it."""
        self.require_open()
        request = Request(
            next(self._ids),
            prompt,
            params,
            self.model,
            self._tokenizer,
            self._eos_token_ids,
            keep_logits=keep_logits,
            now=time.perf_counter(),
        )
        self._scheduler.add(request.sequence)
        self._requests[request.sequence.id] = request
        return request.sequence.id

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request and free its blocks; its last output, or None when it is finished or unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._remove(request)
        return request.abort(time.perf_counter())

    def discard_outputs(self, request_id: int) -> None:
        """Drop a request's outputs that wait to be returned by `step`: nobody will read them."""
        self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def step(self) -> list[RequestOutput]:
        """Advance by one step. When it fails, its requests are aborted and the error is raised.

        The last outputs of requests that were aborted so are returned by the next call. EngineError, with nothing
        aborted, when an open `iterate_prompt_logits` holds the blocks that the next request needs.
        """
        batch = self._scheduler.schedule()
        if not batch.entries and self._scheduler.has_unfinished:
            raise EngineError(
                f"no block is free for the next step: an open iteration over prompt logits holds"
                f" {self._blocks.num_in_use} of {self._blocks.num_blocks}; finish or close it first"
            )
        if batch.entries:
            try:
                logits = self._execute(batch)
                tokens = self._sample(batch, logits)
                self._finish(batch, tokens)
            except BaseException:
                self._give_up(batch)
                raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def iterate_prompt_logits(self, prompts: Iterable[Int64Array]) -> Iterator[PromptLogits]:
        """Logits at every position of checked prompts, in chunks of at most one step; see `prompt_logits`."""
        self.require_open()
        numbered = ((next(self._ids), prompt) for prompt in prompts)
        scheduler = Scheduler(self._blocks, **self._limits)
        return iterate_prompt_logits(self._executor, scheduler, self._builder, numbered)

    def metrics(self) -> EngineMetrics:
        """What runs now, and counters since the start."""
        return EngineMetrics(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            blocks_in_use=self._blocks.num_in_use,
            blocks_cached=self._blocks.num_cached,
            blocks_total=self._blocks.num_blocks,
            num_steps=self._num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            computed_tokens=self._num_computed_tokens,
            prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            output_tokens=self._num_output_tokens,
        )

    def check(self) -> None:
        """Assert that no block is leaked or counted wrongly. For tests; slow."""
        self._blocks.check()
        assert {*self._scheduler.running, *(sequence.id for sequence in self._scheduler.waiting)} == {*self._requests}

    def require_open(self) -> None:
        """Raise EngineError when the engine is closed."""
        if self._closed:
            raise EngineError("the engine is closed; load it again to go on")

    def close(self) -> None:
        """Abort what is unfinished and give back memory and threads. Idempotent."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._outputs.clear()
        if not self._closed:
            self._closed = True
            self._executor.close()

    def _execute(self, batch: ScheduledBatch) -> FloatArray:
        """Logits [sampling sequences, vocab] of the step; afterwards its tokens are in the pool."""
        now = time.perf_counter()
        for entry in batch.entries:
            request = self._requests[entry.sequence.id]
            if request.first_scheduled_seconds is None:
                request.first_scheduled_seconds = now
        for source, target in batch.copies:
            self._executor.copy_block(source, target)
        logits = self._executor.forward(self._builder.build(batch))
        self._scheduler.complete(batch)
        self._num_steps += 1
        self._num_computed_tokens += batch.num_tokens
        return logits

    def _sample(self, batch: ScheduledBatch, logits: FloatArray) -> list[tuple[Request, SampledToken]]:
        sampling = (self._requests[entry.sequence.id] for entry in batch.entries if entry.samples)
        return [(request, request.sample(row)) for request, row in zip(sampling, logits, strict=True)]

    def _finish(self, batch: ScheduledBatch, tokens: list[tuple[Request, SampledToken]]) -> None:
        """Hand the tokens to their requests, and take out those that end."""
        now = time.perf_counter()
        self._num_output_tokens += len(tokens)
        for request, token in tokens:
            output = request.push(token, now)
            self._outputs.append(output)
            if output.finished:
                self._remove(request)

    def _give_up(self, batch: ScheduledBatch) -> None:
        """Abort the requests of a failed step; none of its blocks were entered into the prefix index."""
        for entry in batch.entries:
            output = self.abort(entry.sequence.id)
            if output:
                self._outputs.append(output)

    def _remove(self, request: Request) -> None:
        del self._requests[request.sequence.id]
        self._scheduler.remove(request.sequence)
