"""Overhead of the server: streams of `ingot serve` next to streams of AsyncEngine in the reader's own process.

    python -m benchmarks.cpu.serve [ARTIFACT]

Each round serves the same requests in both ways, in turn: so many streams, each of which begins its next request when
one ends. The server is a process of its own; its client, which only counts bytes, runs on the same cores, so its time
is part of the server's cost here. Ratios are those of a round, server to in process; their median and quartiles are
reported. Prompts differ in every request, so that the prefix cache has none of them.
"""

import asyncio
import json
import random
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot.runtime import AsyncEngine, SamplingParams

PROMPT_TOKENS = 32
_OK = b"HTTP/1.1 200"
_END = b"0\r\n\r\n"  # of a chunked body
_USAGE = b'"completion_tokens": '

Prompts = list[list[int]]


@dataclass(frozen=True)
class Outcome:
    """Tokens a second of all streams together, and the median time to a first token, in seconds."""

    tokens_per_second: float
    ttft_seconds: float


def prompts_of(seed: int, num_requests: int, vocab_size: int) -> Prompts:
    """Prompts of random tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests)]


async def in_process(engine: AsyncEngine, prompts: Prompts, num_streams: int, max_tokens: int) -> Outcome:
    """Read streams of the engine in this event loop."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    left, first_tokens, num_tokens = iter(prompts), list[float](), 0

    async def reader() -> None:
        nonlocal num_tokens
        for prompt in left:
            started, has_begun = time.perf_counter(), False
            async for output in engine.stream(prompt, params):
                if not has_begun:
                    first_tokens.append(time.perf_counter() - started)
                    has_begun = True
                num_tokens += len(output.tokens)

    started = time.perf_counter()
    await asyncio.gather(*(reader() for _ in range(num_streams)))
    return Outcome(num_tokens / (time.perf_counter() - started), statistics.median(first_tokens))


class _Connection:
    """One stream of the server: a connection that is kept, its present request and what arrived of the answer."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = bytearray()
        self.started = 0.0
        self.has_begun = False

    def send(self, prompt: list[int], max_tokens: int) -> None:
        """Send the next request."""
        request = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(request).encode()
        self.received.clear()
        self.has_begun, self.started = False, time.perf_counter()
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )


def over_http(url: str, prompts: Prompts, num_streams: int, max_tokens: int | Sequence[int]) -> Outcome:
    """Read streams of a server. RuntimeError for an answer that is not a stream to its end.

    `max_tokens` may be one number for each prompt.
    """
    place = urlsplit(url)
    lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    left, first_tokens, num_tokens = iter(zip(prompts, lengths, strict=True)), list[float](), 0
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        connections = [_Connection(place.hostname or "", place.port or 0) for _ in range(num_streams)]
        for connection in connections:
            opened.callback(connection.socket.close)
        started = time.perf_counter()
        for connection in connections:
            connection.send(*next(left))
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.data
                arrived = connection.socket.recv(1 << 16)
                connection.received += arrived
                if not connection.has_begun and b"data: " in connection.received:
                    first_tokens.append(time.perf_counter() - connection.started)
                    connection.has_begun = True
                is_stream = connection.received.startswith(_OK)  # others have a length, and the connection stays open
                if arrived and is_stream and not connection.received.endswith(_END):
                    continue
                num_tokens += _tokens_of(bytes(connection.received))
                request = next(left, None)
                if request is None:
                    selector.unregister(connection.socket)
                else:
                    connection.send(*request)
    return Outcome(num_tokens / (time.perf_counter() - started), statistics.median(first_tokens))


def _tokens_of(answer: bytes) -> int:
    if b"data: [DONE]" not in answer:
        raise RuntimeError(f"the server answered {answer[:300]!r}")
    return int(answer.rpartition(_USAGE)[2].partition(b",")[0])


@contextmanager
def server(artifact: str, *options: str) -> Iterator[str]:
    """`ingot serve` in a process, and its URL."""
    command = [sys.executable, "-m", "ingot", "serve", artifact, "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        line = ""
        while "ready on " not in line:
            line = child.stderr.readline()
            if not line:
                raise RuntimeError("the server did not start; run `ingot serve` to see why")
        try:
            yield line.split()[-1]
        finally:
            child.terminate()
            child.wait()


async def rounds_of(
    artifact: str, url: str, num_streams: int, num_requests: int, max_tokens: int, rounds: int
) -> list[tuple[Outcome, Outcome]]:
    """Outcomes in process and of the server, round by round."""
    found = []
    async with AsyncEngine.load(artifact) as engine:
        for number in range(rounds + 1):
            prompts = prompts_of(number, num_requests, engine.model.vocab_size)
            own = await in_process(engine, prompts, num_streams, max_tokens)
            found.append((own, over_http(url, prompts, num_streams, max_tokens)))
    return found[1:]  # the first warms up


def _ratios(values: list[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return {"median": round(median, 3), "lower_quartile": round(lower, 3), "upper_quartile": round(upper, 3)}


@click.command(help=__doc__)
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--streams", multiple=True, default=(8, 64), show_default=True, help="Streams at a time.")
@click.option("--requests", default=96, show_default=True, help="Requests of a round.")
@click.option("--max-tokens", default=48, show_default=True, help="Tokens of each.")
@click.option("--rounds", default=12, show_default=True)
@click.option("--stream-seconds", multiple=True, default=(0.0, 0.02), show_default=True, help="As of ingot serve.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve.json")
def main(
    artifact: str,
    streams: tuple[int, ...],
    requests: int,
    max_tokens: int,
    rounds: int,
    stream_seconds: tuple[float, ...],
    output: Path,
) -> None:
    """Measure, print and write."""
    found: dict[str, dict[str, object]] = {}
    for seconds in stream_seconds:
        with server(artifact, "--stream-seconds", str(seconds)) as url:
            for number in streams:
                pairs = asyncio.run(rounds_of(artifact, url, number, requests, max_tokens, rounds))
                row: dict[str, object] = {
                    "tokens_per_second_in_process": round(statistics.median(own.tokens_per_second for own, _ in pairs)),
                    "tokens_per_second_of_server": round(statistics.median(web.tokens_per_second for _, web in pairs)),
                    "ratio_of_tokens_per_second": _ratios(
                        [web.tokens_per_second / own.tokens_per_second for own, web in pairs]
                    ),
                    "ratio_of_ttft": _ratios([web.ttft_seconds / own.ttft_seconds for own, web in pairs]),
                    "ttft_ms_in_process": round(1000 * statistics.median(own.ttft_seconds for own, _ in pairs), 1),
                }
                found[f"{number} streams, {seconds:g} s between events"] = row
                click.echo(f"{number:3} streams, {seconds:5g} s between events: {json.dumps(row)}")
    facts = {"device": device_facts(), "artifact": Path(artifact).name, "max_tokens": max_tokens, "rounds": rounds}
    output.write_text(json.dumps({**facts, "found": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
