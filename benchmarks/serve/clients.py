"""Refused clients of several kinds, with two keys: the promised time, the true one, and who was served.

    python -m benchmarks.serve.clients [ARTIFACT] [--seconds 40] [--clients 150] [--places 16] [--output FILE]

Each client sends its next request when the last one ended, served or given up after six retries:

    sdk        OpenAI's client as it is, which waits as promised, up to a minute
    obeying    waits exactly as promised
    backoff    waits half a second, doubled up to 8 s, less up to a quarter, whatever was promised

The true time of a refusal is when as many answers had ended as clients waited before it, and its own place was free.
Then four clients of one key, each with a pause of its own between requests, run alone and next to a hog: as many
clients of another key as `--clients`, which send a new request 50 ms after each refusal.
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx2
import openai
from tests.runtime.server.refusals import Refusal, given_and_true

from benchmarks.cpu.serve import server
from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.serve.overload import quantile

_RETRIES = 6
_RAMP = 0.3  # share of a run whose refusals are left out: nothing is measured yet
_KEYS = ("polite-key-1", "abuser-key-2")
_PAUSE_SECONDS, _HOG_SECONDS, _POLITE = 0.5, 0.05, 4


@dataclass
class _Population:
    """Clients of one kind and what became of their requests."""

    url: str
    key: str
    until: float
    max_tokens: int
    ends: list[float] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    waiting: dict[object, float] = field(default_factory=dict)
    num_given_up: int = 0
    num_failed: int = 0

    def request(self, rng: random.Random) -> dict[str, Any]:
        prompt = [rng.randrange(1, 500) for _ in range(32)]
        return {"model": "demo", "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0}

    def refused(self, who: object, since: float, told: float) -> None:
        """Note a refusal of a client that has waited since a time."""
        now = time.monotonic()
        before = sum(begun < since for begun in self.waiting.values())
        if who not in self.waiting:
            self.refusals.append(Refusal(now, told, before))
        self.waiting[who] = since

    def served(self, who: object, since: float) -> None:
        """Note that the server took a request and answered it."""
        self.waiting.pop(who, None)
        self.ends.append(time.monotonic())
        self.waits.append(self.ends[-1] - since)


async def _raw(
    population: _Population, client: httpx2.AsyncClient, number: int, delay: Callable[[int, float], float], pause: float
) -> None:
    """A client that waits by a rule of its own."""
    rng = random.Random(number)
    headers = {"authorization": f"Bearer {population.key}"}
    while (since := time.monotonic()) < population.until:
        body = {**population.request(rng), "ignore_eos": True}
        for turn in range(_RETRIES + 1):
            answer = await client.post(f"{population.url}/v1/completions", json=body, headers=headers)
            if answer.status_code != 429:
                break
            told = float(answer.headers["retry-after-ms"]) / 1000
            population.refused(str(number), since, told)
            await asyncio.sleep(delay(turn, told))
        if answer.status_code == 200:
            population.served(str(number), since)
        else:
            population.waiting.pop(str(number), None)
            population.num_given_up += answer.status_code == 429
            population.num_failed += answer.status_code != 429
        await asyncio.sleep(pause)


async def _sdk(population: _Population, client: openai.AsyncOpenAI, number: int, begun: dict[str, float]) -> None:
    """OpenAI's client, with its own retries."""
    rng, who = random.Random(number), str(number)
    while (since := time.monotonic()) < population.until:
        begun[who] = since
        try:
            request = population.request(rng)
            await client.completions.create(**request, extra_body={"ignore_eos": True}, extra_headers={"x-who": who})
            population.served(who, since)
        except openai.RateLimitError:
            population.waiting.pop(who, None)
            population.num_given_up += 1
        except openai.APIError:
            population.num_failed += 1


async def _run_sdk(population: _Population, clients: int) -> None:
    begun: dict[str, float] = {}

    async def note(response: Any) -> None:
        """Note the promised time, which its retries hide."""
        if response.status_code == 429:
            who = response.request.headers["x-who"]
            population.refused(who, begun[who], float(response.headers["retry-after-ms"]) / 1000)

    hooks: Any = {"response": [note]}
    transport = openai.DefaultAsyncHttpxClient(event_hooks=hooks)
    async with openai.AsyncOpenAI(
        base_url=f"{population.url}/v1", api_key=population.key, max_retries=_RETRIES, http_client=transport
    ) as client:
        await _until(population, [_sdk(population, client, number, begun) for number in range(clients)])


async def _run_raw(
    parts: Sequence[tuple[_Population, int, Callable[[int, float], float], float]],
) -> None:
    """Run so many clients of each population, with their way to wait and their pause."""
    async with httpx2.AsyncClient(timeout=120, limits=httpx2.Limits(max_connections=None)) as client:
        clients = [
            _raw(population, client, number, delay, pause)
            for population, many, delay, pause in parts
            for number in range(many)
        ]
        await _until(parts[0][0], clients)


async def _until(population: _Population, clients: list[Any]) -> None:
    """Run clients for their time; those that wait then are left."""
    tasks = [asyncio.create_task(each) for each in clients]
    await asyncio.sleep(max(0.0, population.until - time.monotonic()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def figures_of(population: _Population, seconds: float) -> dict[str, object]:
    """Promised times, true ones, and how many were served."""
    since = population.until - seconds * (1 - _RAMP)
    pairs = given_and_true(population.refusals, population.ends, since)
    ratios = [told / true for told, true in pairs if true > 0]
    return {
        "served": len(population.ends),
        "given_up": population.num_given_up,
        "failed": population.num_failed,
        "refused_first": len(population.refusals),
        "told_seconds_p50": quantile([told for told, _ in pairs], 0.5),
        "true_seconds_p50": quantile([true for _, true in pairs], 0.5),
        "told_to_true_p50": quantile(ratios, 0.5),
        "share_within_1.5": sum(1 / 1.5 <= each <= 1.5 for each in ratios) / len(ratios) if ratios else None,
        "longest_told_seconds": max((each.given for each in population.refusals), default=None),
        "wait_seconds_p50": quantile(population.waits, 0.5),
    }


def _told(turn: int, told: float) -> float:
    return told


def _at_once(turn: int, told: float) -> float:
    return _HOG_SECONDS


def _backoff(turn: int, told: float) -> float:
    return float(min(0.5 * 2**turn, 8.0) * (1 - 0.25 * random.random()))


@click.command(help=__doc__)
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--seconds", default=40.0, show_default=True, help="Length of each run.")
@click.option("--clients", default=150, show_default=True)
@click.option("--places", default=16, show_default=True, help="--max-requests of the server.")
@click.option("--max-tokens", default=200, show_default=True)
@click.option("--kind", "kinds", multiple=True, default=("sdk", "obeying", "backoff", "hog"), show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve-clients.json")
def main(
    artifact: str, seconds: float, clients: int, places: int, max_tokens: int, kinds: tuple[str, ...], output: Path
) -> None:
    """Measure, print and write."""
    runs: dict[str, object] = {}

    def note(name: str, found: dict[str, object]) -> None:
        runs[name] = {key: round(each, 3) if isinstance(each, float) else each for key, each in found.items()}
        click.echo(f"{name}: {json.dumps(runs[name])}")
        facts = {"device": device_facts(), "seconds": seconds, "clients": clients, "places": places}
        output.write_text(json.dumps({**facts, "max_tokens": max_tokens, "runs": runs}, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.txt")
        keys.write_text("\n".join(_KEYS) + "\n")
        for kind in kinds:
            with server(artifact, "--max-requests", str(places), "--api-keys", str(keys)) as url:
                if kind != "hog":
                    population = _Population(url, _KEYS[0], time.monotonic() + seconds, max_tokens)
                    delay = _backoff if kind == "backoff" else _told
                    run = _run_sdk(population, clients) if kind == "sdk" else None
                    asyncio.run(run or _run_raw([(population, clients, delay, 0.0)]))
                    note(kind, figures_of(population, seconds))
                    continue
                for with_hog in (False, True):
                    polite = _Population(url, _KEYS[0], time.monotonic() + seconds, max_tokens)
                    hog = _Population(url, _KEYS[1], polite.until, max_tokens)
                    parts = [(polite, _POLITE, _told, _PAUSE_SECONDS), (hog, clients * with_hog, _at_once, 0.0)]
                    asyncio.run(_run_raw(parts))
                    note("polite next to a hog" if with_hog else "polite alone", figures_of(polite, seconds))
                note("the hog", figures_of(hog, seconds))


if __name__ == "__main__":
    main()
