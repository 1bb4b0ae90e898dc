"""The engine as callers see it: texts or token ids in, completions out. The steps themselves are in `core`.

    engine = Engine.load("artifacts/demo")
    print(engine.generate("def read_file(path):", SamplingParams(max_tokens=64)).text)
    for output in engine.stream("import"):
        print(output.text, end="")

Output depends on the prompt, the parameters and the seed alone: batch mates, chunks, prefix hits and preemption do not
change it. An Engine belongs to one thread; `AsyncEngine` serves many callers.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, overload

import numpy as np

from ingot.artifact import Artifact, open_artifact
from ingot.errors import RequestError
from ingot.runtime.batch import DeviceFacts, Executor, FloatArray
from ingot.runtime.chat_template import Message
from ingot.runtime.core import EngineCore
from ingot.runtime.executors import ExecutorOptions, load_executor
from ingot.runtime.outputs import Completion, EngineMetrics, RequestOutput
from ingot.runtime.prompt_logits import PromptLogits
from ingot.runtime.prompts import (
    ParamsList,
    Prompt,
    PromptList,
    checked_params,
    checked_prompt,
    each_with_params,
    is_single,
)
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.tokenizer import Tokenizer


class Engine:
    """Serves generation requests with one executor, which it owns and closes. A context manager.

    tokenizer      None serves token ids only
    prefix_cache   keep the KV blocks of finished requests, and share those of common prompts
    identity       names the artifact in the hashes of cached blocks
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        *,
        max_sequences: int = 64,
        prefix_cache: bool = True,
        identity: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.model = executor.model
        self.core = EngineCore(
            executor, tokenizer, max_sequences=max_sequences, prefix_cache=prefix_cache, identity=identity
        )
        self._mailboxes: dict[int, deque[RequestOutput]] = {}  # outputs of requests that `stream`, `generate` made
        self._unclaimed: list[RequestOutput] = []  # outputs for `step` to return

    @classmethod
    def load(
        cls,
        artifact: Artifact | Path | str,
        *,
        kv_blocks: int | None = None,
        kv_bytes: int | None = None,
        max_batch_tokens: int | None = None,
        max_sequences: int | None = None,
        prefix_cache: bool = True,
        num_threads: int | None = None,
    ) -> "Engine":
        """Open an artifact (verified, unless it is open already) and make its engine.

        The KV pool has `kv_blocks` blocks, or as many as fit `kv_bytes`, or what the free memory of the machine or the
        card suggests. A step has at most `max_batch_tokens` tokens of `max_sequences` sequences, by default what the
        artifact is made for. `num_threads` is for engines on the CPU.
        Raises ArtifactError, EngineError, and UsageError for a limit that cannot be.
        """
        options = ExecutorOptions(kv_blocks, kv_bytes, max_batch_tokens, max_sequences, num_threads)
        opened = artifact if isinstance(artifact, Artifact) else open_artifact(artifact)
        tokenizer = Tokenizer.load(opened.path / "tokenizer") if opened.has("tokenizer/tokenizer.json") else None
        loaded = load_executor(opened, options)
        return cls(
            loaded.executor,
            tokenizer,
            max_sequences=loaded.max_sequences,
            prefix_cache=prefix_cache,
            identity=opened.manifest.identity,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is unfinished and give back memory and threads. Idempotent."""
        for request_id in list(self._mailboxes):
            self.abort(request_id)
        self._unclaimed.clear()
        self.core.close()

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Tokens of a text; token ids stay as they are. RequestError for a text where there is no tokenizer."""
        if not isinstance(prompt, str):
            return prompt  # type: ignore[return-value]  # an array of integers serves as a sequence of them
        if self.tokenizer is None:
            raise RequestError("the artifact has no tokenizer, so it takes no text; give the prompt as token ids")
        return self.tokenizer.encode(prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to where the model's answer begins."""
        if self.tokenizer is None:
            raise RequestError("the artifact has no tokenizer, so it takes no messages; give a prompt of token ids")
        return self.tokenizer.encode_chat(messages)

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, keep_logits: bool = False) -> int:
        """Queue a request and return its id; its outputs come from `step`. `keep_logits` is for comparisons.

        RequestError when it can never be served: an empty prompt, one that fills the model's context, a token
        outside the vocabulary, or more KV blocks than the pool has. Output that would leave the context ends with
        it, for the reason "length".
        """
        self.core.require_open()
        tokens = checked_prompt(self.encode(prompt), self.model)
        return self.core.add(tokens, checked_params(params), keep_logits=keep_logits)

    def abort(self, request_id: int) -> Completion | None:
        """End a request and free its blocks; returns what it has so far, or None when it is finished or unknown."""
        output = self.core.abort(request_id)
        if output and request_id in self._mailboxes:
            self._mailboxes[request_id].append(output)
        return output.completion if output else None

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, a step is in flight, or an output waits to be returned by `step`."""
        return self.core.has_unfinished or bool(self._unclaimed)

    def step(self) -> list[RequestOutput]:
        """Advance by one step; return the outputs of requests made by `add`. Those of `stream` go to their caller.

        Where the executor queues steps, one is queued and the outputs are those of the one before: the first call
        returns none. When the executor or the sampler fails, the requests of that step are aborted and the error is
        raised; their last outputs are returned by the next call.
        """
        self.core.require_open()
        self._advance()
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

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

        A prompt is a text or a list of token ids. Completions of a list come in its order.
        """
        ids: list[int] = []
        try:
            for one, its_params in each_with_params(prompt, params):
                ids.append(self._open_mailbox(one, its_params, keep_logits))
            completions = [self._complete(request_id) for request_id in ids]
        finally:
            for request_id in ids:
                self._close_mailbox(request_id)
        return completions[0] if is_single(prompt) else completions

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, keep_logits: bool = False
    ) -> Iterator[RequestOutput]:
        """Yield a request's outputs as they come; the last has the completion. Closing the iterator aborts it.

        The prompt is checked now, and queued when the first output is asked for.
        """
        return self._stream(checked_prompt(self.encode(prompt), self.model), checked_params(params), keep_logits)

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, keep_logits: bool = False
    ) -> Completion:
        """Complete a conversation by the model's chat template. RequestError when it has none, or refuses it."""
        return self.generate(self.encode_chat(messages), params, keep_logits=keep_logits)

    def prompt_logits(self, token_ids: Sequence[int]) -> FloatArray:
        """Logits [tokens, vocab] float32 at every position of one sequence, at most the model's context long."""
        return np.concatenate([part.logits.copy() for part in self.iterate_prompt_logits([token_ids])])

    def iterate_prompt_logits(self, prompts: Iterable[Sequence[int]]) -> Iterator[PromptLogits]:
        """Yield the logits of many sequences in chunks, in order, several sequences to a step.

        A chunk is valid until the next one is drawn or the engine steps; at most `max_batch_tokens` rows exist at a
        time. EngineError when the engine stepped while chunks of one step were still to come: they are gone.
        """
        checked = (checked_prompt(prompt, self.model, room=0) for prompt in prompts)
        return self.core.iterate_prompt_logits(checked)

    @property
    def device(self) -> DeviceFacts | None:
        """The card that it computes on, and what it took of its memory; None on the CPU."""
        return self.core.device

    def metrics(self) -> EngineMetrics:
        """What runs now, and counters since the engine was made."""
        return self.core.metrics()

    def _stream(self, prompt: Prompt, params: SamplingParams | None, keep_logits: bool) -> Iterator[RequestOutput]:
        request_id = self._open_mailbox(prompt, params, keep_logits)
        try:
            while True:
                output = self._next_output(request_id)
                yield output
                if output.finished:
                    return
        finally:
            self._close_mailbox(request_id)

    def _advance(self) -> None:
        for output in self.core.step():
            self._mailboxes.get(output.request_id, self._unclaimed).append(output)

    def _open_mailbox(self, prompt: Prompt, params: SamplingParams | None, keep_logits: bool) -> int:
        request_id = self.add(prompt, params, keep_logits=keep_logits)
        self._mailboxes[request_id] = deque()
        return request_id

    def _close_mailbox(self, request_id: int) -> None:
        self.abort(request_id)
        self.core.discard_outputs(request_id)
        del self._mailboxes[request_id]

    def _next_output(self, request_id: int) -> RequestOutput:
        mailbox = self._mailboxes[request_id]
        while not mailbox:
            self.core.require_open()
            self._advance()
        return mailbox.popleft()

    def _complete(self, request_id: int) -> Completion:
        while (completion := self._next_output(request_id).completion) is None:
            pass
        return completion
