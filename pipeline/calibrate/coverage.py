"""Amount of calibration data that reaches each layer, one warning per build when it is too little, and each expert."""

import logging
from collections.abc import Iterable, Iterator, Sequence
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


def count_choices(sequences: Sequence[Int64Array], experts: int) -> LayerChoices:
    """Count a router's choices, ids [tokens, chosen] of each sequence."""
    counts = np.bincount(np.concatenate(sequences).reshape(-1), minlength=experts)
    return LayerChoices(
        chosen=sequences[0].shape[1],
        counts=tuple(map(int, counts)),
        consecutive=_means(_consecutive(sequences, rows) for rows in WINDOWS),
        concurrent=_means(_concurrent(sequences, rows) for rows in WINDOWS),
    )


def _consecutive(sequences: Sequence[Int64Array], rows: int) -> Iterator[Int64Array]:
    """Yield the ids [windows, rows * chosen] of whole windows of so many tokens, sequence by sequence."""
    for ids in sequences:
        yield ids[: len(ids) // rows * rows].reshape(-1, rows * ids.shape[1])


def _concurrent(sequences: Sequence[Int64Array], rows: int) -> Iterator[Int64Array]:
    """Yield the ids [positions, rows * chosen] of groups of so many sequences, which are far apart in the text."""
    groups = len(sequences) // rows
    for first in range(groups):
        group = sequences[first::groups][:rows]
        positions = min(map(len, group))
        yield np.concatenate([ids[:positions] for ids in group], axis=1)


def _means(kinds: Iterable[Iterator[Int64Array]]) -> tuple[float, ...]:
    """Mean numbers of distinct ids in a row, up to the first kind without rows."""
    found = list[float]()
    for kind in kinds:
        number = distinct = 0
        for ids in kind:
            number += len(ids)
            distinct += len(ids) + int(np.count_nonzero(np.diff(np.sort(ids, axis=1), axis=1)))
        if not number:
            break
        found.append(distinct / number)
    return tuple(found)
