"""The disk store serves exactly what was stored, whatever happens to its folder, its files and its processes."""

import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from benchmarks.kv import disk_faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.errors import UsageError
from ingot.runtime.kv.disk.block_file import file_name
from ingot.runtime.kv.disk.folder import StoreFolder
from ingot.runtime.kv.disk.store import DiskStore
from ingot.runtime.kv.keys import root_hash
from tests.runtime.kv.disk.stored_blocks import (
    BLOCK_BYTES,
    FILE_BYTES,
    bytes_of,
    chain_of,
    content_of,
    has,
    open_store,
    path_of,
    put,
)
from tests.runtime.kv.disk.test_folder import mounted

BLOCKS = [content_of(number) for number in range(40)]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("?/*.kv"))


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
    assert (stats.num_blocks, stats.num_bytes) == (2, 2 * FILE_BYTES)
    assert (stats.hits, stats.misses, stats.writes) == (1, 2, 2)
    assert (stats.bytes_read, stats.bytes_written) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert stats.read_seconds > 0
    assert stats.write_seconds > 0
    store.close()


@pytest.mark.parametrize("durable", [False, True])
def test_blocks_survive_a_restart(tmp_path: Path, durable: bool) -> None:
    options = {"max_bytes": 10**6, "block_bytes": BLOCK_BYTES, "root": disk_faults.ROOT}
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
        path = path_of(tmp_path, content)
        path.write_bytes(path.read_bytes()[:-1] + b"!!")
        assert not has(store, content)
        assert not path.exists()
        assert not store.contains(content.hash)
    assert store.stats.damaged == 2
    assert len(caplog.records) == 1
    assert "holds a damaged block (4,265 bytes instead of 4,264)" in caplog.text
    put(store, *BLOCKS[:2])
    assert has(store, BLOCKS[0])
    store.close()


def test_a_symbolic_link_is_not_followed_and_only_the_link_is_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    put(store, BLOCKS[0])
    path, target = path_of(tmp_path / "kv", BLOCKS[0]), tmp_path / "target"
    path.rename(target)
    path.symlink_to(target)
    assert not has(store, BLOCKS[0])
    assert target.exists()
    assert not path.is_symlink()
    store.close()


def test_a_folder_in_a_block_s_place_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    path = path_of(tmp_path, BLOCKS[0])
    path.mkdir()
    (path / "file").touch()
    assert not store.contains(BLOCKS[0].hash)
    assert not has(store, BLOCKS[0])
    put(store, BLOCKS[0], BLOCKS[1])
    assert has(store, BLOCKS[0])
    store.close()


def test_a_removed_block_is_gone_for_all(tmp_path: Path) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path)
    put(store, BLOCKS[0])
    assert other.contains(BLOCKS[0].hash)
    store.remove(BLOCKS[0].hash)
    assert not store.contains(BLOCKS[0].hash)
    assert not has(other, BLOCKS[0])
    assert not other.contains(BLOCKS[0].hash)
    for opened in (store, other):
        opened.close()


def test_two_stores_find_each_other_s_blocks_at_once(tmp_path: Path) -> None:
    stores = [open_store(tmp_path), open_store(tmp_path)]
    for number, content in enumerate(BLOCKS):
        put(stores[number % 2], content)
        assert stores[1 - number % 2].contains(content.hash)
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
    assert folder_bytes(tmp_path) == store.stats.num_bytes == 10 * FILE_BYTES
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
    store = open_store(tmp_path, num_blocks=5)
    assert folder_bytes(tmp_path) == 5 * FILE_BYTES
    assert all(has(store, content) for content in BLOCKS[-5:])
    store.close()


def test_two_processes_that_evict_keep_the_limit_together(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, num_blocks=20) for _ in range(2)]
    for number in range(400):
        put(stores[number % 2], content_of(number))
        assert folder_bytes(tmp_path) <= 21 * FILE_BYTES
    for store in stores:
        assert store.failure is None
        assert store.stats.errors == 0
        store.close()


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = open_store(tmp_path, num_blocks=20)
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
    assert folder_bytes(tmp_path) <= 20 * FILE_BYTES
    store.close()


def test_a_limit_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a KV folder of 4.0 kB cannot hold one block of 4.1 kB; raise kv_disk_bytes"):
        DiskStore.open(tmp_path / "kv", max_bytes=4000, block_bytes=BLOCK_BYTES, root=disk_faults.ROOT)
    assert not (tmp_path / "kv").exists()


def test_a_limit_above_the_free_space_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_store(tmp_path, num_blocks=10**12).close()
    assert "less than its limit of" in caplog.text


def test_a_full_disk_is_a_warning_and_old_blocks_are_still_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "disk"
    with mounted(path, "size=200k,mode=0700"):
        store = open_store(path)
        stored = [content for content in BLOCKS if store.write(content, bytes_of(content))]
        assert 0 < len(stored) < len(BLOCKS)
        assert all(has(store, content) for content in stored)
        assert not list((path / "tmp").iterdir())
        assert caplog.text.count("is on a full disk") == 1
        assert store.failure is None
        assert store.stats.errors == 1
        store.close()


def test_errors_of_writing_are_a_refusal_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.EACCES):
        for function in ("writev", "rename", "open"):
            folder = tmp_path / f"{number}-{function}"
            store = open_store(folder)
            put(store, BLOCKS[0])
            with monkeypatch.context() as patch:
                fail(patch, function, number)
                assert not store.write(BLOCKS[1], bytes_of(BLOCKS[1]))
            assert not store.contains(BLOCKS[1].hash)
            assert has(store, BLOCKS[0])
            assert not list((folder / "tmp").iterdir())
            assert store.stats.refused_writes == 1
            assert store.stats.num_bytes == FILE_BYTES
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
    assert path_of(tmp_path, BLOCKS[0]).exists()
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
    store.close()


def test_a_folder_that_is_moved_goes_on_working(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    (tmp_path / "kv").rename(tmp_path / "moved")
    put(store, BLOCKS[0])
    assert path_of(tmp_path / "moved", BLOCKS[0]).exists()
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
    assert path_of(tmp_path, BLOCKS[0]).exists()


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


def test_a_slow_folder_is_not_searched_by_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path)
    for _ in range(3):
        store._health.note_look(1.0)
    put(other, BLOCKS[0])
    with monkeypatch.context() as patch:
        fail(patch, "stat", errno.EIO)
        assert not store.contains(BLOCKS[0].hash)
    assert has(store, BLOCKS[0])
    assert store.contains(BLOCKS[0].hash)
    store.close()
    other.close()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("wrdxvf"), st.integers(0, 11)), max_size=60))
def test_no_sequence_of_operations_serves_wrong_bytes_or_breaks_the_limit(
    tmp_path: Path, operations: list[tuple[int, str, int]]
) -> None:
    folder = tmp_path / "kv"
    shutil.rmtree(folder, ignore_errors=True)
    stores = [open_store(folder, num_blocks=6) for _ in range(2)]
    chain = chain_of(12)
    for which, operation, number in operations:
        store, content = stores[which], chain[number]
        path = path_of(folder, content)
        if operation == "w":
            assert store.write(content, bytes_of(content))
        elif operation == "r":
            assert has(store, content) <= path.exists()
        elif operation == "d":
            store.remove(content.hash)
            assert not path.exists()
        elif operation == "x":
            stores[which].close()
            stores[which] = open_store(folder, num_blocks=6)
        elif operation == "v":
            path.unlink(missing_ok=True)
        elif operation == "f" and path.exists():
            path.write_bytes(path.read_bytes()[:-2] + b"??")
        assert folder_bytes(folder) <= 7 * FILE_BYTES
    for store in stores:
        assert store.failure is None
        store.close()


def test_killed_writers_leave_nothing_but_sound_blocks(tmp_path: Path) -> None:
    outcome = disk_faults.kill_writers(tmp_path / "kv", kills=3, seed=2)
    assert (outcome.wrong, outcome.unusable) == (0, 0)
    assert outcome.served > 0


def test_500_damaged_files_are_not_served(tmp_path: Path) -> None:
    outcome = disk_faults.corrupt(tmp_path / "kv", corruptions=500, seed=3)
    assert (outcome.tried, outcome.wrong, outcome.unusable) == (500, 0, 0)
    assert set(outcome.kinds) == set(disk_faults.FAULTS)


def test_names_come_from_hashes_alone(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path)
    hostile = b"../../../etc/passwd\0" + bytes(12)
    assert file_name(hostile) == hostile.hex() + ".kv"
    assert folder.exists(hostile) is None
    folder.close()
