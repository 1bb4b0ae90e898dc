"""Replay a trace on a real engine with tiers: hits per tier, wrong and lost answers, and step times while blocks move.

    python -m benchmarks.kv.replay artifacts/demo --trace ../shared/data/traces/conversation_trace.jsonl \\
        --output benchmarks/results/kv-replay.json

A block of the trace (512 tokens) becomes one block of the engine: its tokens follow from its id, so equal prefixes stay
equal. Chains that exceed the model's context are cut, outputs are scaled alike, and a fixed number of requests is in
flight, in the trace's order. Every configuration answers the same requests greedily; an answer that differs from that
of the engine without a prefix cache is wrong, one that is missing is lost.

**Step times.** Three engines answer the requests in turns of `--turn` requests: the pool alone, the pool with tiers,
and the pool alone again. Their steps are compared as in `step_times.py`, once with steps of the same composition and
once with the time of the same work. The difference of the two engines without tiers is the noise. Between turns the
tiered engine finishes its transfers, so that they disturb only its own steps.

Results are written after each part; parts that `--output` has already are not run again.
"""

import gc
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import click

from benchmarks.device import device_facts
from benchmarks.kv.policies import belady_hits, unlimited_hits
from benchmarks.kv.replay_lane import Lane, Replay, Request, scaled_requests
from benchmarks.kv.step_times import compare_steps
from ingot import Engine
from ingot.artifact import Artifact, open_artifact
from ingot.runtime.kv.eviction import DEFAULT_POLICY


def summary(
    result: Replay, right: Mapping[int, str], total: int, bounds: Mapping[str, int], block: int
) -> dict[str, Any]:
    """Figures of an engine; `right` are the answers without any cache, `bounds` hits in blocks of `block` tokens."""
    hits = sum(result.cached.values())
    return {
        "seconds": round(result.seconds, 1),
        "hit_rate": {name: round(count / result.prompt_tokens, 4) for name, count in result.cached.items()},
        "all": round(hits / result.prompt_tokens, 4),
        "of_bounds": {name: round(hits / block / blocks, 4) for name, blocks in bounds.items()},
        "wrong": sum(answer != right[index] for index, answer in result.answers.items()),
        "lost": total - len(result.answers),
        "steps": len(result.steps),
        **result.tiers,
    }


@dataclass(frozen=True)
class Sizes:
    """Blocks of each tier; 0 for none."""

    pool: int
    host: int
    disk: int

    def options(self, block_bytes: int, folder: Path, restore: str = "always") -> dict[str, Any]:
        """Options of `Engine.load`."""
        options: dict[str, Any] = {"kv_blocks": self.pool, "kv_host_bytes": self.host * block_bytes}
        if self.host:
            options["kv_restore"] = restore
        if self.disk:
            options |= {"kv_disk_path": folder, "kv_disk_bytes": self.disk * (block_bytes + 512)}
        return options


class Report:
    """The document that is written after each part, and continued by a later run."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self._path, self._facts = path, facts
        self.document: dict[str, Any] = {**facts, "runs": {}, "answers": {}}
        if path and path.is_file():
            found = json.loads(path.read_text("utf-8"))
            if {name: found.get(name) for name in facts} != facts:
                raise click.UsageError(f"{path} has results of another machine, artifact or sizes; move it away")
            self.document = found

    def has(self, *names: str) -> bool:
        """Whether runs are there already."""
        return all(name in self.document["runs"] for name in names)

    def add(self, runs: Mapping[str, Mapping[str, Any]]) -> None:
        """Add figures, print and write them."""
        for name, figures in runs.items():
            self.document["runs"][name] = figures
            click.echo(json.dumps({name: figures}))
        self.write()

    def write(self) -> None:
        """Write all that is known."""
        if self._path:
            self._path.write_text(json.dumps(self.document, indent=1) + "\n")


class Runs:
    """The configurations, one after another."""

    def __init__(
        self,
        artifact: Artifact,
        requests: Sequence[Request],
        in_flight: int,
        report: Report,
        threads: int | None = None,
    ) -> None:
        self._artifact, self._requests, self._in_flight, self._report = artifact, requests, in_flight, report
        self._threads = threads
        self._block_tokens = artifact.manifest.kv.block_tokens

    def alone(self, name: str, bounds: Mapping[str, int], **options: Any) -> None:
        """One engine."""
        if self._report.has(name):
            return
        with self._load(options) as engine:
            lane = Lane(engine, self._requests, self._in_flight)
            lane.advance(len(self._requests))
        self._add(bounds, **{name: lane.result})

    def in_turns(
        self,
        names: tuple[str, str, str],
        bounds: Mapping[str, int],
        plain: dict[str, Any],
        tiered: dict[str, Any],
        turn: int,
    ) -> None:
        """The pool alone, the pool with tiers, and the pool alone again, in turns."""
        if self._report.has(*names):
            return
        engines = [self._load(options) for options in (plain, tiered, plain)]
        gc.collect()
        gc.freeze()  # as the engine's own process does once it has loaded: hosting/engine_process_child.py
        try:
            lanes = [Lane(engine, self._requests, self._in_flight) for engine in engines]
            for direction in cycle((1, -1)):
                if not sum(self._advance(lane, turn) for lane in lanes[::direction]):
                    break
        finally:
            gc.unfreeze()
            for engine in engines:
                engine.close()
        self._report.document["step_times"] = compare_steps(*(lane.result.steps for lane in lanes))
        click.echo(json.dumps(self._report.document["step_times"]))
        self._add(bounds, **dict(zip(names, (lane.result for lane in lanes), strict=True)))

    def _load(self, options: Mapping[str, Any]) -> Engine:
        return Engine.load(self._artifact, num_threads=self._threads, **options)

    def _advance(self, lane: Lane, turn: int) -> bool:
        goes_on = lane.advance(turn)
        lane.wait_for_transfers()
        return goes_on

    def _add(self, bounds: Mapping[str, int], **results: Replay) -> None:
        answers = self._report.document["answers"]
        for result in results.values():
            answers = answers or {str(index): answer for index, answer in result.answers.items()}
        self._report.document["answers"] = answers
        right = {int(index): answer for index, answer in answers.items()}
        total = len(self._requests)
        self._report.add(
            {name: summary(result, right, total, bounds, self._block_tokens) for name, result in results.items()}
        )


@click.command()
@click.argument("artifact", type=click.Path(exists=True, path_type=Path))
@click.option("--trace", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--requests", "limit", default=2000, show_default=True)
@click.option("--in-flight", default=8, show_default=True, help="Requests that are unfinished at a time.")
@click.option("--turn", default=50, show_default=True, help="Requests of a turn, where engines take turns.")
@click.option("--pool", default=10, show_default=True, help="Pool, in percent of the working set.")
@click.option("--host", default=20, show_default=True, help="Host memory, in percent of the working set.")
@click.option("--disk", default=50, show_default=True, help="Disk, in percent of the working set.")
@click.option(
    "--restore",
    type=click.Choice(["auto", "always"]),
    default="always",
    show_default=True,
    help="When a prefix is restored: auto computes what is cheaper to compute, so that hits depend on the machine.",
)
@click.option("--threads", type=int, help="Threads of the engine. Default: INGOT_THREADS, or all cores.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the disk tier's folder is made.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of results, made or continued.")
def main(
    artifact: Path,
    trace: Path,
    limit: int,
    in_flight: int,
    turn: int,
    pool: int,
    host: int,
    disk: int,
    restore: str,
    threads: int | None,
    folder: Path | None,
    output: Path | None,
) -> None:
    """Replay a trace without a cache, with an unlimited one, and with a small pool and tiers below it."""
    opened = open_artifact(artifact)
    geometry, model = opened.manifest.kv, opened.manifest.model
    requests = scaled_requests(
        trace,
        limit,
        block_tokens=geometry.block_tokens,
        context_tokens=model.context_tokens,
        vocab=model.vocab_size,
    )
    chains = [request.chain for request in requests]
    working_set = len({key for chain in chains for key in chain})
    floor = in_flight * -(-model.context_tokens // geometry.block_tokens)
    sizes = Sizes(max(working_set * pool // 100, floor), working_set * host // 100, working_set * disk // 100)
    together = sum(vars(sizes).values())
    bounds = {
        "unlimited": unlimited_hits(chains),
        "belady_at_pool": belady_hits(chains, sizes.pool),
        "belady_at_all_tiers_together": belady_hits(chains, together),
    }
    facts = {
        "device": device_facts(),
        "artifact": opened.manifest.identity,
        "policy": DEFAULT_POLICY,
        "requests": limit,
        "in_flight": in_flight,
        "restore": restore,
        "threads": threads,
        "blocks": sum(map(len, chains)),
        "working_set": working_set,
        "sizes": vars(sizes),
        "bounds": bounds,
    }
    click.echo(json.dumps(facts))
    report = Report(output, facts)
    runs = Runs(opened, requests, in_flight, report, threads)
    block_bytes = geometry.block_bytes
    with tempfile.TemporaryDirectory(dir=folder) as base:
        small = Sizes(sizes.pool, 0, 0).options(block_bytes, Path(base), restore)
        with_host = Sizes(sizes.pool, sizes.host, 0).options(block_bytes, Path(base), restore)
        everything = sizes.options(block_bytes, Path(base) / "kv", restore)
        runs.alone("no cache", bounds, prefix_cache=False, **small)
        runs.alone("unlimited", bounds, kv_blocks=working_set + floor)
        runs.alone("pool, host", bounds, **with_host)
        runs.in_turns(("pool", "pool, host, disk", "pool, again"), bounds, small, everything, turn)
        if any((Path(base) / "kv").glob("*")):
            runs.alone("pool, host, disk, after a restart", bounds, **everything)
    report.document.pop("answers", None)  # all parts are there
    report.write()


if __name__ == "__main__":
    main()
