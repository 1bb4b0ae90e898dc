"""Costs of verifying drafts, measured while steps run: how much longer a step takes for each number of drafts.

Times grow with the context and differ between machines, engines and numbers of sequences, and on a busy machine single
ones are wrong by a factor. So costs are kept relative to plain steps of the same number of sequences at the same time,
and each is the median of the last few.
"""

from collections import deque
from itertools import pairwise
from statistics import median

_KEPT = 9
_FEWEST = 3
_PLAIN_EVERY = 64  # steps
_FIRST_GUESS = 0.05  # of a plain step, for each draft, until there are measurements


class StepTimes:
    """Seconds of plain steps, and the cost of steps with drafts in units of them."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._last_plain: dict[int, int] = {}
        self._plain: dict[int, deque[float]] = {}
        self._costs: dict[int, _Costs] = {}

    def observe(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Record a step that decoded `num_sequences` sequences, and verified drafts, and did nothing else."""
        group = _group(num_sequences)
        self._num_steps += 1
        if num_drafts == 0:
            self._last_plain[group] = self._num_steps
            self._plain.setdefault(group, deque(maxlen=_KEPT)).append(seconds)
            return
        plain = self.plain_seconds(num_sequences)
        if plain:
            self._costs.setdefault(group, _Costs()).observe(num_drafts, seconds / plain)

    def plain_seconds(self, num_sequences: int) -> float | None:
        """Seconds of a step without drafts; None before there are enough measurements."""
        seconds = self._plain.get(_group(num_sequences), ())
        return median(seconds) if len(seconds) >= _FEWEST else None

    def needs_plain(self, num_sequences: int) -> bool:
        """Whether a plain step is due, because there are too few measurements, or none of the last steps."""
        group = _group(num_sequences)
        is_old = self._num_steps - self._last_plain.get(group, 0) >= _PLAIN_EVERY
        return is_old or len(self._plain.get(group, ())) < _FEWEST

    def costs(self, num_sequences: int, most: int) -> list[float]:
        """Cost of a step with 0 .. `most` drafts, in plain steps: 1 with none."""
        return self._costs.setdefault(_group(num_sequences), _Costs()).upto(most)


class _Costs:
    """Costs by number of drafts: medians where there are measurements, straight lines between them."""

    def __init__(self) -> None:
        self._measured: dict[int, deque[float]] = {}
        self._points: list[tuple[int, float]] = [(0, 1.0)]
        self._line: list[float] = []

    def observe(self, num_drafts: int, cost: float) -> None:
        """Add a measurement. The first of its kind is left out: an engine prepares for a new number of rows."""
        bucket = _bucket(num_drafts)
        if bucket not in self._measured:
            self._measured[bucket] = deque(maxlen=_KEPT)
            return
        self._measured[bucket].append(cost)
        measured = sorted((count, median(costs)) for count, costs in self._measured.items() if costs)
        self._points = [(0, 1.0), *measured]
        self._line = []

    def upto(self, most: int) -> list[float]:
        """Costs of 0 .. `most` drafts."""
        if len(self._line) <= most:
            self._line = self._drawn(max(most, 16))
        return self._line

    def _drawn(self, most: int) -> list[float]:
        line = [1.0]
        for (left, low), (right, high) in pairwise(self._points):
            line += [low + (high - low) * (x - left) / (right - left) for x in range(left + 1, right + 1)]
        last, cost = self._points[-1]
        slope = max(_FIRST_GUESS, (cost - 1) / last) if last else _FIRST_GUESS
        line += [cost + slope * (x - last) for x in range(last + 1, most + 1)]
        return line


def _group(num_sequences: int) -> int:
    """Numbers of sequences whose steps are measured together: up to an eighth apart."""
    step = 1 << max(0, num_sequences.bit_length() - 4)
    return num_sequences // step * step


def _bucket(num_drafts: int) -> int:
    """Numbers of drafts that are measured together: up to a quarter apart."""
    step = 1 << max(0, num_drafts.bit_length() - 3)
    return num_drafts // step * step
