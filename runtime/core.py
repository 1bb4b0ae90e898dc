"""The engine of token ids: blocks, requests and metrics around the `step_loop`. `Engine` and `AsyncEngine` drive it."""

import itertools
import time
from collections.abc import Iterable, Iterator

from ingot.errors import EngineError, UsageError
from ingot.runtime.batch import BatchBuilder, DeviceFacts, Executor, Int64Array
from ingot.runtime.blocks import BlockManager, root_hash
from ingot.runtime.outputs import EngineMetrics, RequestOutput
from ingot.runtime.prompt_logits import PromptLogits, iterate_prompt_logits
from ingot.runtime.request import Request
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.step_loop import StepLoop
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
        self._loop = StepLoop(executor, self._scheduler, self._builder)
        self._eos_token_ids = frozenset(self.model.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else set())
        self._ids = itertools.count()
        self._closed = False

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one step."""
        return self._limits["max_batch_tokens"]

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, a step is in flight, or an output waits to be returned by `step`."""
        return self._loop.has_unfinished

    @property
    def device(self) -> DeviceFacts | None:
        """The executor's card."""
        return self._executor.device

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
        self._loop.add(request)
        return request.sequence.id

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request and free its blocks; its last output, or None when it is finished or unknown."""
        return self._loop.abort(request_id)

    def discard_outputs(self, request_id: int) -> None:
        """Drop a request's outputs that wait to be returned by `step`: nobody will read them."""
        self._loop.discard_outputs(request_id)

    def step(self) -> list[RequestOutput]:
        """Advance by one step; see `StepLoop.step`."""
        return self._loop.step()

    def iterate_prompt_logits(self, prompts: Iterable[Int64Array]) -> Iterator[PromptLogits]:
        """Logits at every position of checked prompts, in chunks of at most one step; see `prompt_logits`."""
        self.require_open()
        numbered = ((next(self._ids), prompt) for prompt in prompts)
        scheduler = Scheduler(self._blocks, **self._limits)
        return iterate_prompt_logits(self._executor, scheduler, self._builder, numbered, self._loop.drain)

    def metrics(self) -> EngineMetrics:
        """What runs now, and counters since the start."""
        counters = self._loop.counters
        return EngineMetrics(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            blocks_in_use=self._blocks.num_in_use,
            blocks_cached=self._blocks.num_cached,
            blocks_total=self._blocks.num_blocks,
            num_steps=counters.num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            computed_tokens=counters.computed_tokens,
            discarded_tokens=counters.discarded_tokens,
            prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            output_tokens=counters.output_tokens,
        )

    def check(self) -> None:
        """Assert that no block is leaked or counted wrongly. For tests; slow."""
        self._blocks.check()
        self._loop.check()

    def require_open(self) -> None:
        """Raise EngineError when the engine is closed."""
        if self._closed:
            raise EngineError("the engine is closed; load it again to go on")

    def close(self) -> None:
        """Abort what is unfinished and give back memory and threads. Idempotent."""
        self._loop.abandon()
        if not self._closed:
            self._closed = True
            self._executor.close()
