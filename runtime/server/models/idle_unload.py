"""Models without requests give their memory back, and are loaded again at the next request.

An engine that is closed keeps its place among the models, with the counters that it had. Requests that arrive while it
is loaded again wait for that, as many as `max_requests`. The artifact that was served is loaded, and no other.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ingot.runtime.server.http.api_error import ENGINE_UNAVAILABLE, ApiError
from ingot.runtime.server.models.served_models import Models, ServedModel, log_failure, warmed_up

_log = logging.getLogger(__name__)


class IdleModels:
    """Unloads the models of a server after `seconds` without a request. `load` loads the model of a name again."""

    def __init__(self, models: Models, load: Callable[[str], Awaitable[ServedModel]], seconds: float) -> None:
        self._models = models
        self._load = load
        self._seconds = seconds
        self._used: dict[str, float] = {}  # when a model was last seen with a request
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._loading: dict[str, asyncio.Task[ServedModel]] = {}

    def unload(self) -> None:
        """Begin to unload the models that were idle for long enough."""
        now = time.monotonic()
        for model in self._models.all:
            last = self._used.setdefault(model.name, now)
            if model.gate.num_open or model.is_restarting or not model.engine.is_healthy:
                self._used[model.name] = now
            elif now - last >= self._seconds and not model.is_unloaded:
                model.is_unloaded = True
                self._closing[model.name] = asyncio.create_task(self._close(model))

    async def loaded(self, model: ServedModel) -> ServedModel:
        """The model, loaded again if it is not: between this and its admission nothing may be awaited."""
        self._used[model.name] = time.monotonic()
        if not model.is_unloaded:
            return model
        with model.gate.admitted(1):  # no more wait than could be served
            task = self._loading.get(model.name)
            if task is None:
                task = self._loading[model.name] = asyncio.create_task(self._load_again(model))
                task.add_done_callback(lambda done: self._loading.pop(model.name))
            return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for what has begun."""
        await asyncio.gather(*self._closing.values(), *self._loading.values(), return_exceptions=True)

    async def _close(self, model: ServedModel) -> None:
        await model.close()
        _log.warning("%s: unloaded after %g s without a request", model.name, self._seconds)

    async def _load_again(self, model: ServedModel) -> ServedModel:
        await self._closing[model.name]
        started = time.monotonic()
        try:
            new = await warmed_up(self._load(model.name))
        except Exception as error:  # whatever it was: the model stays unloaded, and the next request tries again
            log_failure(_log, f"{model.name}: could not be loaded again", error)
            message = f"the model was idle and unloaded, and could not be loaded again: {error}"
            seconds = time.monotonic() - started
            raise ApiError(503, message, code=ENGINE_UNAVAILABLE, retry_after_seconds=max(1.0, seconds)) from error
        self._models.replace(model, new)
        self._used[model.name] = time.monotonic()
        _log.warning("%s: loaded again in %.1f s", model.name, time.monotonic() - started)
        return new
