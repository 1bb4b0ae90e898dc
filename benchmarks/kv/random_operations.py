"""Random operations on blocks, tiers and scheduler, for as long as asked: every request gets its tokens, nothing leaks.

    python -m benchmarks.kv.random_operations --operations 1000000 --seed 0

Engines with the fake executor, tiny pools, host memories and stores. Transfers end in any order and fail, requests are
added, stepped, aborted and expire, engines restart on the same store. Invariants are checked after every operation,
and each output is compared with what its request gets alone. The exit code is 1 at the first difference.
"""

import json
import logging
import random
import sys
import time
from collections import Counter
from functools import cache
from typing import Any

import click
from tests.runtime.engines import token_engine
from tests.runtime.kv.tiered_engines import tiered_engine
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.fake_host_blocks import FakeStore, Transfers
from tests.simulators.pipelined_executor import FakePipelinedExecutor

from ingot.runtime.engine import Engine
from ingot.runtime.request_options import RequestOptions
from ingot.runtime.sampling import SamplingParams

_OPERATIONS_PER_ENGINE = 300
_VOCAB_SIZE = 3
_CHUNKS = ((0, 0, 0, 0), (0, 1, 0, 1))


@cache
def tokens_alone(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What a request gets from an engine of its own, without tiers."""
    with token_engine(vocab_size=_VOCAB_SIZE) as engine:
        return engine.generate(list(prompt), SamplingParams(max_tokens=max_tokens)).token_ids


class Run:
    """One engine after another, with random sizes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.open_world()

    def open_world(self) -> None:
        """Choose sizes, and an empty store or none."""
        rng = self.rng
        self.transfers = Transfers(random.Random(rng.random()), moves=0.5)
        self.store = FakeStore(self.transfers, rng.choice([2, 8, 64])) if rng.random() < 0.7 else None
        self.options: dict[str, Any] = {
            "kind": rng.choice([FakeExecutor, FakePipelinedExecutor]),
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
        assert self.engine._blocks.num_in_use == 0, "a block leaked"
        metrics = self.engine.metrics()
        self.counts["preemptions"] += metrics.num_preemptions
        self.counts.update({f"hit tokens, {tier}": n for tier, n in metrics.prefix_hit_tokens_by_tier.items()})
        assert metrics.kv_tiers is not None
        for name in ("saved_blocks", "dropped_saves", "restored_blocks", "disk_read_blocks", "failed_transfers"):
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
        wanted = tokens_alone(*self.requests.pop(request_id))
        assert found == (wanted if whole else wanted[: len(found)]), "a request got other tokens than alone"


@click.command()
@click.option("--operations", default=100_000)
@click.option("--seed", default=0)
def main(operations: int, seed: int) -> None:
    """Run, and print what happened."""
    logging.disable(logging.WARNING)  # failed transfers are planned
    started = time.perf_counter()
    run = Run(seed)
    for number in range(1, operations + 1):
        run.operate()
        if number % _OPERATIONS_PER_ENGINE == 0:
            run.close_engine()
            run.open_world()
        if number % 50_000 == 0:
            click.echo(f"{number} operations, {time.perf_counter() - started:.0f} s", err=True)
    run.close_engine()
    click.echo(json.dumps({"operations": operations, "seed": seed, **dict(sorted(run.counts.items()))}, indent=1))
    sys.exit(0)


if __name__ == "__main__":
    main()
