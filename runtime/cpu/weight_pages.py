"""Weights in huge pages: a decode step reads all of them, and 4 KiB pages cost it a third of the memory bandwidth.

A file is mapped, so that processes share its pages. How it was written or read decides about their size (page_cache.py
of the artifact), so `place_weights` looks at what it got and goes on while that is too little:

    map, read in huge pages ─► collapse what is cached ─► drop the cached pages, read again ─► copy
                               (tmpfs, and kernels with    (not those that other processes
                               READ_ONLY_THP_FOR_FS)       have mapped)

Pages change no bit of a result.
"""

import ctypes
import logging
import mmap
import os
import re
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ingot.artifact.page_cache import HUGEPAGE, LEAST_BYTES, POPULATE_READ, drop_from_cache
from ingot.artifact.safetensors import map_whole
from ingot.artifact.serving import WeightPlacement
from ingot.errors import EngineError
from ingot.file_systems import file_system
from ingot.runtime.options import free_memory_bytes
from ingot.sizes import ceil_div, format_bytes, round_up

_log = logging.getLogger(__name__)

HUGE_BYTES = 2 << 20
_DONTNEED, _COLLAPSE = 4, 25
_ENOUGH = 0.9  # share of the whole huge pages that a file has room for
_WINDOW_BYTES = 256 << 20
_MOST_SECONDS = 60.0  # to read a cached file from the disk again
# A copy that the user did not ask for takes at most this share of the free memory.
_COPY_SHARE = 0.5
_PAGE_BYTES = mmap.PAGESIZE
_FIXED, _PRIVATE_ANONYMOUS = 0x10, 0x22
_PRCTL_GET_THP_DISABLE = 42
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


class Region(NamedTuple):
    """Memory at an address that huge pages may have. It is unmapped when the last view of `content` is released."""

    address: int
    content: memoryview


class SystemMemory:
    """Linux's calls about mapped memory. Problems are returned as the system's words for them."""

    def map_file(self, file: Path) -> Region:
        """Map a file, read-only and shared. OSError where the system refuses."""
        handle = os.open(file, os.O_RDONLY)
        try:
            return _mapped(os.fstat(handle).st_size, mmap.PROT_READ, mmap.MAP_SHARED, handle)
        finally:
            os.close(handle)

    def map_anonymous(self, size: int) -> Region:
        """Map memory of this process alone. OSError where the system refuses."""
        return _mapped(size, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE_ANONYMOUS, -1)

    def advise(self, region: Region, advice: int, begin: int = 0, size: int | None = None) -> str | None:
        """Give advice about `size` bytes of a region from `begin`; returns the problem."""
        size = len(region.content) - begin if size is None else size
        return None if libc().madvise(region.address + begin, size, advice) == 0 else os.strerror(ctypes.get_errno())

    def drop(self, file: Path, begin: int, size: int) -> str | None:
        """Empty the page cache of a part of a file."""
        return drop_from_cache(file, begin, size)

    def cached_bytes(self, region: Region, begin: int = 0, size: int | None = None) -> int:
        """Bytes of a region that are in memory, for any process; all of them where the system does not tell."""
        size = len(region.content) - begin if size is None else size
        pages = np.empty(ceil_div(size, _PAGE_BYTES), np.uint8)
        if libc().mincore(region.address + begin, size, pages.ctypes.data) != 0:
            return size
        return min(size, int((pages & 1).sum()) * _PAGE_BYTES)

    def huge_bytes(self, region: Region) -> int | None:
        """Bytes of a region that this process has mapped in huge pages; None where the system does not tell."""
        smaps = _text("/proc/self/smaps")
        return huge_bytes_in(smaps, region.address, region.address + len(region.content)) if smaps else None

    def free_bytes(self) -> int:
        """Memory that this process may use."""
        return free_memory_bytes()

    def refusal(self) -> str | None:
        """Why this process gets no huge pages at all; None where it may have some."""
        if not _SETTINGS.is_dir():
            return "this kernel has no transparent huge pages"
        if libc().prctl(_PRCTL_GET_THP_DISABLE, 0, 0, 0, 0) == 1:
            return "huge pages are turned off for this process (prctl PR_SET_THP_DISABLE)"
        return None

    def may_copy(self) -> bool:
        """Whether anonymous memory may have huge pages."""
        return self.refusal() is None and setting("enabled") != "never"

    def file_system(self, file: Path) -> str:
        """The kind of a file's file system, such as ext4."""
        return file_system(file)


@dataclass(frozen=True)
class WeightPages:
    """Where the weights are and what was done for it.

    huge_bytes     of `num_bytes`, in huge pages; None: not known, or too few bytes to matter
    huge_before    the same before the file was read again, collapsed or copied
    done           what was done besides mapping the file
    reasons        why it is not all in huge pages, or not mapped
    """

    placement: Literal["mapped", "copied"]
    num_bytes: int
    huge_bytes: int | None = None
    huge_before: int | None = None
    seconds: float = 0.0
    done: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def is_huge(self) -> bool:
        """Whether nearly all of it is in huge pages, or it is too small for that."""
        return self.num_bytes < LEAST_BYTES or is_enough(self.huge_bytes, self.num_bytes)

    def __str__(self) -> str:
        words = [f"{format_bytes(self.num_bytes)} {self.placement}"]
        if self.huge_bytes is not None:
            words.append(f"{format_bytes(self.huge_bytes)} in huge pages")
        if self.done:
            before = "" if self.huge_before is None else f" ({format_bytes(self.huge_before)} before)"
            words.append(f"{', '.join(self.done)}{before}")
        reasons = f": {'; '.join(self.reasons)}" if self.reasons else ""
        return f"{', '.join(words)}, in {self.seconds:.2f} s{reasons}"


class PlacedWeights(NamedTuple):
    """The bytes of a file, and where they are."""

    content: memoryview
    pages: WeightPages


def place_weights(
    file: Path, placement: WeightPlacement = "auto", reserved_bytes: int = 0, memory: SystemMemory | None = None
) -> PlacedWeights:
    """Map a file of weights in huge pages, or copy it; logs what was done.

    placement        "mapped": no copy; "copied": a copy; "auto": mapped, or a copy where a mapping gets small pages and
                     the copy takes at most half of the free memory
    reserved_bytes   of the free memory, for what is allocated later

    Raises OSError for a file that cannot be mapped or read, EngineError for a copy that the memory has no room for.
    """
    started = time.perf_counter()
    if memory is None and sys.platform != "linux":
        content = map_whole(file)
        return PlacedWeights(content, WeightPages("mapped", len(content)))
    placing = _Placing(file, memory or SystemMemory())
    if placement == "copied":
        placing.require_room(reserved_bytes)
        placing.copy()
    elif len(placing.mapped.content) >= LEAST_BYTES:
        placing.improve_mapping()
        if placement == "auto" and placing.lacks_huge_pages and placing.may_copy(reserved_bytes):
            placing.try_copy()
    pages = placing.report(time.perf_counter() - started)
    _log.log(logging.INFO if pages.is_huge else logging.WARNING, "weights: %s", pages)
    return PlacedWeights(placing.content, pages)


def place_ranges(
    file: Path, ranges: Sequence[tuple[int, int]], placement: WeightPlacement, memory: SystemMemory | None = None
) -> memoryview:
    """Return a file's bytes, of which only some ranges are used: begin and bytes of each.

    Unless the placement is "mapped", these are copied into huge pages; "auto" needs them to be at most half of the free
    memory. The rest of a copy is zeros that take no memory. Raises as `place_weights`.
    """
    memory, size = memory or SystemMemory(), sum(size for _, size in ranges)
    free = memory.free_bytes() if placement != "mapped" else 0
    if placement == "copied" and size > free:
        raise EngineError(
            f"{file}: weights is copied, which takes {format_bytes(size)} for this stage, and {format_bytes(free)} of"
            " memory are free; set weights to mapped or auto, or a smaller kv_bytes"
        )
    is_copied = placement == "copied" or (placement == "auto" and memory.may_copy() and size <= free * _COPY_SHARE)
    if sys.platform != "linux" or not is_copied or (placement == "auto" and size < LEAST_BYTES):
        return map_whole(file)
    region = memory.map_anonymous(file.stat().st_size)
    memory.advise(region, HUGEPAGE)
    for begin, length in ranges:
        read_into(file, region.content[begin : begin + length], begin)
    return region.content.toreadonly()


@dataclass
class _Placing:
    """The steps, each of which looks at the pages that it got."""

    file: Path
    memory: SystemMemory
    done: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    before: int | None = None
    huge: int | None = None

    def __post_init__(self) -> None:
        self.mapped = self.memory.map_file(self.file)
        self._copied: Region | None = None
        self._size = len(self.mapped.content)

    @property
    def content(self) -> memoryview:
        """Of the copy, if there is one."""
        return (self._copied or self.mapped).content

    @property
    def is_huge(self) -> bool:
        """Whether nearly all is in huge pages."""
        return is_enough(self.huge, self._size)

    @property
    def lacks_huge_pages(self) -> bool:
        """Whether the mapping is known to have too few."""
        return self.huge is not None and not self.is_huge

    def report(self, seconds: float) -> WeightPages:
        placement: Literal["mapped", "copied"] = "mapped" if self._copied is None else "copied"
        before = self.before if self.done else None
        return WeightPages(placement, self._size, self.huge, before, seconds, tuple(self.done), tuple(self.reasons))

    def improve_mapping(self) -> None:
        """Map the file in huge pages by the cheapest step that does it."""
        problem = self._read()
        self.huge = self.before = self.memory.huge_bytes(self.mapped)
        refusal = "/proc/self/smaps cannot be read" if self.huge is None else self.memory.refusal()
        if self.is_huge:
            return
        if refusal or problem:
            self.reasons.append(refusal or f"the system refuses to read a mapping in advance ({problem})")
            return
        if self.memory.advise(self.mapped, _COLLAPSE) is None:
            self.done.append("collapsed in the page cache")
            self._look_again()
        if not self.is_huge:
            self._read_again()

    def may_copy(self, reserved_bytes: int) -> bool:
        """Whether a copy would be in huge pages, in memory that is free; if not, a reason is added."""
        if not self.memory.may_copy():
            self.reasons.append(f"{_SETTINGS}/enabled is never, so a copy would gain nothing")
            return False
        free = self.memory.free_bytes() - reserved_bytes
        if self._size <= free * _COPY_SHARE:
            return True
        self.reasons.append(f"too little memory for a copy ({format_bytes(max(0, free))} free)")
        return False

    def require_room(self, reserved_bytes: int) -> None:
        """EngineError unless there is memory for a copy."""
        free = max(0, self.memory.free_bytes() - reserved_bytes)
        if self._size > free:
            raise EngineError(
                f"{self.file}: weights is copied, which takes {format_bytes(self._size)}, and {format_bytes(free)} of"
                f" memory are free besides {format_bytes(reserved_bytes)} of the KV pool; set weights to mapped or"
                " auto, or a smaller kv_bytes"
            )

    def copy(self) -> None:
        """Read the file into memory of this process."""
        region = self.memory.map_anonymous(self._size)
        self.memory.advise(region, HUGEPAGE)
        read_into(self.file, region.content)
        if not is_enough(self.memory.huge_bytes(region), self._size):
            self.memory.advise(region, _COLLAPSE)  # moves other memory away for it
        self._copied, self.huge = Region(region.address, region.content.toreadonly()), self.memory.huge_bytes(region)
        self.done.append("copied")
        if not is_enough(self.huge, self._size):
            self.reasons.append("the system gave the copy small pages")

    def try_copy(self) -> None:
        """Copy, unless that fails or gains nothing."""
        mapped = self.huge or 0
        try:
            self.copy()
        except OSError as error:
            self.reasons.append(f"a copy failed: {error.strerror}")
            return
        if (self.huge or 0) < max(mapped, self._size * _ENOUGH / 2):
            self._copied, self.huge = None, mapped
            self.done.pop()

    def _read(self) -> str | None:
        """Read the file through the mapping; what is not cached yet comes in huge pages."""
        self.memory.advise(self.mapped, HUGEPAGE)
        for begin, size in self._windows():
            problem = self.memory.advise(self.mapped, POPULATE_READ, begin, size)
            if problem:
                return problem
        return None

    def _read_again(self) -> None:
        """Drop the file from the page cache and read it from the disk, while that is fast and gives huge pages."""
        self.memory.advise(self.mapped, _DONTNEED)
        stops_at = time.perf_counter() + _MOST_SECONDS
        for begin, size in self._windows():
            problem = self._replace(begin, size)
            if not problem and time.perf_counter() > stops_at:
                problem = f"the disk is slow: {format_bytes(begin + size)} were read in {_MOST_SECONDS:.0f} s"
            if problem:
                self.reasons.append(problem)
                self._read()
                break
        self._look_again()
        if self.is_huge:
            self.reasons.clear()
        elif not self.reasons:
            self.reasons.append("too little free memory is in whole huge pages")

    def _replace(self, begin: int, size: int) -> str | None:
        """Replace the cached pages of a window; returns why the next windows are not to be tried."""
        problem = self.memory.drop(self.file, begin, size)
        if problem:
            return f"its cached pages cannot be dropped ({problem})"
        if self.memory.cached_bytes(self.mapped, begin, size) > size / 20:
            return f"another process uses the file, or {self._file_system} keeps it in memory"
        problem = self.memory.advise(self.mapped, POPULATE_READ, begin, size)
        if problem:
            return f"it cannot be read again ({problem})"
        if begin == 0:
            self.done.append("read again from the disk")
            if not self.before and not self.memory.huge_bytes(self.mapped):
                return f"{self._file_system} has no huge pages for files on this kernel, or no memory for some is free"
        return None

    def _look_again(self) -> None:
        self.huge = self.memory.huge_bytes(self.mapped)

    def _windows(self) -> list[tuple[int, int]]:
        """Begin and size of each; the first is small, as it shows what the file system does."""
        ends = [*range(LEAST_BYTES, self._size, _WINDOW_BYTES), self._size]
        return [(begin, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]

    @property
    def _file_system(self) -> str:
        return self.memory.file_system(self.file)


def weights_in_words(file: Path, memory: SystemMemory | None = None) -> dict[str, str]:
    """Where a file of weights is at present, and in which pages; changes nothing."""
    memory = memory or SystemMemory()
    region = memory.map_file(file)
    size, cached = len(region.content), memory.cached_bytes(region)
    found = {"weights": f"{format_bytes(size)} on {memory.file_system(file)}"}
    if cached < size:
        found["page cache"] = f"{format_bytes(cached)}; the rest is read from the disk when it is loaded"
    else:
        memory.advise(region, POPULATE_READ)
        huge = memory.huge_bytes(region)
        found["page cache"] = "all" if huge is None else f"all, {format_bytes(huge)} in huge pages"
    found["huge pages"] = memory.refusal() or f"{setting('enabled')}, for tmpfs {setting('shmem_enabled')}"
    found["free"] = format_bytes(memory.free_bytes())
    return found


def collapse_copies(num_bytes: int, placement: WeightPlacement) -> WeightPages:
    """Put a library's copies of weights into huge pages: what this process has in large writable mappings.

    num_bytes   of the file that the library has read

    No effect for "mapped", and for a small file.
    """
    if sys.platform != "linux" or placement == "mapped" or num_bytes < LEAST_BYTES:
        return WeightPages("copied", num_bytes)
    started, before = time.perf_counter(), _own_huge_bytes()
    for line in _text("/proc/self/maps").splitlines():
        places, access, _, _, inode, *name = line.split()
        begin, end = (int(place, 16) for place in places.split("-"))
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and end - begin >= 2 * HUGE_BYTES:
            for advice in (HUGEPAGE, _COLLAPSE):
                libc().madvise(begin, end - begin, advice)
    huge, refusal = _own_huge_bytes(), SystemMemory().refusal()
    done, reasons = ("collapsed",) if huge > before else (), (refusal,) if refusal else ()
    pages = WeightPages("copied", num_bytes, min(huge, num_bytes), before, time.perf_counter() - started, done, reasons)
    _log.info("weights: %s", pages)
    return pages


def _own_huge_bytes() -> int:
    return huge_bytes_in(_text("/proc/self/smaps_rollup"), 0, 1 << 64)


def is_enough(huge_bytes: int | None, num_bytes: int) -> bool:
    """Whether so many bytes in huge pages are nearly all that a file has room for."""
    return huge_bytes is not None and huge_bytes >= _ENOUGH * (num_bytes // HUGE_BYTES) * HUGE_BYTES


def read_into(file: Path, content: memoryview, begin: int = 0) -> None:
    """Read so many bytes of a file from `begin`. OSError also for one that ends earlier."""
    handle = os.open(file, os.O_RDONLY)
    try:
        done = 0
        while done < len(content):
            count = os.preadv(handle, [content[done : done + _WINDOW_BYTES]], begin + done)
            if count == 0:
                raise OSError(0, f"the file ends after {begin + done} of {begin + len(content)} bytes")
            done += count
    finally:
        os.close(handle)


def huge_bytes_in(smaps: str, begin: int, end: int) -> int:
    """Bytes in huge pages of the mappings from `begin` to `end`, from the text of /proc/PID/smaps."""
    total, counts = 0, False
    for line in smaps.splitlines():
        first = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if first:
            counts = begin <= int(first[1], 16) < end
        elif counts and line.startswith(("FilePmdMapped:", "ShmemPmdMapped:", "AnonHugePages:")):
            total += int(line.split()[1]) * 1024
    return total


def setting(name: str, root: Path = Path("/")) -> str:
    """Return a setting of transparent huge pages, such as madvise; empty on a kernel without it.

    root   the folder in which /sys is
    """
    return _text(root / _SETTINGS.relative_to("/") / name).partition("[")[2].partition("]")[0]


def _text(path: Path | str) -> str:
    try:
        return Path(path).read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _mapped(size: int, protection: int, flags: int, handle: int) -> Region:
    """Map at a multiple of a huge page: the place is found by mapping more, which is unmapped again."""
    system, space = libc(), round_up(size, _PAGE_BYTES) + HUGE_BYTES
    base = checked_address(system.mmap(None, space, 0, _PRIVATE_ANONYMOUS, -1, 0))
    address = round_up(base, HUGE_BYTES)
    try:
        checked_address(system.mmap(address, size, protection, flags | _FIXED, handle, 0))
    except OSError:
        system.munmap(base, space)
        raise
    end = address + round_up(size, _PAGE_BYTES)
    for begin, length in ((base, address - base), (end, base + space - end)):
        if length:
            system.munmap(begin, length)
    content = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(content, system.munmap, address, size).atexit = False
    view = memoryview(content).cast("B")
    return Region(address, view if protection & mmap.PROT_WRITE else view.toreadonly())


def checked_address(address: int | None) -> int:
    """The address that mmap returned; OSError where it failed."""
    if address is None or address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, for calls that Python's modules lack."""
    library = ctypes.CDLL(None, use_errno=True)
    place, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype, library.mmap.argtypes = place, (place, length, number, number, number, ctypes.c_long)
    library.munmap.argtypes = (place, length)
    library.madvise.argtypes = (place, length, number)
    library.mincore.argtypes = (place, length, ctypes.c_void_p)
    library.prctl.argtypes = (number, *[ctypes.c_ulong] * 4)
    return library
