"""Overhead of the server: streams of `ingot serve` next to streams of AsyncEngine in the reader's own process.

    python -m benchmarks.cpu.serve [ARTIFACT]

Each round serves the same requests in both ways, in turn: so many streams, each of which begins its next request when
one ends. The server is a process of its own; its client, which only looks at the ends of what arrives, runs on the same
cores, so its time is part of the server's cost here. Ratios are those of a round, server to in process; their median
and quartiles are reported, and the processor time of each side for a token. With one thread of the engine on two cores
the server finds a core free, and the ratio says what it costs by itself; with as many threads as cores all sides
compete. Prompts differ in every request, so that the prefix cache has none of them. Linux only.
"""

import asyncio
import json
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import click

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot.runtime import AsyncEngine, SamplingParams

PROMPT_TOKENS = 32
_OK = b"HTTP/1.1 200"
_END = b"\r\n0\r\n\r\n"  # of a chunked body
_DONE = b"data: [DONE]"
_USAGE = b'"completion_tokens": '
_LAST_BYTES = 512  # have both, and the end
_PROCESSOR_METRICS = {"server": "process_cpu_seconds_total", "engine": "ingot_engine_cpu_seconds_total"}

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


def lengths_of(seed: int, num_requests: int, max_tokens: int, *, are_equal: bool) -> list[int]:
    """Tokens of each answer: unequal ones of this mean, so that requests do not all end and begin at once."""
    rng = random.Random(seed)
    least = max(1, max_tokens // 4)
    return [max_tokens if are_equal else rng.randint(least, 2 * max_tokens - least) for _ in range(num_requests)]


async def in_process(engine: AsyncEngine, prompts: Prompts, num_streams: int, lengths: Sequence[int]) -> Outcome:
    """Read streams of the engine in this event loop; `lengths` has the tokens of each."""
    left, first_tokens, num_tokens = iter(zip(prompts, lengths, strict=True)), list[float](), 0

    async def reader() -> None:
        nonlocal num_tokens
        for prompt, length in left:
            params = SamplingParams(max_tokens=length, ignore_eos=True)
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
    """One stream of the server: a connection that is kept, its present request and the end of what arrived."""

    __slots__ = ("has_begun", "last", "max_tokens", "socket", "started")

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.last = b""
        self.started = 0.0
        self.max_tokens = 0
        self.has_begun = False

    def send(self, request: bytes, max_tokens: int) -> None:
        """Send the next request."""
        self.last, self.max_tokens, self.has_begun, self.started = b"", max_tokens, False, time.perf_counter()
        self.socket.sendall(request)

    def ends(self, data: bytes, first_tokens: list[float]) -> bool:
        """Take what arrived; whether the answer ends with it. RuntimeError for one that is not a whole stream."""
        if not self.has_begun:
            if self.last or data.startswith(_OK):
                if b"data: " in data:
                    first_tokens.append(time.perf_counter() - self.started)
                    self.has_begun = True
            else:
                raise RuntimeError(f"the server answered {data[:300]!r}")
        self.last = data[-_LAST_BYTES:] if len(data) >= _LAST_BYTES else (self.last + data)[-_LAST_BYTES:]
        if data and not data.endswith(_END):
            return False
        if _DONE not in self.last or int(self.last.rpartition(_USAGE)[2].partition(b",")[0]) != self.max_tokens:
            raise RuntimeError(f"a stream of {self.max_tokens} tokens ended with {self.last!r}")
        return True


def _request(prompt: list[int], max_tokens: int) -> bytes:
    request = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(request).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def over_http(url: str, prompts: Prompts, num_streams: int, lengths: Sequence[int]) -> Outcome:
    """Read streams of a server, as `in_process`. RuntimeError for an answer that is not a stream to its end."""
    place = urlsplit(url)
    requests = [(_request(*each), each[1]) for each in zip(prompts, lengths, strict=True)]  # before the time begins
    left, first_tokens = iter(requests), list[float]()
    with select.epoll() as poller, ExitStack() as opened:
        connections = [
            _Connection(place.hostname or "", place.port or 0) for _ in range(min(num_streams, len(prompts)))
        ]
        by_file = {connection.socket.fileno(): connection for connection in connections}
        for connection in connections:
            opened.callback(connection.socket.close)
        started = time.perf_counter()
        for file, connection in by_file.items():
            connection.send(*next(left))
            poller.register(file, select.EPOLLIN)
        while by_file:
            for file, _ in poller.poll():
                connection = by_file[file]
                if not connection.ends(connection.socket.recv(1 << 16), first_tokens):
                    continue
                request = next(left, None)
                if request is None:
                    poller.unregister(file)
                    del by_file[file]
                else:
                    connection.send(*request)
        seconds = time.perf_counter() - started
    return Outcome(sum(lengths) / seconds, statistics.median(first_tokens))


@contextmanager
def server(artifact: str, *options: str) -> Iterator[str]:
    """`ingot serve` in a process, and its URL."""
    with server_process(artifact, *options) as (url, _):
        yield url


@contextmanager
def server_process(artifact: str, *options: str) -> Iterator[tuple[str, int]]:
    """`ingot serve` in a process: its URL, and the number of the process."""
    command = [sys.executable, "-m", "ingot", "serve", artifact, "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        line = ""
        while "ready on " not in line:
            line = child.stderr.readline()
            if not line:
                raise RuntimeError("the server did not start; run `ingot serve` to see why")
        try:
            yield line.split()[-1], child.pid
        finally:
            child.terminate()
            child.wait()


def processor_seconds(url: str) -> dict[str, float]:
    """Processor time so far of the server's process and of the engine's, from the server's metrics."""
    values = {name.partition("{")[0]: value for name, value in metrics_of(url).items()}
    return {side: values[name] for side, name in _PROCESSOR_METRICS.items() if name in values}


def metrics_of(url: str) -> dict[str, float]:
    """Values of a server's metrics, by name with labels as in the text."""
    with urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


@dataclass
class Rounds:
    """Outcomes in process and of the server, round by round, and the processor time of each side, in seconds."""

    outcomes: list[tuple[Outcome, Outcome]] = field(default_factory=list)
    processor: Counter[str] = field(default_factory=Counter)

    def figures(self, num_tokens: int) -> dict[str, object]:
        """Medians and quartiles; `num_tokens` are those of all rounds."""
        return {
            "tokens_per_second_in_process": round(statistics.median(own.tokens_per_second for own, _ in self.outcomes)),
            "tokens_per_second_of_server": round(statistics.median(web.tokens_per_second for _, web in self.outcomes)),
            "ratio_of_tokens_per_second": _ratios(
                [web.tokens_per_second / own.tokens_per_second for own, web in self.outcomes]
            ),
            "ratio_of_ttft": _ratios([web.ttft_seconds / own.ttft_seconds for own, web in self.outcomes]),
            "ttft_ms_in_process": round(1000 * statistics.median(own.ttft_seconds for own, _ in self.outcomes), 1),
            "processor_microseconds_per_token": {
                side: round(1e6 * seconds / num_tokens, 1) for side, seconds in self.processor.items()
            },
        }


async def rounds_of(
    artifact: str, url: str, num_threads: int, num_streams: int, each_round: Sequence[Sequence[int]]
) -> Rounds:
    """Serve the same requests in both ways, in turn. Each round has the tokens of its answers; the first warms up."""
    found = Rounds()
    async with AsyncEngine.load(artifact, num_threads=num_threads) as engine:
        for number, lengths in enumerate(each_round):
            prompts = prompts_of(number, len(lengths), engine.model.vocab_size)
            started = time.process_time()
            own = await in_process(engine, prompts, num_streams, lengths)
            own_seconds = time.process_time() - started
            before, started = processor_seconds(url), time.process_time()
            web = over_http(url, prompts, num_streams, lengths)
            client_seconds, after = time.process_time() - started, processor_seconds(url)
            if number:
                found.outcomes.append((own, web))
                found.processor.update({"in process": own_seconds, "client": client_seconds})
                found.processor.update({side: after[side] - before[side] for side in after})
    return found


def _ratios(values: list[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return {"median": round(median, 3), "lower_quartile": round(lower, 3), "upper_quartile": round(upper, 3)}


@click.command(help=__doc__)
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--streams", multiple=True, default=(8, 64), show_default=True, help="Streams at a time.")
@click.option("--requests", default=192, show_default=True, help="Requests of a round.")
@click.option("--max-tokens", default=96, show_default=True, help="Mean of the tokens of each.")
@click.option("--equal-lengths", is_flag=True, help="All answers have the mean, so requests end and begin in waves.")
@click.option("--rounds", default=6, show_default=True)
@click.option("--threads", multiple=True, default=(1, os.cpu_count() or 1), help="Of the engine, on both sides.")
@click.option("--stream-seconds", multiple=True, default=(0.02,), show_default=True, help="As of ingot serve.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve.json")
def main(
    artifact: str,
    streams: tuple[int, ...],
    requests: int,
    max_tokens: int,
    equal_lengths: bool,
    rounds: int,
    threads: tuple[int, ...],
    stream_seconds: tuple[float, ...],
    output: Path,
) -> None:
    """Measure, print and write."""
    found: dict[str, dict[str, object]] = {}
    lengths = [lengths_of(each, requests, max_tokens, are_equal=equal_lengths) for each in range(rounds + 1)]
    num_tokens = sum(map(sum, lengths[1:]))
    for num_threads in threads:
        for seconds in stream_seconds:
            options = ("--stream-seconds", str(seconds), "--set", f"num_threads={num_threads}")
            with server(artifact, *options) as url:
                for number in streams:
                    served = asyncio.run(rounds_of(artifact, url, num_threads, number, lengths))
                    name = f"threads {num_threads}, streams {number}, seconds between events {seconds:g}"
                    found[name] = served.figures(num_tokens)
                    click.echo(f"{name}: {json.dumps(found[name])}")
    facts = {"device": device_facts(), "artifact": Path(artifact).name, "max_tokens": max_tokens, "rounds": rounds}
    facts |= {"lengths": "equal" if equal_lengths else "unequal"}
    output.write_text(json.dumps({**facts, "found": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
