"""LoRA adapters over HTTP: loaded and unloaded while the server runs, by an operator.

    POST /v1/load_lora_adapter      {"lora_name": "sql", "lora_path": "sql-v2"}
    POST /v1/unload_lora_adapter    {"lora_name": "sql"}

Both take an admin key, as paths below /admin do, and exist only with `--allow-lora-updates FOLDER`: adapters are read
from folders within it, whatever links are there. Requests, paths and fields are vLLM's.
"""

import json
from pathlib import Path
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from ingot.errors import AdapterError, shown
from ingot.runtime.server.api.admin import Admin
from ingot.runtime.server.api.answer_schemas import AdapterAnswer
from ingot.runtime.server.api.request_schemas import LoadAdapterRequest, UnloadAdapterRequest
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.models.served_models import ServedModel
from ingot.runtime.server.service import Service


class AdapterEndpoints:
    """The two endpoints. `folder` is what adapters may be read from; None: they answer 404."""

    def __init__(self, service: Service, admin: Admin) -> None:
        self._service = service
        self._admin = admin
        self._folder = service.options.lora_folder

    async def load(self, request: Request) -> Response:
        """Load an adapter, or replace the one of its name with `load_inplace`."""
        folder = self._require_allowed(request)
        body = await self._service.read(LoadAdapterRequest, request.scope, request.receive)
        path = _within(folder, body.lora_path)
        model = await self._service.find_loaded(body.model, current=True)
        if body.lora_name in self._service.models.by_name:
            raise ApiError(400, f"lora_name is {shown(body.lora_name)}, the name of a model: choose another",
                           param="lora_name", code="invalid_value")  # fmt: skip
        held = self._service.models.adapter_holder(body.lora_name)
        if held not in (None, model):
            raise ApiError(400, f"lora_name is {shown(body.lora_name)}, an adapter of another model: choose another",
                           param="lora_name", code="invalid_value")  # fmt: skip
        try:
            facts = await model.engine.load_adapter(body.lora_name, path, replace=body.load_inplace or False)
        except AdapterError as error:
            raise ApiError(400, str(error), param="lora_path", code="invalid_value") from error
        return _done("loaded", body.lora_name, model, rank=facts.rank, digest=facts.digest)

    async def unload(self, request: Request) -> Response:
        """Unload an adapter: no new request gets it, open ones keep it."""
        self._require_allowed(request)
        body = await self._service.read(UnloadAdapterRequest, request.scope, request.receive)
        model = self._service.models.adapter_holder(body.lora_name)
        if model is None:
            self._service.models.find(body.lora_name)  # 404, unless it is a model
            raise ApiError(400, f"{shown(body.lora_name)} is a model, not an adapter", param="lora_name",
                           code="invalid_value")  # fmt: skip
        model = await self._service.find_loaded(model.name, current=True)  # an idle one would come back with it
        facts = model.engine.adapters.get(body.lora_name)
        if facts is None:
            raise ApiError(404, f"{model.name} has no adapter {shown(body.lora_name)} any more", param="lora_name")
        await model.engine.unload_adapter(body.lora_name)
        return _done("unloaded", body.lora_name, model, rank=facts.rank, digest=facts.digest)

    def _require_allowed(self, request: Request) -> Path:
        if self._folder is None:
            raise ApiError(404, f"{request.url.path}: start the server with --allow-lora-updates FOLDER to use it")
        self._admin.require_key(request)
        self._service.require_ready()
        return self._folder


def _within(folder: Path, given: str) -> Path:
    """The folder that a path names, below the one that is allowed, links resolved."""
    try:
        path = (folder / given).resolve()
        is_within = path.is_relative_to(folder.resolve()) and path.is_dir()
    except (OSError, ValueError, RuntimeError):  # a null character, a loop of links
        is_within = False
    if not is_within:
        raise ApiError(
            400, f"lora_path is {shown(given)}; it must be a folder within {folder}, or relative to it",
            param="lora_path", code="invalid_value",
        )  # fmt: skip
    return path


def _done(status: Literal["loaded", "unloaded"], name: str, model: ServedModel, *, rank: int, digest: str) -> Response:
    answer = AdapterAnswer(status=status, lora_name=name, parent=model.name, rank=rank, digest=digest)
    return Response(json.dumps(answer), media_type="application/json")
