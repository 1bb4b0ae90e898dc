"""Replay a trace on a real engine with tiers: hits per tier, wrong and lost answers, and step times while blocks move.

    python -m benchmarks.kv.replay ARTIFACT --trace ../shared/data/traces/conversation_trace.jsonl --requests 2000

A block of the trace (512 tokens) becomes one block of the engine: its tokens follow from its id, so equal prefixes stay
equal. Chains that exceed the model's context are cut, outputs are scaled alike, and a fixed number of requests is in
flight, in the trace's order. Every configuration answers the same requests greedily; an answer that differs from that
of the engine without a prefix cache is wrong, one that is missing is lost.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.device import device_facts
from benchmarks.kv.policies import belady_hits, unlimited_hits
from ingot import Engine, SamplingParams
from ingot.artifact import open_artifact
from ingot.runtime.kv.policies import DEFAULT_POLICY

_TRACE_TOKENS = 512  # per block of the trace
_OUTPUT_ROOM = 64  # tokens of the context that are left for the output
_CONCURRENCY = 8


@dataclass(frozen=True)
class Request:
    """A prompt, how many tokens to generate, and the chain of the trace's blocks that the prompt is made of."""

    prompt: tuple[int, ...]
    output_tokens: int
    chain: tuple[bytes, ...]


@dataclass
class Replay:
    """What one configuration did."""

    seconds: float = 0.0
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cached: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    step_seconds: list[float] = field(default_factory=list)
    moving: list[bool] = field(default_factory=list)
    tiers: dict[str, int] = field(default_factory=dict)


def scaled_requests(trace: Path, limit: int, *, block_tokens: int, context_tokens: int, vocab: int) -> list[Request]:
    """The first requests of a trace, in the model's size."""
    most_blocks = (context_tokens - _OUTPUT_ROOM) // block_tokens
    requests = []
    for line in trace.read_text("utf-8").splitlines()[:limit]:
        row = json.loads(line)
        ids = row["hash_ids"][:most_blocks]
        prompt = np.concatenate([np.random.default_rng(each).integers(3, vocab, block_tokens) for each in ids])
        output = min(_OUTPUT_ROOM - 1, max(1, row["output_length"] * block_tokens // _TRACE_TOKENS))
        chain = tuple(each.to_bytes(8, "big") for each in ids)
        requests.append(Request((*prompt.tolist(), 3 + ids[-1] % (vocab - 3)), output, chain))
    return requests


def replay(artifact: Path, requests: Sequence[Request], **options: Any) -> Replay:
    """Answer all requests with an engine of these options."""
    result = Replay()
    with Engine.load(artifact, **options) as engine:
        waiting, running = iter(enumerate(requests)), dict[int, int]()
        started = time.perf_counter()
        _fill(engine, waiting, running)
        while running:
            _step(engine, running, result)
            _fill(engine, waiting, running)
        result.seconds = time.perf_counter() - started
        result.tiers = _tier_counts(engine)
    return result


def _fill(engine: Engine, waiting: Iterator[tuple[int, Request]], running: dict[int, int]) -> None:
    while len(running) < _CONCURRENCY and (following := next(waiting, None)):
        index, request = following
        params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        running[engine.add(list(request.prompt), params)] = index


def _step(engine: Engine, running: dict[int, int], result: Replay) -> None:
    before, started = _tier_counts(engine), time.perf_counter()
    outputs = engine.step()
    result.step_seconds.append(time.perf_counter() - started)
    result.moving.append(_tier_counts(engine) != before)
    for output in outputs:
        if output.result:
            index = running.pop(output.request_id)
            result.answers[index] = output.result.token_ids
            result.prompt_tokens += output.result.prompt_tokens
            result.cached.update(_by_tier(output.result))


def _by_tier(completion: Any) -> dict[str, int]:
    tiers = completion.cached_tokens_by_tier
    return {name: getattr(tiers, name) for name in ("device", "host", "disk")}


def _tier_counts(engine: Engine) -> dict[str, int]:
    tiers = engine.metrics().kv_tiers
    if tiers is None:
        return {}
    names = ("saved_blocks", "restored_blocks", "disk_read_blocks", "disk_written_blocks", "failed_transfers")
    return {name: getattr(tiers, name) for name in names}


def summary(result: Replay, right: Replay, total: int) -> dict[str, object]:
    """Figures of a configuration; `right` is the replay without any cache."""
    wrong = sum(result.answers[index] != right.answers[index] for index in result.answers)
    times, moving = np.array(result.step_seconds) * 1e3, np.array(result.moving)
    return {
        "seconds": round(result.seconds, 1),
        "hit_rate": {name: round(count / result.prompt_tokens, 4) for name, count in result.cached.items()},
        "all": round(sum(result.cached.values()) / result.prompt_tokens, 4),
        "wrong": wrong,
        "lost": total - len(result.answers),
        "steps": len(times),
        "step_ms": _quantiles(times),
        "step_ms_while_blocks_move": _quantiles(times[moving]),
        "step_ms_otherwise": _quantiles(times[~moving]),
        **result.tiers,
    }


def _quantiles(times: "np.ndarray[Any, np.dtype[np.float64]]") -> dict[str, float] | None:
    if not len(times):
        return None
    return {f"p{share}": round(float(np.percentile(times, share)), 2) for share in (50, 90, 99, 100)}


@click.command()
@click.argument("artifact", type=click.Path(exists=True, path_type=Path))
@click.option("--trace", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--requests", "limit", default=2000, show_default=True)
@click.option("--pool", default=10, show_default=True, help="Pool, in percent of the working set.")
@click.option("--host", default=20, show_default=True, help="Host memory, in percent of the working set.")
@click.option("--disk", default=50, show_default=True, help="Disk, in percent of the working set.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the disk tier's folder is made.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(
    artifact: Path, trace: Path, limit: int, pool: int, host: int, disk: int, folder: Path | None, output: Path | None
) -> None:
    """Replay a trace without a cache, with an unlimited one, and with a small pool and tiers below it."""
    geometry, model = open_artifact(artifact).manifest.kv, open_artifact(artifact).manifest.model
    requests = scaled_requests(
        trace,
        limit,
        block_tokens=geometry.block_tokens,
        context_tokens=model.context_tokens,
        vocab=model.vocab_size,
    )
    chains = [request.chain for request in requests]
    working_set = len({key for chain in chains for key in chain})
    floor = _CONCURRENCY * -(-model.context_tokens // geometry.block_tokens)
    sizes = {name: working_set * share // 100 for name, share in (("pool", pool), ("host", host), ("disk", disk))}
    sizes["pool"] = max(sizes["pool"], floor)
    facts = {"requests": limit, "blocks": sum(map(len, chains)), "working_set": working_set, "sizes": sizes}
    bounds = {"unlimited": unlimited_hits(chains), "belady_at_pool": belady_hits(chains, sizes["pool"])}
    click.echo(json.dumps({**facts, **bounds}))
    block_bytes = geometry.block_bytes
    with tempfile.TemporaryDirectory(dir=folder) as base:
        small = {"kv_blocks": sizes["pool"]}
        tiers = {**small, "kv_host_bytes": sizes["host"] * block_bytes}
        everything = {**tiers, "kv_disk_path": base, "kv_disk_bytes": sizes["disk"] * (block_bytes + 512)}
        configurations: dict[str, dict[str, Any]] = {
            "no cache": {**small, "prefix_cache": False},
            "unlimited": {"kv_blocks": working_set + floor},
            "pool": small,
            "pool, host": tiers,
            "pool, host, disk": everything,
            "pool, host, disk, after a restart": everything,
        }
        runs: dict[str, object] = {}
        right: Replay | None = None
        for name, options in configurations.items():
            result = replay(artifact, requests, **options)
            right = right or result
            runs[name] = summary(result, right, len(requests))
            click.echo(json.dumps({name: runs[name]}))
    if output:
        document = {"device": device_facts(), "policy": DEFAULT_POLICY, **facts, "bounds": bounds, "runs": runs}
        output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
