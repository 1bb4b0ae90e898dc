"""The faults of `benchmarks.serve.diagnosis` and its healthy loads: options of a server, and what clients do to it."""

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.processes import children_of

from benchmarks.cpu.serve import metrics_of
from benchmarks.device import available_cores

NEIGHBOURS, COLD = "busy-neighbours", "cold-start"
_VOCAB = 4000  # token ids below it are plain tokens of the demo model
_CLIENTS = count()  # each has prompts of its own, also in another run on the same server
Body = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A server under test."""

    url: str
    pid: int

    @property
    def children(self) -> list[int]:
        """Its processes: those of engines."""
        return children_of(self.pid)

    def post(self, path: str, body: Body, connection: HTTPConnection | None = None) -> int:
        """Send a request and read the answer; returns its status."""
        link = connection or self.connect()
        link.request("POST", path, json.dumps(body))
        answer = link.getresponse()
        answer.read()
        if connection is None:
            link.close()
        return answer.status

    def connect(self) -> HTTPConnection:
        """A connection of its own."""
        return HTTPConnection(urlsplit(self.url).netloc, timeout=30)


Load = Callable[[Place, threading.Event], None]
"""Sends requests until the event is set."""


@dataclass(frozen=True)
class Fault:
    """A fault: the options of `ingot serve` and the load that bring it about."""

    options: tuple[str, ...]
    load: Load
    seconds: float = 4.0


def tokens(rng: random.Random, number: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(1, _VOCAB) for _ in range(number)]


def completion(prompt: list[int] | str, max_tokens: int, **more: object) -> Body:
    """The body of a request."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def closed_loop(make: Callable[[random.Random], Body], num_streams: int, pause: float = 0.0) -> Load:
    """So many clients, each of which sends its next request when it has an answer, and after a pause of this mean."""

    def client(place: Place, stop: threading.Event) -> None:
        rng, connection = random.Random(next(_CLIENTS)), place.connect()
        while not stop.wait(rng.uniform(0, 2 * pause)):
            place.post("/v1/completions", make(rng), connection)
        connection.close()

    def load(place: Place, stop: threading.Event) -> None:
        with ThreadPoolExecutor(num_streams) as pool:
            for done in [pool.submit(client, place, stop) for _ in range(num_streams)]:
                done.result()

    return load


def random_prompts(prompt_tokens: int, max_tokens: int) -> Callable[[random.Random], Body]:
    """Requests whose lengths are within a third of these."""

    def make(rng: random.Random) -> Body:
        length, answer = (max(1, int(each * rng.uniform(0.67, 1.33))) for each in (prompt_tokens, max_tokens))
        return completion(tokens(rng, length), answer)

    return make


def id_first(rng: random.Random) -> Body:
    """A unique id, then text that all prompts share."""
    return completion(tokens(rng, 8) + tokens(random.Random(0), 400) + tokens(rng, 8), 8)


def unpredictable(rng: random.Random) -> Body:
    """Text of 8 tokens in random order, so that what followed two of them before says nothing."""
    alphabet = range(100, 108)
    prompt = [rng.choice(alphabet) for _ in range(600)]
    bias = {str(token): 100 for token in alphabet}
    return completion(prompt, 150, logit_bias=bias, temperature=2.0, seed=rng.randrange(1 << 30))


def slow_readers(place: Place, stop: threading.Event) -> None:
    """Clients that start streams and read nothing of them, next to one that reads."""
    where, rng = urlsplit(place.url), random.Random(1)
    with ExitStack() as opened:
        for _ in range(12):
            link = opened.enter_context(socket.socket())
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the 64 KiB of loopback make a buffer of MiB
            link.connect((where.hostname, where.port))
            body = json.dumps(completion(tokens(rng, 16), 900, stream=True, logprobs=64, temperature=1)).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            link.sendall(head.encode() + body)
        closed_loop(random_prompts(30, 10), 1, pause=0.3)(place, stop)


def many_connections(place: Place, stop: threading.Event) -> None:
    """Connections that are kept, on a server that may have few files open."""
    resource.prlimit(place.pid, resource.RLIMIT_NOFILE, (80, resource.prlimit(place.pid, resource.RLIMIT_NOFILE)[1]))
    files = len(os.listdir(f"/proc/{place.pid}/fd"))
    where = urlsplit(place.url)
    with ExitStack() as opened:
        for _ in range(max(0, 72 - files)):
            opened.enter_context(socket.create_connection((where.hostname or "", where.port or 0)))
        closed_loop(random_prompts(30, 20), 1)(place, stop)


def on_one_core(place: Place, stop: threading.Event) -> None:
    """All threads of the server on one core, as when the cpuset of a container shrinks while it runs."""
    core = min(os.sched_getaffinity(0))
    for process in (place.pid, *place.children):
        for task in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})
    closed_loop(random_prompts(30, 30), 4)(place, stop)


def with_neighbours(place: Place, stop: threading.Event) -> None:
    """As many processes that spin as there are cores."""
    spin = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(spin) for _ in range(available_cores())]
    try:
        closed_loop(random_prompts(30, 30), 4)(place, stop)
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def stopped_at_first(place: Place, stop: threading.Event) -> None:
    """The engine stands still for some seconds while it computes the first prompt."""
    rng = random.Random(2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(place.post, "/v1/completions", completion(tokens(rng, 900), 2))
        while not first.done() and not _is_running(place):
            pass
        for process in place.children:
            os.kill(process, signal.SIGSTOP)
        time.sleep(2.5)
        for process in place.children:
            os.kill(process, signal.SIGCONT)
        first.result()
    while not stop.is_set():
        place.post("/v1/completions", completion(tokens(rng, 200), 2))


def _is_running(place: Place) -> bool:
    """Whether the engine computes a request."""
    found = metrics_of(place.url)
    return any(value for name, value in found.items() if name.startswith("vllm:num_requests_running"))


def long_text(rng: random.Random) -> Body:
    """Text of many characters and few tokens, which the prefix cache has but for its end: it takes long to encode."""
    return completion("#" * 31_000 + f" {rng.randrange(10**6)}", 2)


def _set(**values: object) -> tuple[str, ...]:
    given = {"num_threads": 1, **values}
    return tuple(word for name, value in given.items() for word in ("--set", f"{name}={value}"))


# 3456 KiB are 72 blocks of the demo model: the least that a prompt of its whole context needs, and a few
_LONG_ANSWERS = closed_loop(random_prompts(32, 300), 16)
FAULTS: dict[str, Fault] = {
    "kv-tiers-thrash": Fault(_set(kv_bytes="3456KiB", kv_host_bytes="64MiB", max_sequences=16), _LONG_ANSWERS, 6),
    "kv-pool-full": Fault(_set(kv_bytes="3456KiB", max_sequences=16), closed_loop(random_prompts(300, 60), 16), 6),
    "batch-full": Fault(_set(max_sequences=2), closed_loop(random_prompts(30, 60), 16)),
    "prefix-differs": Fault(_set(), closed_loop(id_first, 2), 6),
    "overload": Fault(("--max-requests", "4", *_set()), closed_loop(random_prompts(30, 60), 16, pause=0.1)),
    "slow-clients": Fault(("--send-seconds", "1", *_set()), slow_readers, 9),
    "open-files": Fault(_set(), many_connections),
    "threads-over-cores": Fault(_set(num_threads=available_cores()), on_one_core),
    NEIGHBOURS: Fault(_set(num_threads=available_cores()), with_neighbours),
    "drafts-rejected": Fault(("--speculate", "lookup", *_set(adaptive="false")), closed_loop(unpredictable, 2), 6),
    "slow-encoding": Fault(_set(), closed_loop(long_text, 16), 6),
    COLD: Fault(_set(max_batch_tokens=8), stopped_at_first, 8),  # many steps: it is stopped in one of them
}


def chat(rng: random.Random) -> Body:
    """A system prompt that all share, then what differs."""
    return completion(tokens(random.Random(0), 200) + tokens(rng, 30), 20)


HEALTHY: dict[str, tuple[tuple[str, ...], Load]] = {
    "one stream": (_set(), closed_loop(random_prompts(60, 40), 1)),
    "eight streams": (_set(), closed_loop(random_prompts(60, 40), 8)),
    "a shared system prompt": (_set(), closed_loop(chat, 4)),
    "answers of one token": (_set(), closed_loop(random_prompts(60, 1), 4)),
    "long prompts": (_set(), closed_loop(random_prompts(500, 20), 2)),
    "pauses between requests": (_set(), closed_loop(random_prompts(60, 40), 8, pause=0.3)),
    "texts": (_set(), closed_loop(lambda rng: completion(f"def f{rng.randrange(10**6)}(path):\n", 30), 4)),
    "speculation": (("--speculate", "lookup", *_set()), closed_loop(random_prompts(60, 40), 4)),
    "host tier": (_set(kv_host_bytes="64MiB"), closed_loop(random_prompts(100, 60), 4)),
    "no requests": (_set(), lambda place, stop: None),
}
