"""Figures and their summary: spread, share of the GPU's peaks, the goals, and a table next to torch's times."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.journal import PartLog
from benchmarks.gpu.parts import Record

Figure = dict[str, Any]
_SHOWN_ERRORS = 5  # of a part
_HEADLINE = "llama-3.1-8b"


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
    """The GPU's measured rates; not a number, as is all that is computed from it, where nothing was measured.

    bytes_per_second     a large copy within the device, bytes read plus bytes written
    flops_per_second     a large matmul of 16-bit matrices of random numbers
    to_device, to_host   bytes per second of large copies from and to pinned memory
    """

    bytes_per_second: float
    flops_per_second: float
    to_device: float
    to_host: float


@dataclass(frozen=True)
class Work:
    """The minimum work: bytes that must move through the device's memory, and operations."""

    bytes: float
    flops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def floor_seconds(self, peaks: Peaks) -> float:
        """Lower bound of the time: the slower of bytes and operations."""
        return max(self.bytes / peaks.bytes_per_second, self.flops / peaks.flops_per_second)

    def record(self, seconds: Spread, peaks: Peaks) -> Record:
        """Time, its lower bound, and their ratio: 1 is all that the GPU can do."""
        floor = self.floor_seconds(peaks)
        return {
            "seconds": seconds.record(),
            "bytes": self.bytes,
            "flops": self.flops,
            "floor_seconds": floor,
            "share_of_roofline": floor / seconds.median,
            "bound": None
            if math.isnan(floor)
            else "bytes"
            if self.bytes / peaks.bytes_per_second >= floor
            else "flops",
        }


@dataclass(frozen=True)
class Goal:
    """One goal and its measurement; `measured` is None if nothing was measured."""

    name: str
    limit: float
    bound: str
    measured: float | None

    def record(self) -> Record:
        """For JSON."""
        measured = None if self.measured is None or math.isnan(self.measured) else self.measured
        met = None
        if measured is not None:
            met = measured >= self.limit if self.bound == "min" else measured <= self.limit
        return {"goal": self.name, "bound": self.bound, "limit": self.limit, "measured": measured, "met": met}


def peaks_of(records: Sequence[Figure]) -> Peaks:
    """The rates that the part "hardware" measured."""
    rates: dict[str, float] = {}
    for record in records:
        if record.get("figure") == "rate":
            kind = str(record["name"]).split()[0] if str(record["name"]).startswith("matmul") else record["name"]
            rates[kind] = max(rates.get(kind, 0.0), record["per_second"])
    return Peaks(
        *(rates.get(name, math.nan) for name in ("within the device", "matmul", "to the device", "to the host"))
    )


def goals(records: Sequence[Figure], wrong: float | None) -> list[Record]:
    """The goals that the figures are compared with; `wrong` counts what the parts that prove the kernels found."""
    decode = _find(records, "step", program=f"{_HEADLINE}-int4-kv-16-bit", bucket="decode-1")
    attention = _all(records, "attention", program=f"{_HEADLINE}-16-bit-kv-16-bit")
    longest = max(attention, key=lambda one: int(one["context"]), default=None)
    prefill = _find(records, "step", program=f"{_HEADLINE}-16-bit-kv-16-bit", bucket="ragged-4096")
    restored = [one["share_of_link"] for one in _all(records, "offload", way="restore")]
    waits = [one["steps_waited_for_python"] for one in _all(records, "gap", program=f"{_HEADLINE}-int4-kv-16-bit")]
    found = (
        Goal("kernels and models that are wrong or failed", 0, "max", wrong),
        Goal(
            "int4 8B decode, batch 1: time over weight bytes / bandwidth",
            1.4,
            "max",
            None if decode is None else float(decode["over_weights"]),
        ),
        Goal("decode attention at 32k: share of bandwidth", 0.8, "min", _share(longest)),
        Goal("prefill of 4096: share of the matmul peak", 0.6, "min", _share(prefill)),
        Goal("restore from host: share of the link", 0.8, "min", min(restored, default=None)),
        Goal("steps of int4 8B at batch 64 where the GPU waited for Python", 0, "max", max(waits, default=None)),
    )
    return [goal.record() for goal in found]


def summary(records: Sequence[Figure], reached: Sequence[Record], logs: Mapping[str, PartLog]) -> str:
    """A short text: parts, goals, steps next to torch's, the kernels farthest from their rooflines."""
    sections = (_part_lines(logs), _goal_lines(reached), _step_lines(records), _kernel_lines(records))
    return "\n\n".join("\n".join(lines) for lines in sections)


def _part_lines(logs: Mapping[str, PartLog]) -> Iterator[str]:
    """How each part ended, and what is wrong, failed or did not run."""
    for name, log in logs.items():
        word = log.status if log.status == "done" else log.status.upper()
        done = len(log.names) - len(log.left)
        yield f"{word:10} {name}: {done} of {len(log.names)} tasks, {log.seconds:.0f} s"
        if log.broken:
            yield f"{'':10}   broke: {_last_line(log.broken)}"
        problems = [f"{task}: {_last_line(error)}" for task, error in log.errors.items()]
        problems += [f"{task}: beyond its limit" for task in log.wrong]
        problems += [f"{task}: did not run" for task in log.left]
        yield from (f"{'':10}   {problem}" for problem in problems[:_SHOWN_ERRORS])
        if len(problems) > _SHOWN_ERRORS:
            yield f"{'':10}   and {len(problems) - _SHOWN_ERRORS} more"


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:160]


def _goal_lines(reached: Sequence[Record]) -> Iterator[str]:
    for goal in reached:
        measured = "not measured" if goal["measured"] is None else f"{goal['measured']:.3g}"
        verdict = {True: "met", False: "NOT MET", None: "-"}[goal["met"]]  # type: ignore[index]
        yield f"{verdict:8} {goal['goal']}: {measured} ({goal['bound']} {goal['limit']})"


def _step_lines(records: Sequence[Figure]) -> Iterator[str]:
    yield f"{'step':48} {'ours ms':>9} {'roofline':>9} {'torch ms':>9} {'torch/ours':>10}"
    for one in _all(records, "step"):
        if "seconds" in one:
            ours = one["seconds"]["median"]
            torch = _torch(records, one)
            torch_columns = f"{torch * 1e3:9.3f} {torch / ours:10.2f}" if torch else f"{'-':>9} {'-':>10}"
            name = f"{one['program']} {one['bucket']}"
            yield f"{name:48} {ours * 1e3:9.3f} {one['share_of_roofline']:9.2f} {torch_columns}"
    for one in _all(records, "attention"):
        name = f"{one['program']} attention {one['context']}"
        yield f"{name:48} {one['seconds']['median'] * 1e3:9.3f} {one['share_of_roofline']:9.2f}"


def _torch(records: Sequence[Figure], ours: Figure) -> float | None:
    """Torch's best time for the same step."""
    program = str(ours["program"])
    times = [
        float(one["seconds"]["median"])
        for one in _all(records, "torch step", phase=ours["phase"], rows=ours["rows"])
        if "seconds" in one and program.startswith(f"{one['model']}-{one['weights']}-")
    ]
    return min(times, default=None)


def _kernel_lines(records: Sequence[Figure]) -> Iterator[str]:
    """Kernels by their time beyond the lower bound."""
    kernels = [one for one in _all(records, "kernel") if str(one["program"]).startswith(_HEADLINE)]
    kernels.sort(key=lambda one: one["launches"] * (one["floor_seconds"] - one["seconds"]["median"]))
    yield f"{'kernels that cost most beyond their floors':90} {'us':>9} {'roofline':>9}"
    for one in kernels[:16]:
        name = f"{one['program']} {one['bucket']} {one['kernel']}"
        yield f"{name[:90]:90} {one['seconds']['median'] * 1e6:9.1f} {one['share_of_roofline']:9.2f}"


def _all(records: Sequence[Figure], figure: str, **facts: object) -> list[Figure]:
    return [
        one
        for one in records
        if one.get("figure") == figure and all(one.get(key) == value for key, value in facts.items())
    ]


def _find(records: Sequence[Figure], figure: str, **facts: object) -> Figure | None:
    found = [one for one in _all(records, figure, **facts) if "seconds" in one]
    return found[0] if found else None


def _share(one: Figure | None) -> float | None:
    return None if one is None or "share_of_roofline" not in one else float(one["share_of_roofline"])
