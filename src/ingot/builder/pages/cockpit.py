"""The cockpit of `ingot simulate --open`: a page on this machine alone, whose sliders run the simulator.

The server listens on 127.0.0.1, on a port that the system chooses; a path with a random token leads to the page, and
names of other hosts and pages of other origins are refused. It makes one run at a time, of a bounded number of requests
and seconds: a new one ends the one before.
"""

import asyncio
import hmac
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ingot.artifact.kv_geometry import KVType
from ingot.builder.pages.plan_page import read_script, slider
from ingot.builder.pages.recording import Recording
from ingot.builder.pages.simulation_page import QUEUE, SCRIPTS, TOKENS, UTILIZATION
from ingot.errors import IngotError, UsageError
from ingot.planning.data_file import validation_problem
from ingot.planning.plan import PlannedModel
from ingot.planning.service_levels import LevelBounds
from ingot.planning.simulation.deployment import Deployment
from ingot.planning.simulation.figures import Figures
from ingot.planning.simulation.timed_request import ObservedSteps, StepWatch
from ingot.planning.simulation.traffic import RequestSizes, Traffic
from ingot.runtime.options import EngineOptions
from ingot.runtime.scheduling_policy import Batching
from ingot.runtime.server.http.browsers import GuardPages, WebRules
from ingot.runtime.server.lifecycle import address_of, listen
from ingot.validation.report.page import Page, PageControl, PagePanel, PageSection, render_page

MOST_REQUESTS = 5000
MOST_SECONDS = 20.0
_MOST_BODY = 4096
_FRAME_SECONDS = 0.2
_KV_TYPES: tuple[KVType, ...] = ("int8", "int4")
_BATCHING: tuple[Batching, ...] = ("continuous", "static", "dynamic")
_SIZES = (0.25, 0.5, 1, 2, 4, 10)
_WEIGHTS = (0, 8, 4)
_HEADERS = {"cache-control": "no-store", "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
_PANELS = (
    PagePanel("outcome", "This run, and the one before", "Figures of all requests that ended.", True),
    QUEUE,
    PagePanel("ttft", "Time to first token", "Mean of the requests whose first token came in that time."),
    PagePanel("itl", "Time between tokens", "Mean of the tokens that came in that time."),
    UTILIZATION,
    PagePanel("pool", "Memory", "KV blocks of running sequences, and those kept for later prompts."),
    TOKENS,
)


class Position(BaseModel):
    """Positions of the sliders. A field of which the page has no slider keeps what the command line says.

    size     times as large as the model are the linear layers and experts that are simulated
    weights  bits; 0 for those that the model has
    kv       place in the types of KV; 0 for the model's own
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: Annotated[float, Field(gt=0, le=1e5)]
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)]
    replicas: Annotated[int | None, Field(ge=1, le=64)] = None
    devices: Annotated[int | None, Field(ge=1, le=64)] = None
    prompt: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    output: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    shared: Annotated[int | None, Field(ge=0, le=1 << 20)] = None
    batching: Annotated[int, Field(ge=0, lt=len(_BATCHING))] = 0
    chunk: Annotated[int | None, Field(ge=16, le=1 << 16)] = None
    prefix: Literal[0, 1] = 1
    drafted: Annotated[int, Field(ge=0, le=16)] = 0
    acceptance: Annotated[float, Field(ge=0, le=100)] = 70
    size: Annotated[float, Field(gt=0, le=100)] = 1
    weights: Literal[0, 4, 8] = 0
    kv: Annotated[int, Field(ge=0, le=len(_KV_TYPES))] = 0


@dataclass(frozen=True)
class Simulated:
    """The deployment and traffic of the command line, and functions that make others.

    sizes      of the requests; those of a trace are its own
    is_trace   whether the requests are those of a trace
    devices    of one engine
    remake     makes the deployment of another subject, options, devices of an engine and acceptance; None where the
               times of steps are given, which then hold for this model and its devices alone
    traffic    makes the requests of other sizes, so many of them
    """

    subject: PlannedModel
    deployment: Deployment
    level: LevelBounds
    source: str
    sizes: RequestSizes
    is_trace: bool
    rate: float
    devices: int
    traffic: Callable[[RequestSizes, int | None], Traffic]
    remake: Callable[[PlannedModel, EngineOptions, int, tuple[float, ...]], Deployment] | None

    def at(self, position: Position) -> tuple[Deployment, Traffic]:
        """Return what is simulated at a position. UsageError where it does not fit, or is not allowed."""
        options = replace(
            self.deployment.options,
            batching=_BATCHING[position.batching],
            prefix_cache=bool(position.prefix),
            max_batch_tokens=position.chunk or self.deployment.options.max_batch_tokens,
        )
        acceptance = (position.acceptance / 100,) * position.drafted
        if self.remake:
            subject = self._subject(position)
            deployment = self.remake(subject, options, position.devices or self.devices, acceptance)
        else:
            shape = replace(self.deployment.shape, acceptance=acceptance)
            if position.chunk:
                most = min(shape.max_sequences, position.chunk)
                shape = replace(shape, max_batch_tokens=position.chunk, max_sequences=most)
            deployment = replace(self.deployment, shape=shape, options=options)
        if position.replicas and _has_replicas(deployment):
            deployment = replace(deployment, replicas=position.replicas)
        return deployment, self.traffic(self._sizes(position), position.requests).at(position.rate)

    def _subject(self, position: Position) -> PlannedModel:
        """Return the model of a position; the file of its weights changes by as much as its matmuls."""
        before = self.subject.shape
        shape = before.with_scaled_matmuls(position.size) if position.size != 1 else before
        if position.weights:
            shape = shape.with_weight_bits(position.weights)
        if position.kv:
            shape = shape.with_kv_type(_KV_TYPES[position.kv - 1])
        saved = before.matmul_bytes - shape.matmul_bytes
        program = replace(self.subject.program, weight_bytes=max(0, self.subject.program.weight_bytes - saved))
        return replace(self.subject, shape=shape, program=program)

    def _sizes(self, position: Position) -> RequestSizes:
        given = {"prompt_tokens": position.prompt, "output_tokens": position.output, "shared_tokens": position.shared}
        return replace(self.sizes, **{name: value for name, value in given.items() if value is not None})


def _has_replicas(deployment: Deployment) -> bool:
    return not (deployment.disaggregation or deployment.regions or deployment.autoscaling)


def cockpit_page(simulated: Simulated) -> Page:
    """The page, whose script asks the server for runs."""
    words = simulated.level.words
    section = PageSection(
        "cockpit",
        "Cockpit",
        f"Every move of a slider simulates anew, with the engine's own scheduler. Goodput counts requests that keep the"
        f" service level ({words}). At most {MOST_REQUESTS:,} requests and {MOST_SECONDS:g} seconds are computed.",
        controls=_controls(simulated),
        panels=_PANELS,
    )
    return Page(
        kind="Ingot simulation",
        title=simulated.subject.name,
        sections=[section],
        sources=f"Times of steps: {simulated.source}.",
        scripts=[read_script(name) for name in (*SCRIPTS, "cockpit.js")],
        connects=True,
    )


def _controls(simulated: Simulated) -> list[PageControl]:
    deployment, sizes = simulated.deployment, simulated.sizes
    options, shape = deployment.options, deployment.shape
    rates = [float(f"{simulated.rate * factor:.3g}") for factor in (0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 5, 8, 12)]
    found = [
        slider("rate", "Requests a second", rates, float(f"{simulated.rate:.3g}")),
        slider("requests", "Requests", (100, 200, 500, 1000, 2000, MOST_REQUESTS), 500),
    ]
    if _has_replicas(deployment):
        found.append(slider("replicas", "Replicas", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), deployment.replicas))
    if simulated.remake:
        found += [
            slider("devices", "Devices of a replica", (1, 2, 4, 8), simulated.devices),
            slider("size", "Size, times the model's", _SIZES, 1),
            PageControl("weights", "Weights", _WEIGHTS, 0, ["as they are", "8 bits", "4 bits"]),
            PageControl("kv", "KV", range(1 + len(_KV_TYPES)), 0, ["as it is", *_KV_TYPES]),
        ]
    if not simulated.is_trace:
        lengths = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
        found += [
            slider("prompt", "Tokens of a prompt", lengths, sizes.prompt_tokens),
            slider("output", "Tokens of an output", lengths[:-2], sizes.output_tokens),
            slider("shared", "Tokens that prompts share", (0, 128, 512, 1024, 2048, 4096), sizes.shared_tokens),
        ]
    acceptance = 100 * sum(shape.acceptance) / len(shape.acceptance) if shape.acceptance else 70
    return [
        *found,
        PageControl("batching", "Batching", range(len(_BATCHING)), _BATCHING.index(options.batching), _BATCHING),
        slider("chunk", "Most tokens of a step", (256, 512, 1024, 2048, 4096, 8192), shape.max_batch_tokens),
        PageControl("prefix", "Prefix cache", (1, 0), 0 if options.prefix_cache else 1, ["on", "off"]),
        slider("drafted", "Drafted tokens of a step", range(9), len(shape.acceptance)),
        slider("acceptance", "Drafts that are right", range(0, 101, 10), acceptance, "%"),
    ]


class _Ended(Exception):
    """A run that is not to go on."""


class CockpitRun:
    """One run, in a thread of its own, whose state is sent while it goes on.

    send   called in the thread with each frame: figures of the page so far
    """

    def __init__(self, simulated: Simulated, position: Position, send: Callable[[dict[str, Any]], object]) -> None:
        self._simulated, self._position, self._send = simulated, position, send
        self._recording, self._is_ended = Recording(), threading.Event()
        self._begin = self._next_frame = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="simulation", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """Stop it, and wait for its thread."""
        self._is_ended.set()
        self._thread.join()

    def _serve(self) -> None:
        try:
            deployment, traffic = self._simulated.at(self._position)
            watched = replace(deployment, watch=self._watch)
            found = watched.run(traffic, self._simulated.level, self._recording.end)
            self._show({**self._frame(), "figures": _figures(found)})
        except _Ended:
            limit = f"stopped after {MOST_SECONDS:g} seconds of computing: take fewer requests or no drafts"
            self._show({**self._frame(), "error": limit})
        except IngotError as error:
            self._show({"error": str(error)})
        finally:
            self._show({})

    def _show(self, frame: dict[str, Any]) -> None:
        if not self._is_ended.is_set():
            self._send(frame)

    def _watch(self, replica: int) -> StepWatch:
        record = self._recording.watch(replica)

        def watch(steps: ObservedSteps) -> None:
            record(steps)
            if self._is_ended.is_set() or time.thread_time() > MOST_SECONDS:
                raise _Ended
            if time.monotonic() >= self._next_frame:
                self._show(self._frame())
                self._next_frame = time.monotonic() + _FRAME_SECONDS

        return watch

    def _frame(self) -> dict[str, Any]:
        return {
            "run": self._recording.series_json(),
            "ended": self._recording.num_ended,
            "requests": self._position.requests,
            "seconds": time.monotonic() - self._begin,
        }


def _figures(found: Figures) -> dict[str, Any]:
    return {name: value for name, value in asdict(found).items() if name != "kv_transfer"}


class Cockpit:
    """The server's application."""

    def __init__(self, simulated: Simulated) -> None:
        self._simulated, self._page = simulated, render_page(cockpit_page(simulated))
        self.token = secrets.token_urlsafe(24)
        self._run: CockpitRun | None = None
        self._turn = asyncio.Lock()
        routes = [Route("/{token}/", self._show), Route("/{token}/run", self._simulate, methods=["POST"])]
        rules = WebRules(own_name="127.0.0.1", is_local=True)
        self.app = Starlette(routes=routes, middleware=[Middleware(GuardPages, rules=rules)])

    def _is_known(self, request: Request) -> bool:
        return hmac.compare_digest(request.path_params["token"].encode(), self.token.encode())

    async def _show(self, request: Request) -> Response:
        if not self._is_known(request):
            return _refusal(404, "the address of the cockpit is the one that was printed")
        return HTMLResponse(self._page, headers=_HEADERS)

    async def _simulate(self, request: Request) -> Response:
        if not self._is_known(request):
            return _refusal(404, "the address of the cockpit is the one that was printed")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_BODY:
                return _refusal(413, f"the body has more than {_MOST_BODY} bytes")
        try:
            position = Position.model_validate_json(body)
        except ValidationError as error:
            return _refusal(400, f"the position is not valid: {validation_problem(error)}")
        frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        async with self._turn:
            if self._run:
                await asyncio.to_thread(self._run.end)
            run = self._run = CockpitRun(
                self._simulated, position, lambda frame: loop.call_soon_threadsafe(frames.put_nowait, frame)
            )
            run.start()
        return StreamingResponse(_lines(frames, run), media_type="application/x-ndjson", headers=_HEADERS)

    def close(self) -> None:
        """End the run that goes on."""
        if self._run:
            self._run.end()


async def _lines(frames: "asyncio.Queue[dict[str, Any]]", run: CockpitRun) -> AsyncIterator[bytes]:
    """Yield a line of JSON for each frame; of those that wait, the last alone. A reader that leaves ends the run."""
    try:
        while frame := await frames.get():
            while not frames.empty() and "run" in frame and "figures" not in frame:
                following = frames.get_nowait()
                if not following:
                    yield json.dumps(frame).encode() + b"\n"
                    return
                frame = following
            yield json.dumps(frame).encode() + b"\n"
    finally:
        await asyncio.to_thread(run.end)


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status, headers=_HEADERS)


def serve_cockpit(simulated: Simulated, on_ready: Callable[[str], object]) -> None:
    """Serve until Ctrl-C. `on_ready` gets the page's address once the server listens."""
    if simulated.rate <= 0:
        raise UsageError("--open has a slider for the rate: give a load with one, as --load poisson:8")
    cockpit, listening = Cockpit(simulated), listen("127.0.0.1", 0)
    config = uvicorn.Config(
        cockpit.app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    on_ready(f"{address_of(listening)}/{cockpit.token}/")
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        cockpit.close()
