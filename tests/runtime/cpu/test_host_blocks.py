"""The arena of the CPU engine: bytes arrive, and too little memory is refused."""

import numpy as np
import pytest

from ingot.artifact import KVGeometry
from ingot.errors import EngineError
from ingot.runtime.cpu.host_blocks import ArenaBlocks, DividedPool, HostBlockCopy, PoolPart
from ingot.runtime.cpu.kv_pool import KVPool, physical_bytes
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.kv.transfers.transfer import Cancelled

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("has_library", [True, False])
def test_a_block_comes_back_as_it_was_saved_in_another_place(
    monkeypatch: pytest.MonkeyPatch, has_library: bool
) -> None:
    if has_library and native_library() is None:
        pytest.skip("the library was not built")
    if not has_library:
        monkeypatch.setattr("ingot.runtime.cpu.host_blocks.native_library", lambda: None)
    pool = KVPool(GEOMETRY, 3)
    pool.blocks[1] = np.random.default_rng(0).integers(0, 256, GEOMETRY.block_bytes)
    saved = pool.blocks[1].copy()
    slots = ArenaBlocks(pool, 2)
    save = slots.save(1, 1)
    while not save.done:
        pass
    pool.blocks[1] = 0
    restore = slots.restore(1, 2)
    while not restore.done:
        pass
    assert save.error is None
    assert restore.error is None
    assert (pool.blocks[2] == saved).all()
    assert (slots.view(1) == saved).all()
    slots.check()
    slots.close()
    slots.close()


def test_queued_copies_are_made_before_it_closes() -> None:
    pool = KVPool(GEOMETRY, 1)
    slots = ArenaBlocks(pool, 64)
    pool.blocks[0] = 7
    saves = [slots.save(0, slot) for slot in range(64)]
    slots.close()
    assert all(save.done and save.error is None for save in saves)


def test_a_copy_that_is_cancelled_at_once_leaves_its_slot_alone() -> None:
    pool = KVPool(GEOMETRY, 1)
    slots = ArenaBlocks(pool, 2)
    pool.blocks[0] = 7
    cancelled = HostBlockCopy(list(slots._runs(0, 1)))
    assert cancelled.cancel()
    assert isinstance(cancelled.error, Cancelled)
    slots._submit(cancelled)
    last = slots.save(0, 0)
    while not last.done:
        pass
    assert (slots.view(0) == 7).all()
    assert not slots.view(1).any()
    assert not cancelled.cancel()
    slots.close()


def test_more_than_the_machines_memory_is_refused() -> None:
    pool = KVPool(GEOMETRY, 1)
    too_many = physical_bytes() // GEOMETRY.block_bytes + 1
    with pytest.raises(EngineError, match=r"KV blocks in host memory need .* this machine has .* kv_host_bytes"):
        ArenaBlocks(pool, too_many)


def test_a_slot_has_the_layout_of_a_whole_block_however_the_pool_is_divided() -> None:
    whole = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=8, dtype="int8")
    layers, block = ((0, 3), (1, 2)), np.random.default_rng(0).integers(0, 256, whole.block_bytes).astype(np.uint8)
    pools = [KVPool(whole.part(one), 3) for one in layers]
    runs = [whole.block_runs(pool.geometry, one) for pool, one in zip(pools, layers, strict=True)]
    divided = DividedPool(
        "KV blocks",
        [PoolPart(pool.blocks, own, pool.memory_bytes) for pool, own in zip(pools, runs, strict=True)],
        whole.block_bytes,
    )
    for pool, own in zip(pools, runs, strict=True):
        for run in own:
            pool.blocks[1, run.part : run.part + run.bytes] = block[run.whole : run.whole + run.bytes]
    divided.copy_block(1, 0)
    slots = ArenaBlocks(divided, 2)
    for transfer in (slots.save(0, 1), slots.restore(1, 2)):
        while not transfer.done:
            pass
        assert transfer.error is None
    filled = [slice(run.whole, run.whole + run.bytes) for own in runs for run in own]
    assert all((np.asarray(slots.view(1))[part] == block[part]).all() for part in filled)
    assert sum(part.stop - part.start for part in filled) == whole.block_bytes
    assert all((pool.blocks[2] == pool.blocks[1]).all() for pool in pools)
    slots.close()
