"""Public routers in front of two servers: nothing is refused, and answers are those without a router.

    python -m venv ENV; ENV/bin/pip install vllm-router==0.1.17 sglang-router==0.3.2 smg==1.13.0 setproctitle
    python -m benchmarks.serve.routers ENV [ARTIFACT] [--requests 10000] [--output FILE]

Each router gets completions and chats, whole and streamed, with and without tools, of greedy prompts whose texts are
taken from a server directly before. Routers add fields of their own to requests. Exit code 1 where an answer is
refused, fails or differs.
"""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import click
import httpx2

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.serve.fuzz import logged_server
from benchmarks.serve.soak import with_chat_template

Json = dict[str, Any]

_AT_ONCE = 16
_START_SECONDS = 60
_PATIENCE_SECONDS = 60.0
_SEED = 0
_WORDS = ("def read", "import os", "class Node", "for i in", "return", "if name", "with open", "while True")
_TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
ROUTERS: Mapping[str, tuple[str, ...]] = {
    "vllm-router": ("vllm-router",),
    "sglang-router": ("sglang-router", "launch"),
    "smg": ("smg", "launch"),
}
"""Packages, and the command of each that starts it."""


def requests() -> list[tuple[str, Json]]:
    """Requests whose answers do not depend on chance: a path and a body each."""
    found: list[tuple[str, Json]] = []
    for word in _WORDS:
        greedy = {"model": "demo", "max_tokens": 8, "temperature": 0}
        found.append(("/v1/completions", {**greedy, "prompt": word}))
        chat = {**greedy, "messages": [{"role": "user", "content": word}]}
        found.append(("/v1/chat/completions", chat))
        found.append(("/v1/chat/completions", {**chat, "tools": _TOOLS, "tool_choice": "none"}))
    return found


async def text_of(client: httpx2.AsyncClient, url: str, path: str, body: Json, *, is_stream: bool) -> str:
    """The text of an answer. ValueError for an answer that is not one."""
    answer = await client.post(f"{url}{path}", json={**body, "stream": is_stream})
    if answer.status_code != 200:
        raise ValueError(f"{answer.status_code}: {answer.text[:300]}")
    if not is_stream:
        (choice,) = answer.json()["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        raise ValueError(f"the stream ended with {lines[-1:]}")
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    return "".join(each["text"] if "text" in each else each["delta"].get("content") or "" for each in choices)


async def measure(url: str, expected: Sequence[tuple[str, Json, str]], number: int) -> Json:
    """Send so many requests through a router; how they ended."""
    rng, ends = random.Random(_SEED), Counter[str]()
    faults: list[str] = []
    left = iter(range(number))
    started = time.monotonic()
    async with httpx2.AsyncClient(timeout=_PATIENCE_SECONDS) as client:

        async def sender() -> None:
            for _ in left:
                path, body, text = rng.choice(expected)
                try:
                    found = await text_of(client, url, path, body, is_stream=rng.random() < 0.5)
                except (ValueError, httpx2.HTTPError) as error:
                    ends["refused or failed"] += 1
                    faults.append(f"{type(error).__name__}: {error}"[:300])
                    continue
                ends["right" if found == text else "wrong"] += 1
                if found != text:
                    faults.append(f"{path} gave {found!r}, not {text!r}")

        await asyncio.gather(*(sender() for _ in range(_AT_ONCE)))
    ends_by_name = {name: ends[name] for name in ("right", "wrong", "refused or failed")}
    return {"requests": number, **ends_by_name, "seconds": round(time.monotonic() - started, 1), "faults": faults[:10]}


async def expected_of(url: str) -> list[tuple[str, Json, str]]:
    """The requests with the texts of a server without a router."""
    async with httpx2.AsyncClient(timeout=_PATIENCE_SECONDS) as client:
        return [(path, body, await text_of(client, url, path, body, is_stream=False)) for path, body in requests()]


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def router(environment: Path, command: Sequence[str], workers: Sequence[str], log: IO[str]) -> Iterator[str]:
    """A router of an environment in front of servers; its URL."""
    port, metrics = _free_port(), _free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    given = [str(environment / "bin" / command[0]), *command[1:], "--worker-urls", *workers, *options]
    child = subprocess.Popen(given, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(10 * _START_SECONDS):
            try:
                # 200 once a server is healthy
                if httpx2.get(f"{url}/readiness", timeout=1).status_code == 200:
                    break
            except httpx2.HTTPError:
                pass
            if child.poll() is not None:
                log.seek(0)
                raise click.ClickException(f"{command[0]} ended: {log.read()[-1000:]}")
            time.sleep(0.1)
        else:
            raise click.ClickException(f"{command[0]} was not ready within {_START_SECONDS} s")
        yield url
    finally:
        child.terminate()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()


def _versions(environment: Path) -> dict[str, str]:
    folders = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    return {found.name: found.version for found in distributions(path=folders) if found.name in ROUTERS}


@click.command()
@click.argument("environment", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--requests", "number", default=10_000, show_default=True, help="Requests through each router.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve-routers.json")
def main(environment: Path, artifact: str, number: int, output: Path) -> None:
    """Print and write how the requests ended."""
    facts: Json = {"device": device_facts(), "artifact": Path(artifact).name, "versions": _versions(environment)}
    with ExitStack() as stack:
        served = stack.enter_context(with_chat_template(Path(artifact)))
        logs = [stack.enter_context(TemporaryFile("w+")) for _ in range(2 + len(ROUTERS))]
        workers = [stack.enter_context(logged_server(served, log))[0] for log in logs[:2]]
        expected = asyncio.run(expected_of(workers[0]))
        for (name, command), log in zip(ROUTERS.items(), logs[2:], strict=True):
            with router(environment, command, workers, log) as url:
                facts[name] = asyncio.run(measure(url, expected, number))
            click.echo(f"{name}: {json.dumps(facts[name])}")
    output.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    sys.exit(any(facts[name]["right"] != number for name in ROUTERS))


if __name__ == "__main__":
    main()
