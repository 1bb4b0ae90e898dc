"""The life of a server's process: listen, load, warm up, serve, drain, end.

It listens from the start, so that probes are answered while models load. The first SIGTERM or Ctrl-C drains; from then
on both signals have their default effect, so a second one ends the process at once.
"""

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette

from ingot.errors import EngineError, UsageError
from ingot.runtime.server.app import make_app
from ingot.runtime.server.event_loop import return_free_memory
from ingot.runtime.server.http.access import ApiKeys
from ingot.runtime.server.http.browsers import WebRules
from ingot.runtime.server.http.connection import protocol_with
from ingot.runtime.server.models.idle_unload import IdleModels
from ingot.runtime.server.models.served_models import Models, ServedModel
from ingot.runtime.server.models.swap import EvidenceChange, Replacements
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.service import Service

_Loaded = TypeVar("_Loaded")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KEEP_ALIVE_SECONDS = 75  # longer than the idle time of common proxies, which else reuse a closed connection
_CLOSE_SECONDS = 2  # for connections of clients that do not close theirs
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. UsageError when the address cannot be used."""
    try:
        with contextlib.ExitStack() as opened:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            listening = opened.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
            opened.pop_all()  # the server closes it
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host}, port {port}: {reason}; choose another --host or --port") from error
    listening.setblocking(False)
    return listening


def address_of(listening: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if listening.family == socket.AF_INET6 else f"http://{host}:{port}"


def web_rules(options: ServerOptions, listening: socket.socket, host: str, *, has_keys: bool) -> WebRules:
    """Which web pages may use a server on this socket. UsageError for names and origins that cannot be ones."""
    address = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0])
    return WebRules(options.allowed_hosts, options.allowed_origins, host, address.is_loopback, has_keys)


async def run(
    service: Service,
    listening: socket.socket,
    load: Callable[[], Models],
    *,
    keys: ApiKeys | None = None,
    admin_keys: ApiKeys | None = None,
    reload: Callable[[str, bool], ServedModel] | None = None,
    evidence_change: EvidenceChange = lambda old, new: None,
    host: str = "",
    on_ready: Callable[[Models], object] = lambda models: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve on a socket until the process is asked to stop, or `stop` is set. Raises what `load` raises.

    `load` runs in a thread; the server closes the engines that it returns. `reload` loads the model of a name again:
    what is served, after its engine failed or was idle; at SIGHUP, then with True, what is in its folder by now, unless
    that does not pass its gates, and `evidence_change` compares its evidence with that of what is served. `host` is the
    name that it was asked to listen on.
    EngineError once no engine serves and none is loaded again: what started the process can start it anew.
    """
    stop = stop or asyncio.Event()
    rules = web_rules(service.options, listening, host, has_keys=keys is not None)
    server = _Server(_config(service, make_app(service, keys, admin_keys, rules)))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    watching = asyncio.create_task(service.watch())
    stopping = asyncio.create_task(stop.wait())
    trimming = asyncio.create_task(return_free_memory())
    failing = asyncio.create_task(service.given_up.wait())
    with _stopping_on_signals(stop), _reloading_on_hangup(service):
        try:
            loading = _in_daemon_thread(load)
            await _first_of(loading, stopping, serving)
            if loading.done():
                await service.start(loading.result())
                if reload:
                    _have_reloaded(service, reload, evidence_change)
                on_ready(service.models)
                await _first_of(stopping, serving, failing)
        finally:
            await service.drain()
            for task in (watching, stopping, trimming, failing):
                task.cancel()
            server.should_exit = True
            await serving
    if service.given_up.is_set():
        raise EngineError("no engine serves, and none is loaded again: the server has ended; its log has the causes")


async def _first_of(*awaited: "asyncio.Future[Any]") -> None:
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)


class _Server(uvicorn.Server):
    """uvicorn's server without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _have_reloaded(
    service: Service, reload: Callable[[str, bool], ServedModel], evidence_change: EvidenceChange
) -> None:
    """Have failed engines restarted, artifacts replaced and idle models unloaded."""
    options = service.options

    def load(name: str, is_new: bool) -> "asyncio.Future[ServedModel]":
        return _in_daemon_thread(lambda: reload(name, is_new))

    if options.idle_unload_seconds is not None:
        service.idle = IdleModels(service.models, lambda name: load(name, False), options.idle_unload_seconds)
    wake = service.idle.loaded if service.idle else None
    service.replacements = Replacements(service.models, load, options.probation_seconds, wake, evidence_change)


def _config(service: Service, app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_with(service.options.body_seconds),  # type: ignore[arg-type]  # it makes them
        log_config=None,
        log_level="error",  # clients could fill the log with requests that are not HTTP
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,  # no answer depends on them
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )


@contextlib.contextmanager
def _stopping_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set the event at the first signal, and give signals their default effect from then on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    loop = asyncio.get_running_loop()

    def first() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in _SIGNALS:
        if before[number] is not signal.SIG_IGN:
            loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


@contextlib.contextmanager
def _reloading_on_hangup(service: Service) -> Iterator[None]:
    """At SIGHUP read the API keys again, and replace the models by the artifacts that are in their folders now."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return

    before, loop = signal.getsignal(signal.SIGHUP), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, service.reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)


def _in_daemon_thread(load: Callable[[], _Loaded]) -> "asyncio.Future[_Loaded]":
    """What `load` returns. A process that ends meanwhile does not wait for it, as it would for a pool's thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Loaded] = loop.create_future()

    def finish(result: _Loaded | BaseException) -> None:
        if future.cancelled():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    def work() -> None:
        result: _Loaded | BaseException
        try:
            result = load()
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            result = error
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
            loop.call_soon_threadsafe(finish, result)

    threading.Thread(target=work, name="ingot-load", daemon=True).start()
    return future
