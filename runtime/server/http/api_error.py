"""Errors as OpenAI's API has them: a status, and {"error": {"message", "type", "param", "code"}}."""

import json
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import Response

from ingot.errors import AdapterError, EngineError, IngotError, Overloaded, RequestError, RequestFailed

_log = logging.getLogger(__name__)
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

ENGINE_UNAVAILABLE = "engine_unavailable"  # the code of a request that an engine could not serve because it failed


class ApiError(Exception):
    """A request that is answered with an error.

    `param` is the field to blame, `code` a word for programs. With `retry_after_seconds` the answer says when to try
    again: rounded up to seconds in Retry-After, exactly in retry-after-ms, which OpenAI's clients read first. An
    endpoint that generates sends it after `delay_seconds`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
        delay_seconds: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or HTTPStatus(status).name.lower()
        self.retry_after_seconds = retry_after_seconds
        self.delay_seconds = delay_seconds

    @classmethod
    def of(cls, error: BaseException, prompt_field: str | None = None) -> "ApiError":
        """The answer to an exception; `prompt_field` is the field that holds the prompt."""
        match error:
            case ApiError():
                return error
            case AdapterError():  # it was unloaded since the request came
                return cls(404, str(error), param="model", code="model_not_found")
            case RequestError():
                return cls(400, str(error), param=error.field or prompt_field, code="invalid_value")
            case Overloaded():
                return cls(429, str(error), code="overloaded", retry_after_seconds=error.retry_after_seconds)
            case RequestFailed(field=str(field)):
                return cls(400, str(error), param=field, code="invalid_value")
            case RequestFailed():
                return cls(500, str(error), code="request_failed")
            case EngineError():
                return cls(503, str(error), code=ENGINE_UNAVAILABLE)
            case IngotError():
                return cls(500, str(error))
        _log.error("a request failed", exc_info=error)
        return cls(500, f"the server failed on this request ({type(error).__name__}); its log has the details")

    def about(self, field: str) -> "ApiError":
        """The error with the client's name of the field, also in a message that begins with the engine's."""
        message = str(self)
        if self.param and message.startswith(f"{self.param} "):
            message = field + message.removeprefix(self.param)
        return ApiError(self.status, message, param=field, code=self.code, retry_after_seconds=self.retry_after_seconds)

    @property
    def type(self) -> str:
        """OpenAI's name for the kind of error."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def as_json(self) -> dict[str, object]:
        """The body of the answer, and the last event of a stream that fails."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def response(self, content: Mapping[str, object] | None = None) -> Response:
        """The answer, with this body instead of that of OpenAI's API."""
        headers = {}
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_seconds)))
            headers["retry-after-ms"] = str(math.ceil(self.retry_after_seconds * 1000))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
            headers["Connection"] = "close"  # the rest of the body is not read
        return Response(json.dumps(content or self.as_json()), self.status, headers, "application/json")
