"""The server's ASGI application: its routes, and the small endpoints. Those that generate are in `generation`."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.errors import RequestError, did_you_mean, shown_path
from ingot.runtime.asking.prompts import TokenIds
from ingot.runtime.server.api import answer_schemas as answers
from ingot.runtime.server.api.admin import Admin
from ingot.runtime.server.api.bodies import ignored_in
from ingot.runtime.server.api.endpoint_formats import ChatApi, CompletionApi
from ingot.runtime.server.api.generation import GenerationEndpoint
from ingot.runtime.server.api.lora_adapters import AdapterEndpoints
from ingot.runtime.server.api.messages.endpoints import MessagesApi, counting
from ingot.runtime.server.api.openapi import document_text
from ingot.runtime.server.api.request_schemas import DetokenizeRequest, TokenizeRequest
from ingot.runtime.server.api.responses.endpoints import KeptResponses, ResponseApi
from ingot.runtime.server.api.responses.store import ResponseStore
from ingot.runtime.server.http.access import ApiKeys, RequireKey, client_of, given_id, holder_of, new_id
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.browsers import GuardPages, WebRules
from ingot.runtime.server.models.served_models import ServedModel
from ingot.runtime.server.service import Service
from ingot.runtime.server.watch.prometheus import Telemetry
from ingot.runtime.server.watch.request_log import CLIENT_LEFT_STATUS

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # names with colons, as vLLM's, need no escapes in it
IGNORED_HEADER = "x-ingot-ignored-fields"
_GENERATES_TEXT = " Ingot generates text alone; serve a model of another kind with another server."
_LACKING = dict.fromkeys(
    (
        *("/v1/embeddings", "/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify"),
        *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/generations"),
        *("/v1/moderations",),
    ),
    _GENERATES_TEXT,
)
_Handler = Callable[[Request], Awaitable[Response]]


def make_app(
    service: Service,
    keys: ApiKeys | None = None,
    admin_keys: ApiKeys | None = None,
    rules: WebRules = WebRules(),  # noqa: B008 (it is frozen)
) -> Starlette:
    """The application; with `keys`, generating and listing models takes one of them.

    Paths below /admin, and those that load adapters, take one of `admin_keys`; without these they do not exist.
    `rules` say which web pages may use it.
    """
    endpoints = _Endpoints(service)
    store = ResponseStore(service.options.stored_responses, service.options.stored_response_bytes)
    kept = KeptResponses(service, store)
    admin = Admin(service, admin_keys)
    adapters = AdapterEndpoints(service, admin)
    is_lenient = service.options.lenient
    generating = {
        "/v1/completions": GenerationEndpoint(service, CompletionApi(is_lenient=is_lenient), keys),
        "/v1/chat/completions": GenerationEndpoint(service, ChatApi(is_lenient=is_lenient), keys),
        "/v1/messages": GenerationEndpoint(service, MessagesApi(is_lenient=is_lenient), keys),
        "/v1/responses": GenerationEndpoint(service, ResponseApi(store, is_lenient=is_lenient), keys),
    }
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()),
        Route("/v1/messages/count_tokens", counting(service), methods=["POST"]),
        Route("/v1/responses/{response_id}", _answering(kept.get_or_delete), methods=["GET", "DELETE"]),
        Route("/v1/responses/{response_id}/cancel", _answering(kept.cancel), methods=["POST"]),
        Route("/v1/responses/{response_id}/input_items", _answering(kept.list_input), methods=["GET"]),
        Route("/v1/models", _answering(endpoints.list_models), methods=["GET"]),
        Route("/v1/models/{name:path}", _answering(endpoints.show_model), methods=["GET"]),
        Route("/v1/load_lora_adapter", _answering(adapters.load), methods=["POST"]),
        Route("/v1/unload_lora_adapter", _answering(adapters.unload), methods=["POST"]),
        Route("/tokenize", _answering(endpoints.tokenize), methods=["POST"]),
        Route("/detokenize", _answering(endpoints.detokenize), methods=["POST"]),
        Route("/tokenizer_info", _answering(endpoints.tokenizer_info), methods=["GET"]),
        Route("/admin/reload", _answering(admin.reload_or_show), methods=["GET", "POST"]),
        Route("/openapi.json", _answering(endpoints.openapi), methods=["GET"]),
        Route("/version", _answering(endpoints.version), methods=["GET"]),
        Route("/health", _answering(endpoints.health), methods=["GET"]),
        Route("/ready", _answering(endpoints.ready), methods=["GET"]),
        Route("/metrics", _answering(endpoints.metrics), methods=["GET"]),
    ]
    middleware = [
        Middleware(_CountAnswers, telemetry=endpoints.telemetry, routes=routes),
        Middleware(GuardPages, rules=rules),
    ]
    if keys:
        middleware.append(Middleware(RequireKey, keys=keys))
    app = _App(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})
    for path, endpoint in generating.items():
        app.generating[path] = _CountAnswers(GuardPages(endpoint, rules), endpoints.telemetry, routes)
    return app


class _App(Starlette):
    """Starlette, but for requests that generate: its layers take a good part of the time of a refusal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generating: dict[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["type"] == "http" and scope["method"] == "POST"
        app = self.generating.get(scope["path"], super().__call__) if generates else super().__call__
        await app(scope, receive, send)


class _Endpoints:
    """Endpoints that generate nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.telemetry = Telemetry(service)

    async def list_models(self, request: Request) -> Response:
        self._service.require_ready()
        models = self._service.models
        names = (name for name in models.names if name not in models.aliases)
        return _json(answers.ModelList(object="list", data=[self._facts(name) for name in names]))

    async def show_model(self, request: Request) -> Response:
        self._service.require_ready()
        self._service.models.find(request.path_params["name"])
        return _json(self._facts(request.path_params["name"]))

    def _facts(self, name: str) -> answers.ModelAnswer:
        models = self._service.models
        model = models.find(name)
        adapter = model.engine.adapters.get(name) if name not in models.by_name else None
        root, parent = (adapter.path, model.name) if adapter else (model.name, None)
        own_name = name if adapter else model.name
        return {
            "id": own_name,
            "object": "model",
            "created": model.created,
            "owned_by": "ingot",
            "root": root,
            "parent": parent,
            "aliases": [alias for alias, of_model in models.aliases.items() if of_model == own_name],
            "max_model_len": model.context_tokens,
        }

    async def tokenize(self, request: Request) -> Response:
        async with self._service.affordable_body(request.scope, request.receive) as raw:
            return await self._tokenized(request, raw)

    async def _tokenized(self, request: Request, raw: bytes) -> Response:
        body = self._service.parsed(TokenizeRequest, raw, request.scope)
        model = await self._service.find_loaded(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give prompt or messages, one of them", param="prompt")
        least = model.least_tokens(sum(map(len, _texts(body))))
        if body.messages is None:
            model.require_length(least, "prompt")
        with self._admitted(request, raw, model, least):
            tokens = await _tokens(body, model)
        holder_of(request.scope).take_tokens(len(tokens))
        answer = answers.TokensAnswer(count=len(tokens), max_model_len=model.context_tokens, tokens=list(tokens))
        if body.return_token_strs:
            answer["token_strs"] = [model.token_text(token).text for token in tokens]
        return _limited(request, answer)

    async def detokenize(self, request: Request) -> Response:
        async with self._service.affordable_body(request.scope, request.receive) as raw:
            body = self._service.parsed(DetokenizeRequest, raw, request.scope)
            model = self._service.models.find(body.model)
            model.require_tokens(body.tokens, "tokens")
            with self._admitted(request, raw, model, min(len(body.tokens), model.most_prompt_tokens)):
                text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
            holder_of(request.scope).take_tokens(len(body.tokens))
            return _limited(request, answers.TextAnswer(prompt=text))

    async def tokenizer_info(self, request: Request) -> Response:
        self._service.require_ready()
        model = self._service.models.find(request.query_params.get("model"))
        tokens = model.tokenizer.named_tokens
        return _json(
            answers.TokenizerAnswer(
                bos_token=tokens.get("bos_token"),
                eos_token=tokens.get("eos_token"),
                pad_token=tokens.get("pad_token"),
                unk_token=tokens.get("unk_token"),
                chat_template=model.tokenizer.chat_templates.get("default"),
                max_model_len=model.context_tokens,
            )
        )

    @contextmanager
    def _admitted(self, request: Request, body: bytes, model: ServedModel, num_tokens: int) -> Iterator[None]:
        """Have a request take a place as one that generates: it uses the threads and the time of those."""
        with model.gate.admitted(num_tokens, client_of(request.scope, body)):
            holder_of(request.scope).take_request()
            yield

    async def openapi(self, request: Request) -> Response:
        return Response(document_text(self._service.version), media_type="application/json")

    async def version(self, request: Request) -> Response:
        return _json(answers.VersionAnswer(version=self._service.version))

    async def health(self, request: Request) -> Response:
        problems = self._service.problems(lasting=True)
        answer = answers.StateAnswer(status="failed" if problems else "alive", problems=problems)
        return _json(answer, 503 if problems else 200)

    async def ready(self, request: Request) -> Response:
        problems, state = self._service.problems(), self._service.state
        is_ready = state == "ready" and not problems
        answer = answers.StateAnswer(status="failed" if problems else state, problems=problems)
        return _json(answer, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        await self._service.refresh_metrics()
        return Response(generate_latest(self.telemetry.registry), headers={"content-type": _METRICS_TYPE})


class _CountAnswers:
    """ASGI middleware: counts answers by the path of their route and by status; paths that do not exist are one.

    A client that left before its answer began counts with the status 499.

    Answers to requests with unknown fields that were left out name these in a header.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry, routes: Sequence[Route]) -> None:
        self._app = app
        self._telemetry = telemetry
        self._routes = routes
        self._paths = frozenset(route.path for route in routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else self._pattern(scope["path"])
        has_begun = False

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._telemetry.count(path, message["status"])
                labels, names = ignored_in(scope)
                if labels:
                    self._telemetry.count_ignored(labels)
                    message = {**message, "headers": [*message["headers"], (IGNORED_HEADER.encode(), names.encode())]}
            await send(message)

        await self._app(scope, receive, counted)
        if not has_begun:
            self._telemetry.count(path, CLIENT_LEFT_STATUS)

    def _pattern(self, path: str) -> str:
        return next((route.path_format for route in self._routes if route.path_regex.match(path)), "other")


def _answering(handler: _Handler) -> _Handler:
    """A handler whose exceptions are answered as OpenAI's API answers."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response()
        except Exception as error:  # noqa: BLE001 (the client gets it)
            return ApiError.of(error).response()

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths, and methods that a path does not have."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, error.headers or {}
    paths = [route.path for route in request.app.routes if "{" not in route.path]
    advice = _LACKING.get(path.rstrip("/")) or did_you_mean(path, paths) or " GET /openapi.json lists the paths."
    if "Allow" in headers:
        advice = f" It takes {headers['Allow']}."
    said = shown_path(f"{request.method} {path}")
    response = ApiError(error.status_code, f"{said}: {error.detail.lower()}.{advice}").response()
    response.headers["x-request-id"] = given_id(request.scope) or new_id()
    response.headers.update(error.headers or {})
    return response


def _texts(body: TokenizeRequest) -> list[str]:
    """The texts of a request, as far as they are plain."""
    if body.messages is None:
        return [body.prompt or ""]
    contents = [message.get("content") for message in body.messages]
    return [text for text in contents if isinstance(text, str)]


async def _tokens(body: TokenizeRequest, model: ServedModel) -> TokenIds:
    try:
        if body.messages is not None:
            return await model.encode_chat(body.chat)
        return await model.engine.encode_text(body.prompt or "", add_special_tokens=body.add_special_tokens)
    except RequestError as error:
        failure = ApiError.of(error, "prompt" if body.messages is None else body.PROMPT_FIELD)
        raise failure.about(body.field_of(failure.param or "")) from error


def _limited(request: Request, content: Any) -> Response:
    """An answer that says what its key may still use."""
    response = _json(content)
    response.headers.update(holder_of(request.scope).headers())
    return response


def _json(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")
