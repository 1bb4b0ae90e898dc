"""What a measurement on a card comes to: its spread, and its share of what the card could do."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

Record = dict[str, object]


@dataclass(frozen=True)
class Spread:
    """Median of the runs, with the tenth and the ninetieth percentile."""

    median: float
    p10: float
    p90: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        ordered = sorted(values)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
        return cls(statistics.median(ordered), low, high, len(ordered))

    def scaled(self, factor: float) -> "Spread":
        """Every value times a factor."""
        return Spread(self.median * factor, self.p10 * factor, self.p90 * factor, self.runs)

    def record(self) -> Record:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Peaks:
    """What the card was measured to do.

    bytes_per_second     a large copy within the device, bytes read and bytes written counted
    flops_per_second     a large product of 16-bit matrices of random numbers
    to_device, to_host   bytes per second of large copies from and to pinned memory
    """

    bytes_per_second: float
    flops_per_second: float
    to_device: float
    to_host: float


@dataclass(frozen=True)
class Work:
    """The least that has to be done: bytes that must move through the device's memory, operations."""

    bytes: float
    flops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def floor_seconds(self, peaks: Peaks) -> float:
        """No faster than the slower of the two."""
        return max(self.bytes / peaks.bytes_per_second, self.flops / peaks.flops_per_second)

    def record(self, seconds: Spread, peaks: Peaks) -> Record:
        """Time, its floor, and the share of the floor in it: 1 is all that the card can do."""
        floor = self.floor_seconds(peaks)
        return {
            "seconds": seconds.record(),
            "bytes": self.bytes,
            "flops": self.flops,
            "floor_seconds": floor,
            "share_of_roofline": floor / seconds.median,
            "bound": "bytes" if self.bytes / peaks.bytes_per_second >= floor else "flops",
        }
