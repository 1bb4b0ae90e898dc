"""The machine that measures: facts about it and its software, and how busy other processes keep it.

Facts are without host name, user or paths, because evidence is shared. The load is measured while latency is:
/proc/stat counts the time that all processors of the machine were busy, `os.times` the part of it that is ours and our
ended children's; the rest is other processes', the kernel's and, on a virtual machine, what the host took away (steal).
"""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from ingot.runtime.executors import DeviceFacts
from ingot.settings import num_threads
from ingot.version import __version__

_CPU_FLAGS = frozenset(
    (
        *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
        *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
        *("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
    )
)
_PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxruntime", "tokenizers", "cuda-bindings")


def environment(threads: int | None = None, device: DeviceFacts | None = None) -> dict[str, Any]:
    """CPU, memory, GPU if one was used, system, Python, packages and engine threads, as plain data."""
    gpu = {"name": device.name, "sm": device.sm, "memory_bytes": device.total_bytes} if device else None
    return {
        "gpu": gpu,
        "cpu": cpu_facts(_read("/proc/cpuinfo")),
        "cores_available": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores_total": os.cpu_count(),
        "memory_bytes": memory_bytes(_read("/proc/meminfo")),
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "threads": threads or num_threads(),
        "packages": {"ingot": __version__} | {name: found for name in _PACKAGES if (found := _version(name))},
    }


def cpu_facts(cpuinfo: str) -> dict[str, Any]:
    """The model, and the instruction sets that matrix kernels use, from the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    model = fields.get("model name") or fields.get("CPU part") or platform.processor() or "unknown"
    return {"model": model, "flags": sorted(_CPU_FLAGS.intersection(flags))}


def memory_bytes(meminfo: str) -> int | None:
    """MemTotal from the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: str) -> str:
    """Text of a system file; empty if it does not exist."""
    file = Path(path)
    return file.read_text(errors="replace") if file.is_file() else ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; idle and iowait are not, guest is part of user
_TOLERANCE_CORES = 0.25  # kernel threads, and the clock's resolution of 10 ms


@dataclass(frozen=True)
class MachineLoad:
    """Processors that other processes kept busy, on average and in the busiest round.

    others, peak  numbers of processors: 1.5 is one all of the time, and another half of it
    cores         processors of the machine
    threads       how many of them the measured engines compute with
    """

    others: float
    peak: float
    cores: int
    threads: int

    @property
    def is_busy(self) -> bool:
        """Whether other processes needed processors that the measurement needed too."""
        return self.others > max(0, self.cores - self.threads) + _TOLERANCE_CORES

    def __str__(self) -> str:
        """Describe the load in a clause."""
        return f"other processes kept {self.others:.1f} of {self.cores} processors busy (at most {self.peak:.1f})"


@dataclass(frozen=True)
class Reading:
    """Seconds since boot or start: of all processors busy, of this process and its children, of the wall."""

    busy: float
    own: float
    wall: float
    cores: int

    @classmethod
    def now(cls, stat: Path = _STAT, ticks_per_second: int | None = None) -> Self | None:
        """Read the counters; None on a system without them."""
        try:
            lines = stat.read_text().splitlines()
        except OSError:
            return None
        name, *ticks = lines[0].split() if lines else [""]
        if name != "cpu" or len(ticks) <= max(_BUSY) or not all(map(str.isdecimal, ticks)):
            return None
        times = os.times()
        return cls(
            busy=sum(int(ticks[column]) for column in _BUSY) / (ticks_per_second or os.sysconf("SC_CLK_TCK")),
            own=times.user + times.system + times.children_user + times.children_system,
            wall=times.elapsed,
            cores=sum(line.startswith("cpu") for line in lines) - 1,
        )


class LoadMeter:
    """Accumulates the load of other processes over rounds.

    meter = LoadMeter(threads=2)
    for ...:
        meter.start()
        ...
        meter.stop()
    meter.load
    """

    def __init__(self, threads: int, read: Callable[[], Reading | None] = Reading.now) -> None:
        self._threads = threads
        self._read = read
        self._started: Reading | None = None
        self._others = self._wall = self._peak = 0.0
        self._cores = 0

    def start(self) -> None:
        """Start a round."""
        self._started = self._read()

    def stop(self) -> None:
        """End the round and add it."""
        start, end = self._started, self._read()
        if start is None or end is None or end.wall <= start.wall:
            return
        seconds = end.wall - start.wall
        others = max(0.0, (end.busy - start.busy) - (end.own - start.own))
        self._others += others
        self._wall += seconds
        self._peak = max(self._peak, others / seconds)
        self._cores = end.cores

    @property
    def load(self) -> MachineLoad | None:
        """The load of all rounds; None if it cannot be measured here."""
        if not self._wall:
            return None
        return MachineLoad(
            others=round(self._others / self._wall, 2),
            peak=round(self._peak, 2),
            cores=self._cores,
            threads=self._threads,
        )
