"""Whatever call on its files fails, the disk store serves no wrong block, leaves nothing half-made, and works again."""

import errno
from pathlib import Path

from ingot.errors import UsageError
from ingot.runtime.kv.disk.store import DiskStore
from tests.runtime.kv.disk.stored_blocks import (
    BLOCK_BYTES,
    bytes_of,
    content_of,
    finds,
    has,
    open_store,
    put,
)
from tests.simulators.failing_calls import FailingCalls, Failure, fail_each_call

OLD = [content_of(number) for number in range(3)]
NEW = [content_of(number) for number in range(10, 13)]


def use_store(folder: Path, calls: FailingCalls) -> None:
    """Open a folder that has blocks or is new, and use everything."""
    for name, stored in (("old", OLD), ("new", [])):
        path = folder / name
        if stored:
            first = open_store(path, num_blocks=8)
            put(first, *stored)
            first.close()
        with calls.on(path):
            use(path)
        require_sound(path, first_use=not stored)


def use(path: Path) -> None:
    try:
        store = open_store(path, num_blocks=8)
    except UsageError as error:
        assert "cannot keep KV blocks in" in str(error)  # noqa: PT017 (not every call makes it raise)
        return
    for content in (*OLD, *NEW):
        has(store, content)  # which checks its bytes
    for content in NEW:
        store.write(content, bytes_of(content))
    other = open_again(path)
    for content in (*NEW, *OLD):
        has(store, content)
        if other is not None:
            finds(other, content)
            has(other, content)
    store.remove(NEW[0].hash)
    for number in range(20, 26):  # more than there is room for
        content = content_of(number)
        store.write(content, bytes_of(content))
        has(store, content)
    store.close()
    if other is not None:
        other.close()


def open_again(path: Path) -> DiskStore | None:
    try:
        return open_store(path, num_blocks=8)
    except UsageError:
        return None


def require_sound(path: Path, *, first_use: bool) -> None:
    """The folder opens, serves what it has as it was stored, and stores."""
    store = open_store(path, num_blocks=8)
    assert not list((path / "tmp").iterdir())
    assert {each.name for each in path.iterdir()} == {"ingot-kv.json", "segments", "tmp", "journal"}
    for content in (*OLD, *NEW, *(content_of(number) for number in range(20, 26))):
        has(store, content)
    other = open_store(path, num_blocks=8)
    fresh = content_of(99)
    put(store, fresh)
    assert has(store, fresh)
    assert finds(other, fresh), "what is stored later is found by other processes at once"
    assert has(other, fresh)
    assert store.stats.num_bytes <= 8 * 2 * BLOCK_BYTES + 8 * 4096
    store.close()
    other.close()


def test_each_call_on_its_files_may_fail(tmp_path: Path) -> None:
    errors = [0, errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES, errno.ENOENT]
    failures = [Failure(error, forever) for error in errors for forever in (False, True)]
    counts = fail_each_call(use_store, tmp_path, failures, step=53)
    assert min(counts.values()) > 200
