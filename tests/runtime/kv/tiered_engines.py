"""Engines with tiers on the fake executor. Nothing runs in threads: transfers move on when they are polled."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ingot.artifact.serving import KVRestore
from ingot.runtime.clock import SYSTEM_CLOCK, Clock
from ingot.runtime.engine.engine import Engine
from ingot.runtime.executors import Executor
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.cost_model import CostModel
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.speculation.speculator import Speculator
from tests.runtime.engines import VOCAB_SIZE
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.fake_host_blocks import FakeStore, SlowWorkers, Transfers
from tests.simulators.layered_executor import LayeredExecutor


def make_tiers(
    executor: Executor,
    blocks: BlockManager,
    root: bytes,
    *,
    num_slots: int,
    store: FakeStore | None,
    num_state_slots: int | None = None,
    rule: KVRestore = "always",
    clock: Clock = SYSTEM_CLOCK,
) -> TierManager:
    assert isinstance(executor, FakeExecutor)
    behaviour = executor.transfers
    kv = executor.kv_geometry
    host_states = None
    if isinstance(executor, LayeredExecutor) and kv.state_bytes:
        host_states = executor.host_states(num_state_slots or num_slots)
    return TierManager(
        blocks,
        executor.host_blocks(num_slots),
        CostModel(blocks.block_tokens, rule, state_blocks=kv.state_bytes / kv.block_bytes),
        block_bytes=kv.block_bytes,
        host_states=host_states,
        state_bytes=kv.state_bytes,
        store=store,
        threads=lambda name, number: SlowWorkers(behaviour),
        clock=clock,
    )


def tiered_engine(
    kind: Callable[..., FakeExecutor] = FakeExecutor,
    *,
    num_slots: int = 64,
    num_state_slots: int | None = None,
    store: FakeStore | None = None,
    transfers: Transfers | None = None,
    max_sequences: int = 64,
    prefix_cache: bool = True,
    speculator: Speculator | None = None,
    rule: KVRestore = "always",
    clock: Clock = SYSTEM_CLOCK,
    **options: Any,
) -> Engine:
    """An engine with tiers. What it restores depends on no clock, unless `rule` is "auto"."""
    executor = kind(**{"vocab_size": VOCAB_SIZE, "block_tokens": 4, "transfers": transfers, **options})
    tiers = partial(make_tiers, num_slots=num_slots, num_state_slots=num_state_slots, store=store, rule=rule)
    return Engine(
        executor,
        max_sequences=max_sequences,
        prefix_cache=prefix_cache,
        clock=clock,
        speculator=speculator,
        tiers=tiers,
    )
