"""How much data reached each layer, and what is said when it was too little: one warning a build, with numbers."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ingot.passes.calibration import Float64Array

_log = logging.getLogger("ingot.pipeline")
_NAMED = 3


@dataclass(frozen=True)
class Reach:
    """Of the layers that read one value: rows and channels of it, and channels that are zero on all rows."""

    layer: str
    tokens: int
    channels: int
    silent: int

    @classmethod
    def of(cls, layer: str, tokens: int, sizes: Float64Array) -> "Reach":
        """From a number per channel [in] that is 0 where the channel never fires."""
        return cls(layer, tokens, len(sizes), int(np.count_nonzero(sizes == 0)))


@dataclass
class ReachLog:
    """What was seen on the ways through a model; says a thing once."""

    seen: dict[str, Reach] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def add(self, reach: Reach) -> None:
        """Remember what reached a layer."""
        self.seen[reach.layer] = reach

    def warn(self) -> None:
        """At the end of a way."""
        parts = [part for part in (says(self.seen.values()) for says in (_few, _dead, _silent)) if part]
        message = "; ".join(parts)
        if message and message not in self._said:
            self._said.add(message)
            _log.warning("calibration: %s", message)


def _few(seen: Iterable[Reach]) -> str:
    few = [reach for reach in seen if reach.tokens < reach.channels]
    if not few:
        return ""
    named = [f"{reach.layer} ({reach.tokens:,} tokens, {reach.channels:,} channels)" for reach in few]
    most = max(reach.channels for reach in few)
    return (
        f"fewer tokens than input channels reach {_layers(named)}; X^T X says nothing of the rest. Raise "
        f"calibration.sequences or sequence_tokens until {most:,} tokens and more reach each, better ten times as many"
    )


def _dead(seen: Iterable[Reach]) -> str:
    named = [f"{reach.layer} ({reach.channels:,} channels)" for reach in seen if reach.silent == reach.channels]
    return f"nothing but zeros reaches {_layers(named)}; its weights are rounded without data" if named else ""


def _silent(seen: Iterable[Reach]) -> str:
    silent = [reach for reach in seen if 0 < reach.silent < reach.channels]
    if not silent:
        return ""
    named = [f"{reach.layer} ({reach.silent:,} of {reach.channels:,})" for reach in silent]
    total = sum(reach.silent for reach in silent)
    where = f"{total:,} input channels are zero on all of the data, in {_layers(named)}"
    return f"{where}; their weights are rounded without it"


def _layers(named: list[str]) -> str:
    more = f" and {len(named) - _NAMED:,} more" if len(named) > _NAMED else ""
    return f"{', '.join(named[:_NAMED])}{more}"
