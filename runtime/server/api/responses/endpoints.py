"""The endpoints of the Responses API: create, and for responses that are kept get, delete, cancel and list input."""

import json
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ingot.errors import shown
from ingot.runtime.server.api.answer_schemas import DeletedResponse, InputItems
from ingot.runtime.server.api.answers import Answer
from ingot.runtime.server.api.bodies import parse
from ingot.runtime.server.api.endpoint_formats import Api, Asked
from ingot.runtime.server.api.responses.answer import CANCELLED, ItemsAnswer
from ingot.runtime.server.api.responses.schemas import ResponseRequest
from ingot.runtime.server.api.responses.store import ResponseStore
from ingot.runtime.server.http.access import holder_of
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.rate_limits import Holder
from ingot.runtime.server.models.served_models import ServedModel
from ingot.runtime.server.service import Service

_MOST_ITEMS = 100  # of a page


class ResponseApi(Api):
    """POST /v1/responses."""

    operation = "chat"
    schema = ResponseRequest

    def __init__(self, store: ResponseStore, *, is_lenient: bool = False) -> None:
        super().__init__(is_lenient=is_lenient)
        self._store = store

    def read(self, body: bytes, holder: Holder) -> Asked:
        request = parse(ResponseRequest, body, is_lenient=self._is_lenient)
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
        return ItemsAnswer(request, asked.conversation, model, holder.group, self._store if is_kept else None)


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
        for given, value in request.query_params.multi_items():
            name = given.removesuffix("[]")  # as OpenAI's clients write lists
            if name in ("stream", "starting_after", "include") and value != "false":
                raise ApiError(400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
        return _json(self._store.get(holder_of(request.scope).group, request.path_params["response_id"]))

    async def _delete(self, request: Request) -> Response:
        """Forget a response."""
        name = request.path_params["response_id"]
        self._store.delete(holder_of(request.scope).group, name)
        return _json(DeletedResponse(id=name, object="response", deleted=True))

    async def list_input(self, request: Request) -> Response:
        """The items of the input of a response's request, in pages."""
        query = request.query_params
        for name in query.keys() - {"limit", "order", "after"}:
            raise ApiError(400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
        items = self._store.input_items(holder_of(request.scope).group, request.path_params["response_id"])
        page, has_more = _page(items, query.get("limit", "20"), query.get("order", "desc"), query.get("after"))
        ids = [item["id"] for item in page] or [None]
        return _json(InputItems(object="list", data=[*page], first_id=ids[0], last_id=ids[-1], has_more=has_more))

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


def _page(
    items: Sequence[dict[str, Any]], limit: str, order: str, after: str | None
) -> tuple[Sequence[dict[str, Any]], bool]:
    """Some of the items in an order, and whether more follow them. ApiError for values that are not allowed."""
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST_ITEMS):
        allowed = f"a whole number from 1 to {_MOST_ITEMS}"
        raise ApiError(400, f"limit is {shown(limit)}; it must be {allowed}", param="limit", code="invalid_value")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {shown(order)}; it must be asc or desc", param="order", code="invalid_value")
    ordered = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    if after is not None and after not in ids:
        raise ApiError(
            400, f"after is {shown(after)}, which no item has as its id", param="after", code="invalid_value"
        )
    first = 0 if after is None else ids.index(after) + 1
    last = first + int(limit)
    return ordered[first:last], last < len(ordered)


def _json(content: object) -> Response:
    return Response(json.dumps(content), media_type="application/json")
