"""The machine during a measurement: memory read bandwidth, memory of a process, and cores that other processes use.

bandwidth.c measures the bandwidth; it is compiled for this machine with the C compiler that CC names (default: cc). The
load of other processes is read from Linux's /proc; on other systems every measurement counts as undisturbed.
"""

import ctypes
import functools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Several times the last-level cache of a large server, so that memory is measured.
BUFFER_BYTES = 1 << 30
_SOURCE = Path(__file__).with_name("bandwidth.c")
_STAT = Path("/proc/stat")
_IDLE_COLUMNS = (3, 4)  # idle, iowait
_GUEST_COLUMN = 8  # guest time is counted in user time already


def measure_read_bandwidth(threads: int, repeats: int = 7, buffer_bytes: int = BUFFER_BYTES) -> float:
    """Return the best of `repeats` streaming reads of a buffer, in bytes per second.

    The best, not the median: the machine's limit, which decode is compared with. Raises RuntimeError when there is no
    C compiler or the threads cannot be started.
    """
    stream_read = _compiled()
    buffer = np.ones(buffer_bytes // 8, dtype=np.uint64)  # written, so that every page is allocated
    checksum = ctypes.c_uint64()
    seconds = [
        stream_read(ctypes.c_void_p(buffer.ctypes.data), buffer.nbytes, threads, ctypes.byref(checksum))
        for _ in range(repeats)
    ]
    if min(seconds) <= 0:
        raise RuntimeError(f"cannot read memory with {threads} threads; allowed are 1 to 256")
    return float(buffer.nbytes / min(seconds))


@functools.cache
def _compiled() -> "ctypes._NamedFuncPointer":
    """Compile bandwidth.c for this machine and return its one function."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "bandwidth.so"
        compiler = shlex.split(os.environ.get("CC", "cc"))
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        command = [*compiler, *flags, str(_SOURCE), "-o", str(library)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise RuntimeError(f"no C compiler {compiler[0]!r} to measure bandwidth with; set CC") from error
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{error.stderr}") from error
        function = ctypes.CDLL(str(library)).stream_read
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return function


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of processor time up to now, of the whole machine and of one process with all its threads."""

    at: float
    machine: float
    process: float


def read_times(pid: int) -> CpuTimes | None:
    """A snapshot; None without /proc."""
    if not _STAT.is_file():
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    process = Path(f"/proc/{pid}/stat").read_text("utf-8")
    return CpuTimes(time.monotonic(), busy_ticks(_STAT.read_text("utf-8")) / ticks, process_ticks(process) / ticks)


def busy_ticks(stat: str) -> int:
    """Ticks that the machine's processors were not idle, from the first line of /proc/stat."""
    columns = [int(column) for column in stat.partition("\n")[0].split()[1:]]
    return sum(columns[:_GUEST_COLUMN]) - sum(columns[column] for column in _IDLE_COLUMNS)


def process_ticks(stat: str) -> int:
    """User and system ticks of a process and of its ended children, from its /proc/PID/stat.

    An adapter may run another program for each measurement. The name may hold spaces and brackets.
    """
    columns = stat.rpartition(")")[2].split()
    return sum(int(column) for column in columns[11:15])


def other_cores(before: CpuTimes | None, after: CpuTimes | None) -> float:
    """Cores that all other processes kept busy between two snapshots: 0.5 is half of one core's time."""
    if before is None or after is None or after.at <= before.at:
        return 0.0
    others = (after.machine - before.machine) - (after.process - before.process)
    return max(0.0, others / (after.at - before.at))


@dataclass(frozen=True)
class Memory:
    """Bytes of a process: resident, its share of pages that others map too, its own pages, and the most resident ever.

    `anonymous_bytes` are the pages that no file holds: what the process cannot give back under pressure. `huge_bytes`
    are mapped in huge pages, of a file or not.
    """

    rss_bytes: int
    pss_bytes: int
    private_bytes: int
    anonymous_bytes: int
    peak_rss_bytes: int
    huge_bytes: int


def read_memory(pid: int) -> Memory | None:
    """Memory of a process; None without /proc."""
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    if not rollup.is_file():
        return None
    sizes = kilobytes(rollup.read_text("utf-8")) | kilobytes(Path(f"/proc/{pid}/status").read_text("utf-8"))
    return Memory(
        rss_bytes=sizes["Rss"],
        pss_bytes=sizes["Pss"],
        private_bytes=sizes["Private_Clean"] + sizes["Private_Dirty"],
        anonymous_bytes=sizes["Anonymous"],
        peak_rss_bytes=sizes["VmHWM"],
        huge_bytes=sum(sizes.get(name, 0) for name in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")),
    )


def kilobytes(text: str) -> dict[str, int]:
    """Bytes of the lines `Name:  123 kB` of a file in /proc."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Processes that spin, each on whichever core the system gives it, and end with this process at the latest."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100_000))"
    spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
