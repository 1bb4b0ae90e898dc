"""Splits an evaluation text into windows of tokens, over which accuracy is paired.

A window has `window_tokens` input tokens and predicts `window_tokens` tokens: token i + 1 from tokens 0 .. i. Windows
are consecutive and share one token (the last target of one is the first input of the next), so n windows need
n * window_tokens + 1 tokens. Every window starts from an empty context, and every token of the text except the first is
predicted exactly once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.errors import DataError
from ingot.validation.options import MIN_WINDOWS, AccuracyOptions


@dataclass(frozen=True)
class EvaluationText:
    """A text: its name (not its path, because evidence is shared), digest and tokens."""

    name: str
    sha256: str
    token_ids: tuple[int, ...]
    bos_token_id: int | None = None

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError when the model does not have a token of the text."""
        worst = max(self.token_ids, default=0)
        if worst >= vocab_size:
            raise DataError(
                f"{self.name}: the tokenizer makes token {worst} of it, but the model's vocabulary has {vocab_size} "
                "tokens; tokenizer.json and weights are from different checkpoints"
            )

    def num_windows(self, options: AccuracyOptions) -> int:
        """Number of windows that the text has tokens for."""
        return max(0, len(self.token_ids) - 1) // options.window_tokens

    def require(self, options: AccuracyOptions) -> None:
        """Raise DataError when the text is too short for the requested windows."""
        if len(self.token_ids) >= options.text_tokens:
            return
        windows = self.num_windows(options)
        lower = f", or set evaluation tokens to {windows * options.window_tokens}"
        if windows < MIN_WINDOWS:
            shorter = (len(self.token_ids) - 1) // MIN_WINDOWS
            lower = f", or set evaluation window_tokens to {shorter} and tokens to {MIN_WINDOWS * shorter}"
            lower = lower if shorter > 0 else ""
        raise DataError(
            f"{self.name}: the text has {len(self.token_ids)} tokens; {options.num_windows} windows of "
            f"{options.window_tokens} need {options.text_tokens}. Give a longer text{lower}"
        )


@dataclass(frozen=True)
class Window:
    """Input tokens, starting with a BOS token if the tokenizer adds one, and targets [window_tokens]."""

    start: int
    inputs: tuple[int, ...]
    targets: NDArray[np.int64]

    @property
    def skipped_rows(self) -> int:
        """Number of leading rows of logits, of the BOS token, that predict no target."""
        return len(self.inputs) - len(self.targets)


def read_text(path: Path) -> tuple[str, str]:
    """The text of a UTF-8 file and the SHA-256 of its bytes. DataError when it is missing or not UTF-8."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read as text: {error.strerror}; check the path") from error
    try:
        return raw.decode("utf-8"), hashlib.sha256(raw).hexdigest()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; convert the text to UTF-8") from error


def split_windows(text: EvaluationText, options: AccuracyOptions) -> list[Window]:
    """The windows of a text, in order. DataError when it is too short."""
    text.require(options)
    prefix = () if text.bos_token_id is None else (text.bos_token_id,)
    starts = range(0, options.num_windows * options.window_tokens, options.window_tokens)
    return [_window(text.token_ids, prefix, start, options.window_tokens) for start in starts]


def _window(token_ids: Sequence[int], prefix: tuple[int, ...], start: int, size: int) -> Window:
    inputs = prefix + tuple(token_ids[start : start + size])
    return Window(start, inputs, np.asarray(token_ids[start + 1 : start + size + 1], dtype=np.int64))
