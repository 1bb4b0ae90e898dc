"""Replay a trace by its timestamps against a server with OpenAI's API.

    python -m examples.load.replay TRACE --url URL --speed 2

Requests are sent when they were in the trace, whatever has become of those before (an open loop), and streamed. The
trace is one of Mooncake's (JSON lines), one of Azure's (CSV), or a log of bodies; see examples/load/README.md. Mooncake
and Azure have lengths, no texts: prompts are random token ids, and those of Mooncake share prefixes as in the trace.

Exit code 1 when a request failed or had no connection; refusals (429, 503) are answers. Ctrl-C ends the replay and
reports what was done.
"""

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx2
from examples.load.outcomes import Outcome, report_of, table_of

from ingot.planning.simulation.traces import (
    FORMATS,
    Arrival,
    Format,
    Json,
    Prompts,
    RequestLengths,
    TraceError,
    read_trace,
    repeated_tokens,
)

_STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}
_REFUSALS = (429, 503)
_BODIES_AHEAD = 256  # made before they are due
_RETRY_SECONDS = 1.0  # after a refusal that has no time
_POSITIVE = click.FloatRange(0, min_open=True)


class AnswerError(Exception):
    """An answer that is not a whole stream: a reason to count by, and a message."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(reason)
        self.reason, self.message = reason, message


class Refusal(Exception):
    """429 or 503, and the seconds after which to try again."""

    def __init__(self, reason: str, message: str, wait_seconds: float) -> None:
        super().__init__(reason)
        self.reason, self.message, self.wait_seconds = reason, message, wait_seconds


class Replay:
    """Sends requests when they are due and collects their outcomes."""

    def __init__(self, client: httpx2.AsyncClient, retries: int, timeout_seconds: float) -> None:
        self.outcomes: list[Outcome] = []
        self.seconds = 0.0  # from the first request to the last end
        self._client, self._retries, self._timeout_seconds = client, retries, timeout_seconds
        self._loop = asyncio.get_running_loop()

    async def run(self, requests: Iterable[tuple[float, Json]], num_requests: int) -> None:
        """Send each body after its seconds; returns when all have ended."""
        ready: asyncio.Queue[tuple[float, str, bytes]] = asyncio.Queue(_BODIES_AHEAD)
        started = self._loop.time()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_prepare(requests, ready))
                await asyncio.sleep(0)  # the queue fills before the clock starts
                started = self._loop.time()
                for _ in range(num_requests):
                    due, path, content = await ready.get()
                    await asyncio.sleep(started + due - self._loop.time())
                    tasks.create_task(self._send(due, started, path, content))
        finally:
            self.seconds = self._loop.time() - started

    async def _send(self, due: float, started: float, path: str, content: bytes) -> None:
        sent = self._loop.time()
        outcome = Outcome(due, max(0.0, sent - started - due))
        self.outcomes.append(outcome)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._until_answered(outcome, sent, path, content)
            outcome.kind = "ok"
        except TimeoutError:
            outcome.kind, outcome.reason = "failed", f"no end after {self._timeout_seconds:g} s"
        except Refusal as refusal:
            outcome.kind, outcome.reason, outcome.message = "refused", refusal.reason, refusal.message
        except AnswerError as error:
            outcome.kind, outcome.reason, outcome.message = "failed", error.reason, error.message
        except httpx2.HTTPError as error:
            outcome.kind, outcome.reason, outcome.message = "connection_error", type(error).__name__, str(error)

    async def _until_answered(self, outcome: Outcome, sent: float, path: str, content: bytes) -> None:
        while True:
            try:
                return await self._attempt(outcome, sent, path, content)
            except Refusal as refusal:
                if outcome.num_retries == self._retries:
                    raise
                outcome.num_retries += 1
                await asyncio.sleep(refusal.wait_seconds)

    async def _attempt(self, outcome: Outcome, sent: float, path: str, content: bytes) -> None:
        async with self._client.stream("POST", path, content=content) as response:
            if response.status_code != 200:
                raise _error_of(response.status_code, response.headers, await response.aread())
            is_whole, previous = False, None
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                if line[5:].strip() == "[DONE]":
                    is_whole = True
                elif _take(line[5:], outcome):
                    now = self._loop.time()
                    if previous is None:
                        outcome.first_seconds = now - sent
                    else:
                        outcome.gap_seconds.append(now - previous)
                    previous = now
        if not is_whole:
            raise AnswerError("stream without an end")
        outcome.end_seconds = self._loop.time() - sent
        if previous is not None and not outcome.output_tokens:  # a server without usage
            outcome.output_tokens = 1 + len(outcome.gap_seconds)


async def _prepare(requests: Iterable[tuple[float, Json]], ready: asyncio.Queue[tuple[float, str, bytes]]) -> None:
    for due, body in requests:
        path = "v1/chat/completions" if "messages" in body else "v1/completions"
        await ready.put((due, path, json.dumps(body).encode()))


def _take(event: str, outcome: Outcome) -> bool:
    """Note what an event of a stream says; whether it has tokens."""
    try:
        document = json.loads(event)
        if "error" in document:
            raise AnswerError("error within the stream", str(document["error"]))
        if usage := document.get("usage"):
            outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return any(_has_tokens(choice) for choice in document.get("choices", ()))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise AnswerError("event that is not of OpenAI's form", f"{error!r}: {event[:200]}") from error


def _has_tokens(choice: Json) -> bool:
    """Each event of a completion has tokens, though perhaps no text yet; a chat's first may have the role only."""
    delta = choice.get("delta")
    return delta is None or any(value for name, value in delta.items() if name != "role")


def _error_of(status: int, headers: httpx2.Headers, body: bytes) -> Refusal | AnswerError:
    found: Any = {}
    with suppress(ValueError):
        found = json.loads(body)
    error = found.get("error", found) if isinstance(found, dict) else {}
    code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
    reason = f"{status} {code}" if isinstance(code, str) else str(status)
    text = str(message or body[:200].decode(errors="replace"))
    return Refusal(reason, text, _wait_seconds(headers)) if status in _REFUSALS else AnswerError(reason, text)


def _wait_seconds(headers: httpx2.Headers) -> float:
    """Seconds to wait by retry-after-ms, or by Retry-After, which is in seconds or a date."""
    with suppress(KeyError, ValueError):
        return max(0.0, float(headers["retry-after-ms"]) / 1000)
    with suppress(KeyError, ValueError):
        return max(0.0, float(headers["retry-after"]))
    with suppress(KeyError, ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(headers["retry-after"]) - datetime.now(UTC)).total_seconds())
    return _RETRY_SECONDS


@dataclass(frozen=True)
class Server:
    """Where requests go, and what the server says of its first model, or of the one that is named."""

    url: str
    model: str | None
    context_tokens: int | None


def ask_server(url: str, api_key: str | None, model: str | None) -> Server:
    """Read /v1/models. ClickException when the server has no answer, or not this model."""
    try:
        with httpx2.Client(base_url=url, headers=_headers(api_key), timeout=30) as client:
            answer = client.get("v1/models").raise_for_status()
        served = {each["id"]: each.get("max_model_len") for each in answer.json()["data"]}
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "give --model and --context, so that it is not read"
        raise click.ClickException(f"{url}/v1/models cannot be read: {error or type(error).__name__}; {hint}") from None
    name = model or next(iter(served), None)
    if name not in served:
        raise click.ClickException(f"{url} has no model {name!r}; it has: {', '.join(served)}")
    return Server(url, name, served[name])


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


def bodies(
    arrivals: Iterable[Arrival], speed: float, prompts: Prompts, defaults: Json, overrides: Json
) -> Iterator[tuple[float, Json]]:
    """When each request is due, in seconds, and its body."""
    for each in arrivals:
        made = each.content if isinstance(each.content, dict) else prompts.body(each.content)
        yield each.seconds / speed, defaults | made | overrides


def trace_facts(arrivals: Sequence[Arrival], prompts: Prompts) -> Json:
    """How many prompts or outputs the context cuts, and which of the prompts' tokens the trace repeats."""
    given = [each.content for each in arrivals if isinstance(each.content, RequestLengths)]
    fitted = [prompts.lengths(each) for each in given]
    if not fitted:
        return {}
    facts: Json = {"cut_requests": sum(map(prompts.is_cut, given))}
    if any(each.blocks for each in fitted):
        total = sum(each.prompt_tokens for each in fitted)
        facts["repeated"] = (repeated_tokens(fitted, prompts.block_tokens), total)
    return facts


async def replay(
    server: Server, api_key: str | None, requests: Iterable[tuple[float, Json]], num: int, retries: int, timeout: float
) -> tuple[list[Outcome], float]:
    """Outcomes, and the seconds that all took. Ctrl-C ends it, and leaves open requests unfinished."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(
        base_url=server.url, headers=_headers(api_key), timeout=None, limits=limits
    ) as client:
        sender = Replay(client, retries, timeout)
        with suppress(asyncio.CancelledError):
            await sender.run(requests, num)
    return sender.outcomes, sender.seconds


def _url(context: click.Context, parameter: click.Parameter, value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.BadParameter(f"{value!r} must begin with http://HOST or https://HOST")
    return value.rstrip("/").removesuffix("/v1")


@click.command(help=__doc__)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--url", default="http://localhost:8000", show_default=True, callback=_url, help="With or without /v1.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option("--model", help="Default: the log's, or the server's first.")
@click.option("--format", "kind", type=click.Choice(FORMATS), help="Default: found from the first line.")
@click.option("--speed", type=_POSITIVE, default=1.0, show_default=True, help="2 replays it in half the time.")
@click.option("--scale", type=_POSITIVE, default=1.0, show_default=True, help="Of prompts and outputs; not for logs.")
@click.option("--limit", type=click.IntRange(1), help="Replay the first N requests of the file.")
@click.option("--duration", type=_POSITIVE, help="Replay what is due within so many seconds.")
@click.option("--context", type=click.IntRange(2), help="Cut prompts to fit. Default: the server's max_model_len.")
@click.option("--vocab-size", type=click.IntRange(8), default=1000, show_default=True, help="Token ids are below it.")
@click.option(
    "--ignore-eos/--no-ignore-eos", default=True, help="Make outputs as long as in the trace, or leave the field out."
)
@click.option(
    "--retry", type=click.IntRange(0), default=0, show_default=True, help="Retries after Retry-After of a refusal."
)
@click.option(
    "--timeout",
    type=_POSITIVE,
    default=600.0,
    show_default=True,
    help="Longest seconds of a request, with its retries.",
)
@click.option("--json", "report_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the report.")
@click.option("--lines", type=click.Path(dir_okay=False, path_type=Path), help="Write a line of JSON for each request.")
def main(
    trace: Path,
    url: str,
    api_key: str | None,
    model: str | None,
    kind: Format | None,
    speed: float,
    scale: float,
    limit: int | None,
    duration: float | None,
    context: int | None,
    vocab_size: int,
    ignore_eos: bool,
    retry: int,
    timeout: float,
    report_path: Path | None,
    lines: Path | None,
) -> None:
    try:
        kind, arrivals = read_trace(trace, kind, limit)
    except TraceError as error:
        raise click.ClickException(str(error)) from None
    if kind == "log" and scale != 1:
        raise click.UsageError(f"--scale {scale:g}: the bodies of a log are sent as they are; leave it out")
    server = Server(url, model, context) if model and context else ask_server(url, api_key, model)
    prompts = Prompts(scale, context or server.context_tokens, vocab_size, ignore_eos)
    arrivals = [each for each in arrivals if duration is None or each.seconds / speed < duration]
    overrides = _STREAMED | ({"model": model} if model else {})
    requests = bodies(arrivals, speed, prompts, {"model": server.model}, overrides)
    outcomes, seconds = asyncio.run(replay(server, api_key, requests, len(arrivals), retry, timeout))
    options = {"trace": trace.name, "format": kind, "speed": speed, "scale": scale, "retry": retry}
    report = {**options, **trace_facts(arrivals, prompts), **report_of(outcomes, seconds)}
    click.echo(table_of(report))
    if report_path:
        report_path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    if lines:
        lines.write_text("".join(json.dumps(asdict(each)) + "\n" for each in outcomes), "utf-8")
    sys.exit(1 if report["requests"]["failed"] or report["requests"]["connection_error"] else 0)


if __name__ == "__main__":
    main()
