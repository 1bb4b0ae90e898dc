"""`ingot serve` at several times its capacity: time of refusals, goodput, and whether `Retry-After` is right.

    python -m benchmarks.serve.overload [ARTIFACT] [--seconds 300] [--output FILE]

The capacity is what 64 streams get, each of which begins its next request when one ends. Then requests arrive by a
Poisson process at 1, 1.5, 3 and 10 times the capacity, whatever has become of those before, and refused clients give
up. In two more runs refused clients wait for as long as the server said and try again once. The load generator is a
process on the same processors, with a higher priority where the system allows it: its time is part of what the server
loses. `cores_used` says how many processors the generator, the server, the engine's process and all others used: a run
in which others used some measures them too. `INGOT_THREADS` is the engine's number of threads: fewer than there are
cores leave one to the server and the generator.

Goodput is output tokens a second of answers that are whole and whose first token came within the bound. The error of a
`Retry-After` compares it with the time at which a place was free for that client: when as many requests had ended as
there were refused clients before it, and itself.
"""

import json
import os
import random
import resource
import statistics
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from benchmarks.cpu.serve import over_http, processor_seconds, server
from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.serve.load import Attempt, Load, around, generate
from ingot.artifact import open_artifact

_RAMP = 0.25  # share of a run that is left out of its goodput: the batch fills up
_CAPACITY_SECONDS = 6.0
_STAT = Path("/proc/stat")


def capacity(url: str, vocab_size: int, streams: int, prompt_tokens: int, max_tokens: int, seconds: float) -> float:
    """Requests a second of as many streams, each of which begins its next request when one ends."""
    rate, rng = 1.0, random.Random(0)
    for num_requests in (2 * streams, 0):  # the first run warms up, and says how many requests the second needs
        lengths = [
            (around(prompt_tokens, rng), around(max_tokens, rng))
            for _ in range(num_requests or max(2 * streams, int(rate * seconds)))
        ]
        outcome = over_http(
            url, [_prompt(length, vocab_size, rng) for length, _ in lengths], streams, [each for _, each in lengths]
        )
        rate = outcome.tokens_per_second / (sum(each for _, each in lengths) / len(lengths))
    return rate


def _prompt(length: int, vocab_size: int, rng: random.Random) -> list[int]:
    return [rng.randrange(1, vocab_size) for _ in range(length)]


def goodput(attempts: Sequence[Attempt], load: Load, ttft_seconds: float) -> float:
    """Output tokens a second of good answers that ended after the ramp and before the last request was due."""
    since = load.seconds * _RAMP
    good = [each for each in accepted(attempts) if ttft(each) <= ttft_seconds and since <= (each.ended or 0)]
    return sum(each.output_tokens for each in good if (each.ended or 0) <= load.seconds) / (load.seconds - since)


def accepted(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Attempts with a whole answer."""
    return [each for each in attempts if each.status == 200 and each.is_whole]


def ttft(attempt: Attempt) -> float:
    """Seconds to the first token, or to the refusal."""
    assert attempt.begun is not None
    return attempt.begun - attempt.sent


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that this share does not exceed; None without any."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def figures_of(attempts: Sequence[Attempt], load: Load, ttft_seconds: float) -> dict[str, object]:
    """The figures of a run in which refused clients give up."""
    refused = [1000 * ttft(each) for each in attempts if each.status == 429]
    served = accepted(attempts)
    within = [ttft(each) <= ttft_seconds for each in served]
    return {
        "requests_per_second": round(load.per_second, 1),
        "requests": len(attempts),
        "accepted": len(served),
        "refused": len(refused),
        "neither": len(attempts) - len(served) - len(refused),
        "goodput_tokens_per_second": round(goodput(attempts, load, ttft_seconds)),
        "refusal_ms_p50": _rounded(quantile(refused, 0.5)),
        "refusal_ms_p99": _rounded(quantile(refused, 0.99)),
        "refusal_ms_most": _rounded(max(refused, default=None)),
        "ttft_seconds_p50": _rounded(quantile([ttft(each) for each in served], 0.5)),
        "ttft_seconds_p99": _rounded(quantile([ttft(each) for each in served], 0.99)),
        "share_of_ttft_within_bound": round(sum(within) / len(within), 4) if within else None,
    }


def all_processor_seconds(url: str) -> dict[str, float]:
    """Processor time of each side so far; of other processes where there is /proc. The generator is an ended child."""
    found = {"generator": sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]), **processor_seconds(url)}
    if _STAT.exists():
        user, nice, system, _, _, interrupts, soft, *_ = map(int, _STAT.read_text().split("\n")[0].split()[1:])
        found["all"] = (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
    return {"seconds": time.monotonic(), **found}


def cores_used(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Processors that each side used between two readings; `others`: what no side did."""
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    seconds, everything = used.pop("seconds"), used.pop("all", None)
    if everything is not None:
        used["others"] = max(0.0, everything - sum(used.values()))
    return {name: round(each / seconds, 2) for name, each in used.items()}


def promises_of(attempts: Sequence[Attempt]) -> dict[str, object]:
    """Whether clients that waited for as long as they were asked to got in, and how good the time was."""
    refused = [each for each in attempts if each.turn == 0 and each.status == 429]
    again = {each.number: each for each in attempts if each.turn == 1}
    came = [again[each.number] for each in refused if each.number in again]
    errors = promise_errors(attempts)
    return {
        "refused": len(refused),
        "came_again": len(came),
        "share_admitted_at_first_retry": round(sum(each.status == 200 for each in came) / len(came), 4)
        if came
        else None,
        "longest_promise_seconds": _rounded(max((each.retry_seconds or 0 for each in refused), default=None)),
        "median_error_of_promise": _rounded(statistics.median(map(abs, errors)) if errors else None),
        "median_bias_of_promise": _rounded(statistics.median(errors) if errors else None),
    }


def promise_errors(attempts: Sequence[Attempt]) -> list[float]:
    """(promised - needed) / needed of every refused client that came again."""
    ends = sorted(each.ended for each in accepted(attempts) if each.ended is not None)
    again = {each.number: each.sent for each in attempts if each.turn == 1}
    errors, waiting = [], list[float]()  # when those that were refused before come again
    for each in sorted((each for each in attempts if each.turn == 0 and each.status == 429), key=lambda one: one.sent):
        if each.number not in again or not each.retry_seconds:
            continue
        waiting = [due for due in waiting if due > each.sent]
        place = bisect_right(ends, each.sent) + len(waiting)
        waiting.append(again[each.number])
        if place < len(ends):
            needed = ends[place] - each.sent
            errors.append((each.retry_seconds - needed) / needed)
    return errors


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


@click.command(help=__doc__)
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--factor", "factors", multiple=True, default=(1.0, 1.5, 3.0, 10.0), show_default=True)
@click.option("--retry-factor", "retry_factors", multiple=True, default=(1.5, 10.0), show_default=True)
@click.option("--seconds", default=20.0, show_default=True, help="Length of each run.")
@click.option(
    "--backlog-seconds", default=20.0, show_default=True, help="Work that waits at the end of a run with retries."
)
@click.option("--prompt-tokens", default=128, show_default=True)
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--streams", default=64, show_default=True, help="Streams that measure the capacity.")
@click.option("--ttft-seconds", default=2.0, show_default=True, help="Bound of the time to a first token.")
@click.option("--serve", "options", multiple=True, metavar="OPTION", help="Further option of ingot serve; repeatable.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve-overload.json")
def main(
    artifact: str,
    factors: tuple[float, ...],
    retry_factors: tuple[float, ...],
    seconds: float,
    backlog_seconds: float,
    prompt_tokens: int,
    max_tokens: int,
    streams: int,
    ttft_seconds: float,
    options: tuple[str, ...],
    output: Path,
) -> None:
    """Measure, print and write."""
    vocab_size = open_artifact(artifact).manifest.model.vocab_size
    runs: dict[str, dict[str, object]] = {}
    command = (artifact, "--max-ttft-seconds", str(ttft_seconds), *options)

    def load(url: str, factor: float, length: float, retries: int, seed: int) -> Load:
        patience = 60 + 4 * backlog_seconds
        return Load(url, factor * rate, length, prompt_tokens, max_tokens, vocab_size, retries, patience, seed)

    def note(name: str, found: dict[str, object]) -> None:
        """Print and write a run at once: all of them take half an hour."""
        runs[name] = found
        click.echo(f"{name} the capacity: {json.dumps(found)}")
        facts = {
            "device": device_facts(),
            "artifact": Path(artifact).name,
            "engine_threads": os.environ.get("INGOT_THREADS", "all cores"),
            "serve_options": list(options),
            "seconds": seconds,
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
            "ttft_seconds": ttft_seconds,
            "capacity_tokens_per_second": round(rate * max_tokens),
        }
        output.write_text(json.dumps({**facts, "runs": runs}, indent=2) + "\n")

    with server(*command) as url:
        rate = capacity(url, vocab_size, streams, prompt_tokens, max_tokens, min(seconds, _CAPACITY_SECONDS))
        click.echo(f"capacity: {rate:.1f} requests a second, {rate * max_tokens:.0f} tokens a second")
        for number, factor in enumerate(factors):
            given = load(url, factor, seconds, 0, number)
            before = all_processor_seconds(url)
            attempts = generate(given)
            used = cores_used(before, all_processor_seconds(url))
            note(f"{factor:g} times", {**figures_of(attempts, given, ttft_seconds), "cores_used": used})
    for number, factor in enumerate(retry_factors):
        with server(*command) as url:  # the server learns whether refused clients return
            capacity(url, vocab_size, streams, prompt_tokens, max_tokens, min(seconds, _CAPACITY_SECONDS))
            given = load(url, factor, min(seconds, backlog_seconds / max(0.1, factor - 1)), 1, 100 + number)
            note(f"{factor:g} times, retries", promises_of(generate(given)))


if __name__ == "__main__":
    main()
