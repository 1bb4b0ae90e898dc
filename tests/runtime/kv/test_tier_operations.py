"""Random use of an engine with tiers: transfers end in any order, fail, and engines restart on one store.

A request that finishes has the tokens that it gets alone, whatever was restored for it; invariants hold after each
operation. `benchmarks/kv/random_operations.py` runs the same for as long as it is asked to.
"""

import random
from functools import partial
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from ingot.runtime.engine.engine import Engine
from tests.runtime.engine.test_engine_operations import (
    BreakableExecutor,
    BreakableOverlappingExecutor,
    BreakablePipelinedExecutor,
    EngineOperations,
)
from tests.runtime.kv.tiered_engines import make_tiers
from tests.simulators.fake_host_blocks import FakeStore, Transfers


class TierOperations(EngineOperations):
    """A pool, host memory and a store that are all too small."""

    executor_type: ClassVar[type[BreakableExecutor]] = BreakableExecutor

    @initialize(
        num_blocks=st.integers(6, 10),
        budget=st.integers(1, 12),
        places=st.integers(1, 5),
        prefix_cache=st.sampled_from([True, True, False]),
        num_slots=st.integers(1, 12),
        store_blocks=st.sampled_from([0, 4, 64]),
        seed=st.integers(0, 1 << 30),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        places: int,
        prefix_cache: bool,
        num_slots: int,
        store_blocks: int,
        seed: int,
    ) -> None:
        super().start(num_blocks=num_blocks, budget=budget, places=places, prefix_cache=prefix_cache)
        self.transfers = Transfers(random.Random(seed), moves=0.5)
        self.store = FakeStore(self.transfers, store_blocks) if store_blocks else None
        self.places, self.prefix_cache, self.num_slots = places, prefix_cache, num_slots
        self.limits: dict[str, Any] = {"num_blocks": num_blocks, "block_tokens": 4, "max_batch_tokens": budget}
        self.open()

    def open(self) -> None:
        self.executor = self.executor_type(**self.limits, vocab_size=3, transfers=self.transfers)
        tiers = partial(make_tiers, num_slots=self.num_slots, store=self.store)
        self.engine = Engine(
            self.executor,
            max_sequences=self.places,
            prefix_cache=self.prefix_cache,
            clock=self.clock,
            tiers=tiers,
        )

    @rule(moves=st.sampled_from([0.05, 0.3, 0.7, 1.0]), fails=st.sampled_from([0.0, 0.0, 0.1, 0.5]))
    def change_transfers(self, moves: float, fails: float) -> None:
        self.transfers.moves, self.transfers.fails = moves, fails

    @precondition(lambda self: hasattr(self, "engine"))
    @rule()
    def restart(self) -> None:
        """What is unfinished is aborted; the store keeps its blocks."""
        for request_id in list(self.requests):
            self.abort(sorted(self.requests).index(request_id))
        for request_id in list(self.searches):
            assert self.engine.abort(request_id) is not None
        self.searches = {}
        self.transfers.moves = max(self.transfers.moves, 0.3)
        self.engine.close()
        self.engine.check()
        self.ended, self.failed = {}, set()
        self.open()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.transfers.moves = 0.7
        super().teardown()
        if hasattr(self, "engine"):
            self.engine.close()
            self.engine.check()
            assert self.engine._blocks.num_pinned == 0, "a transfer never ended"


class PipelinedTierOperations(TierOperations):
    """The same with a step in flight."""

    executor_type = BreakablePipelinedExecutor


class OverlappingTierOperations(TierOperations):
    """The same with a step in flight in each stage."""

    executor_type = BreakableOverlappingExecutor


TestTierOperations = TierOperations.TestCase
TestTierOperations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

TestPipelinedTierOperations = PipelinedTierOperations.TestCase
TestPipelinedTierOperations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

TestOverlappingTierOperations = OverlappingTierOperations.TestCase
TestOverlappingTierOperations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
