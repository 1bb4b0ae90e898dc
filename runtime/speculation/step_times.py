"""Costs of speculation, measured while steps run: how much longer a step takes for each number of drafts.

A plain step is one in which the speculator did nothing. One that looked for drafts and verified none is longer by the
look.

Times grow with the context and differ between machines, engines and numbers of sequences, and on a busy machine single
ones are wrong by a factor. So costs are kept relative to plain steps of the same number of sequences at the same time,
and each is the median of the last few.
"""

from collections import deque
from itertools import pairwise

_KEPT = 9
_FEWEST = 3
_PLAIN_EVERY = 128  # steps with a look
SPIKE = 1.5  # a longer time than so many expected ones is a disturbance
_FIRST_GUESS = 0.05  # of a plain step, for each draft, until there are measurements


class _Recent:
    """The median of the last few values; 0 without any."""

    __slots__ = ("_values", "count", "median")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_KEPT)
        self.count = 0
        self.median = 0.0

    def append(self, value: float) -> None:
        """Add a value; the oldest leaves."""
        self._values.append(value)
        self.count = len(self._values)
        self.median = sorted(self._values)[self.count // 2]


class StepTimes:
    """Seconds of plain steps, and the cost of steps with drafts in units of them."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._last_plain: dict[int, int] = {}
        self._plain: dict[int, _Recent] = {}
        self._costs: dict[int, _Costs] = {}

    def observe_plain(self, num_sequences: int, seconds: float) -> None:
        """Record a step that decoded `num_sequences` sequences and did nothing else; the speculator was at rest."""
        group = _group(num_sequences)
        self._last_plain[group] = self._num_steps
        self._plain.setdefault(group, _Recent()).append(seconds)

    def observe(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Record a step that looked for drafts, verified as many, decoded and did nothing else."""
        self._num_steps += 1
        plain = self.plain_seconds(num_sequences)
        if plain:
            self._costs.setdefault(_group(num_sequences), _Costs()).observe(num_drafts, seconds / plain)

    def plain_seconds(self, num_sequences: int) -> float | None:
        """Seconds of a step without drafts; None before there are enough measurements."""
        seconds = self._plain.get(_group(num_sequences))
        return (seconds.median or None) if seconds and seconds.count >= _FEWEST else None

    def needs_plain(self, num_sequences: int) -> bool:
        """Whether a plain step is due, because there are too few measurements, or none of the last steps."""
        group = _group(num_sequences)
        is_old = self._num_steps - self._last_plain.get(group, 0) >= _PLAIN_EVERY
        return is_old or group not in self._plain or self._plain[group].count < _FEWEST

    def costs(self, num_sequences: int, most: int) -> list[float]:
        """Cost of a step that verifies 0 .. `most` drafts, the look for them included, in plain steps."""
        return self._costs.setdefault(_group(num_sequences), _Costs()).upto(most)

    def is_measured(self, num_sequences: int, num_drafts: int) -> bool:
        """Whether the cost of about this many drafts is a measurement."""
        costs = self._costs.get(_group(num_sequences))
        return costs is not None and costs.is_measured(num_drafts)

    def most_measured(self, num_sequences: int) -> int:
        """The largest number of drafts whose cost is a measurement."""
        costs = self._costs.get(_group(num_sequences))
        return costs.most_measured if costs else 0


class DraftTimes:
    """Times of a draft model, from the calls that made drafts."""

    def __init__(self) -> None:
        self._steps = _Recent()
        self._tokens = _Recent()

    def observe(self, seconds: float, num_steps: int, catch_up_tokens: int) -> float:
        """Record a call that took `num_steps` steps; the first of them also caught up with many tokens, if not 0.

        Returns the seconds without what a busy machine added, as far as that can be told.
        """
        expected = num_steps * self.step_seconds + self.catch_up_seconds(catch_up_tokens)
        is_known = self._tokens.count if catch_up_tokens else self._steps.count
        if catch_up_tokens:
            self._tokens.append(max(0.0, seconds - num_steps * self.step_seconds) / catch_up_tokens)
        elif num_steps:
            self._steps.append(seconds / num_steps)
        return min(seconds, SPIKE * expected) if is_known else seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of a step that makes one draft for each sequence; 0 before it is measured."""
        return self._steps.median

    def catch_up_seconds(self, num_tokens: int, guess: float = 0.0) -> float:
        """Seconds to compute this many tokens; `guess` for each before it is measured."""
        return (self._tokens.median or guess) * num_tokens


class _Costs:
    """Costs by number of drafts: medians where there are measurements, straight lines between them."""

    def __init__(self) -> None:
        self._measured: dict[int, _Recent] = {}
        self._points: list[tuple[int, float]] = [(0, 1.0)]
        self._line: list[float] = []

    def observe(self, num_drafts: int, cost: float) -> None:
        """Add a measurement. The first of its kind is left out: an engine prepares for a new number of rows."""
        bucket = _bucket(num_drafts)
        if bucket not in self._measured:
            self._measured[bucket] = _Recent()
            return
        self._measured[bucket].append(cost)
        medians = {drafts: costs.median for drafts, costs in self._measured.items() if costs.count}
        self._points = sorted(({0: 1.0} | medians).items())
        self._line = []

    def is_measured(self, num_drafts: int) -> bool:
        """Whether there is a measurement of about this many drafts."""
        measured = self._measured.get(_bucket(num_drafts))
        return measured is not None and measured.count > 0

    @property
    def most_measured(self) -> int:
        """The largest number of drafts with a measurement; 0 without any."""
        return self._points[-1][0]

    def upto(self, most: int) -> list[float]:
        """Costs of 0 .. `most` drafts."""
        if len(self._line) <= most:
            self._line = self._drawn(max(most, 16))
        return self._line

    def _drawn(self, most: int) -> list[float]:
        line = [self._points[0][1]]
        for (left, low), (right, high) in pairwise(self._points):
            line += [low + (high - low) * (x - left) / (right - left) for x in range(left + 1, right + 1)]
        last, cost = self._points[-1]
        slope = max(_FIRST_GUESS, (cost - line[0]) / last) if last else _FIRST_GUESS
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
