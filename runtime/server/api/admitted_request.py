"""A request that was parsed, admitted and encoded: it generates for its prompts, and counts tokens for its API key."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ingot.runtime.asking.outputs import Completion, RequestOutput
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.requests.engine_request import EngineRequest
from ingot.runtime.server.api.answers import Answer
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.rate_limits import Holder
from ingot.runtime.server.http.response_writer import ResponseWriter
from ingot.runtime.server.models.admission import AdmittedEntry
from ingot.runtime.server.models.served_models import ServedModel

_SETTLE_SECONDS = 5.0  # that an aborted generation is waited for: the engine may hang


@dataclass
class AdmittedRequest:
    """It generates for `at_once` of its prompts at a time, so that others find places in the engine's batch."""

    model: ServedModel
    entry: AdmittedEntry
    holder: Holder
    requests: Sequence[EngineRequest]
    at_once: int
    _generations: "dict[int, _Generation]" = field(default_factory=dict)  # by the number of their prompt

    async def generate(self, events: "Events | None", interval_seconds: float) -> list[Completion]:
        """Generate for all prompts; returns their results. `events` gets the number of a prompt and what it got."""
        left = enumerate(self.requests)

        async def some() -> None:
            for number, request in left:
                await self._generate(number, request, events, interval_seconds)

        if self.at_once == 1:
            await some()
        else:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self.at_once):
                        group.create_task(some())
            except ExceptionGroup as error:
                raise error.exceptions[0] from error
        return self.results

    @property
    def results(self) -> list[Completion]:
        """The results so far, in the order of the prompts."""
        ended = (self._generations[number].ended for number in sorted(self._generations))
        return [each.result() for each in ended if each.done() and not each.cancelled()]

    @property
    def params(self) -> SamplingParams:
        """Those of all prompts."""
        params = self.requests[0].params
        assert isinstance(params, SamplingParams)
        return params

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(each.num_prompt_tokens for each in self.requests)

    @property
    def num_generated(self) -> int:
        """Tokens of the output."""
        return sum(each.num_counted for each in self._generations.values())

    async def settle(self) -> None:
        """Wait for the results of generations that were aborted, and count the tokens that the client did not get."""
        aborted = [each.ended for each in self._generations.values() if not each.ended.done()]
        if aborted:
            await asyncio.wait(aborted, timeout=_SETTLE_SECONDS)
        for each in self._generations.values():
            if each.ended.done() and not each.ended.cancelled():
                each.count(each.ended.result().generated_tokens - each.num_counted)

    async def _generate(
        self, number: int, request: EngineRequest, events: "Events | None", interval_seconds: float
    ) -> None:
        ended: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        generation = self._generations[number] = _Generation(self.holder, ended)
        failures: list[Exception] = []  # of events that were written directly: what the request ends with

        def direct(output: RequestOutput) -> bool:
            try:
                is_written = events is not None and events.write_now(number, output)
            except Exception as error:  # noqa: BLE001 (the request ends with it, and other streams go on)
                failures.append(error)
                return False
            if is_written:
                generation.count(output.new_tokens)
            return is_written

        outputs = self.model.engine.stream_request(
            request, interval_seconds=interval_seconds, direct=direct, ended=ended
        )
        async with aclosing(outputs):
            async for arrived in outputs:
                if failures:
                    raise failures[0]
                self.entry.starts()
                generation.count(sum(output.new_tokens for output in arrived))
                if events:
                    await events.write(number, arrived)
                if any(_is_aborted(output.completion) for output in arrived):
                    raise ApiError(503, "the server shuts down, and the request was aborted", code="aborted")


@dataclass
class _Generation:
    """The generation for one prompt. `ended` gets its result, also if the client leaves before it."""

    holder: Holder
    ended: asyncio.Future[Completion]
    num_counted: int = 0

    def count(self, new_tokens: int) -> None:
        """Take tokens of the output from the budget of the key."""
        self.num_counted += new_tokens
        self.holder.take_tokens(new_tokens)


class Events:
    """Writes the events of a stream for what its prompts got."""

    def __init__(self, request: AdmittedRequest, answer: Answer, outlet: ResponseWriter) -> None:
        self._answer = answer
        self._outlet = outlet
        self._prompt_tokens = request.prompt_tokens
        self._choices_of_prompt = request.params.n
        self._has_logprobs = request.params.logprobs is not None

    async def write(self, number: int, outputs: Sequence[RequestOutput]) -> None:
        """Write what the prompt of a number got."""
        data = self._of(number, outputs)
        if data:
            await self._outlet.events(data)

    def write_now(self, number: int, output: RequestOutput) -> bool:
        """Write one output of a choice that goes on, if the client accepts it at once; False: nothing is written."""
        if not self._outlet.is_free:
            return False
        data = self._of(number, (output,))
        if data:
            self._outlet.write_events(data)
        return True

    def _of(self, number: int, outputs: Sequence[RequestOutput]) -> bytes:
        events = []
        self._answer.count(self._prompt_tokens, sum(output.new_tokens for output in outputs))
        for index, of_choice in _by_choice(outputs).items():
            text = "".join(output.text for output in of_choice)
            tokens = [token for output in of_choice for token in output.tokens] if self._has_logprobs else []
            done = of_choice[-1].completion if not _is_aborted(of_choice[-1].completion) else None
            events.append(self._answer.event(number * self._choices_of_prompt + index, text, tokens, done))
        return b"".join(events)


def _by_choice(outputs: Sequence[RequestOutput]) -> dict[int, list[RequestOutput]]:
    found: dict[int, list[RequestOutput]] = {}
    for output in outputs:
        found.setdefault(output.index, []).append(output)
    return found


def _is_aborted(completion: Completion | None) -> bool:
    return completion is not None and completion.finish_reason == "abort"
