"""Whether a text is written in an alphabet that the tokenizer knows.

A token says nothing of a character when it is the unknown token, or a byte of a character that the vocabulary lacks (a
byte-fallback piece such as <0xD0>, or a byte of a byte-level BPE). A text made of these calibrates the embeddings of
bytes and nothing that the model reads in its life. White space is known to every tokenizer and does not count.
"""

import logging

import numpy as np
from numpy.typing import NDArray

from ingot.errors import DataError
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
