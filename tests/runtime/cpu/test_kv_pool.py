"""The KV pool: its layout, its copies, and the error when it does not fit into memory."""

import numpy as np
import pytest

from ingot.artifact import KVGeometry
from ingot.artifact.kv_geometry import KVType
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import KVPool
from tests.each_case import each_case

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=4)


def test_a_block_is_contiguous_over_all_layers() -> None:
    pool = KVPool(GEOMETRY, 5)
    assert pool.blocks.shape == (5, GEOMETRY.block_bytes)
    assert pool.blocks[1].flags.c_contiguous


@each_case(
    ("dtype", "group", "scales_of_token"),  # of both layers' keys and values, 3 heads in all
    [("float32", 0, 0), ("bfloat16", 0, 0), ("int8", 0, 6), ("int4", 0, 6), ("int4", 4, 20), ("k8v4", 4, 3 + 10)],
)
def test_the_views_of_all_layers_cover_a_block_once(dtype: KVType, group: int, scales_of_token: int) -> None:
    unequal = KVGeometry(
        num_layers=3, num_kv_heads=(2, 1, 2), head_dim=(8, 4, 8), shares=(0, 1, 0), block_tokens=4, dtype=dtype,
        int4_group=group,
    )  # fmt: skip
    pool = KVPool(unequal, 2)
    for layer in (0, 1):
        for view in pool.layer(layer):
            if view is not None:
                assert np.shares_memory(view, pool.blocks)
                view.view(np.uint8 if view.itemsize == 1 else f"u{view.itemsize}")[1] += 1
    vectors = (2 * 8 + 1 * 4) * 4 * 2  # elements of both layers' keys and values
    codes = {"int4": vectors // 2, "k8v4": vectors * 3 // 4}.get(dtype, vectors)
    assert np.count_nonzero(pool.blocks[1]) == codes + 4 * scales_of_token
    assert not pool.blocks[0].any()
    shared = pool.layer(2)
    assert all(np.array_equal(a, b) for a, b in zip(shared[:2], pool.layer(0)[:2], strict=True))


def test_a_heads_keys_are_ordered_as_the_pool_says() -> None:
    keys = KVPool(GEOMETRY, 1).layer(0).keys  # [blocks, kv heads, token, width]
    assert KVPool.key_order == "by-dim"
    assert keys.strides[2] == keys.itemsize, "the next token's element of a dim follows at once"


def test_the_pool_is_aligned_zeroed_and_counted() -> None:
    pool = KVPool(GEOMETRY, 5)
    assert pool.blocks.ctypes.data % 64 == 0
    assert not pool.blocks.any()
    assert pool.num_bytes == pool.blocks.nbytes
    assert pool.num_tokens == 20


def test_copying_a_block_copies_every_layer_and_changes_no_other_block() -> None:
    pool = KVPool(GEOMETRY, 3)
    pool.blocks[:] = np.random.default_rng(0).integers(0, 256, pool.blocks.shape)
    before = pool.blocks.copy()
    pool.copy_block(2, 0)
    assert (pool.blocks[0] == before[2]).all()
    assert (pool.blocks[1:] == before[1:]).all()


def test_a_pool_larger_than_the_machine_is_refused_with_advice() -> None:
    with pytest.raises(EngineError, match=r"KV pool of 100000000000 blocks .* needs .* TB, .*fewer blocks"):
        KVPool(GEOMETRY, 100_000_000_000)
