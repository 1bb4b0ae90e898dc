"""The arena of the CPU engine: bytes arrive, and too little memory is refused."""

import numpy as np
import pytest

from ingot.artifact import KVGeometry
from ingot.errors import EngineError
from ingot.runtime.cpu.host_blocks import ArenaBlocks, HostBlockCopy
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
    cancelled = HostBlockCopy(slots._block_at(0), slots._slot_at(1))
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
