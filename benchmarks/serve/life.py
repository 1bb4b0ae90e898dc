"""The life of a server under load: it is stopped, its engine is killed, its artifact is swapped, a bad one is planted.

    python -m benchmarks.serve.life [ARTIFACT] [--output FILE]

Each case is a server of its own with clients that stream one completion after the other, each on a new connection. A
stream is "whole", ended with an "error" that says why, "broken" (the connection ended without either) or "hung" (no end
within a minute). Bad artifacts are real ones: a copy with a damaged file, what a build leaves whose gates fail, one of
the same model with its layers four times over, which is slow, and one whose engine is killed on probation. Exit code 1
where something was broken or hung, a request failed that should not have, or a bad artifact was kept. Linux only.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import click
from safetensors.numpy import load_file, save_file
from tests.processes import children_of

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.serve.fuzz import logged_server

Json = dict[str, Any]

_CHECKPOINT = ROOT / "examples/models/stdlib-llama-6m"
KEY = "sk-operator"
_STREAMS, _CLIENTS, _MANY_CLIENTS = 200, 16, 64
_TOKENS = 100
_PATIENCE_SECONDS = 60.0
_PROBATION_SECONDS = 20.0
_LOADED_SECONDS = 3.0  # before and after what is done to the server
_COPIES = 4  # of each layer in the slow artifact
_QUICK = (
    "evaluation.tokens=1024", "evaluation.window_tokens=256", "evaluation.layer_kl_tokens=0", "latency.rounds=2",
    "latency.requests=1",
)  # fmt: skip
_ANY_QUALITY = ("gates.perplexity_ratio.max=9", "gates.kl_mean.max=9", "gates.top1_agreement.min=0.01")
_BAD = ("damaged file", "failed gates", "slow", "engine killed on probation")


def kind_of(answer: bytes) -> str:
    """The end of a stream, by all that arrived of it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return "error" if b'"error"' in body else "broken"
    if b"data: [DONE]" in body:
        return "whole"
    return "error" if b'data: {"error"' in body and body.endswith(b"0\r\n\r\n") else "broken"


@dataclass
class Clients:
    """Streams of a server, and what became of each."""

    url: str
    kinds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def stream(self) -> None:
        """Read one stream to its end."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                answer = await self._answer()
            kind = kind_of(answer)
        except TimeoutError:
            kind = "hung"
        except OSError:
            kind = "broken"
        if kind == "error":
            self.errors[answer.rpartition(b'"message": "')[2].partition(b'"')[0].decode()[:120]] += 1
        self.kinds[kind] += 1

    async def _answer(self) -> bytes:
        place = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            body = json.dumps(
                {"prompt": "def read_file(path):", "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}
            ).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            return await reader.read()
        finally:
            writer.close()

    async def _one_after_the_other(self) -> None:
        while not self.is_over:
            failed = self.kinds["error"] + self.kinds["broken"]
            await self.stream()
            if self.kinds["error"] + self.kinds["broken"] > failed:
                await asyncio.sleep(0.1)  # as clients do that retry

    @asynccontextmanager
    async def busy(self, num_clients: int) -> AsyncIterator[None]:
        """So many clients that send requests, some seconds before and after what is done meanwhile."""
        clients = [asyncio.create_task(self._one_after_the_other()) for _ in range(num_clients)]
        await asyncio.sleep(_LOADED_SECONDS)
        try:
            yield
            await asyncio.sleep(_LOADED_SECONDS)
        finally:
            self.is_over = True
            await asyncio.gather(*clients)

    def facts(self) -> Json:
        """Counts of streams."""
        counts = {kind: self.kinds[kind] for kind in ("whole", "error", "broken", "hung")}
        return {"streams": self.kinds.total(), **counts, "errors": dict(self.errors)}


@dataclass(frozen=True)
class Server:
    """A server of the artifact that a symbolic link points to."""

    url: str
    child: "subprocess.Popen[str]"
    link: Path

    def engine_pids(self) -> list[int]:
        """Processes of its engines, the oldest first."""
        return [
            pid
            for pid in sorted(children_of(self.child.pid))
            if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    async def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        """The status and the body of an answer."""
        return await asyncio.to_thread(self._get, path, method)

    def _get(self, path: str, method: str) -> tuple[int, bytes]:
        request = Request(self.url + path, method=method, headers={"Authorization": f"Bearer {KEY}"})
        try:
            with urlopen(request, timeout=2 * _PATIENCE_SECONDS) as answer:
                return answer.status, answer.read()
        except HTTPError as error:
            return error.code, error.read()

    async def until_ready(self) -> float:
        """Seconds until it is not ready, and then until it is again; at most a minute for each."""
        started = time.monotonic()
        for is_ready in (False, True):
            while ((await self.get("/ready"))[0] == 200) != is_ready and time.monotonic() < started + _PATIENCE_SECONDS:
                await asyncio.sleep(0.01)
        return time.monotonic() - started

    async def reload(self, artifact: Path) -> Json:
        """Point the link at an artifact and have it replace the present one; the result of the checks."""
        other = self.link.with_suffix(".new")
        other.symlink_to(artifact)
        other.replace(self.link)
        return _of_model((await self.get("/admin/reload?wait=true", "POST"))[1])

    async def outcome(self) -> Json:
        """The result of the last reload, once its probation has ended."""
        while (found := _of_model((await self.get("/admin/reload"))[1]))["state"] in (
            "loading",
            "checking",
            "probation",
        ):
            await asyncio.sleep(0.1)
        return found


def _of_model(answer: bytes) -> Json:
    found: Json = json.loads(answer)["models"][0]
    return found


@contextmanager
def server(artifact: Path, folder: Path, log: IO[str]) -> Iterator[Server]:
    """A server whose artifact can be swapped."""
    link, keys = folder / "served", folder / "keys"
    link.unlink(missing_ok=True)
    link.symlink_to(artifact)
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    options = ("--admin-keys", str(keys), "--probation-seconds", str(_PROBATION_SECONDS))
    with logged_server(str(link), log, *options) as (url, child):
        yield Server(url, child, link)


async def terminated(served: Server) -> Json:
    """SIGTERM while streams are open."""
    clients = Clients(served.url)
    streams = [asyncio.create_task(clients.stream()) for _ in range(_STREAMS)]
    num_open = 0.0
    while num_open < _STREAMS and not any(stream.done() for stream in streams):
        metrics = (await served.get("/metrics"))[1].decode()
        num_open = next(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("ingot_open_req"))
    started = time.monotonic()
    served.child.send_signal(signal.SIGTERM)
    await asyncio.gather(*streams)
    code = await asyncio.to_thread(served.child.wait)
    seconds = time.monotonic() - started
    return {**clients.facts(), "open_at_sigterm": num_open, "exit_code": code, "seconds_to_exit": round(seconds, 1)}


async def killed(served: Server) -> Json:
    """SIGKILL of the engine's process under load."""
    clients = Clients(served.url)
    async with clients.busy(_CLIENTS):
        os.kill(served.engine_pids()[0], signal.SIGKILL)
        seconds = await served.until_ready()
    return {**clients.facts(), "seconds_until_ready": round(seconds, 2)}


async def swapped(served: Server, artifact: Path, num_clients: int = _CLIENTS) -> Json:
    """A reload under load, to the end of its probation."""
    clients = Clients(served.url)
    async with clients.busy(num_clients):
        await served.reload(artifact)
        found = await served.outcome()
    return {**clients.facts(), "clients": num_clients, "state": found["state"], "reason": found["reason"]}


async def killed_on_probation(served: Server, artifact: Path) -> Json:
    """A reload under load whose engine dies on probation."""
    clients = Clients(served.url)
    async with clients.busy(_CLIENTS):
        before = {*served.engine_pids()}
        await served.reload(artifact)
        new = {*served.engine_pids()} - before
        os.kill(new.pop(), signal.SIGKILL)
        found = await served.outcome()
    return {**clients.facts(), "clients": _CLIENTS, "state": found["state"], "reason": found["reason"]}


def planted(kind: str, artifact: Path, folder: Path) -> Path:
    """An artifact of the same name that is bad in one way."""
    bad = folder / kind.replace(" ", "-")
    if kind == "failed gates":
        return _built(_CHECKPOINT, bad, ("gates.perplexity_ratio.max=0.5",), bad.with_name(f"{bad.name}.rejected"))
    if kind == "slow":
        return _built(_deeper(folder / "deeper"), bad, _ANY_QUALITY, bad)
    shutil.copytree(artifact, bad)
    if kind == "damaged file":
        largest = max((file for file in bad.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    return bad


def _built(checkpoint: Path, artifact: Path, settings: Sequence[str], result: Path) -> Path:
    """Build an artifact; returns `result`, the folder that this leaves: another where gates fail."""
    given = [part for each in ("name=demo", *_QUICK, *settings) for part in ("--set", each)]
    command = [sys.executable, "-m", "ingot", "build", "demo", str(checkpoint), "-o", str(artifact), "-q", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.is_dir():
        raise click.ClickException(f"a build left no {result.name}; its last words: {done.stderr[-2000:]}")
    return result


def _deeper(folder: Path) -> Path:
    """The demo model's checkpoint with its layers several times over."""
    shutil.copytree(_CHECKPOINT, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((_CHECKPOINT / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": _COPIES * num_layers}))
    tensors = {}
    for name, tensor in load_file(_CHECKPOINT / "model.safetensors").items():
        prefix, separator, rest = name.partition(".layers.")
        number, _, suffix = rest.partition(".")
        for copy in range(_COPIES if separator else 1):
            key = f"{prefix}.layers.{int(number) + copy * num_layers}.{suffix}" if separator else name
            tensors[key] = tensor.copy()
    save_file(tensors, folder / "model.safetensors")
    return folder


def faults(cases: Json) -> list[str]:
    """Faults of the run."""
    found = [f"{name}: {case['broken']} broken, {case['hung']} hung" for name, case in cases.items()
             if case["broken"] or case["hung"]]  # fmt: skip
    found += [f"{name}: {cases[name]['error']} requests failed" for name in ("sigterm", "swap") if cases[name]["error"]]
    if cases["swap"]["state"] != "kept":
        found.append(f"swap: the artifact is {cases['swap']['state']}: {cases['swap']['reason']}")
    return found + [f"{name}: it was kept" for name in _BAD if cases[name]["state"] == "kept"]


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path), default=ROOT / "artifacts/demo")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve-life.json")
def main(artifact: Path, output: Path) -> None:
    """Print and write what happened."""
    cases: Json = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(artifact, folder / "copy")
        bad = {kind: planted(kind, artifact, folder) for kind in _BAD}

        def run(name: str, case: Callable[[Server], Any]) -> None:
            with TemporaryFile("w+") as log, server(artifact.resolve(), folder, log) as served:
                cases[name] = asyncio.run(case(served))
            click.echo(f"{name}: {json.dumps(cases[name])}")

        run("sigterm", terminated)
        run("engine killed", killed)
        run("swap", lambda served: swapped(served, folder / "copy"))
        run("damaged file", lambda served: swapped(served, bad["damaged file"]))
        run("failed gates", lambda served: swapped(served, bad["failed gates"]))
        run("slow", lambda served: swapped(served, bad["slow"], _MANY_CLIENTS))
        run("engine killed on probation", lambda served: killed_on_probation(served, folder / "copy"))
    found = {"device": device_facts(), "probation_seconds": _PROBATION_SECONDS, "cases": cases, "faults": faults(cases)}
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if found["faults"]:
        raise click.ClickException("; ".join(faults(cases)))


if __name__ == "__main__":
    main()
