"""Amount of calibration data that reaches each layer, one warning per build when it is too little, and each expert."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ingot.artifact.programs.expert_choices import WINDOWS, LayerChoices
from ingot.passes.numerics.arrays import Float64Array
from ingot.passes.numerics.experts import Int64Array

_NUM_NAMED = 3  # layers that a warning names

_log = logging.getLogger("ingot.pipeline")


@dataclass(frozen=True)
class Coverage:
    """Size of a value that layers read: its rows (tokens), its channels, and channels that are zero in every row.

    least_tokens    of an expert that fewer tokens reach, and that is rounded without data; else 0
    """

    layer: str
    tokens: int
    channels: int
    zero_channels: int
    least_tokens: int = 0

    @classmethod
    def of(cls, layer: str, tokens: int, sizes: Float64Array) -> "Coverage":
        """Count channels from one number per channel [in] that is 0 for a channel of zeros."""
        return cls(layer, tokens, len(sizes), int(np.count_nonzero(sizes == 0)))


@dataclass
class CoverageLog:
    """Coverage by layer, over all runs of a build; gives each warning once."""

    seen: dict[str, Coverage] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    def add(self, coverage: Coverage) -> None:
        """Record the coverage of a layer."""
        self.seen[coverage.layer] = coverage

    def warn(self) -> None:
        """Warn of layers that too little data reached; call at the end of a run."""
        calibrated = [coverage for coverage in self.seen.values() if not coverage.least_tokens]
        found = (describe(calibrated) for describe in (_too_few_tokens, _only_zeros, _some_zeros))
        message = "; ".join(filter(None, (_uncalibrated(self.seen.values()), *found)))
        if message and message not in self._warned:
            self._warned.add(message)
            _log.warning("calibration: %s", message)


def _uncalibrated(seen: Iterable[Coverage]) -> str:
    few = [coverage for coverage in seen if coverage.least_tokens]
    if not few:
        return ""
    named = [f"{one.layer} ({one.tokens:,} tokens)" for one in few]
    return (
        f"fewer than {few[0].least_tokens:,} tokens are routed to {_layers(named)}; these experts are rounded to "
        "nearest. Raise calibration.sequences, or lower calibration.expert_tokens"
    )


def _too_few_tokens(seen: Iterable[Coverage]) -> str:
    few = [coverage for coverage in seen if coverage.tokens < coverage.channels]
    if not few:
        return ""
    named = [f"{one.layer} ({one.tokens:,} tokens, {one.channels:,} channels)" for one in few]
    most = max(coverage.channels for coverage in few)
    return (
        f"fewer tokens than input channels reach {_layers(named)}, so that X^T X is singular. Raise "
        f"calibration.sequences or sequence_tokens until each gets at least {most:,} tokens, better ten times as many"
    )


def _only_zeros(seen: Iterable[Coverage]) -> str:
    named = [f"{one.layer} ({one.channels:,} channels)" for one in seen if one.zero_channels == one.channels]
    return f"only zeros reach {_layers(named)}; its weights are rounded without data" if named else ""


def _some_zeros(seen: Iterable[Coverage]) -> str:
    some = [coverage for coverage in seen if 0 < coverage.zero_channels < coverage.channels]
    if not some:
        return ""
    named = [f"{one.layer} ({one.zero_channels:,} of {one.channels:,})" for one in some]
    total = sum(coverage.zero_channels for coverage in some)
    where = f"{total:,} input channels are zero for all tokens, in {_layers(named)}"
    return f"{where}; their weights are rounded without data"


def _layers(named: list[str]) -> str:
    more = f" and {len(named) - _NUM_NAMED:,} more" if len(named) > _NUM_NAMED else ""
    return f"{', '.join(named[:_NUM_NAMED])}{more}"


# Experts


def count_choices(sequences: Iterable[Int64Array], experts: int) -> LayerChoices:
    """Count a router's choices, ids [tokens, chosen] of each sequence."""
    counts, windows = np.zeros(experts, np.int64), np.zeros((len(WINDOWS), 2), np.int64)
    chosen = 0
    for ids in sequences:
        chosen = ids.shape[1]
        counts += np.bincount(ids.reshape(-1), minlength=experts)
        for place, rows in enumerate(WINDOWS):
            whole = ids[: len(ids) // rows * rows].reshape(-1, rows * chosen)
            ordered = np.sort(whole, axis=1)
            windows[place] += len(whole), len(whole) + np.count_nonzero(np.diff(ordered, axis=1))
    means = tuple(int(distinct) / int(number) for number, distinct in windows if number)
    return LayerChoices(chosen=chosen, counts=tuple(map(int, counts)), distinct=means)
