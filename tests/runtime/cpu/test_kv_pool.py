"""The KV pool: its layout, its copies, and the error when it does not fit into memory."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import KVGeometry
from ingot.artifact.kv_geometry import KVType
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import KVPool, physical_bytes
from ingot.runtime.slow_part import SlowPart
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


@pytest.mark.parametrize("place", ["file", "memory"])
@pytest.mark.parametrize("num_fast", [1, 3, 40])
def test_fast_and_slow_blocks_are_in_one_range(tmp_path: Path, num_fast: int, place: str) -> None:
    slow = SlowPart(num_blocks=9, folder=tmp_path if place == "file" else None)
    pool = KVPool(GEOMETRY, num_fast, slow)
    assert (pool.num_blocks, pool.num_fast) == (num_fast + 9, num_fast)
    assert pool.blocks.flags.c_contiguous
    assert not pool.blocks.any()
    assert pool.num_bytes == pool.blocks.nbytes
    assert pool.memory_bytes == (num_fast if place == "file" else num_fast + 9) * GEOMETRY.block_bytes
    pool.blocks[:] = np.random.default_rng(0).integers(0, 256, pool.blocks.shape)
    before = pool.blocks.copy()
    pool.copy_block(num_fast - 1, num_fast)
    pool.copy_block(num_fast + 8, 0)
    assert (pool.blocks[num_fast] == before[num_fast - 1]).all()
    assert (pool.blocks[0] == before[num_fast + 8]).all()
    assert (pool.blocks[num_fast + 1 :] == before[num_fast + 1 :]).all()


def test_only_slow_blocks_are_in_the_file(tmp_path: Path) -> None:
    pool = KVPool(GEOMETRY, 40, SlowPart(90, tmp_path))
    end = pool.blocks.ctypes.data + pool.num_bytes
    start = pool.blocks.ctypes.data + 40 * GEOMETRY.block_bytes
    first, last = _deleted_mapping()
    assert start <= first < start + mmap.PAGESIZE
    assert last - mmap.PAGESIZE < end <= last
    del pool
    assert _deleted_mapping() == (0, 0), "the space is given back"


def _deleted_mapping() -> tuple[int, int]:
    """Addresses of the mapped file that has no name any more."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "rw-s" in line and line.endswith("(deleted)"):
            first, last = line.split()[0].split("-")
            return int(first, 16), int(last, 16)
    return 0, 0


def test_a_slow_part_larger_than_the_memory_is_refused_only_if_it_is_in_memory(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    num_blocks = 2 * max(physical_bytes(), disk.f_blocks * disk.f_frsize) // GEOMETRY.block_bytes
    with pytest.raises(EngineError, match=r"KV pool of .* and this machine has .*; lower kv_offload, or kv_blocks"):
        KVPool(GEOMETRY, 1, SlowPart(num_blocks))
    with pytest.raises(EngineError, match=r"the slow part of the KV pool needs .* in .*, where .* are free; lower"):
        KVPool(GEOMETRY, 1, SlowPart(num_blocks, tmp_path))
