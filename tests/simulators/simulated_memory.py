"""A system that maps files: what is cached, in which pages, and what it refuses. For the steps of weight_pages.py."""

from dataclasses import dataclass, field
from pathlib import Path

from ingot.artifact.page_cache import HUGEPAGE, POPULATE_READ
from ingot.runtime.cpu.weight_pages import Region, SystemMemory

_DONTNEED, _COLLAPSE = 4, 25


@dataclass
class SimulatedMemory(SystemMemory):
    """Files of one kind of file system on one kind of kernel.

    cached            in small pages at the start, as after a write
    has_huge_files    the file system caches in huge pages what is read through advice
    can_collapse      as for tmpfs
    users             share of the file that other processes have mapped
    refused           problems by advice; "drop" and "smaps" too
    """

    cached: bool = True
    has_huge_files: bool = True
    can_collapse: bool = False
    users: float = 0.0
    free: int = 1 << 40
    anonymous_are_huge: bool = True
    may_be_copied: bool = True
    refused: dict[int | str, str] = field(default_factory=dict)
    process_refusal: str | None = None
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_huge = False
        self._advised = False

    def map_file(self, file: Path) -> Region:
        """The file's bytes."""
        return Region(0, memoryview(file.read_bytes()))

    def map_anonymous(self, size: int) -> Region:
        """Memory, at an address of its own."""
        if "map" in self.refused:
            raise OSError(12, self.refused["map"])
        self.calls.append("copy")
        return Region(1, memoryview(bytearray(size)))

    def advise(self, region: Region, advice: int, begin: int = 0, size: int | None = None) -> str | None:
        """Change the state as the advice does."""
        if advice in self.refused:
            return self.refused[advice]
        if advice == HUGEPAGE:
            self._advised = True
        elif advice == POPULATE_READ and not self.cached:
            self.calls.append("read")
            self.cached, self._is_huge = True, self.has_huge_files and self._advised and self.users == 0
        elif advice == _COLLAPSE:
            if not self.can_collapse:
                return "Invalid argument"
            self._is_huge = True
        return None

    def drop(self, file: Path, begin: int, size: int) -> str | None:
        """Empty the cache, but for what others have mapped."""
        self.calls.append("drop")
        if "drop" not in self.refused:
            self.cached = False
        return self.refused.get("drop")

    def cached_bytes(self, region: Region, begin: int = 0, size: int | None = None) -> int:
        """Bytes that a drop left."""
        return int(self.users * (size or len(region.content)))

    def huge_bytes(self, region: Region) -> int | None:
        """All or nothing."""
        if "smaps" in self.refused:
            return None
        is_huge = self.anonymous_are_huge if region.address else self._is_huge
        return len(region.content) if is_huge else 0

    def free_bytes(self) -> int:
        """As set."""
        return self.free

    def refusal(self) -> str | None:
        """As set."""
        return self.process_refusal

    def may_copy(self) -> bool:
        """As set."""
        return self.may_be_copied and self.process_refusal is None

    def file_system(self, file: Path) -> str:
        """A name of its own."""
        return "somefs"
