"""The KV pool: its layout, its copies, and the error when it does not fit into memory."""

import numpy as np
import pytest

from ingot.artifact import KVGeometry
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import KVPool

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=4)


def test_a_block_is_contiguous_over_all_layers() -> None:
    pool = KVPool(GEOMETRY, 5)
    assert pool.blocks.shape == (5, 3, 2, 2, 4, 8)
    assert pool.blocks[1].flags.c_contiguous
    assert pool.blocks[1].nbytes == GEOMETRY.block_bytes


def test_the_pool_is_aligned_zeroed_and_counted() -> None:
    pool = KVPool(GEOMETRY, 5)
    assert pool.blocks.ctypes.data % 64 == 0
    assert not pool.blocks.any()
    assert pool.num_bytes == pool.blocks.nbytes
    assert pool.num_tokens == 20


def test_copying_a_block_copies_every_layer_and_changes_no_other_block() -> None:
    pool = KVPool(GEOMETRY, 3)
    pool.blocks[:] = np.arange(pool.blocks.size).reshape(pool.blocks.shape)
    before = pool.blocks.copy()
    pool.copy_block(2, 0)
    assert (pool.blocks[0] == before[2]).all()
    assert (pool.blocks[1:] == before[1:]).all()


def test_a_pool_larger_than_the_machine_is_refused_with_advice() -> None:
    with pytest.raises(EngineError, match=r"KV pool of 100000000000 blocks .* needs .* TB, .*fewer blocks"):
        KVPool(GEOMETRY, 100_000_000_000)
