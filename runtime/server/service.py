"""The state of a server: its models, the requests that are open, and whether it takes more.

    starting -> ready -> draining -> stopped

Every second `watch` looks for engines that make no progress and for clients that accept nothing, and ends their
requests.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from starlette.types import Receive, Scope

from ingot.runtime.server.api.bodies import Body, name_ignored, parse
from ingot.runtime.server.http.access import BodyRoom, KeyFiles, holder_of, read_body
from ingot.runtime.server.http.api_error import ENGINE_UNAVAILABLE, ApiError
from ingot.runtime.server.http.response_writer import ResponseWriter
from ingot.runtime.server.models.idle_unload import IdleModels
from ingot.runtime.server.models.self_check import SelfCheck
from ingot.runtime.server.models.served_models import Models, ServedModel
from ingot.runtime.server.models.swap import Replacements
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.watch.key_usage import KeyUsage
from ingot.runtime.server.watch.request_log import RecordObserver

_log = logging.getLogger(__name__)
_WATCH_SECONDS = 1.0
_FLUSH_SECONDS = 10.0  # for blocks on their way to the disk tier
_LAST_WORDS_SECONDS = 5.0  # in which aborted requests may still be answered
_MOST_DELAYED = 1024  # refusals at a time: each is a connection

State = Literal["starting", "ready", "draining", "stopped"]
_Body = TypeVar("_Body", bound=Body)


@dataclass(eq=False)
class OpenRequest:
    """A request that is being served by a task."""

    task: "asyncio.Task[None]"
    outlet: ResponseWriter
    model: ServedModel | None = None
    answer_id: str | None = None
    failure: ApiError | None = None

    def end_with(self, failure: ApiError | None) -> None:
        """Cancel it. Its client gets the error; with None, nothing: it does not read."""
        self.failure = failure
        self.task.cancel()


class Service:
    """Counts and ends the open requests of all models. `version` is that of Ingot, which clients may read."""

    def __init__(self, options: ServerOptions, version: str = "") -> None:
        self.options = options
        self.bodies = BodyRoom(options)
        self.version = version
        self.models = Models([])
        self.replacements: Replacements | None = None  # None: engines are neither restarted nor replaced
        self.idle: IdleModels | None = None  # None: models stay loaded
        self.key_files: KeyFiles | None = None  # None: API keys stay as they are
        self.state: State = "starting"
        self.observers: list[RecordObserver] = []  # of requests that have ended, served or not
        self.key_usage = KeyUsage()
        self.num_slow_clients = 0
        self.num_clients_left: Counter[str] = Counter()  # models
        self._send_seconds: defaultdict[str, float] = defaultdict(float)  # models, answers that have ended
        self._num_delayed = 0
        self.given_up = asyncio.Event()  # set once no engine serves, and none is loaded again
        self._self_check = SelfCheck()
        self._open: set[OpenRequest] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    @property
    def num_open(self) -> int:
        """Requests that are open."""
        return len(self._open)

    def send_seconds(self, model: ServedModel) -> float:
        """How long answers of a model waited for their clients to accept them, those of open requests included."""
        open_answers = (request.outlet.send_seconds for request in self._open if request.model is model)
        return self._send_seconds[model.name] + sum(open_answers)

    @asynccontextmanager
    async def affordable_body(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """Yield the body of a request for which its key has a budget; its bytes count until the end of the context."""
        self.require_ready()
        holder = holder_of(scope)
        with self.bodies.body(holder.group) as held:
            body = await read_body(scope, receive, held)
            holder.require_budget()
            yield body

    async def read(self, kind: type[_Body], scope: Scope, receive: Receive) -> _Body:
        """The request of an endpoint that generates nothing."""
        with self.bodies.body("") as held:
            return self.parsed(kind, await read_body(scope, receive, held), scope)

    def parsed(self, kind: type[_Body], text: bytes, scope: Scope) -> _Body:
        """The request in a body that was read."""
        body = parse(kind, text, is_lenient=self.options.lenient)
        name_ignored(scope, body)
        return body

    def find_open(self, answer_id: str) -> OpenRequest | None:
        """The open request with an answer of this id."""
        return next((request for request in self._open if request.answer_id == answer_id), None)

    async def find_loaded(self, name: str | None, *, current: bool = False) -> ServedModel:
        """The model of a request, which is loaded if it is not. ApiError for an unknown name.

        `current`: not the engine before it, which may take requests while both are compared. It may lack adapters.
        """
        model = self.models.find(name)
        model = await self.idle.loaded(model) if self.idle else model
        return model if current or name in model.engine.adapters else self.models.less_busy(model)

    def require_ready(self) -> None:
        """Raise ApiError 503 unless requests are taken."""
        if self.state != "ready":
            reason = "is starting" if self.state == "starting" else "is shutting down"
            raise ApiError(503, f"the server {reason}", code=self.state, retry_after_seconds=1.0)

    async def delay(self, error: ApiError) -> None:
        """Wait before an error is sent, which says the rest of its time to retry then.

        It is sent at once, with the whole time, if as many wait as may, or the server ends.
        """
        seconds = error.delay_seconds
        if not seconds or error.retry_after_seconds is None:
            return
        if self.state == "ready" and self._num_delayed < _MOST_DELAYED:
            self._num_delayed += 1
            try:
                await asyncio.sleep(seconds)
            finally:
                self._num_delayed -= 1
            error.retry_after_seconds -= seconds

    def problems(self, *, lasting: bool = False) -> list[str]:
        """Why engines do not serve, each with its model; empty while all do, and once they are closed on purpose.

        `lasting`: without engines that are being restarted, or will be, those that run but fail every request, and
        those whose stages are being started again.
        """
        if self.state in ("draining", "stopped"):
            return []
        found = [(model, model.problem() or (None if lasting else model.passing_problem)) for model in self.models.all]
        return [f"{model.name}: {text}" for model, text in found if text and not (lasting and self._restarts(model))]

    def unavailable(self, model: ServedModel, reason: str) -> ApiError:
        """The error of a request whose engine has failed, with the time when it should serve again."""
        seconds = self.replacements.seconds_until_ready(model) if self.replacements else None
        return ApiError(503, reason, code=ENGINE_UNAVAILABLE, retry_after_seconds=seconds)

    def _restarts(self, model: ServedModel) -> bool:
        hangs = model.engine.is_healthy and not model.engine.process  # and cannot be ended without this process
        if self.replacements is None or hangs:
            return False
        return model.is_restarting or self.replacements.may_restart(model)

    @contextmanager
    def opened(self, request: OpenRequest) -> Iterator[None]:
        """Count a request as open."""
        self._open.add(request)
        self._none_open.clear()
        try:
            yield
        finally:
            failure = request.failure or request.outlet.error
            if request.model and failure and failure.code == ENGINE_UNAVAILABLE:
                request.model.count_lost()
            self._open.discard(request)
            if request.model:
                self._send_seconds[request.model.name] += request.outlet.send_seconds
            if not self._open:
                self._none_open.set()

    async def start(self, models: Models) -> None:
        """Warm the models up, and take requests."""
        self.models = models
        for model in models.all:
            await model.warm_up()
        self.state = "ready"

    def reload(self, *, accept_change: bool = False) -> asyncio.Event | None:
        """Read the API keys again, and begin to replace the models; what is set when each was checked.

        None while the models are loaded for the first time, or when they are not loaded again.
        """
        if self.key_files:
            self.key_files.reload()
        if self.replacements is None or self.state != "ready":
            return None
        return self.replacements.reload_all(accept_change=accept_change)

    async def watch(self) -> None:
        """Until cancelled, end requests that make no progress."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            await self.refresh_metrics()
            self.end_stuck()
            if self.state == "ready":
                self._self_check.look(self.models.all)
            if self.replacements and self.state == "ready":
                self.replacements.restart_failed()
                if self.replacements.has_given_up:
                    self.given_up.set()
            is_compared = self.replacements and self.replacements.is_checking
            if self.idle and self.state == "ready" and not is_compared:
                self.idle.unload()

    async def refresh_metrics(self) -> None:
        """Have engines in processes of their own send their metrics."""
        await asyncio.gather(*(model.engine.refresh_metrics() for model in self.models.counting))

    def end_stuck(self) -> None:
        """End requests whose engine has stalled, with its process, and those whose client accepts nothing."""
        latest = time.monotonic() - self.options.send_seconds
        for request in list(self._open):
            since = request.outlet.sending_since
            if since is not None and since < latest:
                self.num_slow_clients += 1
                request.end_with(None)
        for model in self.models.with_requests:
            problem = model.problem() if self.state == "ready" and model.engine.is_healthy else None
            if problem is None:
                continue  # streams of an engine that failed raise
            stuck = [request for request in self._open if request.model is model]
            if stuck or model.engine.process:
                _log.error("%s: %s", model.name, problem)
            for request in stuck:
                request.end_with(self.unavailable(model, problem))
            if model.engine.process:
                model.engine.process.kill()

    async def drain(self) -> None:
        """Take no more requests, serve the open ones for `drain_seconds`, abort the others, and close the engines."""
        self.state = "draining"
        if not await self._until_none_open(self.options.drain_seconds):
            _log.warning("%d requests were open after %g s of draining", self.num_open, self.options.drain_seconds)
        self.state = "stopped"
        await self._self_check.close()
        if self.replacements:
            await self.replacements.close()
        if self.idle:
            await self.idle.close()
        await asyncio.gather(*(model.engine.close(flush_seconds=_FLUSH_SECONDS) for model in self.models.all))
        if not await self._until_none_open(_LAST_WORDS_SECONDS):
            for request in list(self._open):
                request.end_with(None)

    async def _until_none_open(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._none_open.wait()
        except TimeoutError:
            return False
        return True
