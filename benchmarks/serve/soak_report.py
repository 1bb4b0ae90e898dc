"""The report of a soak: what requests ended how, and by how much the memory of both processes grew."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.serve.fuzz import LEFT

SAMPLE_SECONDS = 10.0
_WARM_UP_SHARE = 0.25
_MOST_GROWTH_SHARE = 0.02  # of the resident memory, in an hour
_MEMORY = {"server": "process_resident_memory_bytes", "engine": "ingot_engine_resident_bytes"}


@dataclass
class Outcome:
    """Requests by kind and end, faults, and samples of (seconds, metrics)."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    output_tokens: int = 0
    faults: list[str] = field(default_factory=list)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)


def facts_of(
    outcome: Outcome, left: dict[str, float], growing: Collection[str] = ("server", "engine")
) -> dict[str, object]:
    """The report of a run, as JSON writes it. `growing`: the processes whose memory may not grow."""
    requests: dict[str, dict[str, int]] = {}
    for (kind, end), number in sorted(outcome.requests.items()):
        requests.setdefault(kind, {})[end] = number
    since = _WARM_UP_SHARE * outcome.samples[-1][0]
    samples = [(seconds, metrics) for seconds, metrics in outcome.samples if seconds >= since]
    memory = {}
    for process in growing:
        name = _MEMORY[process]
        resident = [metrics[name] for _, metrics in samples]
        grown, middle = growth([seconds for seconds, _ in samples], resident), float(np.median(resident))
        memory[process] = {
            "resident_mib": round(middle / (1 << 20), 1),
            "resident_mib_every_minute": [round(each / (1 << 20), 2) for each in resident[::6]],
            "growth_mib_per_hour": round(grown.per_hour / (1 << 20), 3),
            "growth_mib_per_hour_95_percent": [round(each / (1 << 20), 3) for each in (grown.lower, grown.upper)],
        }
        if grown.lower > _MOST_GROWTH_SHARE * middle:
            outcome.faults.append(f"the memory of the {process} grows by {grown.per_hour / (1 << 20):.1f} MiB an hour")
    gaps = np.diff([seconds for seconds, _ in outcome.samples])
    return {
        "samples_used": len(samples),
        "stopped_seconds": round(float(np.sum(gaps[gaps > 2 * SAMPLE_SECONDS]))),
        "requests": requests,
        "num_requests": sum(outcome.requests.values()),
        "output_tokens": outcome.output_tokens,
        "memory": memory,
        "open_files_first_and_last": [samples[place][1].get("process_open_fds") for place in (0, -1)],
        "refused": left.get("ingot_turned_away_total"),
        "failed": left.get("ingot_failed_requests_total"),
        "left": {name: left.get(name) for name in LEFT},
        "num_faults": len(outcome.faults),
        "faults": outcome.faults[:20],
    }


@dataclass(frozen=True)
class Growth:
    """Bytes an hour, and the 95 % interval."""

    per_hour: float
    lower: float
    upper: float


def growth(seconds: Sequence[float], values: Sequence[float], seed: int = 0, rounds: int = 200) -> Growth:
    """The Theil-Sen slope of a series, and the interval of a bootstrap over blocks of its residuals."""
    times, found = np.asarray(seconds), np.asarray(values)
    slope = _slope(times, found)
    line = np.median(found - slope * times) + slope * times
    residuals, rng = found - line, np.random.default_rng(seed)
    length = max(1, round(len(times) ** 0.5))
    slopes = []
    for _ in range(rounds):
        starts = rng.integers(0, len(times) - length + 1, -(-len(times) // length))
        places = (starts[:, None] + np.arange(length)).ravel()[: len(times)]
        slopes.append(_slope(times, line + residuals[places]))
    lower, upper = np.quantile(slopes, [0.025, 0.975])
    return Growth(3600 * slope, 3600 * float(lower), 3600 * float(upper))


def _slope(times: "np.ndarray[Any, Any]", values: "np.ndarray[Any, Any]") -> float:
    first, second = np.triu_indices(len(times), 1)
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))
