"""How busy other processes keep the machine while an engine is measured, so that a disturbed figure can be told.

Read from Linux's /proc; on other systems nothing is known, and every measurement counts as undisturbed.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE_COLUMNS = (3, 4)  # idle, iowait
_GUEST_COLUMN = 8  # guest time is counted in user time already


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of processor time up to now: of the whole machine, and of one process with all its threads."""

    at: float
    machine: float
    process: float


def read_times(pid: int) -> CpuTimes | None:
    """A snapshot; None where /proc does not tell."""
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
    """User and system ticks of a process, from its /proc/PID/stat; its name may hold spaces and brackets."""
    columns = stat.rpartition(")")[2].split()
    return int(columns[11]) + int(columns[12])


def other_cores(before: CpuTimes | None, after: CpuTimes | None) -> float:
    """Cores that all other processes kept busy between two snapshots: 0.5 is half of one core's time."""
    if before is None or after is None or after.at <= before.at:
        return 0.0
    others = (after.machine - before.machine) - (after.process - before.process)
    return max(0.0, others / (after.at - before.at))
