"""Engines with tiers on the fake executor. Nothing runs in threads: transfers move on when they are polled."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ingot.runtime.engine import Engine
from ingot.runtime.executors import Executor
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.cost_model import CostModel
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.speculation.speculator import Speculator
from tests.runtime.engines import VOCAB_SIZE
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.fake_host_blocks import FakeStore, SlowWorkers, Transfers


def make_tiers(
    executor: Executor, blocks: BlockManager, root: bytes, *, num_slots: int, store: FakeStore | None
) -> TierManager:
    assert isinstance(executor, FakeExecutor)
    behaviour = executor.transfers
    return TierManager(
        blocks,
        executor.host_blocks(num_slots),
        CostModel(blocks.block_tokens),
        block_bytes=executor.kv_geometry.block_bytes,
        store=store,
        threads=lambda name, number: SlowWorkers(behaviour),
    )


def tiered_engine(
    kind: Callable[..., FakeExecutor] = FakeExecutor,
    *,
    num_slots: int = 64,
    store: FakeStore | None = None,
    transfers: Transfers | None = None,
    max_sequences: int = 64,
    prefix_cache: bool = True,
    speculator: Speculator | None = None,
    **options: Any,
) -> Engine:
    executor = kind(**{"vocab_size": VOCAB_SIZE, "block_tokens": 4, "transfers": transfers, **options})
    tiers = partial(make_tiers, num_slots=num_slots, store=store)
    return Engine(executor, max_sequences=max_sequences, prefix_cache=prefix_cache, speculator=speculator, tiers=tiers)
