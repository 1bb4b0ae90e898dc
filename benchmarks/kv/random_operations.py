"""Random operations on blocks, tiers and scheduler: every request gets its tokens, nothing leaks.

    python -m benchmarks.kv.random_operations --output benchmarks/results/kv-random-operations.json

Engines with the fake executors, half of them with side state, and tiny pools, host memories and stores. Transfers end
in any order and fail, requests are added, stepped, aborted and expire, engines restart on the same store. Invariants
are checked after every operation, and each output is compared with what its request gets alone. The exit code is 1 at
the first difference.

A world is one set of sizes and 300 operations, seeded by the run's seed and its number; each process has its own seed.
Counts are written while the run goes on, also at Ctrl-C, and a run with the same `--output` continues. A world that
fails is named, and repeated alone by `--world SEED,NUMBER`.
"""

import json
import logging
import multiprocessing
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import click
from tests.runtime.kv.tiered_engines import tiered_engine
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.fake_host_blocks import FakeStore, Transfers
from tests.simulators.layered_executor import LayeredExecutor, LayeredPipelinedExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

from benchmarks.device import device_facts
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine

_OPERATIONS_PER_WORLD = 300
_VOCAB_SIZE = 3
_WORLDS_PER_TASK = 20
_LAYOUT = "all"  # with side state
_COUNTED = (
    "saved_blocks",
    "saved_states",
    "dropped_saves",
    "restored_blocks",
    "restored_states",
    "disk_read_blocks",
    "disk_read_states",
    "failed_transfers",
)
_CHUNKS = ((0, 0, 0, 0), (0, 1, 0, 1))


@cache
def tokens_alone(prompt: tuple[int, ...], max_tokens: int, has_state: bool) -> tuple[int, ...]:
    """What a request gets from an engine of its own, without tiers."""
    executor = LayeredExecutor(_LAYOUT, vocab_size=_VOCAB_SIZE) if has_state else FakeExecutor(vocab_size=_VOCAB_SIZE)
    with Engine(executor, prefix_cache=False) as engine:
        return engine.generate(list(prompt), SamplingParams(max_tokens=max_tokens)).token_ids


class World:
    """One engine after another, with random sizes."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = random.Random(f"{seed},{number}")
        self.counts: Counter[str] = Counter()
        self.open_world()

    def open_world(self) -> None:
        """Choose sizes, and an empty store or none."""
        rng = self.rng
        self.transfers = Transfers(random.Random(rng.random()), moves=0.5)
        self.store = FakeStore(self.transfers, rng.choice([2, 8, 64])) if rng.random() < 0.7 else None
        self.has_state = rng.random() < 0.5
        kinds: list[Callable[..., FakeExecutor]] = [FakeExecutor, FakePipelinedExecutor]
        if self.has_state:
            states: dict[str, Any] = {"layout": _LAYOUT, "num_states": rng.randrange(1, 12)}
            kinds = [partial(LayeredExecutor, **states), partial(LayeredPipelinedExecutor, **states)]
        self.options: dict[str, Any] = {
            "kind": rng.choice(kinds),
            "num_state_slots": rng.randrange(1, 6),
            "num_slots": rng.randrange(1, 14),
            "store": self.store,
            "transfers": self.transfers,
            "max_sequences": rng.randrange(1, 6),
            "prefix_cache": rng.random() < 0.8,
            "num_blocks": rng.randrange(8, 14),
            "max_batch_tokens": rng.randrange(1, 13),
            "vocab_size": _VOCAB_SIZE,
        }
        self.open_engine()

    def open_engine(self) -> None:
        """Make an engine on the store."""
        self.engine: Engine = tiered_engine(**self.options)
        self.requests: dict[int, tuple[tuple[int, ...], int]] = {}

    def close_engine(self) -> None:
        """End the engine, and count what it did."""
        self.transfers.moves = max(self.transfers.moves, 0.3)
        for request_id in [*self.requests]:
            self.abort(request_id)
        self.engine.close()
        self.engine.check()
        assert self.engine._blocks.num_pinned == 0, "a transfer never ended"
        states = self.engine._blocks.states
        assert states is None or states.num_pinned == 0, "a transfer of a state never ended"
        assert self.engine._blocks.num_in_use == 0, "a block leaked"
        metrics = self.engine.metrics()
        self.counts["preemptions"] += metrics.num_preemptions
        self.counts.update({f"hit tokens, {tier}": n for tier, n in metrics.prefix_hit_tokens_by_tier.items()})
        assert metrics.kv_tiers is not None
        for name in _COUNTED:
            self.counts[name] += getattr(metrics.kv_tiers, name)

    def operate(self) -> None:
        """One operation, then the invariants."""
        rng, choice = self.rng, self.rng.random()
        if choice < 0.25:
            self.add()
        elif choice < 0.9:
            self.step()
        elif choice < 0.93 and self.requests:
            self.abort(rng.choice([*self.requests]))
        elif choice < 0.99:
            self.transfers.moves = rng.choice([0.05, 0.3, 0.7, 1.0])
            self.transfers.fails = rng.choice([0.0, 0.0, 0.0, 0.1, 0.5])
        else:
            self.close_engine()
            self.open_engine()
        self.engine.check()

    def add(self) -> None:
        """Add a request whose prompt may begin like others."""
        rng = self.rng
        chunks = [rng.choice(_CHUNKS) for _ in range(rng.randrange(5))]  # a block each: few prompts share many
        prompt = (*(token for chunk in chunks for token in chunk), *(0,) * rng.randrange(0 if chunks else 1, 4))
        max_tokens = rng.randrange(1, 11)
        options = RequestOptions(
            cache_salt=rng.choice(["", "", "", "a"]),
            prefix_cache=rng.random() < 0.9,
            priority=rng.choice([0, 0, 0, 1]),
        )
        request_id = self.engine.add(list(prompt), SamplingParams(max_tokens=max_tokens), options=options)
        self.requests[request_id] = prompt, max_tokens

    def step(self) -> None:
        """Make a step, and compare what ended."""
        for output in self.engine.step():
            if output.completion:
                assert output.completion.error is None, output.completion.error
                self.compare(output.request_id, output.completion.token_ids, whole=True)
                self.counts["requests"] += 1

    def abort(self, request_id: int) -> None:
        """End a request early."""
        completion = self.engine.abort(request_id)
        assert completion is not None
        self.compare(request_id, completion.token_ids, whole=False)

    def compare(self, request_id: int, found: tuple[int, ...], *, whole: bool) -> None:
        """Compare a request's tokens with those that it gets alone."""
        wanted = tokens_alone(*self.requests.pop(request_id), self.has_state)
        assert found == (wanted if whole else wanted[: len(found)]), "a request got other tokens than alone"


class Difference(Exception):
    """An invariant or an output that does not hold, and the world where."""


def run_world(seed: int, number: int) -> Counter[str]:
    """Run a world and return its counts. Raises Difference."""
    world = World(seed, number)
    for operation in range(_OPERATIONS_PER_WORLD):
        try:
            world.operate()
        except BaseException as error:
            raise Difference(
                f"world {seed},{number}, operation {operation}: {type(error).__name__}: {error}"
            ) from error
    try:
        world.close_engine()
    except BaseException as error:
        raise Difference(f"world {seed},{number}, at its end: {type(error).__name__}: {error}") from error
    return world.counts


@dataclass(frozen=True)
class Task:
    """Consecutive worlds of one seed."""

    seed: int
    first: int

    def run(self) -> tuple["Task", Counter[str], str | None]:
        """Counts of all worlds, and the first difference."""
        counts: Counter[str] = Counter()
        for number in range(self.first, self.first + _WORLDS_PER_TASK):
            try:
                counts += run_world(self.seed, number)
            except Difference as difference:
                return self, counts, str(difference)
        return self, counts, None


@dataclass
class Progress:
    """Operations and counts so far; the document of `--output`."""

    operations: int = 0
    seconds: float = 0.0
    difference: str | None = None
    worlds: dict[str, int] = field(default_factory=dict)  # by seed
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None) -> "Progress":
        """Continue a document, or begin."""
        if path is None or not path.is_file():
            return cls()
        found = json.loads(path.read_text("utf-8"))
        return cls(**{name: found[name] for name in asdict(cls())})

    def add(self, task: Task, counts: Counter[str], difference: str | None) -> None:
        """Record a task."""
        self.difference = self.difference or difference
        if difference is None:
            self.operations += _WORLDS_PER_TASK * _OPERATIONS_PER_WORLD
            self.worlds[str(task.seed)] = task.first + _WORLDS_PER_TASK
        self.counts = dict(sorted((Counter(self.counts) + counts).items()))

    def write(self, path: Path | None) -> None:
        """Write the document."""
        if path:
            rate = round(self.operations / self.seconds) if self.seconds else None
            document = {"device": device_facts(), "operations_per_second": rate, "leaks": 0, **asdict(self)}
            if self.difference:
                del document["leaks"]
            path.write_text(json.dumps(document, indent=1) + "\n")


def tasks(seed: int, done: int) -> Iterator[Task]:
    """All tasks of a seed after the worlds that are done."""
    return (Task(seed, first) for first in count(done, _WORLDS_PER_TASK))


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    logging.disable(logging.WARNING)  # failed transfers are planned


def _run(task: Task) -> tuple[Task, Counter[str], str | None]:
    return task.run()


def run_all(progress: Progress, operations: int, seeds: list[int], output: Path | None) -> None:
    """Run until so many operations are done or one differs; each seed has a process."""
    started, before = time.perf_counter(), progress.seconds
    waiting = {seed: tasks(seed, progress.worlds.get(str(seed), 0)) for seed in seeds}
    with multiprocessing.get_context("spawn").Pool(len(seeds), _prepare) as pool:
        running = {seed: pool.apply_async(_run, (next(waiting[seed]),)) for seed in seeds}
        while progress.operations < operations and not progress.difference:
            for seed in [seed for seed in seeds if running[seed].ready()]:
                progress.add(*running[seed].get())
                running[seed] = pool.apply_async(_run, (next(waiting[seed]),))
                progress.seconds = before + time.perf_counter() - started
                progress.write(output)
                if not progress.difference:
                    click.echo(f"{progress.operations} operations, {progress.seconds:.0f} s", err=True)
            time.sleep(0.02)


@click.command()
@click.option("--operations", default=1_000_000, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the first process; the others have the following ones.")
@click.option("--processes", default=2, show_default=True)
@click.option("--world", help="SEED,NUMBER: run this world alone, in this process.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of results, made or continued.")
def main(operations: int, seed: int, processes: int, world: str | None, output: Path | None) -> None:
    """Run, and print what happened."""
    logging.disable(logging.WARNING)
    if world:
        click.echo(json.dumps(run_world(*map(int, world.split(",")))))
        return
    progress = Progress.read(output)
    try:
        run_all(progress, operations, list(range(seed, seed + processes)), output)
    except KeyboardInterrupt:
        click.echo("interrupted: the same command continues", err=True)
        sys.exit(130)
    finally:
        progress.write(output)
    click.echo(json.dumps(asdict(progress), indent=1))
    sys.exit(1 if progress.difference else 0)


if __name__ == "__main__":
    main()
