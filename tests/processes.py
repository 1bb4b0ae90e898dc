"""Processes that another one has started."""

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """The processes that the threads of a process have started; a thread may end while they are listed."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, file.read_text().split())
    return found
