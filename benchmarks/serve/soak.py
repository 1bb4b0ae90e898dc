"""A server for an hour under clients of all kinds: memory stays flat, no KV block is left, nothing fails.

    python -m benchmarks.serve.soak [ARTIFACT] [--seconds 3600] [--clients 16] [--chaos-seconds 0] [--seed 0]

Each client sends requests one after the other, of random kinds: short and long, whole and streamed, with several
choices, a shared prefix, schemas, patterns, grammars, tools, stop strings, log-probabilities, priorities, time limits,
stored responses, wrong ones, large ones of up to 8 MB, hostile constraints; some leave in the middle, some are
cancelled. Every answer is checked, and greedy ones have to be what they were at first. With `--chaos-seconds` the
engine's process is killed and the artifact reloaded in turn, so far apart: requests that were open at a kill may end
with an error, no others may, and the growth of the engine's memory is not judged. An engine that fails more often than
the server loads it again ends the server, so an interval has a least length.

What the server keeps up to a limit is filled before: words that the tokenizer has encoded, the tokens of the vocabulary
and stored responses, which else fill for half an hour. A burst of three times the clients comes next, so that memory
for more open requests than any later is taken before it is watched. Resident memory of both processes is sampled; its
growth is the median of the slopes between all pairs of samples (Theil and Sen) after a quarter of the time, in which
other caches fill, with the 95 % interval of a bootstrap over blocks of consecutive samples. Exit code 1 for a fault, a
block left or growth surely above the limit.

An artifact without a chat template is served from a copy with one.
"""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory, TemporaryFile
from typing import IO, Any

import click
from tests.artifact.tiny_artifact import reseal

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.serve.fuzz import Fuzz, abort, logged_server
from benchmarks.serve.large import KINDS, Limits, hostile_constraints
from benchmarks.serve.life import KEY, Server
from benchmarks.serve.malformed import framed
from benchmarks.serve.soak_report import SAMPLE_SECONDS, Outcome, facts_of
from ingot.artifact import open_artifact
from ingot.runtime.server.models.swap import MOST_RESTARTS, RESTARTS_SECONDS

Json = dict[str, Any]

_PAUSE_SECONDS = 0.3  # mean time of a client between two requests
_PATIENCE_SECONDS = 1800  # the machine may stop both sides for other work
_PATIENCE = ("--stall-seconds", str(_PATIENCE_SECONDS), "--send-seconds", str(_PATIENCE_SECONDS))
_CHAT_TEMPLATE = (
    "{% if tools %}<tool_call> {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
)
_CONFIG = "tokenizer/tokenizer_config.json"
_SCHEMA: Json = {
    "type": "object",
    "properties": {"kind": {"enum": ["file", "folder"]}, "size": {"enum": [1, 2]}, "open": {"type": "boolean"}},
    "required": ["kind", "size", "open"],
    "additionalProperties": False,
}
_TOOLS = [{"type": "function", "function": {"name": f"find_{name}", "parameters": _SCHEMA}} for name in ("a", "b")]
_KEPT_WORDS, _WORDS_AT_ONCE = 44_000, 50  # each of the threads that encode keeps 2,000, and they share unevenly
_BIASED_TOKENS = 128  # of the vocabulary, which a request is made to choose from
_KEPT_RESPONSES = 1024
_BURST_TIMES, _BURST_SECONDS = 3, 60.0
_PREFIX = "You complete programs in Python. " * 8
_GREEDY = ("def read_file(path):", "import os\n", "class Node:", "for i in range(", "return [", "if __name__ ==")
_PATTERN, _GRAMMAR = "[a-c]{2,8}-[0-9]{3}", 'start: item ("," item)*\nitem: /[a-z]{1,5}/\n'
_LARGE_SHARE = 0.2  # a large request takes a hundred times as long as others
_PROBATION_SECONDS = 10.0
# Every second disturbance is a kill, and a run's first minute has none.
_LEAST_CHAOS_SECONDS = RESTARTS_SECONDS / MOST_RESTARTS / 2 + 10.0


class Failed(Exception):
    """An answer that says that the request failed on the server's side."""


class Soak:
    """The clients of one server."""

    def __init__(self, url: str, seed: int, vocab_size: int, child: "subprocess.Popen[str]") -> None:
        self.outcome = Outcome()
        self.chaos: list[dict[str, object]] = []
        self._child = child
        self._server = Server(url, child, Path())
        self._limits = Limits.of(url)
        self._hostile = hostile_constraints()
        self._texts: dict[str, str] = {}
        # Each kill has the time of its signal, and that at which the server was ready again.
        self._kills: list[tuple[float, float]] = []
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._http = Fuzz(url, seed, _PATIENCE_SECONDS)
        self._host, self._port = url.removeprefix("http://").split(":")
        self._kinds: dict[str, Callable[[random.Random], Awaitable[str]]] = {
            "completion": self._completion,
            "chat": self._chat,
            "choices": self._choices,
            "schema": self._schema,
            "tools": self._tools,
            "response": self._response,
            "cancelled response": self._cancelled_response,
            "disconnect": self._disconnect,
            "wrong": self._wrong,
            "tokenize": self._tokenize,
            "greedy": self._greedy,
            "pattern": self._pattern,
            "stop string": self._stop,
            "scored": self._scored,
            "urgent": self._urgent,
            "timeout": self._timeout,
            "large": self._large,
            "hostile constraint": self._hostile_constraint,
        }

    async def run(self, seconds: float, clients: int, chaos_seconds: float) -> dict[str, float]:
        """Serve all clients for so long; returns the metrics at the end."""
        await self._http.golden()
        await self._fill_caches(clients)
        await self._serve_clients(_BURST_TIMES * clients, min(seconds, _BURST_SECONDS))
        sampling = asyncio.create_task(self._sample())
        chaos = asyncio.create_task(self._disturb(chaos_seconds, time.monotonic() + seconds - chaos_seconds))
        await self._serve_clients(clients, seconds)
        self._require_server()
        await chaos
        sampling.cancel()
        await self._http.golden()
        left = await self._http.require_nothing_left()
        self.outcome.faults += self._http.outcome.faults
        return left

    async def _fill_caches(self, clients: int) -> None:
        rng = random.Random(self._rng.random())

        def words() -> Json:
            return {"prompt": " ".join(str(rng.random()) for _ in range(_WORDS_AT_ONCE))}

        def tokens(first: int, logprobs: int | None) -> Json:
            biases = {str(token): 100 for token in range(first, min(first + _BIASED_TOKENS, self._vocab_size))}
            options = {"temperature": 2, "frequency_penalty": 2, "ignore_eos": True, "logprobs": logprobs}
            return {"prompt": "def", "max_tokens": 2 * _BIASED_TOKENS, "logit_bias": biases, **options}

        response = {"input": "def", "max_output_tokens": 20, "store": True}
        requests = [("/tokenize", words()) for _ in range(_KEPT_WORDS // _WORDS_AT_ONCE)]
        requests += [
            ("/v1/completions", tokens(first, logprobs))
            for first in range(0, self._vocab_size, _BIASED_TOKENS)
            for logprobs in (None, 1)
        ]
        left = iter(requests + [("/v1/responses", response)] * _KEPT_RESPONSES)

        async def sender() -> None:
            for path, body in left:
                await self._answer(path, body, is_stream=False)

        await asyncio.gather(*(sender() for _ in range(clients)))

    async def _serve_clients(self, number: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._client(random.Random(self._rng.random()), until) for _ in range(number)))

    async def _client(self, rng: random.Random, until: float) -> None:
        while time.monotonic() < until and self._child.poll() is None:
            kind, started = rng.choice(list(self._kinds)), time.monotonic()
            try:
                end = await self._kinds[kind](rng)
            except Exception as error:  # noqa: BLE001 (every fault is counted, and the others go on)
                if isinstance(error, Failed) and self._overlaps_a_kill(started):
                    end = "engine killed"
                else:
                    end = "fault"
                    self.outcome.faults.append(f"{kind}: {type(error).__name__}: {error}"[:400])
            self.outcome.requests[kind, end] += 1
            await asyncio.sleep(rng.expovariate(1 / _PAUSE_SECONDS))

    def _require_server(self) -> None:
        if self._child.poll() is not None:
            raise click.ClickException(f"the server ended with code {self._child.returncode}: {self.outcome.faults}")

    async def _sample(self) -> None:
        started = time.monotonic()
        while True:
            self.outcome.samples.append((time.monotonic() - started, await self._http.metrics()))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _disturb(self, interval_seconds: float, until: float) -> None:
        """Kill the engine's process and reload the artifact in turn."""
        while interval_seconds and time.monotonic() < until:
            await asyncio.sleep(interval_seconds)
            try:
                await (self._reload() if len(self.chaos) % 2 else self._kill())
            except Exception as error:  # noqa: BLE001 (it is a fault, and the others go on)
                self.chaos.append({"failed": repr(error)})
                self.outcome.faults.append(f"a disturbance: {error!r}")

    async def _reload(self) -> None:
        with suppress(TimeoutError):
            # On a busy machine the comparison of both takes longer than this client waits.
            await self._server.get("/admin/reload?wait=true", "POST")
        found = await self._server.outcome()
        self.chaos.append({"reload": found["state"], "reason": found["reason"]})
        if found["state"] != "kept":
            self.outcome.faults.append(f"a reload of the same artifact: {found['state']}: {found['reason']}")

    async def _kill(self) -> None:
        begun = time.monotonic()
        self._kills.append((begun, begun + _PATIENCE_SECONDS))
        os.kill(self._server.engine_pids()[0], signal.SIGKILL)
        seconds = await self._server.until_ready()
        self._kills[-1] = (begun, time.monotonic())
        self.chaos.append({"killed": True, "seconds_until_ready": round(seconds, 2)})

    def _overlaps_a_kill(self, started: float) -> bool:
        return any(started <= ready for _, ready in self._kills)

    # One request of each kind; returns how it ended, raises for an answer that is wrong.

    async def _completion(self, rng: random.Random) -> str:
        prompt = [rng.randrange(1, 250) for _ in range(rng.choice([1, 20, 100, 600]))]
        most = rng.choice([1, 16, 64, 300])
        body: Json = {"prompt": prompt, "max_tokens": most, "ignore_eos": True, "temperature": rng.choice([0, 1])}
        body |= {"logprobs": 2} if rng.random() < 0.2 else {}
        usage = await self._answer("/v1/completions", body, is_stream=rng.random() < 0.7)
        return self._counted(usage["usage"], most)

    async def _chat(self, rng: random.Random) -> str:
        messages = [{"role": "system", "content": _PREFIX}, {"role": "user", "content": f"number {rng.randrange(50)}"}]
        body = {"messages": messages, "max_tokens": 40, "ignore_eos": True, "top_p": 0.9}
        answer = await self._answer("/v1/chat/completions", body, is_stream=rng.random() < 0.7)
        return self._counted(answer["usage"], 40)

    async def _choices(self, rng: random.Random) -> str:
        number = rng.choice([2, 4])
        body = {"prompt": [rng.randrange(1, 250)] * 30, "n": number, "max_tokens": 24, "ignore_eos": True}
        answer = await self._answer("/v1/completions", body, is_stream=rng.random() < 0.5)
        return self._counted(answer["usage"], 24 * number)

    async def _schema(self, rng: random.Random) -> str:
        schema = {**_SCHEMA, "title": f"number {rng.randrange(200)}"}  # more than the compiled ones that are kept
        body = {"messages": [{"role": "user", "content": "describe"}], "max_tokens": 100}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = await self._answer("/v1/chat/completions", body, is_stream=False)
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            found = json.loads(choice["message"]["content"])
            _require(sorted(found) == sorted(_SCHEMA["properties"]), f"the schema gave {found}")
        return str(choice["finish_reason"])

    async def _tools(self, rng: random.Random) -> str:
        body = {"messages": [{"role": "user", "content": f"find {rng.random()}"}], "tools": _TOOLS}
        body |= {"max_tokens": 200, "tool_choice": "required", "parallel_tool_calls": False}
        answer = await self._answer("/v1/chat/completions", body, is_stream=False)
        choice = answer["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            for call in choice["message"]["tool_calls"]:
                _require(call["function"]["name"] in ("find_a", "find_b"), f"the call is {call}")
                json.loads(call["function"]["arguments"])
        return str(choice["finish_reason"])

    async def _response(self, rng: random.Random) -> str:
        body = {"input": f"def read_{rng.randrange(1000)}", "max_output_tokens": 20, "store": rng.random() < 0.5}
        answer = await self._answer("/v1/responses", body, is_stream=False)
        _require(answer["status"] in ("completed", "incomplete"), f"the response is {answer}")
        return str(answer["status"])

    async def _cancelled_response(self, rng: random.Random) -> str:
        body = {"input": "import os", "max_output_tokens": 400, "stream": True, "ignore_eos": True}
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            writer.write(framed(json.dumps(body).encode(), "/v1/responses"))
            try:
                begun = await reader.readuntil(b'"id": "resp_')
            except asyncio.IncompleteReadError as error:
                if error.partial[9:12] == b"503":
                    raise Failed(f"the answer is {error.partial[:300]!r}") from None
                raise
            answer_id = "resp_" + (await reader.readuntil(b'"')).decode().rstrip('"')
            await asyncio.sleep(rng.random() * 0.05)
            await self._http.exchange(framed(b"", f"/v1/responses/{answer_id}/cancel"))
            rest = begun + await reader.read()
        finally:
            await abort(writer)
        _require(
            b"response.failed" in rest or b"response.incomplete" in rest or b"response.completed" in rest, "no end"
        )
        return "cancelled" if b"response.failed" in rest else "was faster"

    async def _disconnect(self, rng: random.Random) -> str:
        body: Json = {"prompt": [rng.randrange(1, 250) for _ in range(rng.choice([3, 300]))], "ignore_eos": True}
        body |= {"max_tokens": 400, "stream": rng.random() < 0.7, "n": rng.choice([1, 3])}
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        writer.write(framed(json.dumps(body).encode(), "/v1/completions"))
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.5):
                while await reader.read(4096):
                    pass
        if rng.random() < 0.5:  # reset instead of close
            writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER
        await abort(writer)
        return "left"

    async def _wrong(self, rng: random.Random) -> str:
        body = rng.choice([b"{", b'{"prompt": 5}', b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "x": 1}'])
        answer = await self._http.exchange(framed(body, "/v1/completions"))
        _require(answer[9:12] == b"400", f"a wrong request got {answer[:200]!r}")
        return answer[9:12].decode()

    async def _tokenize(self, rng: random.Random) -> str:
        answer = await self._answer("/tokenize", {"prompt": f"import {rng.random()}"}, is_stream=False)
        _require(answer["count"] == len(answer["tokens"]), f"the answer is {answer}")
        return "right"

    async def _greedy(self, rng: random.Random) -> str:
        prompt = rng.choice(_GREEDY)
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "speculate": rng.random() < 0.5}
        text = (await self._answer("/v1/completions", body, is_stream=False))["choices"][0]["text"]
        first = self._texts.setdefault(prompt, text)
        _require(text == first, f"the prompt {prompt!r} gave {text!r}, and first {first!r}")
        return "equal"

    async def _pattern(self, rng: random.Random) -> str:
        kind = rng.choice(["regex", "grammar", "choice"])
        outputs: Json = {"regex": _PATTERN, "grammar": _GRAMMAR, "choice": ["left", "right", "neither"]}
        body = {"prompt": "def", "max_tokens": 60, "structured_outputs": {kind: outputs[kind]}}
        choice = (await self._answer("/v1/completions", body, is_stream=False))["choices"][0]
        if choice["finish_reason"] == "stop":
            patterns = {"regex": _PATTERN, "grammar": "[a-z]{1,5}(,[a-z]{1,5})*", "choice": "left|right|neither"}
            _require(re.fullmatch(patterns[kind], choice["text"]) is not None, f"the {kind} gave {choice['text']!r}")
        return f"{kind}, {choice['finish_reason']}"

    async def _stop(self, rng: random.Random) -> str:
        stop = [rng.choice(["a", "e", "\n", "("]), rng.choice(["zzz", "x" * 300_000])]
        body = {"prompt": "import ", "max_tokens": 100, "stop": stop, "ignore_eos": True}
        choice = (await self._answer("/v1/completions", body, is_stream=False))["choices"][0]
        _require(not any(each in choice["text"] for each in stop), f"a stop string is in {choice['text']!r}")
        return str(choice["finish_reason"])

    async def _scored(self, rng: random.Random) -> str:
        prompt = [rng.randrange(1, 250) for _ in range(rng.choice([2, 50, 500]))]
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
        found = (await self._answer("/v1/completions", body, is_stream=False))["choices"][0]["logprobs"]
        _require(len(found["token_logprobs"]) == len(prompt), f"{len(found['token_logprobs'])} log-probabilities")
        return "right"

    async def _urgent(self, rng: random.Random) -> str:
        body = {"prompt": "def", "max_tokens": 40, "ignore_eos": True, "priority": rng.choice([-5, 5])}
        body |= {"cache_salt": str(rng.randrange(3)), "best_of": 2, "n": 1}
        answer = await self._answer("/v1/completions", body, is_stream=False)
        return self._counted(answer["usage"], 80)

    async def _timeout(self, rng: random.Random) -> str:
        body = {"prompt": "def", "max_tokens": 800, "ignore_eos": True, "timeout_seconds": rng.choice([0.01, 0.2])}
        return str((await self._answer("/v1/completions", body, is_stream=False))["choices"][0]["finish_reason"])

    async def _large(self, rng: random.Random) -> str:
        if rng.random() > _LARGE_SHARE:
            return await self._tokenize(rng)
        kind = rng.choice(list(KINDS))
        request = KINDS[kind](rng, self._limits)
        status = await self._status(request.path, request.body)
        _require(request.is_right(status), f"{kind} got {status}")
        return f"{kind}, {status}"

    async def _hostile_constraint(self, rng: random.Random) -> str:
        kind, request = rng.choice(list(self._hostile.items()))
        status = await self._status(request.path, request.body)
        _require(request.is_right(status), f"{kind} got {status}")
        return f"{kind}, {status}"

    async def _status(self, path: str, body: Json) -> str:
        answer = await self._http.exchange(framed(json.dumps(body).encode(), path))
        if answer[9:12] == b"503":
            raise Failed(f"the answer is {answer[:300]!r}")
        return str(answer[9:12], "ascii", "replace")

    def _counted(self, usage: Json, expected: int) -> str:
        self.outcome.output_tokens += usage["completion_tokens"]
        _require(usage["completion_tokens"] == expected, f"the usage is {usage}, expected {expected}")
        return "whole"

    async def _answer(self, path: str, body: Json, *, is_stream: bool) -> Json:
        """The JSON of an answer, or the last event of a stream, which has the usage."""
        if is_stream:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        answer = await self._http.exchange(framed(json.dumps(body).encode(), path))
        head, _, rest = answer.partition(b"\r\n\r\n")
        if head[9:12] == b"503" or b'data: {"error"' in rest:
            raise Failed(f"the answer is {head[:300]!r} {rest[-300:]!r}")
        _require(head[9:12] == b"200", f"the answer is {answer[:300]!r}")
        if not is_stream:
            found: Json = json.loads(rest)
            return found
        events = [line.partition(b"data: ")[2] for line in rest.split(b"\n") if line.startswith(b"data: ")]
        _require(events[-1:] == [b"[DONE]"], f"the stream ended with {events[-1:]}")
        last: Json = json.loads(events[-2])
        return last


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


@contextmanager
def with_chat_template(artifact: Path) -> Iterator[str]:
    """The artifact, or a copy with a chat template if it has none."""
    config = json.loads((artifact / _CONFIG).read_text())
    if "chat_template" in config:
        yield str(artifact)
        return
    with TemporaryDirectory() as folder:
        copy = Path(folder) / artifact.name
        shutil.copytree(artifact, copy)
        data = json.dumps({**config, "chat_template": _CHAT_TEMPLATE})
        (copy / _CONFIG).write_text(data)
        reseal(copy)
        yield str(copy)


def _admin(keys: IO[str]) -> tuple[str, ...]:
    """The options of a server that a key may reload."""
    keys.write(f"{KEY}\n")
    keys.flush()
    return "--admin-keys", keys.name, "--probation-seconds", str(_PROBATION_SECONDS)


@click.command()
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--seconds", default=3600.0, show_default=True)
@click.option("--clients", default=16, show_default=True)
@click.option("--chaos-seconds", default=0.0, show_default=True, help="Between two kills or reloads; 0: none.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve-soak.json")
def main(artifact: str, seconds: float, clients: int, chaos_seconds: float, seed: int, output: Path) -> None:
    """Print and write what happened."""
    if 0 < chaos_seconds < _LEAST_CHAOS_SECONDS:
        raise click.UsageError(
            f"--chaos-seconds is {chaos_seconds:g}; it must be 0, or at least {_LEAST_CHAOS_SECONDS:g}"
        )
    with (
        with_chat_template(Path(artifact)) as served,
        TemporaryFile("w+") as log,
        NamedTemporaryFile("w") as keys,
        logged_server(served, log, *_admin(keys), *_PATIENCE) as (url, child),
    ):
        soak = Soak(url, seed, open_artifact(artifact).manifest.model.vocab_size, child)
        started = time.monotonic()
        left = asyncio.run(soak.run(seconds, clients, chaos_seconds))
        seconds = time.monotonic() - started
        if child.poll() is not None:
            soak.outcome.faults.append(f"the server ended with code {child.returncode}")
        log.seek(0)
        tracebacks = log.read().count("Traceback")
    found = facts_of(soak.outcome, left, growing=("server",) if chaos_seconds else ("server", "engine"))
    facts = {"device": device_facts(), "artifact": Path(artifact).name, "seconds": round(seconds), "clients": clients}
    facts |= {"seed": seed, "chaos_seconds": chaos_seconds, "chaos": soak.chaos, **found, "tracebacks": tracebacks}
    output.write_text(json.dumps(facts, indent=2) + "\n")
    click.echo(json.dumps(facts, indent=2))
    sys.exit(bool(soak.outcome.faults))


if __name__ == "__main__":
    main()
