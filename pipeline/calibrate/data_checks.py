"""How much data reached each layer, and what is said when it was too little: one warning a build, with numbers.

Whether a text is written in an alphabet that the tokenizer knows.

A token says nothing of a character when it is the unknown token, or a byte of a character that the vocabulary lacks (a
byte-fallback piece such as <0xD0>, or a byte of a byte-level BPE). A text made of these calibrates the embeddings of
bytes and nothing that the model reads in its life. White space is known to every tokenizer and does not count.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ingot.errors import DataError
from ingot.passes.numerics.arrays import Float64Array
from ingot.runtime import Tokenizer

REFUSED_SHARE = 0.5
WARNED_SHARE = 0.1

_log = logging.getLogger("ingot.pipeline")


def check_alphabet(name: str, tokens: NDArray[np.int64], tokenizer: Tokenizer) -> float:
    """The share of tokens that stand for no whole character, white space apart.

    Above REFUSED_SHARE a DataError, above WARNED_SHARE a warning, both with the numbers.
    """
    ids, counts = np.unique(tokens, return_counts=True)
    entries = [_entry(int(token), tokenizer) for token in ids]
    unknown = sum(int(count) for entry, count in zip(entries, counts, strict=True) if entry is None)
    known = sum(int(count) for entry, count in zip(entries, counts, strict=True) if entry and not entry.isspace())
    share = unknown / max(1, unknown + known)
    if share <= WARNED_SHARE:
        return share
    found = (
        f"{name}: {share:.0%} of the text's tokens ({unknown:,} of {unknown + known:,}, white space apart) are unknown "
        "to the tokenizer or single bytes of a character"
    )
    if share > REFUSED_SHARE:
        raise DataError(
            f"{found}; refused above {REFUSED_SHARE:.0%}. Give text in the languages that the model was trained on"
        )
    _log.warning("%s; text in other languages than the model's makes poor calibration data", found)
    return share


def _entry(token: int, tokenizer: Tokenizer) -> str | None:
    """The token's text; None for the unknown token and for a part of a character."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    return None if token == tokenizer.unk_token_id or "\ufffd" in text else text


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
