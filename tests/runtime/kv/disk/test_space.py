"""The limit of a folder holds, and costs no block that there is room for, whatever happens to its files."""

import os
from contextlib import closing
from pathlib import Path

from ingot.runtime.kv.disk.segment import parse_name
from tests.runtime.kv.disk.stored_blocks import (
    content_of,
    finds,
    folder_bytes,
    has,
    open_store,
    put,
    room_for,
    segments_of,
    slot_of,
)

BLOCKS = [content_of(number) for number in range(96)]


def test_the_room_of_a_segment_that_was_cut_goes_to_no_other(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS)
    cut = segments_of(tmp_path)[0]
    lost = [content for content in BLOCKS if (found := slot_of(tmp_path, content)) and found[0] == cut]
    os.truncate(cut, 5000)
    with closing(open_store(tmp_path)) as other:
        put(other, content_of(100))
    assert not any(has(store, content) for content in lost)
    put(store, *lost)  # in their slots, so the file has its size again
    assert folder_bytes(tmp_path) <= room_for(96)
    store.close()
    with closing(open_store(tmp_path)) as store:
        assert store.stats.evictions == 0
        assert sum(has(store, content) for content in [*BLOCKS, content_of(100)]) == 96


def test_a_segment_that_was_cut_has_all_its_slots_again_when_it_is_opened(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        put(store, *BLOCKS[:6])
    (path,) = segments_of(tmp_path)
    for size in (0, 100, 5000, path.stat().st_size - 5000):
        os.truncate(path, size)
        with closing(open_store(tmp_path)) as store:
            lost = [content for content in BLOCKS[:6] if not has(store, content)]
            assert len(lost) == (6 if size <= 5000 else 1)
            put(store, *lost)
            assert all(has(store, content) for content in BLOCKS[:6])
        assert segments_of(tmp_path) == [path]


def test_a_segment_that_was_extended_costs_no_block(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS)
    with segments_of(tmp_path)[3].open("ab") as file:
        file.write(bytes(5000))
    with closing(open_store(tmp_path)) as other:
        assert other.stats.num_bytes == folder_bytes(tmp_path) == room_for(96)
        assert other.stats.evictions == 0
        assert all(has(other, content) for content in BLOCKS)
    with segments_of(tmp_path)[5].open("ab") as file:
        file.write(bytes(5000))
    put(store, content_of(100))
    assert sum(has(store, content) for content in BLOCKS) == 95
    assert folder_bytes(tmp_path) == room_for(96)
    store.close()


def test_no_block_is_evicted_while_a_slot_is_free_that_another_process_freed(tmp_path: Path) -> None:
    with closing(open_store(tmp_path, num_blocks=32)) as store, closing(open_store(tmp_path, num_blocks=32)) as other:
        put(store, *BLOCKS[:32])
        assert finds(other, BLOCKS[0])
        store.remove(BLOCKS[0].hash)
        put(other, BLOCKS[32])
        assert other.stats.evictions == 0
        assert [has(store, content) for content in BLOCKS[:33]] == [False] + [True] * 32


def test_no_block_is_evicted_while_a_segment_that_another_process_added_has_free_slots(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store, closing(open_store(tmp_path)) as other:
        put(store, *BLOCKS[:6])
        assert finds(other, BLOCKS[0])
        other._space.used_bytes = other._space.max_bytes  # as it last saw the folder
        put(store, BLOCKS[6])
        put(other, BLOCKS[7])
        assert all(has(store, content) for content in BLOCKS[:8])
        assert other.stats.evictions == 0


def test_a_file_with_the_name_of_a_huge_segment_costs_no_block(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        put(store, *BLOCKS)
    huge = tmp_path / "segments" / f"{'0' * 16}-8192-999999999.kvs"
    assert parse_name(huge.name)
    huge.touch()
    with closing(open_store(tmp_path)) as store:
        assert all(has(store, content) for content in BLOCKS)
    assert huge.stat().st_size == 0
