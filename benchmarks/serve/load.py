"""Open-loop load: requests that are sent when they are due, whatever has become of those before.

It runs as a process of its own, reads a `Load` as JSON from its input and writes the attempts as JSON. Connections are
kept and used again; a request finds an idle one or opens one. The generator usually shares the server's processors, so
answers are scanned for what is counted and not parsed, and a stream that has begun is read ten times a second: its end
may be noted that much later.
"""

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

_END_OF_CHUNKS = b"0\r\n\r\n"
_READ_SECONDS = 0.1  # between two looks at a stream that has begun: its pieces would take most of the generator's time
_PRIORITY = -10  # where the system allows it: on a machine of its own the generator would not wait for the engine


@dataclass(frozen=True)
class Load:
    """Requests for `seconds` at `per_second`, by a Poisson process, each with random prompt tokens.

    prompt_tokens, max_tokens are means: lengths are equally likely from a quarter of them to seven quarters.
    retries        how often a refused client waits for as long as the server said and tries again
    patience       longest time in seconds for the answers, after the last request was due
    """

    url: str
    per_second: float
    seconds: float
    prompt_tokens: int
    max_tokens: int
    vocab_size: int
    retries: int = 0
    patience: float = 60.0
    seed: int = 0


@dataclass
class Attempt:
    """One request and its answer. Times are seconds since the load began; `status` is 0 without an answer."""

    number: int
    turn: int  # 0: the first attempt of a client, 1: its first retry
    output_tokens: int
    sent: float
    status: int = 0
    begun: float | None = None  # the first token, or the refusal
    ended: float | None = None
    retry_seconds: float | None = None
    is_whole: bool = False


class _Connection(asyncio.Protocol):
    """A connection, its present attempt and what arrived of the answer."""

    def __init__(self, generator: "_Generator") -> None:
        self._generator = generator
        self._transport: asyncio.Transport | None = None
        self._attempt: Attempt | None = None
        self._head = b""
        self._left = -1  # bytes of a body with a content length; -1: chunks
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, attempt: Attempt, request: bytes) -> None:
        assert self._transport
        self._go_on()
        self._attempt, self._head, self._rest = attempt, b"", b""
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        now = self._generator.now()
        if not attempt.status:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            attempt.status = int(head[9:12])
            length = _header(head, b"content-length")
            self._left = int(length) if length else -1
            if (milliseconds := _header(head, b"retry-after-ms")) is not None:
                attempt.retry_seconds = float(milliseconds) / 1000
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                attempt.begun = now
                self._end(attempt, now)
            return
        if attempt.begun is None and data:
            attempt.begun = now
        self._rest_a_while()
        seen = self._rest + data
        self._rest = seen[-64:]
        if seen.endswith(_END_OF_CHUNKS):
            attempt.is_whole = b"data: [DONE]" in seen
            self._end(attempt, now)

    def _rest_a_while(self) -> None:
        """Leave what comes next of a stream in the socket for a while."""
        assert self._transport
        self._transport.pause_reading()
        self._generator.call_later(_READ_SECONDS, self._go_on)

    def _go_on(self) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.resume_reading()

    def _end(self, attempt: Attempt, now: float) -> None:
        attempt.ended, self._attempt = now, None
        self._generator.finished(self, attempt)

    def connection_lost(self, error: Exception | None) -> None:
        attempt, self._attempt = self._attempt, None
        self._generator.lost(self, attempt)


class _Generator:
    """Sends the requests of a load and collects the attempts."""

    def __init__(self, load: Load) -> None:
        self._load = load
        place = urlsplit(load.url)
        self._host, self._port = place.hostname or "", place.port or 0
        self._idle: list[_Connection] = []
        self._bodies: dict[int, bytes] = {}
        self._output_tokens: dict[int, int] = {}
        self._open = 0
        self._done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._started = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.attempts: list[Attempt] = []

    def now(self) -> float:
        return self._loop.time() - self._started

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self._loop.call_later(seconds, call)

    async def run(self) -> None:
        load, rng = self._load, random.Random(self._load.seed)
        due, arrivals = 0.0, []
        while (due := due + rng.expovariate(load.per_second)) < load.seconds:
            arrivals.append(due)
        for number in range(len(arrivals)):
            self._bodies[number], self._output_tokens[number] = _request(load, rng)
        gc.collect()
        gc.disable()
        self._open = len(arrivals)
        self._started = self._loop.time() + 0.1
        for number, due in enumerate(arrivals):
            self._loop.call_at(self._started + due, self._send, number, 0)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._done.wait(), load.seconds + load.patience)

    def _send(self, number: int, turn: int) -> None:
        attempt = Attempt(number, turn, self._output_tokens[number], self.now())
        self.attempts.append(attempt)
        if self._idle:
            self._idle.pop().send(attempt, self._bodies[number])
        else:
            task = self._loop.create_task(self._connect(attempt))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, attempt: Attempt) -> None:
        try:
            _, connection = await self._loop.create_connection(lambda: _Connection(self), self._host, self._port)
        except OSError:
            self._close(attempt)
            return
        connection.send(attempt, self._bodies[attempt.number])

    def finished(self, connection: _Connection, attempt: Attempt) -> None:
        self._idle.append(connection)
        self._close(attempt)

    def lost(self, connection: _Connection, attempt: Attempt | None) -> None:
        with suppress(ValueError):
            self._idle.remove(connection)
        if attempt:
            self._close(attempt)

    def _close(self, attempt: Attempt) -> None:
        if attempt.retry_seconds is not None and attempt.turn < self._load.retries:
            self._loop.call_later(attempt.retry_seconds, self._send, attempt.number, attempt.turn + 1)
            return
        self._open -= 1
        if not self._open:
            self._done.set()


def _header(head: bytes, name: bytes) -> bytes | None:
    _, found, rest = head.lower().partition(b"\r\n" + name + b":")
    return rest.partition(b"\r\n")[0].strip() if found else None


def around(mean: int, rng: random.Random) -> int:
    """A length of this mean."""
    return rng.randint(max(1, mean // 4), 2 * mean - max(1, mean // 4))


def _request(load: Load, rng: random.Random) -> tuple[bytes, int]:
    """A request, and the length of its output."""
    max_tokens = around(load.max_tokens, rng)
    request = {
        "prompt": [rng.randrange(1, load.vocab_size) for _ in range(around(load.prompt_tokens, rng))],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(request).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body, max_tokens


def generate(load: Load) -> list[Attempt]:
    """Run a load in a process of its own; returns its attempts in the order in which they were sent."""
    command = [sys.executable, "-m", "benchmarks.serve.load"]
    done = subprocess.run(command, input=json.dumps(asdict(load)), capture_output=True, text=True, check=True)
    return [Attempt(**each) for each in json.loads(done.stdout)]


async def _main() -> None:
    generator = _Generator(Load(**json.loads(sys.stdin.read())))
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    await generator.run()
    json.dump([asdict(each) for each in generator.attempts], sys.stdout)


if __name__ == "__main__":
    asyncio.run(_main())
