"""An engine without the calls that wait: requests in by `add`, the outputs of each `step` out.

`engine.Engine` adds the calls of one caller, who waits for completions; `AsyncEngine` steps one for many callers.
"""

import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from ingot.artifact.programs.projections import Projection
from ingot.errors import EngineError, UsageError
from ingot.runtime.adapters import Adapter
from ingot.runtime.asking.outputs import Completion, RequestOutput
from ingot.runtime.asking.prompt_encoder import PromptEncoder
from ingot.runtime.asking.prompts import ChatPrompt, Prompt, TokenIds, Tools, Variables, checked_prompt
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.clock import SYSTEM_CLOCK, Clock
from ingot.runtime.constraints.compiler import ConstraintCompiler, Grammar
from ingot.runtime.engine.adapter_registry import AdapterFacts, AdapterRegistry
from ingot.runtime.engine.admission import AdmissionControl
from ingot.runtime.engine.open_tiers import OpenTiers
from ingot.runtime.executors import (
    AdaptingExecutor,
    DeviceFacts,
    Executor,
    ObservedExecutor,
    OverlappingExecutor,
    StageFacts,
    num_fast_blocks,
)
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.keys import PrefixScope, prefix_scope, root_hash
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.options import checked_seconds
from ingot.runtime.requests.beam_search import BeamParams
from ingot.runtime.requests.engine_request import EngineRequest, GenerationParams
from ingot.runtime.requests.request import Request
from ingot.runtime.requests.sampler import choice_params
from ingot.runtime.scheduling_policy import SchedulingPolicy
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.steps.beams import BeamGroup
from ingot.runtime.steps.metrics import EngineMetrics
from ingot.runtime.steps.side_state import state_manager
from ingot.runtime.steps.step_loop import StepLoop
from ingot.runtime.text.messages import Message
from ingot.runtime.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_MOVED_BYTES = 32 * 2**20
"""Bytes of the blocks that move between the parts of the pool in one step, at most; but always _MOVES blocks."""
_MOVES = 4


class EngineCore:
    """Serves generation requests with one executor, which it owns and closes. A context manager.

    tokenizer       None serves token ids only
    max_sequences   most sequences in a step; by default what the executor allows
    prefix_cache    keep the KV blocks of finished requests, and share those of common prompts
    identity        identifies the artifact in the hashes of cached blocks
    clock           monotonic seconds: of metrics, timeouts and measured costs
    speculator      drafts tokens and is closed with the engine; None: one token at a time
    policy          how it schedules
    tiers           host memory and disk for its blocks; see `runtime/engine/open_tiers.py`

    `max_requests`, `max_waiting_tokens`, `reject_late`, `max_prompt_chars` and `max_host_adapters` are those of
    EngineOptions.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        *,
        max_sequences: int | None = None,
        prefix_cache: bool = True,
        max_requests: int | None = None,
        max_waiting_tokens: int | None = None,
        reject_late: bool = False,
        policy: SchedulingPolicy | None = None,
        max_prompt_chars: int | None = None,
        max_host_adapters: int | None = None,
        identity: str = "",
        clock: Clock = SYSTEM_CLOCK,
        speculator: Speculator | None = None,
        tiers: OpenTiers | None = None,
    ) -> None:
        max_sequences = executor.max_sequences if max_sequences is None else max_sequences
        if max_sequences < 1:
            raise UsageError(f"max_sequences is {max_sequences}; it must be at least 1")
        self.tokenizer = tokenizer
        self.model = executor.model
        self.max_batch_tokens = executor.max_batch_tokens
        self._prompts = PromptEncoder(tokenizer, self.model, max_prompt_chars)
        self.constraints = ConstraintCompiler(tokenizer, self.model.vocab_size)
        kv = executor.kv_geometry
        self._root = root_hash(identity, kv.format_digest(executor.key_order), kernels=executor.kernel_version)
        self._prefix_cache = prefix_cache
        self._executor = executor
        self._blocks = BlockManager(
            executor.num_blocks,
            kv.block_tokens,
            states=state_manager(executor),
            num_fast=num_fast_blocks(executor),
            most_moves=max(_MOVES, _MOVED_BYTES // kv.block_bytes),
        )
        self.clock = clock
        self._speculator = speculator
        self._tiers = tiers(executor, self._blocks, self._root, clock=clock) if tiers else None
        self._loop = StepLoop(
            executor,
            self._blocks,
            max_sequences=max_sequences,
            policy=policy,
            clock=clock,
            speculator=speculator,
            tiers=self._tiers,
        )
        self._outputs = self._loop.requests.outputs
        self._adapters = AdapterRegistry(executor, max_host_adapters)
        self.admission = AdmissionControl(
            self._loop.scheduler,
            self._loop.requests.rates,
            self._loop.requests.metrics,
            max_requests=max_requests,
            max_waiting_tokens=max_waiting_tokens,
            reject_late=reject_late,
            clock=clock,
        )
        self._eos_token_ids = frozenset(self.model.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else set())
        self._ids = itertools.count()
        self._closed = False
        self._is_freed = False
        self._lock = threading.RLock()  # held while a call uses what steps change
        self._turn = threading.RLock()  # held by calls that wait for the lock; the next step lets them go first
        self._user: int | None = None  # thread of the call that has the lock; None between calls

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, flush_seconds: float | None = None) -> None:
        """Abort unfinished requests, free memory and threads. Idempotent.

        Any thread may call it: it waits for the step that another thread makes, whose next call raises EngineError.

        With a disk tier, first write the blocks that the pool and host memory hold to it, for at most `flush_seconds`;
        None: as long as it takes, unless none is written for half a minute. What is left is logged, with its number.
        """
        checked_seconds("flush_seconds", flush_seconds)
        if self._user == threading.get_ident():
            raise EngineError(
                "close() was called inside a step of this engine, as by a signal handler; raise an exception there, and"
                " close the engine after the call that it ends"
            )
        self._closed = True  # now, so that no step begins while this waits for one
        with self._turn, self._lock:
            self._loop.close(flush_seconds)
            if not self._is_freed:
                self._is_freed = True
                self._executor.close()
                self.constraints.close()
                if self._speculator:
                    self._speculator.close()

    def _alone(self, function: Callable[[], _T]) -> _T:
        """Call a function while no other call runs. EngineError when another thread is in one."""
        before, caller = self._user, threading.get_ident()
        if before not in (None, caller):
            raise EngineError(
                "two threads use this engine at the same time; one thread may use an Engine at a time: let each wait"
                " for the other, or load an AsyncEngine, which serves many callers at once"
            )
        if before is None:
            with self._turn:  # a thread that waits to end a request or the engine goes first
                pass
        with self._lock:
            try:
                self._user = caller
                return function()
            finally:
                self._user = before

    def _step(self) -> None:
        if self._closed or self._loop.requests.error:
            self._require_open()
        self._loop.step()

    def encode(self, prompt: Prompt | ChatPrompt) -> TokenIds:
        """Tokens of a text or a conversation; token ids are returned unchanged.

        RequestError for a text if there is no tokenizer, and, before it is encoded, for one that is too long.
        """
        return self._prompts.encode(prompt)

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Tools | None = None, variables: Variables | None = None
    ) -> list[int]:
        """Tokens of a conversation, by the model's chat template, up to the start of the model's answer.

        `tools` are JSON schemas of functions; `variables` are passed to the template, as {"enable_thinking": False}.
        RequestError when the model has no template, and when the template refuses the conversation.
        """
        return self._prompts.encode_chat(ChatPrompt(messages, tools, variables))

    def compile(self, params: GenerationParams | None) -> Grammar | None:
        """The compiled constraint of parameters; None without one. Any thread may call it.

        RequestError when it cannot be compiled. The first constraint also reads the vocabulary.
        """
        if not isinstance(params, SamplingParams | BeamParams) or params.constraint is None:
            return None
        return self.constraints.compile(params.constraint)

    def add(
        self,
        prompt: Prompt,
        params: GenerationParams | None = None,
        *,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
        arrival_seconds: float | None = None,
        grammar: Grammar | None = None,
    ) -> int:
        """Queue a request and return its id; `step` returns its outputs. `keep_logits` adds them to the completion.

        `arrival_seconds` is when it arrived, by the engine's `clock`; None: now. Output that would exceed the context
        ends there, with the reason "length". Raises RequestError when the request can never be served: an empty prompt,
        one that fills the model's context, a token outside the vocabulary, or more KV blocks than the pool has.
        Overloaded when the engine has `max_requests` or `max_waiting_tokens` already, and with `reject_late` when there
        is too much work before the request for its timeout. With BeamParams it is a beam search, whose outputs come at
        its end, one for each sequence that it returns, without logits: `keep_logits` is refused with RequestError.

        `grammar` is the constraint of the parameters as `compile` returns it; None: it is compiled now.
        """
        return self.submit(EngineRequest.of(prompt, params, options, keep_logits, arrival_seconds), grammar)

    def submit(self, request: EngineRequest, grammar: Grammar | None = None) -> int:
        """Queue a request that is one value; see `add`."""
        request_id = next(self._ids)
        try:
            self._alone(partial(self._add, request_id, request, grammar))
        except BaseException:  # as Ctrl-C, which may come when the request is queued already
            self.end(request_id)
            raise
        return request_id

    def _add(self, request_id: int, asked: EngineRequest, grammar: Grammar | None) -> None:
        self._require_open()
        self.admission.require_place(len(self._loop.requests))
        params = asked.params
        asked = asked.encoded(checked_prompt(self.encode(asked.prompt), self.model)).arrived(self.clock())
        new = self._request_factory(request_id, asked, grammar or self.compile(params))
        if isinstance(params, BeamParams):
            group = BeamGroup(params, self._eos_token_ids, partial(new, params.sampling))
            self.admission.require_room(group.first.sequence, group.first.deadline_seconds)
            self._loop.requests.add_search(group)
            return
        choices = [new(each, index) for index, each in enumerate(choice_params(params))]
        self.admission.require_room(choices[0].sequence, choices[0].deadline_seconds)
        if len(choices) > 1:
            self._loop.requests.add_choices(choices)
        else:
            self._loop.requests.add(choices[0])

    def _request_factory(
        self, request_id: int, asked: EngineRequest, grammar: Grammar | None
    ) -> Callable[..., Request]:
        """Makes the choices or beams of one request from parameters and index. The first has the request's id."""
        sequence_ids = itertools.chain([request_id], self._ids)
        adapter = None if asked.options.adapter is None else self._adapters.find(asked.options.adapter)
        scope = self._scope(asked.options, adapter)  # of all of them, so that they find the prompt's blocks

        def new(params: SamplingParams, index: int = 0) -> Request:
            return Request(
                request_id,
                asked,
                params,
                self.model,
                self.tokenizer,
                self._eos_token_ids,
                scope=scope,
                index=index,
                sequence_id=next(sequence_ids),
                grammar=grammar,
                adapter=adapter,
            )

        return new

    def _scope(self, options: RequestOptions, adapter: Adapter | None) -> PrefixScope:
        shared = self._prefix_cache and options.prefix_cache
        digest = adapter.digest if adapter else ""
        return prefix_scope(self._root, cache_salt=options.cache_salt, adapter=digest, shared=shared)

    @property
    def adapters(self) -> Mapping[str, AdapterFacts]:
        """LoRA adapters that requests can name (`RequestOptions.adapter`)."""
        return dict(self._adapters.all)

    @property
    def projections(self) -> Sequence[Projection]:
        """Return what an adapter can change; empty where the engine computes none, or the artifact does not say."""
        return self._executor.projections if isinstance(self._executor, AdaptingExecutor) else ()

    def load_adapter(self, name: str, path: Path | str | os.PathLike[str], *, replace: bool = False) -> AdapterFacts:
        """Load a LoRA adapter that PEFT saved, for requests that name it; one that is loaded already stays as it is.

        AdapterError when it cannot be used with this artifact and engine, and for a name that another adapter has,
        unless `replace`: then later requests get the new one, those that are open keep theirs.
        """
        return self.register_adapter(self.read_adapter(name, path), path, replace=replace)

    def read_adapter(self, name: str, path: Path | str | os.PathLike[str]) -> Adapter:
        """Read what `register_adapter` takes. Any thread may call it."""
        return self._adapters.read(name, Path(path))

    def register_adapter(
        self, adapter: Adapter, path: Path | str | os.PathLike[str], *, replace: bool = False
    ) -> AdapterFacts:
        """Let requests name an adapter that was read; see `load_adapter`."""
        self._require_open()
        self._alone(lambda: self._drop_adapter(self._adapters.add(adapter, Path(path), replace=replace)))
        return self._adapters.require(adapter.name)

    def unload_adapter(self, name: str) -> None:
        """Refuse the name from now on; requests that are open keep their adapter. AdapterError for an unknown name."""
        self._alone(lambda: self._drop_adapter(self._adapters.remove(name)))

    def _drop_adapter(self, digest: str | None) -> None:
        if digest is not None and self._loop.adapters:
            self._loop.adapters.drop(digest)

    def call_when_cores_are_free(self, function: Callable[[], None]) -> None:
        """Have a function called once in each step, where work that is given to other processes delays it least.

        That is when an executor on the CPU has computed, as what follows takes one core, and while a GPU computes.
        """
        self._loop.when_cores_are_free = function

    @property
    def leaves_a_core(self) -> bool:
        """Whether other threads of this process find a core, and the interpreter, while a step is computed."""
        return isinstance(self._executor, ObservedExecutor) and self._executor.leaves_a_core

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, a step is in flight, or `step` has an output to return."""
        return bool(self._loop.requests or self._loop.in_flight or self._outputs.has_any)

    def step(self) -> list[RequestOutput]:
        """Advance by one step; return the outputs of requests made by `add`. `stream` and `generate` get their own.

        A pipelined executor queues this step and the outputs are those of the one before: the first call returns none.
        A request, or a choice of one, that fails ends with an output that has its `error`, and the others are not
        affected. If the executor is broken, all requests end so, and `error` says why. EngineError when that was so
        before, and when an open `iterate_prompt_logits` holds the blocks that the next request needs.
        """
        if not (self._loop.requests.error and self._outputs.has_any):  # then another call found it broken
            self._alone(self._step)
        return self._outputs.take()

    @property
    def error(self) -> EngineError | None:
        """Why the engine takes no more requests, after its executor failed; None while it works."""
        return self._loop.error

    def abort(self, request_id: int) -> Completion | None:
        """End a request and free its blocks; returns its output so far, or None when it is finished or unknown."""
        outputs = self.end(request_id)
        if request_id in self._outputs:
            for output in outputs:
                self._outputs.put(output)
        return outputs[-1].result if outputs else None

    def end(self, request_id: int) -> list[RequestOutput]:
        """As `abort`, for a caller that streams: returns the last outputs, with the text that was held back.

        It waits for the step that another thread makes.
        """
        if self._user == threading.get_ident():  # a stream that is garbage is closed inside a step
            return self._loop.requests.end(request_id)
        with self._turn, self._lock:
            return self._loop.requests.end(request_id)

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; load it again to continue")
        if self.error:
            raise EngineError(str(self.error)) from self.error

    @property
    def device(self) -> DeviceFacts | None:
        """The GPU that it computes on, and its memory use; None on the CPU."""
        return self._executor.device

    @property
    def tiers(self) -> TierManager | None:
        """What moves its blocks to host memory and disk; None without. For verification and benchmarks."""
        return self._tiers

    def flush_kv(self, seconds: float | None = None) -> bool:
        """Save all cached KV blocks to the tiers, and wait until they are stored; returns whether all were in time.

        seconds   most that it takes; None: as long as it takes, unless none is stored for half a minute

        Without it a block whose place a step needs before it was saved is computed again later. `close` does it for the
        disk. True without tiers. EngineError if a thread that moves blocks has died.
        """
        checked_seconds("seconds", seconds)
        tiers = self._tiers
        return self._alone(lambda: tiers.flush(seconds)) if tiers else True

    def metrics(self) -> EngineMetrics:
        """What runs now, and totals since the engine was made."""
        scheduler, pages = self._loop.scheduler, getattr(self._executor, "weight_pages", None)  # of executors on a CPU
        stages = self._executor.stages if isinstance(self._executor, OverlappingExecutor) else StageFacts()
        return EngineMetrics(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            waiting_prompt_tokens=scheduler.waiting.num_prompt_tokens,
            blocks_in_use=self._blocks.num_in_use,
            blocks_cached=self._blocks.num_cached,
            blocks_total=self._blocks.num_blocks,
            blocks_slow=self._blocks.num_slow,
            blocks_slow_in_use=self._blocks.num_slow_in_use,
            slow_read_seconds=scheduler.slow_read_seconds,
            blocks_moved={"down": self._blocks.num_moved_down, "up": self._blocks.num_moved_up},
            block_bytes=self._executor.kv_geometry.block_bytes,
            block_tokens=self._executor.kv_geometry.block_tokens,
            kv_dtype=self._executor.kv_geometry.type_in_words,
            prefix_cache=self._prefix_cache,
            max_sequences=scheduler.max_sequences,
            max_batch_tokens=scheduler.max_batch_tokens,
            context_tokens=self.model.context_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
            num_yields=scheduler.num_yields,
            num_batch_full=scheduler.num_batch_full,
            num_pool_full=scheduler.num_pool_full,
            num_threads=getattr(self._executor, "num_threads", 0),  # executors on a GPU have none
            weight_bytes=pages.num_bytes if pages and pages.huge_bytes is not None else 0,
            weight_huge_bytes=pages.huge_bytes or 0 if pages else 0,
            num_stages=stages.num_running,
            num_stage_restarts=stages.num_restarts,
            stage_problem=stages.problem,
            prefix_query_tokens=scheduler.num_prefix_query_tokens,
            speculation=self._speculator.counters.snapshot() if self._speculator else None,
            prefix_hit_tokens=scheduler.prefix_hit_tokens.total(),
            prefix_hit_tokens_by_tier=dict(scheduler.prefix_hit_tokens),
            adapters_running=self._loop.count_adapters(scheduler.running.values()),
            adapters_waiting=self._loop.count_adapters(scheduler.waiting),
            num_adapter_loads=self._loop.adapters.num_loads if self._loop.adapters else 0,
            max_adapters=self._loop.adapters.num_slots if self._loop.adapters else 0,
            kv_tiers=self._tiers.metrics() if self._tiers else None,
            **self._loop.requests.metrics.snapshot(),
        )

    def check(self) -> None:
        """Assert that no block is leaked, every request is scheduled, and exactly those in flight await a token."""
        self._loop.check()
