"""What an operator may ask of a server over HTTP, with a key of its own."""

import json
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from ingot.runtime.server.access import ApiKeys, bearer_key
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.service import Service


class Admin:
    """Endpoints below /admin, and the key of all that only an operator may do. Without keys they answer 404."""

    def __init__(self, service: Service, keys: ApiKeys | None) -> None:
        self._service = service
        self._keys = keys

    async def reload(self, request: Request) -> Response:
        """As SIGHUP: read the API keys again, and begin to replace each model by what is in its folder now."""
        self.require_key(request)
        self._service.require_ready()
        if self._service.replacements is None:
            raise ApiError(404, "this server does not load models again", code="not_found")
        self._service.reload()
        names = [model.name for model in self._service.models.all]
        answer = json.dumps({"status": "reloading", "models": names})
        return Response(answer, HTTPStatus.ACCEPTED, media_type="application/json")

    def require_key(self, request: Request) -> None:
        """Raise ApiError unless the request has an admin key."""
        if self._keys is None:
            raise ApiError(404, f"{request.url.path}: start the server with --admin-keys FILE to use it")
        key = bearer_key(request.scope)
        if not key or self._keys.holder_of(key) is None:
            message = "the admin key is wrong" if key else "an admin key is required"
            raise ApiError(401, f"{message}: send Authorization: Bearer KEY", code="invalid_api_key")
