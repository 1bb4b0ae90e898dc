"""Each system error turns off what cannot work any more, and is logged once."""

import errno
import logging
import time
from pathlib import Path

import pytest

from ingot.runtime.kv.disk.health import StoreHealth


@pytest.fixture
def health() -> StoreHealth:
    return StoreHealth(Path("/kv"))


def note(health: StoreHealth, number: int, *, reading: bool = False, is_deleted: bool = False) -> bool:
    error = OSError(number, "an error")
    return health.note_error(error, "storing a block", reading=reading, is_deleted=is_deleted)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_gets_no_new_segments_for_a_while(
    health: StoreHealth, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    note(health, number)
    assert not health.can_grow
    assert health.can_write
    assert health.failure is None
    now[0] += 31
    assert health.can_grow


def test_a_full_disk_takes_writes_only_where_segments_are(health: StoreHealth) -> None:
    assert health.refusal(has_segments=False) is None
    note(health, errno.ENOSPC)
    assert health.refusal(has_segments=True) is None
    assert health.refusal(has_segments=False) == "the disk is full"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_without_permission_blocks_are_only_read(health: StoreHealth, number: int) -> None:
    note(health, number)
    assert not health.can_write
    assert health.failure is None
    assert health.refusal(has_segments=True) == "storing a block in /kv failed: an error"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_busy_process_changes_nothing(health: StoreHealth, number: int) -> None:
    assert [note(health, number) for _ in range(20)] == [True] * 20
    assert health.can_write
    assert health.failure is None


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTDIR, errno.ENODEV])
def test_a_folder_that_is_gone_turns_the_store_off(health: StoreHealth, number: int) -> None:
    note(health, number, reading=True)
    assert health.failure == "storing a block in /kv failed: an error"


def test_a_missing_name_is_no_failure_unless_the_folder_is_deleted(health: StoreHealth) -> None:
    note(health, errno.ENOENT)
    assert health.failure is None
    note(health, errno.ENOENT, is_deleted=True)
    assert health.failure


def test_ten_errors_in_a_row_turn_the_store_off(health: StoreHealth) -> None:
    for _ in range(9):
        assert not note(health, errno.EIO, reading=True)
    health.note_success()
    for _ in range(9):
        note(health, errno.EIO, reading=True)
    assert health.failure is None
    note(health, errno.EIO, reading=True)
    assert health.failure


def test_a_warning_is_logged_once(health: StoreHealth, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        note(health, errno.ENOSPC)
    assert caplog.record_tuples == [
        (
            "ingot.runtime.kv.disk.health",
            logging.WARNING,
            "the KV folder /kv is on a full disk: blocks are stored in the place of others until there is space",
        )
    ]
