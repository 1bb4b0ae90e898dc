"""Step times from a profile of a GPU by layer: a folder of tables, as LLMServingSim's profiler writes it.

    dense.csv           layer, tokens, time_us          of layers whose time follows from the tokens of a step
    per_sequence.csv    layer, sequences, time_us       of those that compute one row for each sequence
    attention.csv       prefill_chunk, kv_prefill, n_decode, kv_decode, time_us
    skew_fit.csv        pc, n_label, skew_rate_label, kv_big_label, kp_label, alpha; may be missing

Between points of the tables times are interpolated, beyond them extrapolated; the profile is of one layer, so a model
has its times as often as it has layers. Several chunks of prompts in a step count as one chunk, whose context gives the
same number of attended tokens. Attention over contexts of several lengths takes the time of as many contexts of the
mean length, and a share, alpha, of what it would take longer if all were as long as the longest.
"""

import csv
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan, prod
from pathlib import Path

from ingot.errors import DataError
from ingot.planning.step_model import StepShape

_ONCE = ("embedding", "final_layernorm")
_TWICE = ("layernorm",)  # before attention and before the feed-forward part
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_SKEW = ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label")
_LABEL = re.compile(r"[a-zA-Z]*(<=|>|=)(\d+)([k%]?)")
_UNITS = {"": 1.0, "k": 1024.0, "%": 0.01}
_MOST_ROWS = 1_000_000


@dataclass(frozen=True)
class TimesOfSizes:
    """Times at points of one axis, linear between them."""

    points: Sequence[float]
    values: Sequence[float]

    def at(self, point: float) -> float:
        """Return the time at a point; beyond the last, on the line through the last two."""
        low, share = _bracket(self.points, point)
        high = min(low + 1, len(self.values) - 1)
        return max(0.0, self.values[low] + share * (self.values[high] - self.values[low]))


@dataclass(frozen=True)
class LayerProfile:
    """Predicts steps of a model of so many equal layers. Implements `StepPredictor`.

    overhead_seconds  of a step, that no kernel of the profile has
    """

    num_layers: int
    dense: Mapping[str, TimesOfSizes]
    per_sequence: Mapping[str, TimesOfSizes]
    attention: Mapping[tuple[float, ...], float]
    axes: tuple[Sequence[float], ...]
    skews: Mapping[tuple[float, ...], float]
    skew_bounds: tuple[Sequence[float], ...]
    overhead_seconds: float = 0.0

    @classmethod
    def read(cls, folder: Path, num_layers: int, overhead_seconds: float = 0.0) -> "LayerProfile":
        """Read the tables of a folder. DataError names the file, line and value that is wrong."""
        dense = _curves(folder / "dense.csv", "tokens")
        per_sequence = _curves(folder / "per_sequence.csv", "sequences")
        attention = {
            tuple(row[name] for name in _ATTENTION): row["time_us"]
            for row in _rows(folder / "attention.csv", (*_ATTENTION, "time_us"))
        }
        axes = tuple(sorted({0.0, *(key[place] for key in attention)}) for place in range(len(_ATTENTION)))
        skews = _skews(folder / "skew_fit.csv")
        bounds = tuple(sorted({key[place] for key in skews}) for place in range(len(_SKEW)))
        return cls(num_layers, dense, per_sequence, attention, axes, skews, bounds, overhead_seconds)

    def seconds(self, step: StepShape) -> float:
        """Return the seconds of a step."""
        once = sum(self.dense[name].at(step.rows) for name in _ONCE if name in self.dense)
        layer = sum(
            curve.at(step.rows) * (2 if name in _TWICE else 1)
            for name, curve in self.dense.items()
            if name not in _ONCE
        )
        heads = sum(curve.at(step.num_sequences) for curve in self.per_sequence.values())
        layers = self.num_layers * (layer + self._attention(step))
        return self.overhead_seconds + (once + layers + heads) * 1e-6

    def _attention(self, step: StepShape) -> float:
        chunk, rows = step.prefill_tokens, step.decode_rows
        before = max(0.0, step.prefill_context_tokens / chunk - (chunk + 1) / 2) if chunk else 0.0
        mean = step.context_tokens / rows if rows else 0.0
        seconds = self._interpolated((chunk, before, rows, mean))
        if step.longest_context <= mean:
            return seconds
        alpha = self._alpha((chunk, rows, mean / step.longest_context, step.longest_context, before))
        longest = self._interpolated((chunk, before, rows, step.longest_context)) if alpha else seconds
        return max(0.0, seconds + alpha * (longest - seconds))

    def _alpha(self, at: tuple[float, ...]) -> float:
        """Return the share of the bucket that a step is in; 0 where the profile has none."""
        if not self.skews:
            return 0.0
        places = (bisect_left(bounds, value) for bounds, value in zip(self.skew_bounds, at, strict=True))
        key = (bounds[min(place, len(bounds) - 1)] for bounds, place in zip(self.skew_bounds, places, strict=True))
        return self.skews.get(tuple(key), 0.0)

    def _interpolated(self, at: tuple[float, ...]) -> float:
        """Return the time at a point of the grid's four axes, from the corners of its cell."""
        brackets = [_bracket(axis, value) for axis, value in zip(self.axes, at, strict=True)]
        total = 0.0
        for corner in range(1 << len(at)):
            sides = [corner >> place & 1 for place in range(len(at))]
            weight = prod(share if side else 1 - share for side, (_, share) in zip(sides, brackets, strict=True))
            if weight:
                places = [low + side for side, (low, _) in zip(sides, brackets, strict=True)]
                total += weight * self._cell(tuple(axis[at] for axis, at in zip(self.axes, places, strict=True)))
        return max(0.0, total)

    def _cell(self, key: tuple[float, ...]) -> float:
        """Return the time at a point of the grid; of one that was not measured, prefill and decode on their own."""
        chunk, before, rows, context = key
        if not chunk:
            key = (0.0, 0.0, rows, context if rows else 0.0)
        elif not rows:
            key = (chunk, before, 0.0, 0.0)
        if key in self.attention or not (chunk or (rows and context)):
            return self.attention.get(key, 0.0)
        if chunk and rows:
            return self._cell((chunk, before, 0.0, 0.0)) + self._cell((0.0, 0.0, rows, context))
        return self._scaled(key)

    def _scaled(self, key: tuple[float, ...]) -> float:
        """Return the time of an unmeasured prefill or decode, in proportion to the largest that was measured."""
        chunk, before, rows, context = key
        wanted = chunk * (before + chunk) if chunk else rows * context
        nearest, best = 0.0, 0.0
        for other, seconds in self.attention.items():
            if (other[0] > 0) == (chunk > 0) and (other[2] > 0) == (rows > 0):
                size = other[0] * (other[1] + other[0]) if chunk else other[2] * other[3]
                if best < size <= wanted:
                    nearest, best = seconds, size
        return nearest * wanted / best if best else 0.0


def _bracket(points: Sequence[float], value: float) -> tuple[int, float]:
    """Return the place of the point below a value, and the value's share of the way to the next."""
    if len(points) == 1:
        return 0, 0.0
    low = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return low, (value - points[low]) / (points[low + 1] - points[low])


def _curves(path: Path, axis: str) -> dict[str, TimesOfSizes]:
    found: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for number, row in enumerate(_table(path), 2):
        point, seconds = (_number(path, number, name, row.get(name)) for name in (axis, "time_us"))
        found[row.get("layer") or ""][point] = seconds
    return {
        name: TimesOfSizes([*sorted(times)], [times[each] for each in sorted(times)]) for name, times in found.items()
    }


def _skews(path: Path) -> dict[tuple[float, ...], float]:
    """Return the alpha of each bucket, by the upper bounds of its chunk, rows, skew, longest and earlier context."""
    if not path.exists():
        return {}
    found = {}
    for number, row in enumerate(_table(path), 2):
        key = tuple(_bound(path, number, name, row.get(name)) for name in _SKEW)
        found[key] = _number(path, number, "alpha", row.get("alpha"), least=-inf)
    return found


def _bound(path: Path, line: int, column: str, text: str | None) -> float:
    """Return the upper bound that a label such as kvB<=4k states; infinite for one without."""
    if column == "pc":
        return _number(path, line, column, text)
    matched = _LABEL.fullmatch(text or "")
    if not matched:
        raise DataError(f"{path}:{line}: {column} is {text!r}; it must be a bound such as n<=32, kvB<=4k or sr>70%")
    return inf if matched[1] == ">" else float(matched[2]) * _UNITS[matched[3]]


def _rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, float]]:
    """Yield the rows of a table as numbers."""
    for number, row in enumerate(_table(path), 2):
        yield {column: _number(path, number, column, row.get(column)) for column in columns}


def _table(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                if number > _MOST_ROWS:
                    raise DataError(f"{path} has more than {_MOST_ROWS:,} lines; it is not a profile")
                yield row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"the profile {path} cannot be read: {error}") from None


def _number(path: Path, line: int, column: str, text: str | None, least: float = 0.0) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = nan
    if not (isfinite(number) and number >= least):
        raise DataError(f"{path}:{line}: {column} is {text!r}; it must be a number{' from 0 on' if not least else ''}")
    return number
