"""The endpoints of the Responses API: create, and for responses that are kept get, delete and cancel."""

import json

from starlette.requests import Request
from starlette.responses import Response

from ingot.runtime.server.access import holder_of
from ingot.runtime.server.answers import Answer
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.apis import Api, Asked
from ingot.runtime.server.key_limits import Holder
from ingot.runtime.server.models import ServedModel
from ingot.runtime.server.responses.answer import CANCELLED, ResponseAnswer
from ingot.runtime.server.responses.schemas import ResponseRequest
from ingot.runtime.server.responses.store import ResponseStore
from ingot.runtime.server.schemas import parse
from ingot.runtime.server.service import Service


class ResponseApi(Api):
    """POST /v1/responses."""

    operation = "chat"
    schema = ResponseRequest

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def read(self, body: bytes, holder: Holder) -> Asked:
        request = parse(ResponseRequest, body)
        if request.store and not self._store.most_responses:
            raise ApiError(
                400,
                "store is true, and the server keeps no responses; leave it out",
                param="store",
                code="unsupported_parameter",
            )
        before = request.previous_response_id
        conversation = request.conversation(self._store.conversation(holder.group, before) if before else ())
        return Asked(request, request.chat(conversation), conversation)

    def answer(self, asked: Asked, model: ServedModel, holder: Holder) -> Answer:
        request = asked.request
        assert isinstance(request, ResponseRequest)
        is_kept = self._store.most_responses and request.store is not False
        return ResponseAnswer(request, asked.conversation, model, holder.group, self._store if is_kept else None)


class KeptResponses:
    """Endpoints of responses that are kept."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store

    async def get_or_delete(self, request: Request) -> Response:
        """Read or forget a response."""
        return await (self._delete(request) if request.method == "DELETE" else self._get(request))

    async def _get(self, request: Request) -> Response:
        """The response as it is now; its output so far while it is streamed."""
        for name in ("stream", "starting_after", "include"):
            if request.query_params.get(name, "false") != "false":
                raise ApiError(400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
        return _json(self._store.get(holder_of(request.scope).group, request.path_params["response_id"]))

    async def _delete(self, request: Request) -> Response:
        """Forget a response."""
        name = request.path_params["response_id"]
        self._store.delete(holder_of(request.scope).group, name)
        return _json({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End a response that is being streamed: its stream ends with response.failed."""
        name = request.path_params["response_id"]
        body = self._store.get(holder_of(request.scope).group, name)
        found = self._service.find_open(name)
        if body["status"] != "in_progress" or found is None:
            raise ApiError(
                400,
                f"the response is {body['status']}; only one that is being streamed can be cancelled",
                param="response_id",
                code="invalid_value",
            )
        found.end_with(ApiError(409, "the response was cancelled", code=CANCELLED))
        return _json({**body, "status": CANCELLED})


def _json(content: object) -> Response:
    return Response(json.dumps(content), media_type="application/json")
