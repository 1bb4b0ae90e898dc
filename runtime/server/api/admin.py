"""What an operator may ask of a server over HTTP, with a key of its own."""

import json
from dataclasses import asdict
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from ingot.errors import shown
from ingot.runtime.server.http.access import ApiKeys, bearer_key
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.models.swap import Replacements
from ingot.runtime.server.service import Service


class Admin:
    """Endpoints below /admin, and the key of all that only an operator may do. Without keys they answer 404."""

    def __init__(self, service: Service, keys: ApiKeys | None) -> None:
        self._service = service
        self._keys = keys

    async def reload_or_show(self, request: Request) -> Response:
        """POST, as SIGHUP: read the API keys again, and begin to replace each model by what is in its folder now.

        With `wait` the answer comes when each was checked, and serves or was refused. With `accept_change` an artifact
        may answer otherwise than the one that is served. GET says what became of it.
        """
        self.require_key(request)
        replacements, waits, accepts = self._replacements(), _flag(request, "wait"), _flag(request, "accept_change")
        if request.method != "POST":
            return self._answer(replacements, HTTPStatus.OK)
        self._service.require_ready()
        checked = self._service.reload(accept_change=accepts)
        if waits and checked:
            await checked.wait()
        return self._answer(replacements, HTTPStatus.OK if waits else HTTPStatus.ACCEPTED)

    def _replacements(self) -> Replacements:
        if self._service.replacements is None:
            raise ApiError(404, "this server does not load models again", code="not_found")
        return self._service.replacements

    def _answer(self, replacements: Replacements, status: HTTPStatus) -> Response:
        last = {model.name: replacements.last_reload(model.name) for model in self._service.models.all}
        answer = {
            "status": "reloading" if replacements.is_checking else "done",
            "models": [{"model": name, **asdict(reload)} for name, reload in last.items()],
        }
        return Response(json.dumps(answer), status, media_type="application/json")

    def require_key(self, request: Request) -> None:
        """Raise ApiError unless the request has an admin key."""
        if self._keys is None:
            raise ApiError(404, f"{request.url.path}: start the server with --admin-keys FILE to use it")
        key = bearer_key(request.scope)
        if not key or self._keys.holder_of(key) is None:
            message = "the admin key is wrong" if key else "an admin key is required"
            raise ApiError(401, f"{message}: send Authorization: Bearer KEY", code="invalid_api_key")


def _flag(request: Request, name: str) -> bool:
    """A parameter of the URL that is true or false; without it, false."""
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise ApiError(400, f"{name} is {shown(given)}; it must be true or false", param=name, code="invalid_value")
    return given == "true"
