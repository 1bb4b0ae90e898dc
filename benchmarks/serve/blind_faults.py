"""Faults that no rule of `ingot doctor` was written for, and healthy loads: see `benchmarks.serve.blind_diagnosis`.

Each fault says in advance which words a finding must have to name it. The server computes with one thread on one core,
and the clients use the others, unless the fault is about threads.
"""

import json
import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from benchmarks.device import available_cores
from benchmarks.serve.faults import Body, Load, Place, chat, closed_loop, completion, random_prompts, tokens

_CLIENTS = count(1000)
_SLOW_READ_MS = 40
_SLOW_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static void delay(int file)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    if (strstr(path, "slow-kv-disk")) usleep(DELAY_MS * 1000);
}

#define SLOW(name) \
    ssize_t name(int file, const struct iovec *vectors, int length, off_t at, int flags) \
    { \
        static ssize_t (*real)(int, const struct iovec *, int, off_t, int); \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name); \
        delay(file); \
        return real(file, vectors, length, at, flags); \
    }
SLOW(preadv2)
SLOW(preadv64v2)
SLOW(pwritev2)
SLOW(pwritev64v2)
"""


@dataclass(frozen=True)
class BlindFault:
    """A fault. A finding names it if its texts have a match of each of `words`, which are regular expressions."""

    words: tuple[str, ...]
    load: Load
    options: tuple[str, ...] = ()
    seconds: float = 6.0
    cores: int | None = 1
    has_slow_disk: bool = False


def on_one_thread(**values: object) -> tuple[str, ...]:
    """Options of an engine with one thread."""
    given = {"num_threads": 1, **values}
    return tuple(word for name, value in given.items() for word in ("--set", f"{name}={value}"))


def all_of(*loads: Load) -> Load:
    """Several loads at a time."""

    def load(place: Place, stop: threading.Event) -> None:
        with ThreadPoolExecutor(len(loads)) as pool:
            for done in [pool.submit(each, place, stop) for each in loads]:
                done.result()

    return load


def impatient(num_clients: int, patience: float, max_tokens: int) -> Load:
    """Clients whose timeout is shorter than their answers take, and which try again."""

    def client(place: Place, stop: threading.Event) -> None:
        rng = random.Random(next(_CLIENTS))
        while not stop.is_set():
            link = HTTPConnection(urlsplit(place.url).netloc, timeout=patience)
            try:
                link.request("POST", "/v1/completions", json.dumps(completion(tokens(rng, 40), max_tokens)))
                link.getresponse().read()
            except OSError:
                pass
            finally:
                link.close()

    return all_of(*[client] * num_clients)


def half_invalid(rng: random.Random) -> Body:
    """Every other request has a top_p that is not allowed."""
    return completion(tokens(rng, 30), 8, top_p=rng.choice([1, 9]))


def pausing_engine(place: Place, stop: threading.Event) -> None:
    """The engine's process is stopped for a part of each second, as by a debugger, a snapshot of a VM or a freezer."""

    def pauses(place: Place, stop: threading.Event) -> None:
        while not stop.wait(0.7):
            for name in (signal.SIGSTOP, signal.SIGCONT):
                for process in place.children:
                    os.kill(process, name)
                if name is signal.SIGSTOP:
                    threading.Event().wait(0.5)

    all_of(closed_loop(random_prompts(40, 60), 4), pauses)(place, stop)


def bursts(number: int, every: float, make: Callable[[random.Random], Body]) -> Load:
    """So many requests at once, then silence until the next such moment."""

    def load(place: Place, stop: threading.Event) -> None:
        rng = random.Random(next(_CLIENTS))
        with ThreadPoolExecutor(2 * number) as pool:
            while True:
                done = [pool.submit(place.post, "/v1/completions", make(rng)) for _ in range(number)]
                if stop.wait(every):
                    break
            for each in done:
                each.result()

    return load


def slow_readers(number: int, bytes_per_second: int) -> Load:
    """Clients that read their streams, more slowly than the tokens come."""

    def client(place: Place, stop: threading.Event) -> None:
        where, rng = urlsplit(place.url), random.Random(next(_CLIENTS))
        body = json.dumps(completion(tokens(rng, 16), 600, stream=True, logprobs=64, temperature=1)).encode()
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the 64 KiB of loopback make a buffer of MiB
            link.connect((where.hostname, where.port))
            link.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            link.sendall(body)
            while not stop.wait(0.1):
                link.recv(bytes_per_second // 10)

    return all_of(*[client] * number)


def known_prompts(number: int, length: int, answer: int) -> Callable[[random.Random], Body]:
    """Prompts of a fixed set, each with an end of its own."""

    def make(rng: random.Random) -> Body:
        return completion(tokens(random.Random(rng.randrange(number)), length) + tokens(rng, 4), answer)

    return make


_SMALL_POOL = {"kv_bytes": "3456KiB", "max_sequences": 16}  # 72 blocks of the demo model, 4 more than its context needs
FAULTS: dict[str, BlindFault] = {
    "client timeouts": BlindFault((r"client", r"timeout|left"), impatient(8, 0.25, 400), on_one_thread()),
    "half of the answers 400": BlindFault((r"\b400\b",), closed_loop(half_invalid, 4), on_one_thread()),
    "tiny chunks": BlindFault(
        (r"max_batch_tokens", r"raise"), closed_loop(random_prompts(500, 8), 3), on_one_thread(max_batch_tokens=16)
    ),
    "prompts that interrupt streams": BlindFault(
        (r"prompt", r"interrupt|stall|between tokens"),
        all_of(
            closed_loop(random_prompts(20, 200), 4),
            closed_loop(lambda rng: completion(tokens(rng, 900), 1), 1, pause=0.25),
        ),
        on_one_thread(max_batch_tokens=2048),
    ),
    "an engine that pauses": BlindFault((r"stood still|paused|stopped",), pausing_engine, on_one_thread()),
    "one thread of two": BlindFault(
        (r"threads?\b", r"num_threads|INGOT_THREADS"), closed_loop(random_prompts(100, 60), 8), on_one_thread(), 6, None
    ),
    "bursts": BlindFault(
        (r"burst",), bursts(40, 2.5, random_prompts(60, 30)), on_one_thread(max_sequences=8), seconds=8
    ),
    "a slow reader": BlindFault((r"client", r"read|accept"), slow_readers(8, 3000), on_one_thread(), seconds=8),
    "a pool that preempts": BlindFault(
        (r"pool", r"preempt|too small|kv_bytes"),
        closed_loop(random_prompts(32, 400), 16),
        on_one_thread(**_SMALL_POOL, kv_host_bytes=0),
    ),
    "a prefix cache that never hits": BlindFault(
        (r"prefix[_ ]cache", r"\boff\b|prefix_cache=true"), closed_loop(chat, 4), on_one_thread(prefix_cache="false")
    ),
    "max_tokens far too large": BlindFault(
        (r"max_tokens",), closed_loop(random_prompts(30, 100_000), 5), on_one_thread(max_sequences=4), seconds=12
    ),
    "a slow disk tier": BlindFault(
        (r"disk", r"slow"),
        closed_loop(known_prompts(24, 400, 4), 2),
        on_one_thread(**_SMALL_POOL, kv_host_bytes="2MiB", kv_disk_bytes="256MiB"),
        seconds=10,
        has_slow_disk=True,
    ),
}


def now_and_then(make: Callable[[random.Random], Body], share: float, other: Body) -> Callable[[random.Random], Body]:
    """Requests of which a small share is of another kind."""

    def mixed(rng: random.Random) -> Body:
        return {**make(rng), **other} if rng.random() < share else make(rng)

    return mixed


_PLAIN = on_one_thread()
HEALTHY: dict[str, tuple[tuple[str, ...], Load]] = {
    "nothing": (_PLAIN, lambda place, stop: None),
    "one stream": (_PLAIN, closed_loop(random_prompts(60, 40), 1)),
    "one long answer after the other": (_PLAIN, closed_loop(random_prompts(20, 300), 1)),
    "four streams": (_PLAIN, closed_loop(random_prompts(40, 120), 4)),
    "sixteen streams": (_PLAIN, closed_loop(random_prompts(40, 60), 16)),
    "requests now and then": (_PLAIN, closed_loop(random_prompts(60, 40), 2, pause=0.6)),
    "many short prompts": (_PLAIN, closed_loop(random_prompts(10, 4), 6, pause=0.03)),
    "few long prompts": (_PLAIN, closed_loop(random_prompts(700, 30), 1, pause=0.2)),
    "small bursts": (_PLAIN, bursts(4, 1.0, random_prompts(40, 20))),
    "a constant system prompt": (_PLAIN, closed_loop(chat, 4)),
    "mixed lengths": (
        _PLAIN,
        all_of(
            closed_loop(random_prompts(20, 30), 3, pause=0.1), closed_loop(random_prompts(200, 80), 1, pause=0.1)
        ),
    ),
    "answers of one token": (_PLAIN, closed_loop(random_prompts(60, 1), 4)),
    "a wrong request in forty": (
        _PLAIN, closed_loop(now_and_then(random_prompts(30, 8), 1 / 40, {"top_p": 9}), 4),
    ),
    "a client that leaves now and then": (
        _PLAIN, all_of(closed_loop(random_prompts(30, 10), 6), impatient(1, 1.0, 900)),
    ),
    "texts": (_PLAIN, closed_loop(lambda rng: completion(f"def f{rng.randrange(10**6)}(path):\n", 30), 4)),
    "speculation": (("--speculate", "lookup", *_PLAIN), closed_loop(random_prompts(60, 40), 4)),
    "a host tier": (on_one_thread(kv_host_bytes="64MiB"), closed_loop(random_prompts(100, 60), 4)),
    "a disk tier": (
        on_one_thread(kv_host_bytes="8MiB", kv_disk_bytes="256MiB"), closed_loop(known_prompts(12, 200, 20), 3),
    ),
    "a prefix cache that is off, and prompts that share nothing": (
        on_one_thread(prefix_cache="false"), closed_loop(random_prompts(60, 40), 4),
    ),
    "small steps for short prompts": (on_one_thread(max_batch_tokens=128), closed_loop(random_prompts(30, 40), 4)),
}  # fmt: skip


@contextmanager
def slow_disk(is_slow: bool) -> Iterator[tuple[str, ...]]:
    """A folder for a disk tier, as options; reads and writes in it take long for processes that start meanwhile."""
    with ExitStack() as stack:
        if not is_slow:
            yield ()
            return
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="slow-kv-disk")))
        source, library = folder / "slow.c", folder / "slow.so"
        source.write_text(_SLOW_DISK.replace("DELAY_MS", str(_SLOW_READ_MS)))
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        os.environ["LD_PRELOAD"] = str(library)
        stack.callback(os.environ.pop, "LD_PRELOAD")
        yield ("--set", f"kv_disk_path={folder / 'tier'}")


def pin(place: Place, cores: int | None) -> None:
    """Keep a server and its engines on the last cores of those available, or leave it on all."""
    if cores is None or available_cores() == 1:
        return
    chosen = sorted(os.sched_getaffinity(0))[-cores:]
    for process in (place.pid, *place.children):
        for task in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(task.name), chosen)
