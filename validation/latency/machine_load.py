"""Measures how busy the machine is with other processes while latency is measured.

/proc/stat counts the time that all processors of the machine were busy, `os.times` the part of it that is ours and our
ended children's; the rest is other processes', the kernel's and, on a virtual machine, what the host took away (steal).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
