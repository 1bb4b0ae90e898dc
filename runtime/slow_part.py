"""The slow part of a KV pool: how many blocks it gets, and the file that it is in.

The file has no name: nothing is left when the process ends, and its folder may vanish. All of its space is taken when
it is made, so a disk that is full is an error at that time, and never a fault of a later write.
"""

import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.serving import OffloadTo, parse_percent
from ingot.errors import EngineError, UsageError, shown_path
from ingot.file_systems import file_system
from ingot.sizes import ceil_div, format_bytes

_log = logging.getLogger(__name__)
_AUTO_SHARE = 0.5
"""Share of the free space that "auto" takes at most."""
_SAMPLE_BYTES = 1 << 20
"""Bytes that are written and read to measure a file."""
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_REMEDY = "lower kv_offload, or name another folder (kv_offload_path)"


@dataclass(frozen=True)
class SlowPart:
    """The slow part of a pool, as it is asked for.

    num_blocks   blocks; 0 for none
    folder       of its file; None: it is in host memory
    reason       for its size
    """

    num_blocks: int = 0
    folder: Path | None = None
    reason: str = "kv_offload is off"


NO_SLOW_PART = SlowPart()


def resolve_slow_part(
    model: ModelFacts,
    kv: KVGeometry,
    num_fast: int,
    *,
    kv_offload: int | str,
    kv_offload_to: OffloadTo,
    folder: Path,
    free_bytes: Callable[[], int],
    is_size_given: bool = False,
) -> SlowPart:
    """Choose the blocks of the slow part after `num_fast` fast ones, and log the reason.

    With "auto" a pool that holds a whole context has none, nor one whose size is given in blocks or bytes; a smaller
    one gets what a context lacks, up to half of the free space. `free_bytes` is the free memory. Raises UsageError for
    a size below one block.
    """
    in_memory = kv_offload_to == "memory"
    if kv_offload == "off" or (kv_offload == "auto" and is_size_given):
        return NO_SLOW_PART
    if kv_offload == "auto":
        part = _automatic(model, kv, num_fast, None if in_memory else folder, free_bytes)
    else:
        part = SlowPart(_asked(kv, num_fast, kv_offload), None if in_memory else folder, f"kv_offload={kv_offload}")
    if part.num_blocks:
        place = "host memory" if part.folder is None else f"a file in {shown_path(part.folder)}"
        size = format_bytes(part.num_blocks * kv.block_bytes)
        _log.info("KV pool: %d slow blocks after these, %s in %s (%s)", part.num_blocks, size, place, part.reason)
    elif part.reason:
        _log.warning("KV pool: no slow blocks (%s)", part.reason)
    return part


def _asked(kv: KVGeometry, num_fast: int, kv_offload: int | str) -> int:
    if isinstance(kv_offload, str):
        return math.ceil(num_fast * parse_percent(kv_offload) / 100)
    if kv_offload < kv.block_bytes:
        raise UsageError(
            f"kv_offload is {kv_offload}; one block takes {kv.block_bytes} bytes: give at least one, a share of the"
            " pool such as 200%, auto, or off"
        )
    return kv_offload // kv.block_bytes


def _automatic(
    model: ModelFacts, kv: KVGeometry, num_fast: int, folder: Path | None, free_bytes: Callable[[], int]
) -> SlowPart:
    per_context = ceil_div(model.context_tokens, kv.block_tokens)
    missing = per_context - num_fast
    if missing <= 0:
        return SlowPart(reason="")
    try:
        free = free_bytes() if folder is None else _free_space(folder, free_bytes)
    except OSError as error:
        return SlowPart(reason=f"{error}; a request that the pool cannot hold is refused")
    fitting = int(free * _AUTO_SHARE) // kv.block_bytes
    lacks = f"a context of {model.context_tokens} tokens takes {per_context} blocks, the pool has {num_fast}"
    if fitting < missing:
        lacks += f"; only half of {format_bytes(free)} free space is used"
    return SlowPart(min(missing, fitting), folder, lacks)


def _free_space(folder: Path, free_bytes: Callable[[], int]) -> int:
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{shown_path(folder)} is not a folder that can be written to")
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    return min(free, free_bytes()) if file_system(folder) in _MEMORY_FILE_SYSTEMS else free


def offload_folder(kv_offload_path: Path | None, kv_disk_path: Path | None) -> Path:
    """The folder of the file: the one that is named, else the nearest one of the disk tier, else for temporary files.

    UsageError for a name that is not a folder.
    """
    if kv_offload_path is not None:
        if not os.path.isdir(kv_offload_path):
            raise UsageError(f"kv_offload_path {shown_path(kv_offload_path)} is not a folder; make it, or name another")
        return kv_offload_path
    if kv_disk_path is None:
        return Path(tempfile.gettempdir())
    # Unlike Path.is_dir, it says no to a name that the system refuses, which the disk tier then names.
    return next((each for each in (kv_disk_path, *kv_disk_path.absolute().parents) if os.path.isdir(each)), Path("/"))


class SlowFile:
    """A file without a name, all of whose bytes have a place on disk.

    EngineError, which names folder and size, where the disk has too little room or the folder takes no file.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        what = f"the slow part of the KV pool needs {format_bytes(num_bytes)} in {shown_path(folder)}"
        try:
            self.handle = _open_unnamed(folder)
        except OSError as error:
            raise EngineError(f"{what}, where no file can be made: {error.strerror}; {_REMEDY}") from error
        try:
            free = _free_in(self.handle)
            if num_bytes > free:  # the system would fill the disk before it refuses
                raise EngineError(f"{what}, where {format_bytes(free)} are free; {_REMEDY}")
            os.posix_fallocate(self.handle, 0, num_bytes)
            self.bytes_per_second = _read_speed(self.handle, min(num_bytes, _SAMPLE_BYTES))
        except OSError as error:
            self.close()
            raise EngineError(f"{what}, which the file system refused: {error.strerror}; {_REMEDY}") from error
        except EngineError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; its mappings stay, and its space is free once they are unmapped."""
        os.close(self.handle)


def _free_in(handle: int) -> int:
    stat = os.fstatvfs(handle)
    return stat.f_bavail * stat.f_frsize


def _open_unnamed(folder: Path) -> int:
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # a file system that makes no file without a name
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    handle, name = tempfile.mkstemp(dir=folder, prefix="ingot-kv-")
    os.unlink(name)
    return handle


def _read_speed(handle: int, num_bytes: int) -> float:
    """Bytes a second that come from the disk: of a few that are written, dropped from the page cache, and read."""
    os.pwrite(handle, bytes(num_bytes), 0)
    os.fdatasync(handle)
    os.posix_fadvise(handle, 0, num_bytes, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    os.pread(handle, num_bytes, 0)
    return num_bytes / max(time.perf_counter() - started, 1e-9)
