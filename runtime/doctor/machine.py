"""Facts about the machine, from Linux's /proc and /sys: read twice, what happened in between.

Every reading takes the folder in which these trees are, so that tests read trees of their own. What a system does not
have is None or empty.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ingot.runtime.cpu.weight_pages import setting
from ingot.settings import num_threads

_BUSY = (0, 1, 2, 5, 6, 7)  # columns of /proc/stat: user, nice, system, irq, softirq, steal
_NVIDIA, _DISPLAY = "0x10de", "0x03"


@dataclass(frozen=True)
class Link:
    """The PCI Express link of a GPU, in lanes."""

    device: str
    lanes: int
    most_lanes: int


@dataclass(frozen=True)
class Disk:
    """The file system of a folder, in bytes."""

    path: str
    free_bytes: int
    total_bytes: int

    @property
    def is_full(self) -> bool:
        """Whether less than a hundredth of it is free."""
        return self.free_bytes < self.total_bytes / 100


@dataclass(frozen=True)
class MachineReading:
    """One look at the machine. Counters are since its boot or since the start of a control group.

    cores              that this process may use: by affinity, and by the quotas of its control groups
    threads            that an engine computes with by default
    busy_seconds       of all processors together
    swapped_pages      read from and written to swap
    throttled, periods of the control group with the tightest quota: in how many of its periods it was used up
    clock_share        present clock to the highest, over the cores; None where it cannot be read
    huge_pages         the system's setting of transparent huge pages, such as madvise; empty where it has none
    """

    taken_seconds: float
    cores: float
    all_cores: int
    threads: int
    busy_seconds: float | None = None
    own_seconds: float | None = None
    swapped_pages: int | None = None
    free_memory_bytes: int | None = None
    throttled: int = 0
    periods: int = 0
    clock_share: float | None = None
    links: tuple[Link, ...] = ()
    disk: Disk | None = None
    open_files_limit: int | None = None
    huge_pages: str = ""

    @classmethod
    def take(cls, root: Path = Path("/"), disk: Path | None = None) -> Self:
        """Read the machine now. `disk` is the folder of a disk tier."""
        busy, all_cores = _processor_time(root)
        periods, throttled = throttling(root) or (0, 0)
        times = os.times()
        return cls(
            taken_seconds=time.monotonic(),
            cores=usable_cores(root),
            all_cores=all_cores,
            threads=num_threads(),
            busy_seconds=busy,
            own_seconds=times.user + times.system,
            swapped_pages=_swapped_pages(root),
            free_memory_bytes=_free_memory(root),
            throttled=throttled,
            periods=periods,
            clock_share=_clock_share(root),
            links=_links(root),
            disk=_disk(disk),
            open_files_limit=_open_files_limit(root),
            huge_pages=setting("enabled", root),
        )


@dataclass(frozen=True)
class MachineWindow:
    """Two readings, and what happened between them."""

    before: MachineReading
    after: MachineReading

    @property
    def seconds(self) -> float:
        """Time between the readings."""
        return max(1e-9, self.after.taken_seconds - self.before.taken_seconds)

    @property
    def busy_cores(self) -> float | None:
        """Processors that were busy, on average."""
        if self.after.busy_seconds is None or self.before.busy_seconds is None:
            return None
        return (self.after.busy_seconds - self.before.busy_seconds) / self.seconds

    @property
    def swapped_pages_per_second(self) -> float:
        """Pages that were read from swap or written to it."""
        return ((self.after.swapped_pages or 0) - (self.before.swapped_pages or 0)) / self.seconds

    @property
    def throttled_share(self) -> float:
        """Share of the periods of the control group in which its quota was used up."""
        periods = self.after.periods - self.before.periods
        return (self.after.throttled - self.before.throttled) / periods if periods > 0 else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _processor_time(root: Path) -> tuple[float | None, int]:
    lines = _text(root / "proc/stat").splitlines()
    name, *ticks = lines[0].split() if lines else [""]
    if name != "cpu" or len(ticks) <= max(_BUSY):
        return None, os.cpu_count() or 1
    cores = sum(line.startswith("cpu") for line in lines) - 1
    return sum(int(ticks[column]) for column in _BUSY) / os.sysconf("SC_CLK_TCK"), cores


def usable_cores(root: Path = Path("/"), process: int = 0) -> float:
    """Processors that a process may use, by its affinity and by the quotas of this one's control groups. 0: this one.

    OSError when it has ended.
    """
    allowed = len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min((float(allowed), *(cores for cores, _ in _quotas(root))))


def throttling(root: Path = Path("/")) -> tuple[int, int] | None:
    """Periods of the control group with the tightest quota, and those in which it was used up; None without a quota."""
    found = min(_quotas(root), default=None)
    if found is None:
        return None
    facts = _facts(found[1] / "cpu.stat")
    return facts.get("nr_periods", 0), facts.get("nr_throttled", 0)


def _quotas(root: Path) -> list[tuple[float, Path]]:
    """Quotas in processors of this process's control group and of those around it, each with its folder (cgroup v2).

    A container often sees its own group as the root; on a host the quota of a systemd service is further down.
    """
    top = root / "sys/fs/cgroup"
    lines = _text(root / "proc/self/cgroup").splitlines()
    path = Path(next((line[3:] for line in lines if line.startswith("0::")), "/").lstrip("/"))
    inner = () if ".." in path.parts else (path, *path.parents)  # "..": in a group that is not visible from here
    found = []
    for folder in dict.fromkeys((*(top / each for each in inner), top)):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append((int(quota) / int(period), folder))
    return found


def _facts(path: Path) -> dict[str, int]:
    """Lines of a name and a number; a unit after it is left out."""
    found = {}
    for line in _text(path).splitlines():
        name, *values = line.split()
        if values and values[0].isdecimal():
            found[name.rstrip(":")] = int(values[0])
    return found


def _swapped_pages(root: Path) -> int | None:
    facts = _facts(root / "proc/vmstat")
    return facts["pswpin"] + facts["pswpout"] if {"pswpin", "pswpout"} <= facts.keys() else None


def _free_memory(root: Path) -> int | None:
    kibibytes = _facts(root / "proc/meminfo").get("MemAvailable")
    return None if kibibytes is None else kibibytes * 1024


def _clock_share(root: Path) -> float | None:
    shares = []
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"):
        present, most = _number(folder / "scaling_cur_freq"), _number(folder / "cpuinfo_max_freq")
        if present and most:
            shares.append(present / most)
    return sum(shares) / len(shares) if shares else None


def _links(root: Path) -> tuple[Link, ...]:
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _text(folder / "vendor") != _NVIDIA or not _text(folder / "class").startswith(_DISPLAY):
            continue
        lanes, most = _number(folder / "current_link_width"), _number(folder / "max_link_width")
        if lanes and most:
            found.append(Link(folder.name, lanes, most))
    return tuple(found)


def _disk(path: Path | None) -> Disk | None:
    """The file system of a folder; one that does not exist is made in the nearest that does."""
    for each in (path.absolute(), *path.absolute().parents) if path else ():
        try:
            found = os.statvfs(each)
        except FileNotFoundError:
            continue
        except OSError:
            break
        return Disk(str(path), found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
    return None


def _open_files_limit(root: Path) -> int | None:
    for line in _text(root / "proc/self/limits").splitlines():
        if line.startswith("Max open files"):
            soft = line.split()[3]
            return int(soft) if soft.isdecimal() else None
    return None
