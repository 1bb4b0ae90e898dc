"""Calibration data: a text as tokens, cut into sequences of one length, of which some are drawn by a seed."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.errors import DataError
from ingot.passes.calibration import CalibrationFacts
from ingot.runtime import Tokenizer


@dataclass(frozen=True)
class CalibrationData:
    """sequences [sequences, sequence_tokens] int64 and where they come from."""

    facts: CalibrationFacts
    sequences: NDArray[np.int64]


def read_calibration_data(
    text: Path, tokenizer_folder: Path, sequences: int, sequence_tokens: int, seed: int, vocab_size: int
) -> CalibrationData:
    """Draw that many sequences from a UTF-8 text, without overlap, in text order.

    Each begins with the BOS token where the tokenizer wants one. DataError when the text cannot be read, is too short,
    or its tokens are not the model's.
    """
    raw = _read(text)
    tokenizer = Tokenizer.load(tokenizer_folder)
    tokens = np.asarray(tokenizer.encode(_decode(text, raw), add_special_tokens=False), np.int64)
    prefix = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id][:1]
    taken = sequence_tokens - len(prefix)
    available = len(tokens) // max(taken, 1)
    if taken < 1 or available < sequences:
        raise DataError(_too_short(text.name, len(tokens), available, sequences, sequence_tokens))
    if tokens.max() >= vocab_size:
        raise DataError(
            f"{text.name}: the tokenizer made token {tokens.max()}, the model knows {vocab_size}; "
            "tokenizer and weights are not of the same checkpoint"
        )
    starts = np.sort(np.random.default_rng(seed).permutation(available)[:sequences]) * taken
    drawn = np.stack([np.concatenate([prefix, tokens[start : start + taken]]) for start in starts]).astype(np.int64)
    digest = hashlib.sha256(raw).hexdigest()
    return CalibrationData(
        CalibrationFacts(text.name, digest, len(tokens), sequences, sequence_tokens, seed),
        drawn,
    )


def _too_short(name: str, tokens: int, available: int, sequences: int, sequence_tokens: int) -> str:
    lower = f"set calibration.sequences to {available} or less" if available else "lower calibration.sequence_tokens"
    return (
        f"{name}: the text has {tokens} tokens, {available} sequences of {sequence_tokens}; calibration asks for "
        f"{sequences}. Give a longer text, or {lower}"
    )


def _read(text: Path) -> bytes:
    try:
        return text.read_bytes()
    except OSError as error:
        raise DataError(f"{text}: cannot read the calibration text: {error.strerror}; check the path") from error


def _decode(text: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{text}: byte {error.start} is not UTF-8; convert the text to UTF-8") from error
