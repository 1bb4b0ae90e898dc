"""The disk store serves exactly what was stored, whatever happens to its folder, its files and its processes."""

import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from benchmarks.kv import disk_faults
from benchmarks.kv.disk_fault_kinds import FAULTS
from benchmarks.kv.numbered_blocks import ROOT as NUMBERED_ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.errors import UsageError
from ingot.runtime.kv.disk.folder import StoreFolder
from ingot.runtime.kv.disk.segment import parse_name
from ingot.runtime.kv.disk.store import BlockUnavailable, DiskStore
from ingot.runtime.kv.keys import root_hash, state_content
from tests.each_case import each_case
from tests.runtime.kv.disk.stored_blocks import (
    BLOCK_BYTES,
    ROOT,
    SLOT_BYTES,
    bytes_of,
    chain_of,
    content_of,
    damage,
    finds,
    folder_bytes,
    has,
    open_store,
    put,
    room_for,
    segments_of,
    slot_of,
)
from tests.runtime.kv.disk.test_folder import mounted
from tests.simulators.hanging_files import hanging_files

BLOCKS = [content_of(number) for number in range(40)]


def fail(monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    """Let a function of the system fail from now on."""

    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, failing)


def test_a_stored_block_is_found_and_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert not store.contains(BLOCKS[0].hash)
    assert not has(store, BLOCKS[0])
    assert repr((store.stats.hits, store.stats.misses)) == "(0, 1)", "counts, not bools"
    put(store, *BLOCKS[:2])
    assert store.contains(BLOCKS[0].hash)
    assert has(store, BLOCKS[0])
    assert not has(store, BLOCKS[2])
    stats = store.stats
    assert (stats.num_blocks, stats.num_bytes) == (2, folder_bytes(tmp_path))
    assert (stats.hits, stats.misses, stats.writes) == (1, 2, 2)
    assert (stats.bytes_read, stats.bytes_written) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert stats.read_seconds > 0
    assert stats.write_seconds > 0
    store.close()


def test_a_store_that_is_off_holds_nothing_by_its_metrics(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, BLOCKS[0])
    assert store.metrics.num_blocks == 1
    store._health.failure = "the folder was deleted"
    assert (store.metrics.num_blocks, store.metrics.num_bytes) == (0, 0)
    store.close()


@pytest.mark.parametrize("durable", [False, True])
def test_blocks_survive_a_restart(tmp_path: Path, durable: bool) -> None:
    options = {"max_bytes": 10**6, "block_bytes": BLOCK_BYTES, "root": NUMBERED_ROOT}
    store = DiskStore.open(tmp_path, durable=durable, **options)  # type: ignore[arg-type]
    put(store, BLOCKS[0])
    store.close()
    store = open_store(tmp_path)
    assert len(store) == 1
    assert has(store, BLOCKS[0])
    store.close()


def test_a_block_of_another_artifact_with_the_same_tokens_is_not_served(tmp_path: Path) -> None:
    other = open_store(tmp_path, root=root_hash("another artifact of the same name", "float32"))
    put(other, BLOCKS[0])
    store = open_store(tmp_path)
    assert not has(store, BLOCKS[0])
    assert store.stats.damaged == 1
    store.close()
    other.close()


def test_equal_hashes_with_other_tokens_are_not_served(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, BLOCKS[0])
    assert not has(store, BLOCKS[0]._replace(tokens=BLOCKS[1].tokens))
    store.close()


def test_damaged_files_are_removed_counted_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS[:2])
    for content in BLOCKS[:2]:
        damage(tmp_path, content)
        assert not has(store, content)
        assert slot_of(tmp_path, content) is None
        assert not store.contains(content.hash)
    assert store.stats.damaged == 2
    assert len(caplog.records) == 1
    assert "holds a damaged block (a wrong checksum)" in caplog.text
    put(store, *BLOCKS[:2])
    assert has(store, BLOCKS[0])
    store.close()


def test_a_damaged_block_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS[:12])
    assert len(segments_of(tmp_path)) == 2, "six slots each"
    damage(tmp_path, BLOCKS[3], at=100)
    assert [has(store, content) for content in BLOCKS[:12]] == [number != 3 for number in range(12)]
    put(store, BLOCKS[3])
    assert len(segments_of(tmp_path)) == 2, "its slot is used again"
    store.close()


def test_files_of_others_in_the_folder_of_segments_are_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv", num_blocks=16)
    put(store, *BLOCKS[:4])
    path, target = segments_of(tmp_path / "kv")[0], tmp_path / "target"
    path.rename(target)
    path.symlink_to(target)
    (tmp_path / "kv" / "segments" / "notes").write_text("mine")
    store.close()
    store = open_store(tmp_path / "kv", num_blocks=16)
    assert len(store) == 3
    put(store, *BLOCKS)
    assert path.is_symlink()
    assert target.exists()
    assert (tmp_path / "kv" / "segments" / "notes").exists()
    store.close()


def test_a_state_and_its_block_are_kept_in_slots_of_their_sizes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    block, state = BLOCKS[0], state_content(BLOCKS[0].hash)
    large = np.arange(50_000, dtype=np.uint8)
    put(store, block)
    assert store.write(state, large)
    buffer = np.empty_like(large)
    for _ in range(2):
        store.read_into(state, buffer)
        assert np.array_equal(buffer, large)
        assert has(store, block)
        store.close()
        store = open_store(tmp_path)
    assert sorted(path.name.split("-")[1] for path in segments_of(tmp_path)) == ["53248", "8192"]
    store.remove(state.hash)
    with pytest.raises(BlockUnavailable):
        store.read_into(state, buffer)
    store.close()


def test_blocks_of_another_size_take_the_place_of_those_that_are_not_used(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *(content_of(number) for number in range(96)))
    other = DiskStore.open(tmp_path, max_bytes=room_for(96), block_bytes=10_000, root=ROOT)
    large = np.arange(10_000, dtype=np.uint8)
    for number in range(100, 120):
        assert other.write(content_of(number), large)
        assert folder_bytes(tmp_path) <= room_for(96)
    assert other.stats.evictions > 0
    assert all(finds(other, content_of(number)) for number in range(100, 120))
    assert 0 < sum(has(store, content_of(number)) for number in range(96)) < 96
    assert has(store, content_of(95)), "what was used last stays"
    for opened in (store, other):
        assert opened.failure is None
        opened.close()


def test_blocks_that_are_used_keep_their_place_against_those_of_another_size(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    large = np.arange(10_000, dtype=np.uint8)
    for number in range(1000, 1006):
        assert store.write(content_of(number), large)
    kept = [content_of(number) for number in range(60)]
    put(store, *kept)
    for number in range(2000, 2100):
        assert store.write(content_of(number), large)
        for content in kept[number % 6 :: 6]:
            assert has(store, content)
    assert folder_bytes(tmp_path) <= room_for(96)
    store.close()


def test_a_removed_block_is_gone_for_all(tmp_path: Path) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path)
    put(store, BLOCKS[0])
    assert finds(other, BLOCKS[0])
    store.remove(BLOCKS[0].hash)
    assert not store.contains(BLOCKS[0].hash)
    assert not has(other, BLOCKS[0])
    assert not finds(other, BLOCKS[0])
    for opened in (store, other):
        opened.close()


def test_two_stores_find_each_other_s_blocks_at_once(tmp_path: Path) -> None:
    stores = [open_store(tmp_path), open_store(tmp_path)]
    for number, content in enumerate(BLOCKS):
        put(stores[number % 2], content)
        assert finds(stores[1 - number % 2], content)
        assert has(stores[1 - number % 2], content)
    for store in stores:
        store.close()


def test_the_oldest_blocks_go_first_and_used_ones_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path, num_blocks=10)
    put(store, *BLOCKS[:10])
    assert has(store, BLOCKS[0])
    put(store, *BLOCKS[10:15])
    kept = [number for number in range(15) if store.contains(BLOCKS[number].hash)]
    assert kept == [0, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert store.stats.evictions == 5
    assert folder_bytes(tmp_path) == store.stats.num_bytes == room_for(10)
    store.close()


def test_a_chain_loses_its_end_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.runtime.kv.disk.index._LEAD_NS", 0)
    chain = chain_of(8, first=100)
    store = open_store(tmp_path, num_blocks=10)
    put(store, *BLOCKS[:2], *chain)
    assert all(has(store, content) for content in chain)
    put(store, *BLOCKS[2:9])
    assert [store.contains(content.hash) for content in chain] == [True] * 3 + [False] * 5
    store.close()


def test_using_the_end_of_a_chain_uses_its_start(tmp_path: Path) -> None:
    chain = chain_of(4, first=100)
    store = open_store(tmp_path, num_blocks=10)
    put(store, *chain, *BLOCKS[:6])
    assert has(store, chain[-1])  # the others were hits on the device
    put(store, *BLOCKS[6:12])
    assert all(store.contains(content.hash) for content in chain)
    store.close()


def test_a_block_used_by_another_process_is_not_evicted(tmp_path: Path) -> None:
    store = open_store(tmp_path, num_blocks=32)
    put(store, *BLOCKS[:32])
    store.close()
    store, other = open_store(tmp_path, num_blocks=32), open_store(tmp_path, num_blocks=32)
    assert has(other, BLOCKS[0])
    put(store, BLOCKS[32])
    assert has(other, BLOCKS[0])
    assert not has(other, BLOCKS[1])
    store.close()
    other.close()


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS)
    store.close()
    store = open_store(tmp_path, num_blocks=16)
    assert 0 < folder_bytes(tmp_path) <= room_for(16)
    assert [has(store, content) for content in BLOCKS] == [number >= 24 for number in range(40)], "whole segments"
    store.close()


def test_two_processes_that_evict_keep_the_limit_together(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, num_blocks=16) for _ in range(2)]
    for number in range(400):
        put(stores[number % 2], content_of(number))
        assert folder_bytes(tmp_path) <= room_for(16)
    newest = [content_of(number) for number in range(384, 400)]
    for store in stores:
        assert all(has(store, content) for content in newest)
        assert store.failure is None
        assert store.stats.errors == store.stats.damaged == 0
        store.close()


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = open_store(tmp_path, num_blocks=16)
    problems: list[BaseException] = []

    def use(seed: int) -> None:
        chance = np.random.default_rng(seed)
        try:
            for number in chance.integers(0, len(BLOCKS), 150):
                content = BLOCKS[number]
                store.write(content, bytes_of(content))
                has(store, content)
                store.contains(content.hash)
        except BaseException as problem:  # noqa: BLE001  (raised by the main thread)
            problems.append(problem)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert store.stats.errors == store.stats.damaged == 0
    assert folder_bytes(tmp_path) <= room_for(16)
    store.close()


def test_a_limit_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"a KV folder of 12.3 kB cannot hold one block of 4.1 kB; raise kv_disk_bytes"
    ):
        DiskStore.open(tmp_path / "kv", max_bytes=SLOT_BYTES + 4095, block_bytes=BLOCK_BYTES, root=NUMBERED_ROOT)
    assert not (tmp_path / "kv").exists()


def test_a_limit_above_the_free_space_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_store(tmp_path, num_blocks=10**12).close()
    assert "less than its limit of" in caplog.text


def test_on_a_full_disk_blocks_take_the_place_of_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "disk"
    with mounted(path, "size=200k,mode=0700"):
        store = open_store(path)
        put(store, *BLOCKS)
        stored = [content for content in BLOCKS if has(store, content)]
        assert BLOCKS[-15:] == stored[-15:]
        assert len(stored) < len(BLOCKS)
        assert not list((path / "tmp").iterdir())
        assert caplog.text.count("is on a full disk") == 1
        assert store.failure is None
        assert store.stats.errors == store.stats.refused_writes == 0
        store.close()


def test_a_disk_without_space_for_one_slot_refuses_and_then_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    with monkeypatch.context() as patch:
        fail(patch, "posix_fallocate", errno.ENOSPC)
        assert not store.write(BLOCKS[0], bytes_of(BLOCKS[0]))
    assert not store.write(BLOCKS[0], bytes_of(BLOCKS[0]))
    assert store.refusal == "the disk is full"
    assert store.stats.refused_writes == 2
    assert not list((tmp_path / "tmp").iterdir())
    monkeypatch.setattr(store._health, "_full_until", 0.0)
    assert store.refusal is None
    put(store, BLOCKS[0])
    store.close()


@each_case("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.EACCES])
@each_case("function", ["pwrite", "pwritev"])
def test_errors_of_writing_are_a_refusal_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, function: str
) -> None:
    store = open_store(tmp_path)
    put(store, BLOCKS[0])
    with monkeypatch.context() as patch:
        fail(patch, function, number)
        assert not store.write(BLOCKS[1], bytes_of(BLOCKS[1]))
    assert not store.contains(BLOCKS[1].hash)
    assert has(store, BLOCKS[0])
    assert store.stats.refused_writes == 1
    assert store.stats.num_bytes == folder_bytes(tmp_path)
    store.close()
    store = open_store(tmp_path)
    assert len(store) == 1
    store.close()


@each_case("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE, errno.EACCES])
@each_case("function", ["posix_fallocate", "rename", "open"])
def test_errors_of_adding_a_segment_are_a_refusal_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, function: str
) -> None:
    store = open_store(tmp_path, num_blocks=16)
    put(store, BLOCKS[0])
    with monkeypatch.context() as patch:
        fail(patch, function, number)
        if number != errno.ENOSPC:  # then it takes the only slot
            assert not store.write(BLOCKS[1], bytes_of(BLOCKS[1]))
            assert has(store, BLOCKS[0])
        assert store.contains(BLOCKS[0].hash)
    assert not list((tmp_path / "tmp").iterdir())
    assert store.failure is None
    store.close()


def test_a_write_that_fails_over_an_older_block_leaves_a_free_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, num_blocks=1)
    put(store, BLOCKS[0])
    pwritev = os.pwritev

    def half(file: int, views: list[memoryview], offset: int) -> int:
        pwritev(file, [views[0], views[1][:1000]], offset)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", half)
        assert not store.write(BLOCKS[1], bytes_of(BLOCKS[1]))
    assert not has(store, BLOCKS[0])
    assert not has(store, BLOCKS[1])
    assert store.stats.damaged == 0
    put(store, BLOCKS[2])
    assert has(store, BLOCKS[2])
    store.close()


def test_errors_of_reading_are_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS[:2])
    for number, is_kept in ((errno.EMFILE, True), (errno.EIO, False)):
        with monkeypatch.context() as patch:
            fail(patch, "preadv", number)
            assert not has(store, BLOCKS[0])
            assert len(store) == 1 + is_kept
    assert store.failure is None
    assert slot_of(tmp_path, BLOCKS[0])
    store.close()


def test_blocks_are_read_where_times_of_use_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS[:12])
    fail(monkeypatch, "pwrite", errno.EROFS)
    assert all(has(store, content) for content in BLOCKS[:12])
    assert store.failure is None
    assert not store.write(BLOCKS[12], bytes_of(BLOCKS[12]))
    store.close()


def test_a_device_that_only_fails_turns_the_store_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS)
    with monkeypatch.context() as patch:
        fail(patch, "preadv", errno.EIO)
        assert not any(has(store, content) for content in BLOCKS)
    assert store.failure
    assert not has(store, BLOCKS[-1])
    assert not store.write(BLOCKS[0], bytes_of(BLOCKS[0]))
    assert not store.contains(BLOCKS[-1].hash)
    assert caplog.text.count("is not used any more") == 1
    store.close()


def test_a_folder_that_vanishes_turns_the_store_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path / "kv")
    put(store, *BLOCKS[:3])
    shutil.rmtree(tmp_path / "kv")
    assert not has(store, BLOCKS[0])
    assert not store.write(BLOCKS[1], bytes_of(BLOCKS[1]))
    assert not store.write(BLOCKS[4], bytes_of(BLOCKS[4]))
    assert store.failure
    assert not store.contains(BLOCKS[2].hash)
    assert caplog.text.count("is not used any more") == 1
    assert not (tmp_path / "kv").exists()
    assert store.refusal == store.failure == store.metrics.refusal
    assert store.metrics.num_errors == store.stats.errors > 0
    store.close()


def test_metrics_are_those_of_the_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS[:3])
    found = store.metrics
    assert found.takes_writes
    assert (found.num_blocks, found.num_damaged, found.num_evicted, found.num_errors) == (3, 0, 0, 0)
    assert found.num_bytes == sum(map(parsed_bytes, (tmp_path / "segments").iterdir())) <= found.max_bytes
    store.close()


def test_a_folder_that_is_moved_goes_on_working(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    (tmp_path / "kv").rename(tmp_path / "moved")
    put(store, BLOCKS[0])
    assert slot_of(tmp_path / "moved", BLOCKS[0])
    assert has(store, BLOCKS[0])
    store.close()


def test_a_closed_store_finds_and_stores_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, BLOCKS[0])
    store.close()
    store.close()
    assert store.failure == "the store is closed"
    assert not store.contains(BLOCKS[0].hash)
    assert not has(store, BLOCKS[0])
    assert not store.write(BLOCKS[1], bytes_of(BLOCKS[1]))
    store.remove(BLOCKS[0].hash)
    assert slot_of(tmp_path, BLOCKS[0])


def test_close_waits_for_a_running_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    put(store, BLOCKS[0])
    reading, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(file: int, views: list[memoryview], offset: int) -> int:
        reading.set()
        go_on.wait()
        return preadv(file, views, offset)

    monkeypatch.setattr(os, "preadv", slow)
    results: list[bool] = []
    reader = threading.Thread(target=lambda: results.append(has(store, BLOCKS[0])))
    reader.start()
    reading.wait()
    closer = threading.Thread(target=store.close)
    closer.start()
    assert closer.is_alive()
    go_on.set()
    reader.join()
    closer.join()
    assert results == [True]


def test_whether_a_block_is_stored_is_answered_without_the_file_system(tmp_path: Path) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path)
    put(store, BLOCKS[0])
    put(other, BLOCKS[1])
    with hanging_files() as files:
        files.hang()
        assert [store.contains(content.hash) for content in BLOCKS[:3]] == [True, False, False]
        reader = threading.Thread(target=store.look)
        reader.start()
        assert files.is_awaited.wait(60)
        assert [store.contains(content.hash) for content in BLOCKS[:3]] == [True, False, False], "while one waits"
        assert len(store) == store.stats.num_blocks == 1
        files.release()
        reader.join()
    assert not files.misused
    assert [store.contains(content.hash) for content in BLOCKS[:3]] == [True, True, False]
    store.close()
    other.close()


def test_a_slot_that_another_process_used_again_is_a_miss_and_not_damage(tmp_path: Path) -> None:
    store, other = open_store(tmp_path, num_blocks=2), open_store(tmp_path, num_blocks=2)
    put(store, *BLOCKS[:2])
    assert finds(other, BLOCKS[0])
    put(store, *BLOCKS[2:4])
    assert not has(other, BLOCKS[0])
    assert has(other, BLOCKS[3])
    assert other.stats.damaged == 0
    for opened in (store, other):
        opened.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_slot_that_is_used_again_while_it_is_read_is_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    store, other = open_store(tmp_path, num_blocks=1), open_store(tmp_path, num_blocks=1)
    put(store, BLOCKS[0])
    assert finds(other, BLOCKS[0])
    preadv, count = os.preadv, iter(range(10))

    def read(file: int, views: list[memoryview], offset: int) -> int:
        if next(count) == 0 and when == "before":
            put(store, BLOCKS[1])
            return preadv(file, views, offset)
        found = preadv(file, views, offset)
        views[1][:2000] = bytes(2000)  # as if another process had overwritten half of it meanwhile
        put(store, BLOCKS[1])
        return found

    monkeypatch.setattr(os, "preadv", read)
    assert not has(other, BLOCKS[0])
    monkeypatch.undo()
    assert other.stats.damaged == 0
    assert has(other, BLOCKS[1])
    for opened in (store, other):
        opened.close()


def test_a_segment_that_another_process_deleted_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS[:12])
    segments_of(tmp_path)[0].unlink()
    found = [has(store, content) for content in BLOCKS[:12]]
    assert found.count(True) == 6
    put(store, *BLOCKS[:12])
    assert all(has(store, content) for content in BLOCKS[:12])
    assert store.failure is None
    store.close()


def test_segments_that_change_their_names_are_followed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS[:12])
    first, second = segments_of(tmp_path)
    first.rename(first.with_name("0" * 16 + first.name[16:]))
    second.rename(first)
    put(store, *BLOCKS[12:24])
    assert all(has(store, content) for content in BLOCKS[:24])
    assert len(store) == 24
    store.close()


def test_a_locked_segment_is_not_waited_for(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS[:3])
    other = StoreFolder(tmp_path)
    segment = other.segment(segments_of(tmp_path)[0].name)
    assert segment.lock()
    put(store, BLOCKS[3])
    assert len(segments_of(tmp_path)) == 2
    assert all(has(store, content) for content in BLOCKS[:4])
    store.close()
    other.close()


def test_a_cut_segment_serves_what_is_left_of_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS[:6])
    path = segments_of(tmp_path)[0]
    found = slot_of(tmp_path, BLOCKS[3])
    assert found
    os.truncate(path, found[1] + 1000)
    served = [has(store, content) for content in BLOCKS[:6]]
    assert served == [True] * 3 + [False] * 3
    store.close()
    store = open_store(tmp_path)
    assert [has(store, content) for content in BLOCKS[:6]] == served
    put(store, *BLOCKS)
    assert all(has(store, content) for content in BLOCKS)
    store.close()


def test_a_table_that_was_zeroed_costs_no_bytes_that_are_wrong(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *BLOCKS[:6])
    with segments_of(tmp_path)[0].open("r+b") as file:
        file.write(bytes(4096))
    store.close()
    store = open_store(tmp_path)
    assert len(store) == 0
    put(store, *BLOCKS[6:12])
    assert not any(has(store, content) for content in BLOCKS[:6])
    assert all(has(store, content) for content in BLOCKS[6:12])
    store.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("wrdxvft"), st.integers(0, 11)), max_size=60))
def test_no_sequence_of_operations_serves_wrong_bytes_or_breaks_the_limit(
    tmp_path: Path, operations: list[tuple[int, str, int]]
) -> None:
    folder = tmp_path / "kv"
    shutil.rmtree(folder, ignore_errors=True)
    limit = 60_000  # two segments of two slots, and one of one
    options = {"max_bytes": limit, "block_bytes": BLOCK_BYTES, "root": ROOT}

    def opened() -> DiskStore:
        store = DiskStore.open(folder, **options)  # type: ignore[arg-type]
        store._space._segment_bytes = 25_000
        return store

    stores = [opened() for _ in range(2)]
    chain, is_cut = chain_of(12), False
    for which, operation, number in operations:
        store, content = stores[which], chain[number]
        if operation == "w":
            assert store.write(content, bytes_of(content))
            assert has(store, content) or is_cut  # zeros in a slot are found when it is read
        elif operation == "r":
            has(store, content)
        elif operation == "d":
            store.remove(content.hash)
            assert slot_of(folder, content) is None
        elif operation == "x":
            store.close()
            stores[which] = opened()
        elif operation == "v" and segments_of(folder):
            segments_of(folder)[number % len(segments_of(folder))].unlink()
        elif operation == "f" and slot_of(folder, content):
            damage(folder, content, at=number * 350)
            has(store, content)
        elif operation == "t" and segments_of(folder):
            path = segments_of(folder)[number % len(segments_of(folder))]
            os.truncate(path, number * 2048)
            if number % 2:
                os.truncate(path, parsed_bytes(path))
            is_cut = True
        assert folder_bytes(folder) <= limit
    for store in stores:
        assert store.failure is None
        store.close()


def parsed_bytes(path: Path) -> int:
    """The size that a segment's name states."""
    parsed = parse_name(path.name)
    assert parsed
    return parsed[1].file_bytes


def test_killed_writers_leave_nothing_but_sound_blocks(tmp_path: Path) -> None:
    outcome = disk_faults.kill_writers(tmp_path / "kv", kills=3, seed=2)
    assert (outcome.wrong, outcome.unusable, outcome.problems) == (0, 0, [])
    assert outcome.served > 0


def test_500_damages_are_not_served(tmp_path: Path) -> None:
    outcome = disk_faults.corrupt(tmp_path / "kv", corruptions=500, seed=3)
    assert (outcome.tried, outcome.problems) == (500, [])
    assert set(outcome.kinds) == set(FAULTS)
