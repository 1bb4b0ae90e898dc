"""The endpoints of Anthropic's Messages API. Their errors are in its form."""

import json
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ingot.errors import RequestError
from ingot.runtime.server.api.answers import Answer, Json
from ingot.runtime.server.api.bodies import parse
from ingot.runtime.server.api.endpoint_formats import Api, Asked
from ingot.runtime.server.api.messages.answer import BlocksAnswer, error_json
from ingot.runtime.server.api.messages.schemas import CountRequest, MessagesRequest
from ingot.runtime.server.http.access import client_of, holder_of
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.rate_limits import Holder
from ingot.runtime.server.models.served_models import ServedModel
from ingot.runtime.server.service import Service


class MessagesApi(Api):
    """POST /v1/messages."""

    operation = "chat"
    schema = MessagesRequest

    def read(self, body: bytes, holder: Holder) -> Asked:
        request = parse(MessagesRequest, body, is_lenient=self._is_lenient)
        return Asked(request, request.chat)

    def answer(self, asked: Asked, model: ServedModel, holder: Holder) -> Answer:
        assert isinstance(asked.request, MessagesRequest)
        return BlocksAnswer(asked.request, model)

    def error(self, error: ApiError) -> Json:
        return error_json(error)


def counting(service: Service) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of POST /v1/messages/count_tokens."""

    async def count(request: Request) -> Response:
        async with service.affordable_body(request.scope, request.receive) as raw:
            body = service.parsed(CountRequest, raw, request.scope)
            model = await service.find_loaded(body.model)
            contents = [message.get("content") for message in body.chat.messages]
            least = model.least_tokens(sum(len(text) for text in contents if isinstance(text, str)))
            model.require_length(least, body.PROMPT_FIELD)
            with model.gate.admitted(least, client_of(request.scope, raw)):
                holder_of(request.scope).take_request()
                tokens = await model.encode_chat(body.chat)
        holder_of(request.scope).take_tokens(len(tokens))
        response = Response(json.dumps({"input_tokens": len(tokens)}), media_type="application/json")
        response.headers.update(holder_of(request.scope).headers())
        return response

    async def answer(request: Request) -> Response:
        try:
            return await count(request)
        except ClientDisconnect:
            return Response()
        except Exception as error:  # noqa: BLE001 (the client gets it)
            failure = ApiError.of(error, CountRequest.PROMPT_FIELD)
            if isinstance(error, RequestError) and failure.param:
                failure = failure.about(CountRequest.FIELDS.get(failure.param, failure.param))
            return failure.response(error_json(failure))

    return answer
