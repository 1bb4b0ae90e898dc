"""The slow part of a pool: its size, its file, and one error for each disk that cannot have it."""

import logging
import os
import resource
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import KVGeometry
from ingot.errors import EngineError, UsageError
from ingot.runtime import slow_part
from ingot.runtime.slow_part import SlowFile, SlowPart, offload_folder, resolve_slow_part
from tests.runtime.kv.disk.test_folder import mounted
from tests.simulators.fake_executor import FakeExecutor

KV = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8)
MODEL = FakeExecutor(context_tokens=1000).model  # 63 blocks
MIB = 1 << 20


def resolved(num_fast: int, folder: Path, **options: Any) -> SlowPart:
    given = {"kv_offload": "auto", "kv_offload_to": "file", "free_bytes": lambda: 1 << 40, **options}
    return resolve_slow_part(MODEL, KV, num_fast, folder=folder, **given)


def test_auto_adds_what_one_context_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert resolved(63, tmp_path).num_blocks == 0
    assert resolved(500, tmp_path).num_blocks == 0
    assert not caplog.messages, "nothing changes where the pool holds a context"
    part = resolved(20, tmp_path)
    assert (part.num_blocks, part.folder) == (43, tmp_path)
    assert caplog.messages == [
        f"KV pool: 43 slow blocks after these, 176.1 kB in a file in {tmp_path}"
        " (a context of 1000 tokens takes 63 blocks, the pool has 20)"
    ]


def test_auto_adds_nothing_to_a_pool_whose_size_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolved(20, tmp_path, is_size_given=True).num_blocks == 0
    assert not caplog.messages
    assert resolved(20, tmp_path, is_size_given=True, kv_offload="100%").num_blocks == 20


def test_auto_takes_at_most_half_of_what_is_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = 30 * KV.block_bytes
    part = resolved(20, tmp_path, kv_offload_to="memory", free_bytes=lambda: free)
    assert (part.num_blocks, part.folder) == (15, None)
    assert "only half of 122.9 kB free space is used" in part.reason
    gone = resolved(20, tmp_path / "gone")
    assert gone.num_blocks == 0
    assert "gone is not a folder that can be written to; a request that the pool cannot hold is refused" in caplog.text


def test_auto_counts_a_file_in_memory_as_memory(tmp_path: Path) -> None:
    with mounted(tmp_path / "tmpfs", "size=64m"):
        assert resolved(20, tmp_path / "tmpfs", free_bytes=lambda: 30 * KV.block_bytes).num_blocks == 15


def test_sizes_are_bytes_or_a_share_of_the_fast_part(tmp_path: Path) -> None:
    assert resolved(20, tmp_path, kv_offload="off") == SlowPart()
    assert resolved(20, tmp_path, kv_offload="250%").num_blocks == 50
    assert resolved(20, tmp_path, kv_offload="1%").num_blocks == 1
    assert resolved(20, tmp_path, kv_offload=10 * KV.block_bytes + 5).num_blocks == 10
    with pytest.raises(UsageError, match=r"kv_offload is 10; one block takes 4096 bytes: give at least one, a share"):
        resolved(20, tmp_path, kv_offload=10)


def test_the_folder_is_the_given_one_else_that_of_the_disk_tier_else_for_temporary_files(tmp_path: Path) -> None:
    assert offload_folder(tmp_path, None) == tmp_path
    assert offload_folder(None, tmp_path / "not" / "yet") == tmp_path
    assert offload_folder(None, None) == Path(tempfile.gettempdir())
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(UsageError, match=rf"kv_offload_path .*{path.name} is not a folder; make it, or name"):
            offload_folder(path, None)


def test_a_file_has_no_name_and_all_of_its_space(tmp_path: Path) -> None:
    file = SlowFile(tmp_path, MIB)
    assert not [*tmp_path.iterdir()]
    stat = os.fstat(file.handle)
    assert stat.st_size == MIB
    assert stat.st_blocks * 512 >= MIB
    assert file.bytes_per_second > 0
    file.close()


def test_a_file_system_without_unnamed_files_gets_one_whose_name_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    SlowFile(tmp_path, MIB).close()
    assert not [*tmp_path.iterdir()]


def test_a_disk_without_room_is_refused_before_any_of_it_is_taken(tmp_path: Path) -> None:
    path, before = tmp_path / "disk", len(os.listdir("/proc/self/fd"))
    with mounted(path, "size=1m"):
        with pytest.raises(EngineError) as refused:
            SlowFile(path, 4 * MIB)
        assert str(refused.value) == (
            f"the slow part of the KV pool needs 4.2 MB in {path}, where 1.0 MB are free; lower kv_offload, or name"
            " another folder (kv_offload_path)"
        )
        assert os.statvfs(path).f_bavail * os.statvfs(path).f_frsize == MIB
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_that_fills_up_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_part, "_free_in", lambda handle: 1 << 40)
    with (
        mounted(tmp_path / "disk", "size=1m"),
        pytest.raises(EngineError, match="which the file system refused: No space left on device; lower kv_offload"),
    ):
        SlowFile(tmp_path / "disk", 4 * MIB)


def test_a_limit_of_the_process_is_an_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(EngineError, match="which the file system refused: File too large; lower kv_offload"):
            SlowFile(tmp_path, 4 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_read_only_folder_and_one_that_vanished_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with mounted(path, "size=8m"):
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        with pytest.raises(EngineError, match=r"where no file can be made: Read-only file system; lower kv_offload"):
            SlowFile(path, MIB)
    with pytest.raises(EngineError, match=r"gone, where no file can be made: No such file or directory; .*another"):
        SlowFile(tmp_path / "gone", MIB)
