"""The OpenAPI 3.1 document of the server: its paths, with the schemas of bodies and answers.

    python -m ingot.runtime.server.api.openapi > docs/openapi.json      what is committed, as CI checks

Schemas are those that the server reads bodies with; a field that it refuses is there with the values that it takes.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from ingot.runtime.server.api import answer_schemas as answers
from ingot.runtime.server.api.bodies import Body
from ingot.runtime.server.api.messages.schemas import CountRequest, MessagesRequest
from ingot.runtime.server.api.request_schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from ingot.runtime.server.api.responses.schemas import ResponseRequest
from ingot.version import __version__

Json = dict[str, Any]
_PLACE = "#/components/schemas/{model}"
_REASONS = {
    400: "A field is missing, unknown, of a wrong type or has a value that cannot be used; `param` names it.",
    401: "An API key is required, or the one given is wrong.",
    404: "The model, the path or the response does not exist.",
    405: "The path does not have this method.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is compressed.",
    429: "Too much work; Retry-After says when to try again.",
    500: "This request failed, and no other.",
    503: "The server is starting or shutting down, or the engine is broken.",
}
_READS_BODY = (400, 404, 408, 413, 415, 429)
_GENERATES = (*_READS_BODY, 500, 503)
_EVENT = {
    "type": "object",
    "description": "With stream: a server-sent event; `data` is JSON, or [DONE] at the end of completions and chats.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
    "additionalProperties": False,
}
_STREAM = {"text/event-stream": {"schema": _EVENT}}
_KEPT_BY_ID = (
    "get_responses_response_id",
    "delete_responses_response_id",
    "post_responses_response_id_cancel",
    "get_responses_response_id_input_items",
)
_PAGE: Json = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string", "description": "The id of the item before the page."},
}


@dataclass(frozen=True)
class _Operation:
    """A method of a path.

    `also` are further statuses with the same answer, with their descriptions, `errors` those with an error; `query` has
    the schemas of the parameters of its query.
    """

    path: str
    method: str
    summary: str
    answer: type[Any] | None
    body: type[Body] | None = None
    errors: Sequence[int] = ()
    also: Mapping[int, str] = field(default_factory=dict)
    parameters: Sequence[str] = ()
    query: Mapping[str, Json] = field(default_factory=dict)
    is_open: bool = False
    status: int = 200
    streams: bool = False
    error: type[Any] = answers.ErrorAnswer


_OPERATIONS = (
    _Operation(
        "/v1/chat/completions", "post", "Answer a conversation", answers.ChatAnswer, ChatRequest, _GENERATES,
        streams=True,
    ),
    _Operation(
        "/v1/completions", "post", "Continue prompts", answers.CompletionAnswer, CompletionRequest, _GENERATES,
        streams=True,
    ),
    _Operation(
        "/v1/messages", "post", "Answer a conversation, in Anthropic's form", answers.MessageAnswer, MessagesRequest,
        _GENERATES, streams=True, error=answers.MessageErrorAnswer,
    ),
    _Operation(
        "/v1/messages/count_tokens", "post", "Count the tokens of a conversation", answers.InputTokens, CountRequest,
        (*_READS_BODY, 503), error=answers.MessageErrorAnswer,
    ),
    _Operation(
        "/v1/responses", "post", "Answer items", answers.ResponseAnswer, ResponseRequest, _GENERATES, streams=True
    ),
    _Operation(
        "/v1/responses/{response_id}", "get", "Read a response", answers.ResponseAnswer, errors=(400, 404),
        parameters=("response_id",),
    ),
    _Operation(
        "/v1/responses/{response_id}", "delete", "Forget a response", answers.DeletedResponse, errors=(404,),
        parameters=("response_id",),
    ),
    _Operation(
        "/v1/responses/{response_id}/cancel", "post", "Cancel a streamed response", answers.ResponseAnswer,
        errors=(400, 404), parameters=("response_id",),
    ),
    _Operation(
        "/v1/responses/{response_id}/input_items", "get", "List the items of a response's input", answers.InputItems,
        errors=(400, 404), parameters=("response_id",), query=_PAGE,
    ),
    _Operation("/v1/models", "get", "List models, aliases and adapters", answers.ModelList, errors=(503,)),
    _Operation(
        "/v1/models/{name}", "get", "Describe a model", answers.ModelAnswer, errors=(404, 503), parameters=("name",)
    ),
    _Operation(
        "/admin/reload", "post", "Replace models by the artifacts in their folders", answers.ReloadAnswer,
        errors=(400, 404, 503), status=202, also={200: "With wait: each was checked, and serves or was refused."},
        query={
            "wait": {"type": "boolean", "description": "Answer when the checks have ended."},
            "accept_change": {
                "type": "boolean",
                "description": "Serve artifacts that answer otherwise than those that are served, too.",
            },
        },
    ),
    _Operation(
        "/admin/reload", "get", "Read what became of the last replacements", answers.ReloadAnswer, errors=(400, 404)
    ),
    _Operation(
        "/v1/load_lora_adapter", "post", "Load a LoRA adapter", answers.AdapterAnswer, LoadAdapterRequest,
        (*_READS_BODY, 503),
    ),
    _Operation(
        "/v1/unload_lora_adapter", "post", "Unload a LoRA adapter", answers.AdapterAnswer, UnloadAdapterRequest,
        (*_READS_BODY, 503),
    ),
    _Operation("/tokenize", "post", "Encode a prompt", answers.TokensAnswer, TokenizeRequest, (*_READS_BODY, 503)),
    _Operation("/detokenize", "post", "Decode tokens", answers.TextAnswer, DetokenizeRequest, (*_READS_BODY, 503)),
    _Operation(
        "/tokenizer_info", "get", "Describe a tokenizer", answers.TokenizerAnswer, errors=(400, 404, 503),
        query={"model": {"type": "string", "description": "Needed where several are served."}},
    ),
    _Operation("/version", "get", "The version of Ingot", answers.VersionAnswer, is_open=True),
    _Operation("/health", "get", "Alive", answers.StateAnswer, also={503: "The same, when it is not."}, is_open=True),
    _Operation(
        "/ready", "get", "Takes requests", answers.StateAnswer, also={503: "The same, when it does not."}, is_open=True
    ),
    _Operation("/metrics", "get", "Metrics for Prometheus", None, is_open=True),
)  # fmt: skip


def openapi(version_of_ingot: str) -> Json:
    """The document."""
    schemas = _schemas(_OPERATIONS)
    paths: dict[str, Json] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ingot",
            "version": version_of_ingot,
            "description": "OpenAI's API, as `ingot serve` answers it.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "With --api-keys."}},
        },
    }


def _schemas(operations: Iterable[_Operation]) -> dict[str, Json]:
    bodies = {operation.body for operation in operations if operation.body}
    models = [operation.answer for operation in operations if operation.answer]
    unique: set[type[Any]] = {*bodies, *models, *(operation.error for operation in operations)}
    ordered = sorted(unique, key=lambda each: each.__name__)
    inputs: list[tuple[str, Literal["validation"], TypeAdapter[Any]]] = [
        (each.__name__, "validation", TypeAdapter(each)) for each in ordered
    ]
    _, found = TypeAdapter.json_schemas(inputs, ref_template=_PLACE)
    schemas: dict[str, Json] = found["$defs"]
    for body in bodies:
        for name, values in body.LACKING.items():
            refused = {"description": "Not supported: these values change nothing.", "enum": list(values)}
            schemas[body.__name__]["properties"][name] = refused
    return schemas


def _described(operation: _Operation) -> Json:
    content: Json = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer:
        content = {"application/json": {"schema": _reference(operation.answer)}}
    content |= _STREAM if operation.streams else {}
    statuses: Json = {str(operation.status): {"description": "The answer.", "content": content}}
    for status, description in operation.also.items():
        statuses[str(status)] = {"description": description, "content": content}
    if operation.body is ResponseRequest:
        place = {"response_id": "$response.body#/id"}
        statuses["200"]["links"] = {name: {"operationId": name, "parameters": place} for name in _KEPT_BY_ID}
    for status in sorted({*operation.errors, 405, *(() if operation.is_open else (401,))}):
        statuses[str(status)] = _error(status, operation.error)
    found: Json = {"summary": operation.summary, "operationId": _name(operation), "responses": statuses}
    if operation.parameters or operation.query:
        found["parameters"] = [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in operation.parameters
            ),
            *({"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()),
        ]
    if operation.body:
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(operation.body)}},
        }
    return found if operation.is_open else {**found, "security": [{}, {"key": []}]}


def _error(status: int, answer: type[Any]) -> Json:
    found: Json = {
        "description": _REASONS[status],
        "content": {"application/json": {"schema": _reference(answer)}},
    }
    if status == 429:
        found["headers"] = {
            "Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer"}},
            "retry-after-ms": {"description": "Milliseconds.", "required": True, "schema": {"type": "integer"}},
        }
    return found


def _reference(model: type[Any]) -> Json:
    return {"$ref": _PLACE.format(model=model.__name__)}


def _name(operation: _Operation) -> str:
    words = [word.strip("{}") for word in operation.path.split("/") if word not in ("", "v1")]
    return "_".join([operation.method, *words])


def document_text(version_of_ingot: str) -> str:
    """The document as it is committed."""
    return json.dumps(openapi(version_of_ingot), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document_text(__version__))
