"""The endpoints that generate: from the body of a request to its answer, whole or as a stream.

    parse -> find the model -> admit -> encode -> generate -> write

Each request has a task, which is cancelled when its client leaves or accepts nothing for too long. That leaves the
engine's stream, which aborts the generation and frees its blocks. The status of a stream is sent with its first event,
so a request that is refused gets an error's status in either case.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ingot.errors import RequestError
from ingot.runtime.asking.prompts import TokenIds
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints.constraint import FIELD as CONSTRAINT_FIELD
from ingot.runtime.requests.engine_request import EngineRequest
from ingot.runtime.server.api.admitted_request import AdmittedRequest, Events
from ingot.runtime.server.api.answers import Answer, ChoicesAnswer, Echo
from ingot.runtime.server.api.bodies import name_ignored
from ingot.runtime.server.api.endpoint_formats import Api, Asked
from ingot.runtime.server.api.request_schemas import CompletionRequest, Sampling
from ingot.runtime.server.http.access import ApiKeys, client_of, holder_of, new_id, require_key
from ingot.runtime.server.http.api_error import ENGINE_UNAVAILABLE, ApiError
from ingot.runtime.server.http.rate_limits import Holder
from ingot.runtime.server.http.response_writer import ResponseWriter
from ingot.runtime.server.http.retry import Client
from ingot.runtime.server.models.chat import Chat, ReplyPlan
from ingot.runtime.server.models.served_models import ServedModel
from ingot.runtime.server.service import OpenRequest, Service
from ingot.runtime.server.watch.request_log import CLIENT_LEFT, CLIENT_LEFT_STATUS, Record

_log = logging.getLogger(__name__)
_MOST_PROMPTS = 2048  # as OpenAI's
_LONGEST_INTERVAL = 1.5  # times stream_seconds; unequal ones, so that streams do not all write at once


class GenerationEndpoint:
    """An ASGI application: an endpoint that generates. With `keys` a request needs one of them."""

    def __init__(self, service: Service, api: Api, keys: ApiKeys | None = None) -> None:
        self._service = service
        self._api = api
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Serving(self._service, self._api, ResponseWriter(scope, receive, send), scope)
        request.outlet.error_body = self._api.error
        try:
            await self._serve(request, scope, receive)
        finally:
            try:
                await request.settle()
            finally:  # also where the server ends
                request.record()
                request.forget()

    async def _serve(self, request: "_Serving", scope: Scope, receive: Receive) -> None:
        try:
            if self._keys:
                require_key(scope, self._keys)
            async with self._service.affordable_body(scope, receive) as body:
                client = client_of(scope, body)
                self._service.models.require_place(client)
                await self._serve_body(request, body, client, receive)
        except ClientDisconnect:
            pass
        except ApiError as error:
            # The frames of its traceback hold the body.
            error.__traceback__ = None
            await self._service.delay(error)
            await request.outlet.fail(error)

    async def _serve_body(self, request: "_Serving", body: bytes, client: Client, receive: Receive) -> None:
        outlet = request.outlet
        task = asyncio.create_task(request.serve(body, client))
        request.open = OpenRequest(task, outlet)
        gone = asyncio.create_task(_until_gone(receive))
        with self._service.opened(request.open):
            try:
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                task.cancel()
                gone.cancel()
                await asyncio.wait({task, gone})
            if request.open.failure and outlet.sending_since is None:
                await outlet.fail(request.open.failure)


async def _until_gone(receive: Receive) -> None:
    """Wait until the client leaves; after the body nothing else arrives."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Serving:
    """Serves one request. `open` is set once it has a task."""

    open: OpenRequest | None = None
    _admitted: AdmittedRequest | None = None
    _shows_output = True  # False: the one token that is generated is not part of the answer

    def __init__(self, service: Service, api: Api, outlet: ResponseWriter, scope: Scope) -> None:
        self._service = service
        self._api = api
        self.outlet = outlet
        self._scope = scope
        self._started_unix = time.time()

    @property
    def _holder(self) -> Holder:
        return holder_of(self._scope)

    async def serve(self, body: bytes, client: Client) -> None:
        """Answer, with an error if there is one. `client` identifies it at the gate."""
        asked = None
        try:
            asked = self._api.read(body, self._holder)
            name_ignored(self._scope, asked.request)
            await self._answer(asked, client)
        except Exception as error:  # noqa: BLE001 (the client gets it)
            failure = ApiError.of(error, self._api.schema.PROMPT_FIELD)
            model = self.open.model if self.open else None
            if model and failure.code == ENGINE_UNAVAILABLE and failure.retry_after_seconds is None:
                failure = self._service.unavailable(model, str(failure))
            if asked and failure.param == CONSTRAINT_FIELD:
                failure.param = _constraint_field(asked.request)
            if asked and isinstance(error, RequestError) and failure.param:
                failure = failure.about(asked.request.field_of(failure.param))
            try:
                await self._service.delay(failure)
                await self.outlet.fail(failure)
            finally:
                del failure  # whose traceback has this frame

    async def _answer(self, asked: Asked, client: Client) -> None:
        """Find the model, check what is asked and admit it; then encode, plan and generate."""
        model = await self._find_model(asked.request)
        arrival = model.engine.engine.clock()
        params = asked.request.sampling_params(model.context_tokens)
        options = self._options(asked.request, model)
        least = _least_tokens(model, asked)
        answer = self._begin(asked, model)
        at_once = model.gate.prompts_at_once(len(least), params.num_samples)
        with model.gate.admitted(sum(least[:at_once]), client, at_once * params.num_samples) as entry:
            self._holder.take_request()
            prompts = await _encoded(model, asked, options.cache_salt)
            entry.count(sum(map(len, prompts[:at_once])))
            params = model.fitted(params, max(map(len, prompts)), self._holder.limits)
            params = self._plan(asked, model, prompts, params, answer)
            self._holder.take_tokens(sum(map(len, prompts)))
            requests = [EngineRequest(each, params, options, arrival_seconds=arrival) for each in prompts]
            self._admitted = AdmittedRequest(model, entry, self._holder, requests, at_once)
            try:
                await (self._stream if asked.request.stream else self._whole)(self._admitted, answer)
            except BaseException:
                answer.ends_early()
                raise

    async def _find_model(self, request: Sampling) -> ServedModel:
        model = await self._service.find_loaded(request.model)
        assert self.open
        self.open.model = model
        return model

    def _options(self, request: Sampling, model: ServedModel) -> RequestOptions:
        limits = self._service.options
        options = request.options(self._holder, limits.request_seconds, shares_cache=limits.share_prefix_cache)
        return replace(options, adapter=request.model) if request.model in model.engine.adapters else options

    def _begin(self, asked: Asked, model: ServedModel) -> Answer:
        """Return the answer, of which nothing is written yet, and name the request by its id."""
        answer = self._api.answer(asked, model, self._holder)
        assert self.open
        self.open.answer_id = answer.id
        self.outlet.request_id = self.outlet.request_id or answer.id
        return answer

    def _plan(
        self, asked: Asked, model: ServedModel, prompts: Sequence[TokenIds], params: SamplingParams, answer: Answer
    ) -> SamplingParams:
        """Decide how the answer shows what is generated; return the parameters for that."""
        request = asked.request
        if isinstance(asked.prompt, Chat):
            answer.plan = plan = _reply_plan(model, asked.prompt, request, prompts[0])
            return replace(params, keep_special_tokens=plan.keep_special_tokens, constraint=plan.constraint)
        if isinstance(request, CompletionRequest) and request.echo:
            assert isinstance(answer, ChoicesAnswer)
            answer.scores_only = request.scores_only
            self._shows_output = not request.scores_only
            answer.echoes = [echo for echo in _echoes(model, asked.prompt, prompts) for _ in range(params.n)]
        return replace(params, constraint=model.replies.spaced(params.constraint))

    async def _whole(self, admitted: AdmittedRequest, answer: Answer) -> None:
        results = await admitted.generate(None, inf)
        await self.outlet.whole(answer.whole(results))

    async def _stream(self, admitted: AdmittedRequest, answer: Answer) -> None:
        self.outlet.failure = answer.failure
        interval = self._service.options.stream_seconds * random.uniform(1, _LONGEST_INTERVAL)
        results = await admitted.generate(Events(admitted, answer, self.outlet), interval)
        await self.outlet.events(answer.end(results), more=False)

    async def settle(self) -> None:
        """As `AdmittedRequest.settle`, if it was admitted."""
        if self._admitted:
            await self._admitted.settle()

    def forget(self) -> None:
        """Let go of the task and of the error, whose tracebacks lead back here.

        Otherwise all of a request stays until the next collection of all objects, which is rare, and memory grows for
        hours.
        """
        self.open, self.outlet.error = None, None

    def record(self) -> None:
        """Count the request, which has ended, for its key and its client, and give the observers its record."""
        outlet, admitted = self.outlet, self._admitted
        model, failure = (self.open.model, self.open.failure) if self.open else (None, None)
        failure = outlet.error or failure
        error = failure.code if failure else None if outlet.has_ended else CLIENT_LEFT
        if model and error == CLIENT_LEFT and outlet.sending_since is None:
            self._service.num_clients_left[model.name] += 1
        output_tokens = admitted.num_generated if admitted and self._shows_output else 0
        if admitted:
            self._service.key_usage.count(self._holder.group, admitted.prompt_tokens, output_tokens)
        if not self._service.observers:
            return
        record = Record(
            request_id=outlet.request_id or new_id(),
            operation=self._api.operation,
            model=model.name if model else None,
            group=self._holder.group,
            headers=dict(Headers(scope=self._scope)),
            status=outlet.status or (failure.status if failure else CLIENT_LEFT_STATUS),
            error=error,
            results=admitted.results if admitted else (),
            prompt_tokens=admitted.prompt_tokens if admitted else None,
            output_tokens=output_tokens,
            started_unix=self._started_unix,
            ended_unix=time.time(),
            ended_seconds=model.engine.engine.clock() if model else 0.0,
        )
        for observer in self._service.observers:
            try:
                observer(record)
            except Exception:  # noqa: BLE001 (a log that cannot be written ends no connection)
                _log.exception("a request could not be recorded")


def _least_tokens(model: ServedModel, asked: Asked) -> list[int]:
    """Return lower bounds of the prompts' tokens. ApiError for too many or too long prompts, and for unknown tokens."""
    prompt, field = asked.prompt, asked.request.PROMPT_FIELD
    if isinstance(prompt, Chat):
        contents = [message.get("content") for message in prompt.messages]
        least = [model.least_tokens(sum(len(text) for text in contents if isinstance(text, str)))]
    elif len(prompt) > _MOST_PROMPTS:
        message = f"the request has {len(prompt)} prompts; it may have {_MOST_PROMPTS}: send several requests"
        raise ApiError(400, message, param=field)
    else:
        least = [model.least_tokens(len(each)) if isinstance(each, str) else len(each) for each in prompt]
    for num_tokens in least:
        model.require_length(num_tokens, field)
    for each in () if isinstance(prompt, Chat) else prompt:
        if not isinstance(each, str):
            model.require_tokens(each, field)
    return least


async def _encoded(model: ServedModel, asked: Asked, salt: str) -> list[TokenIds]:
    """Return the tokens of each prompt. ApiError for one that is too long."""
    started, prompt = time.perf_counter(), asked.prompt
    prompts: list[TokenIds]
    if isinstance(prompt, Chat):
        prompts = [await model.encode_chat(prompt)]
    else:
        prompts = [await model.engine.encode(each) if isinstance(each, str) else each for each in prompt]
    model.encode_seconds.observe(time.perf_counter() - started)
    model.recent_prompts.extend(prompts)
    for tokens in prompts:
        model.pieces.observe(tokens, salt)
    for tokens in prompts:
        model.require_length(len(tokens), asked.request.PROMPT_FIELD)
    return prompts


def _echoes(model: ServedModel, given: Sequence[str | list[int]], prompts: Sequence[TokenIds]) -> list[Echo]:
    """The prompts as they were given, or the text of their tokens."""
    texts = [
        each if isinstance(each, str) else model.tokenizer.decode(each, skip_special_tokens=False) for each in given
    ]
    return [Echo(text, tokens[0] if tokens else 0) for text, tokens in zip(texts, prompts, strict=True)]


def _constraint_field(request: Sampling) -> str:
    """The field that a constraint comes from which cannot be made or compiled."""
    return next(name for name in request.CONSTRAINT_FIELDS if getattr(request, name, None) is not None)


def _reply_plan(model: ServedModel, chat: Chat, request: Sampling, prompt: TokenIds) -> ReplyPlan:
    constraint = None if chat.must_call else request.constraint[0]  # a required call is the whole reply
    return model.replies.plan(
        prompt,
        chat.tools,
        must_call=chat.must_call,
        many_calls=chat.many_calls,
        answer=constraint,
        may_reason=chat.may_reason,
        continues=bool((chat.variables or {}).get("continue_final_message")),
    )
