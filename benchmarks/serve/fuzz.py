"""A server under malformed and large requests, slow clients and clients that leave: it answers others right.

    python -m benchmarks.serve.fuzz [ARTIFACT] [--requests 100000] [--large 400] [--disconnects 1000] [--seed 0]

Large requests that are valid, and hostile constraints, come from `large`. Meanwhile greedy prompts are completed again
and again and have to give the texts that they gave at first. At the end no request may be open and no KV block in use,
and the process is the one that was started. Exit code 1 otherwise, or if an answer had a status of 500 or above.
"""

import asyncio
import json
import random
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from urllib.parse import urlsplit
from urllib.request import urlopen

import click

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.serve.large import Limits, hostile_constraints, large
from benchmarks.serve.malformed import fields_of, framed, malformed

_BODY_SECONDS = 2.0
_AT_ONCE = 48
_LARGE_AT_ONCE = 4
_PATIENCE_SECONDS = 20.0  # for one answer, on processors that others use too
_GOLDEN = ("def read_file(path):", "import os\n", "class Node:", "for i in range(", "return [", "if __name__ ==")
LEFT = ("vllm:num_requests_running", "vllm:num_requests_waiting", "ingot_kv_blocks_in_use", "ingot_open_requests")


@dataclass
class Outcome:
    """Counts of answers by kind of request and status, and every fault."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_golden: int = 0
    faults: list[str] = field(default_factory=list)


class Fuzz:
    """Sends to one server, whose answers to the golden prompts are taken first."""

    def __init__(self, url: str, seed: int, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        place = urlsplit(url)
        self._patience_seconds = patience_seconds
        self._host, self._port = place.hostname or "", place.port or 0
        self._rng = random.Random(seed)
        self._fields = fields_of(json.load(urlopen(f"{url}/openapi.json")))
        self._limits = Limits.of(url)
        self._golden: dict[str, str] = {}
        self.outcome = Outcome()

    async def malformed(self, number: int) -> None:
        """Send malformed requests, so many at a time."""
        rng = random.Random(self._rng.random())
        requests = (malformed(rng, self._fields) for _ in range(number))

        async def sender() -> None:
            for kind, request in requests:
                answer = await self.exchange(request)
                self._note(kind, answer)

        await asyncio.gather(*(sender() for _ in range(_AT_ONCE)))

    async def large(self, number: int) -> None:
        """Send each hostile constraint, and so many large requests, a few at a time; each status has to be right."""
        rng = random.Random(self._rng.random())
        requests = [*hostile_constraints().items(), *(large(rng, self._limits) for _ in range(number))]
        rng.shuffle(requests)
        left = iter(requests)

        async def sender() -> None:
            for kind, request in left:
                answer = await self.exchange(framed(json.dumps(request.body).encode(), request.path))
                self._note(kind, answer)
                if not request.is_right(str(answer[9:12], "ascii", "replace")):
                    self.outcome.faults.append(f"{kind}: {answer[:300]!r}")

        await asyncio.gather(*(sender() for _ in range(_LARGE_AT_ONCE)))

    async def slow_clients(self, number: int, body_seconds: float) -> None:
        """Send heads and bodies a byte at a time: the server has to close the connection or answer 408."""
        request = framed(b'{"prompt": "' + b"x" * 2000 + b'"}', "/v1/completions")
        head = request.index(b"\r\n\r\n")

        async def slow(begun: int) -> None:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            started = time.monotonic()
            writer.write(request[:begun])
            answer = asyncio.create_task(reader.read(65536))
            for place in range(begun, len(request) - 1):
                await asyncio.wait([answer], timeout=body_seconds / 20)
                if answer.done() or writer.is_closing():
                    break
                with suppress(ConnectionError):
                    writer.write(request[place : place + 1])
                if time.monotonic() - started > self._patience_seconds + body_seconds:
                    self.outcome.faults.append("a slow client was not closed")
                    break
            found = b""
            with suppress(ConnectionError):
                found = await answer
            if found and b" 408 " not in found[:20]:
                self.outcome.faults.append(f"a slow client got {found[:40]!r}")
            self.outcome.answers["slow client", str(found[9:12], "ascii") or "closed"] += 1
            await abort(writer)

        places = [self._rng.choice([0, 1, 10, head, head + 4, head + 20]) for _ in range(number)]
        await asyncio.gather(*(slow(place) for place in places))

    async def disconnects(self, number: int) -> None:
        """Leave before the request is complete, during prefill, or in the stream; by a close or by a reset."""
        left = iter(range(number))

        async def client() -> None:
            for _ in left:
                await self._leave()

        await asyncio.gather(*(client() for _ in range(_AT_ONCE // 2)))

    async def _leave(self) -> None:
        rng = self._rng
        body = {"prompt": [rng.randrange(1, 250) for _ in range(rng.choice([3, 60, 400]))], "max_tokens": 80}
        body |= {"stream": rng.random() < 0.8, "ignore_eos": True, "n": rng.choice([1, 1, 2])}
        request = framed(json.dumps(body).encode(), "/v1/completions")
        reader, writer = await asyncio.open_connection(self._host, self._port)
        moment = rng.choice(["before", "prefill", "stream"])
        writer.write(request[: rng.randrange(len(request))] if moment == "before" else request)
        with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            await writer.drain()
            if moment == "stream":
                await asyncio.wait_for(reader.readuntil(b"data: "), 0.5)
                await asyncio.sleep(rng.random() * 0.05)
            else:
                await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.5:  # reset instead of close
            writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER
        await abort(writer)
        self.outcome.answers["disconnect", moment] += 1

    async def golden(self) -> None:
        """Complete the golden prompts: the first time remember the texts, then compare."""
        for prompt in _GOLDEN:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
            for _ in range(100):
                answer = await self.exchange(framed(json.dumps(body).encode(), "/v1/completions"))
                if answer[9:12] != b"429":
                    break
                await asyncio.sleep(0.05)
            try:
                text = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
            except (ValueError, KeyError):
                self.outcome.faults.append(f"the prompt {prompt!r} got {answer[:200]!r}")
                continue
            self.outcome.num_golden += 1
            if self._golden.setdefault(prompt, text) != text:
                self.outcome.faults.append(f"the prompt {prompt!r} gave {text!r}, and first {self._golden[prompt]!r}")

    async def golden_until(self, done: asyncio.Event) -> None:
        """Complete the golden prompts again and again."""
        while not done.is_set():
            await self.golden()
            await asyncio.sleep(0.1)

    async def metrics(self) -> dict[str, float]:
        """All values of /metrics, of all models together."""
        answer = await self.exchange(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        found: dict[str, float] = {}
        for line in answer.decode(errors="replace").splitlines():
            name, _, value = line.rpartition(" ")
            with suppress(ValueError):
                key = name.partition("{")[0]
                found[key] = found.get(key, 0.0) + float(value)
        return found

    async def require_nothing_left(self) -> dict[str, float]:
        """Wait until nothing is open; a fault if that does not happen. Returns the metrics."""
        for _ in range(100):
            found = await self.metrics()
            if not any(found.get(name, 1.0) for name in LEFT):
                return found
            await asyncio.sleep(0.1)
        self.outcome.faults.append(f"left at the end: { ({name: found.get(name) for name in LEFT}) }")
        return found

    async def exchange(self, request: bytes) -> bytes:
        """Send the bytes and nothing else; return the server's answer."""
        found = b""
        with suppress(ConnectionError, TimeoutError):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write(request)
                if b"Connection: close" not in request[:200]:
                    writer.write_eof()
                async with asyncio.timeout(self._patience_seconds):
                    while data := await reader.read(65536):
                        found += data
            finally:
                await abort(writer)
        return found

    def _note(self, kind: str, answer: bytes) -> None:
        status = str(answer[9:12], "ascii", "replace") if answer.startswith(b"HTTP/1.1 ") else ""
        self.outcome.answers[kind, status or ("closed" if not answer else "not HTTP")] += 1
        if status >= "500" or (answer and not status):
            self.outcome.faults.append(f"{kind}: {answer[:300]!r}")


async def abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def fuzz(
    url: str, requests: int, large: int, slow: int, disconnects: int, seed: int
) -> tuple[Outcome, dict[str, float]]:
    """Everything against one server; what happened, and its metrics at the end."""
    run, done = Fuzz(url, seed), asyncio.Event()
    await run.golden()
    meanwhile = asyncio.create_task(run.golden_until(done))
    await run.malformed(requests)
    await run.large(large)
    await run.slow_clients(slow, _BODY_SECONDS)
    await run.disconnects(disconnects)
    done.set()
    await meanwhile
    await run.golden()
    return run.outcome, await run.require_nothing_left()


@contextmanager
def logged_server(artifact: str, log: IO[str], *options: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server whose log goes to a file: nothing reads it meanwhile."""
    command = [sys.executable, "-m", "ingot", "serve", artifact, "--port", "0", *options]
    with subprocess.Popen(command, stderr=log, text=True) as child:
        for _ in range(600):
            log.seek(0)
            ready = [line for line in log.read().splitlines() if "ready on " in line]
            if ready or child.poll() is not None:
                break
            time.sleep(0.1)
        try:
            if not ready:
                raise click.ClickException("the server did not start; run `ingot serve` to see why")
            yield ready[0].split()[-1], child
        finally:
            child.terminate()
            child.wait()


@click.command()
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--requests", default=100_000, show_default=True, help="Malformed requests.")
@click.option("--large", default=400, show_default=True, help="Large requests that are valid.")
@click.option("--slow", default=40, show_default=True, help="Slow clients.")
@click.option("--disconnects", default=1000, show_default=True, help="Clients that leave.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve-fuzz.json")
def main(artifact: str, requests: int, large: int, slow: int, disconnects: int, seed: int, output: Path) -> None:
    """Print and write what happened."""
    with TemporaryFile("w+") as log, logged_server(artifact, log, "--body-seconds", str(_BODY_SECONDS)) as (url, child):
        before = asyncio.run(Fuzz(url, seed).metrics())
        started = time.monotonic()
        outcome, after = asyncio.run(fuzz(url, requests, large, slow, disconnects, seed))
        seconds = time.monotonic() - started
        if child.poll() is not None:
            outcome.faults.append(f"the server ended with code {child.returncode}")
        log.seek(0)
        tracebacks = log.read().count("Traceback")
    answers: dict[str, dict[str, int]] = {}
    for (kind, status), number in sorted(outcome.answers.items()):
        answers.setdefault(kind, {})[status] = number
    names = ("process_open_fds", "process_resident_memory_bytes", "ingot_failed_requests_total")
    facts = {
        "device": device_facts(),
        "seed": seed,
        "requests": requests,
        "large_requests": large,
        "slow_clients": slow,
        "disconnects": disconnects,
        "seconds": round(seconds, 1),
        "answers": answers,
        "golden_answers_equal": outcome.num_golden,
        "left": {name: after.get(name) for name in LEFT},
        "before": {name: before.get(name) for name in names},
        "after": {name: after.get(name) for name in names},
        "tracebacks": tracebacks,
        "num_faults": len(outcome.faults),
        "faults": outcome.faults[:20],
    }
    output.write_text(json.dumps(facts, indent=2) + "\n")
    click.echo(json.dumps(facts, indent=2))
    sys.exit(bool(outcome.faults))


if __name__ == "__main__":
    main()
