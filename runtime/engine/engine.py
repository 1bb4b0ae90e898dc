"""The engine: texts or token ids in, completions out. The steps that serve them are in `step_loop`.

    engine = Engine.load("artifacts/demo")
    print(engine.generate("def read_file(path):", SamplingParams(max_tokens=64)).text)
    for output in engine.stream("import"):
        print(output.text, end="")

Output depends on prompt, parameters and seed alone (batch invariance): the rest of the batch and its failures, chunked
prefill, prefix hits, preemption and speculation do not change it. One thread may use an Engine at a time: a call while
another thread is in one raises EngineError. Any thread may close it. `AsyncEngine` has many callers.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import overload

import numpy as np

from ingot.artifact import Artifact
from ingot.errors import explain_threads
from ingot.runtime.asking.outputs import Completion, RequestOutput, raise_failure
from ingot.runtime.asking.prompts import (
    ParamsList,
    Prompt,
    PromptList,
    TokenIds,
    Tools,
    Variables,
    checked_prompt,
    each_with_params,
    is_single,
)
from ingot.runtime.asking.request_options import OptionsList, RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine_core import EngineCore
from ingot.runtime.engine.open_tiers import open_tiers
from ingot.runtime.executors import load_executor
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.options import EngineOptions, takes_options
from ingot.runtime.requests.beam_search import BeamParams, checked_beam_params
from ingot.runtime.requests.engine_request import EngineRequest
from ingot.runtime.speculation.loading import load_speculator
from ingot.runtime.steps.prompt_logits import PromptLogits, iterate_prompt_logits
from ingot.runtime.text.messages import Message
from ingot.runtime.text.tokenizer import Tokenizer


class Engine(EngineCore):
    """An engine for one caller, who waits: for completions, or for each output of a stream. A context manager."""

    @classmethod
    @takes_options(EngineOptions)
    def load(cls, artifact: Artifact, options: EngineOptions) -> "Engine":
        """Open an artifact, verify it unless it is open already, and load its engine. Options: see EngineOptions.

        Raises ArtifactError, EngineError, and UsageError for an option that is out of range.
        """
        tokenizer = Tokenizer.of_artifact(artifact, options.chat_template_file)
        with ExitStack() as opened_parts, explain_threads("the engine"):
            executor = load_executor(artifact, options)
            opened_parts.callback(executor.close)
            speculator = load_speculator(options, artifact, executor)
            if speculator:
                opened_parts.callback(speculator.close)
            engine = cls(
                executor,
                tokenizer,
                prefix_cache=options.prefix_cache,
                max_requests=options.max_requests,
                max_waiting_tokens=options.max_waiting_tokens,
                reject_late=options.reject_late,
                policy=options,
                max_prompt_chars=options.max_prompt_chars,
                max_host_adapters=options.max_host_adapters,
                identity=artifact.manifest.identity,
                speculator=speculator,
                tiers=partial(open_tiers, options=options),
            )
            opened_parts.pop_all()  # the engine closes them
            opened_parts.callback(engine.close)
            for name, path in options.adapters.items():
                engine.load_adapter(name, path)
            opened_parts.pop_all()
            return engine

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: PromptList,
        params: SamplingParams | ParamsList | None = None,
        *,
        options: RequestOptions | OptionsList | None = None,
        keep_logits: bool = False,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | PromptList,
        params: SamplingParams | ParamsList | None = None,
        *,
        options: RequestOptions | OptionsList | None = None,
        keep_logits: bool = False,
    ) -> Completion | list[Completion]:
        """Complete a prompt, or a list of prompts together, with one set of parameters and options or one for each.

        A prompt is a text or a list of token ids. The completions of a list are in its order. With `n` above 1 the
        completion is choice 0, and its `choices` are all of them. RequestFailed when a request or choice fails; the
        other choices and those of a list are all completed first, and the error has their `completions`.
        """
        ids: list[int] = []
        try:
            for one, its_params, its_options in each_with_params(prompt, params, options):
                ids.append(self._open_queue(EngineRequest(one, its_params, its_options, keep_logits)))
            completions = [self._complete(request_id) for request_id in ids]
        finally:
            for request_id in ids:
                self._close_queue(request_id)
        choices = [choice for completion in completions for choice in completion.choices]
        raise_failure(choices, "prompts" if len(choices) == len(completions) else "choices")
        return completions[0] if is_single(prompt) else completions

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
    ) -> Generator[RequestOutput, None, None]:
        """Yield a request's outputs as they arrive; the last has the result. Closing the iterator aborts it.

        With `n` above 1 each output belongs to the choice `index`, whose last one has its completion. With `best_of`
        above n there is one output for each of the n best, at the end.

        The prompt is checked now, and queued when the first output is read. RequestFailed when the request fails.
        """
        request = EngineRequest.of(prompt, params, options, keep_logits)
        return self._stream(request.encoded(checked_prompt(self.encode(prompt), self.model)))

    def beam_search(
        self, prompt: Prompt, params: BeamParams | None = None, *, options: RequestOptions | None = None
    ) -> Completion:
        """Search for the likeliest sequences after a prompt, a text or token ids. RequestFailed when it fails.

        The completion is the best; its `choices` are all that `params.num_return` asks for, each with its `score`. With
        a width of 1 it is greedy decoding.
        """
        request_id = self._open_queue(EngineRequest.of(prompt, checked_beam_params(params), options))
        try:
            result = self._complete(request_id)
        finally:
            self._close_queue(request_id)
        raise_failure([result])
        return result

    def generate_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        variables: Variables | None = None,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
    ) -> Completion:
        """Complete a conversation; see `encode_chat` and `generate`."""
        prompt = self.encode_chat(messages, tools=tools, variables=variables)
        return self.generate(prompt, params, options=options, keep_logits=keep_logits)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        variables: Variables | None = None,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
    ) -> Generator[RequestOutput, None, None]:
        """Yield the outputs of a conversation's answer; see `encode_chat` and `stream`."""
        prompt = self.encode_chat(messages, tools=tools, variables=variables)
        return self.stream(prompt, params, options=options, keep_logits=keep_logits)

    def _stream(self, request: EngineRequest) -> Generator[RequestOutput, None, None]:
        request_id = self._open_queue(request)
        try:
            while True:
                output = self._next_output(request_id)
                if not output.error:
                    yield output
                if output.result:
                    raise_failure(output.result.choices)
                    return
        finally:
            self._close_queue(request_id)

    def _open_queue(self, request: EngineRequest) -> int:
        request_id = self.submit(request)
        try:
            self._outputs.open(request_id)
        except BaseException:  # as Ctrl-C: the caller does not have the id yet
            self.end(request_id)
            raise
        return request_id

    def _close_queue(self, request_id: int) -> None:
        self.end(request_id)
        self._outputs.close(request_id)

    def _next_output(self, request_id: int) -> RequestOutput:
        while (output := self._outputs.next(request_id)) is None:
            self._alone(self._step)
        return output

    def _complete(self, request_id: int) -> Completion:
        while (result := self._next_output(request_id).result) is None:
            pass
        return result

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
        loop = self._loop
        chunks = iterate_prompt_logits(self._executor, loop.new_scheduler(), loop.builder, numbered, loop.quiesce)
        return self._each_alone(chunks)

    def _each_alone(self, chunks: Iterator[PromptLogits]) -> Generator[PromptLogits, None, None]:
        """Yield chunks, each of which is computed as a step is."""
        assert isinstance(chunks, Generator)
        try:
            while (chunk := self._alone(lambda: next(chunks, None))) is not None:
                yield chunk
        finally:
            with self._lock:
                chunks.close()
