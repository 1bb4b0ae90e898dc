"""How long it takes to read a block from a KV folder, measured when it is opened, for the first restore-or-compute.

Blocks that are stored are read as they are, in the system's page cache or not, as a request will find them. In a folder
without any, one block is written and read back: it is in the page cache, where blocks that this process writes will be
too.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.kv.disk.folder import StoreFolder
from ingot.runtime.kv.disk.index import DiskPlace
from ingot.runtime.kv.disk.slot import scan_slot, write_slot
from ingot.runtime.kv.keys import BlockContent

MOST_SLOTS = 8
_MOST_SECONDS = 0.02  # after which no further slot is read
_MOST_WRITTEN = 16 * 2**20  # bytes, to keep loading an engine fast


@dataclass(frozen=True)
class ReadSpeed:
    """Seconds of each read, checksum included, and what was read."""

    seconds: tuple[float, ...] = ()
    source: str = ""


def measure_stored(places: Iterable[DiskPlace], buffer: NDArray[np.uint8], token_bytes: int) -> ReadSpeed:
    """Read stored blocks into a buffer of their size, whose bytes are undefined afterwards. Raises OSError."""
    seconds: list[float] = []
    for segment, slot in places:
        started = time.perf_counter()
        scan_slot(segment.file, segment.offset(slot), token_bytes, buffer.data)
        seconds.append(time.perf_counter() - started)
        if sum(seconds) > _MOST_SECONDS or len(seconds) == MOST_SLOTS:
            break
    return ReadSpeed(tuple(seconds), f"{len(seconds)} that were stored")


def measure_written(folder: StoreFolder, buffer: NDArray[np.uint8], token_bytes: int) -> ReadSpeed:
    """Write a block to a temporary file, and read it. Raises OSError."""
    if buffer.nbytes > _MOST_WRITTEN:
        return ReadSpeed()
    content = BlockContent(bytes(32), bytes(32), bytes(token_bytes))
    with folder.scratch() as file:
        write_slot(file, 0, content, bytes(32), buffer.data)
        started = time.perf_counter()
        scan_slot(file, 0, token_bytes, buffer.data)
        return ReadSpeed((time.perf_counter() - started,), "one that was written just now, in the page cache")
