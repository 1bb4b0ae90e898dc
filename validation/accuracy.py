"""How far the candidate's predictions are from the baseline's: perplexity, KL divergence, top-1 agreement.

Both read the same windows of the same text, window by window and chunk by chunk, so that memory holds one chunk of
logits of each and one float per token, however long the text is. Items are windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.errors import EngineError, UsageError
from ingot.progress import Progress, silent
from ingot.validation.progress import Stage
from ingot.validation.scoring import FloatArray, TokenScores, score
from ingot.validation.subject import AccuracySubject
from ingot.validation.windows import AccuracyOptions, EvaluationText, Window, split_windows


@dataclass(frozen=True)
class AccuracyItem:
    """One window: where it starts in the text's tokens, and its sums over the predicted tokens. Nats."""

    start: int
    tokens: int
    baseline_nll: float
    candidate_nll: float
    kl: float
    kl_max: float
    agreements: int


@dataclass(frozen=True)
class AccuracyResult:
    """All windows, in text order, and KL of every token [windows * window_tokens]."""

    text_name: str
    text_sha256: str
    options: AccuracyOptions
    items: tuple[AccuracyItem, ...]
    token_kl: FloatArray

    @property
    def num_tokens(self) -> int:
        """Predicted tokens."""
        return sum(item.tokens for item in self.items)

    @property
    def baseline_perplexity(self) -> float:
        """exp of the mean negative log-likelihood per token."""
        return float(np.exp(sum(item.baseline_nll for item in self.items) / self.num_tokens))

    @property
    def candidate_perplexity(self) -> float:
        """exp of the mean negative log-likelihood per token."""
        return float(np.exp(sum(item.candidate_nll for item in self.items) / self.num_tokens))

    @property
    def window_of_token(self) -> NDArray[np.int64]:
        """[windows * window_tokens] index of the window that each token_kl belongs to."""
        return np.repeat(np.arange(len(self.items)), [item.tokens for item in self.items])


def measure_accuracy(
    candidate: AccuracySubject,
    baseline: AccuracySubject,
    text: EvaluationText,
    options: AccuracyOptions,
    progress: Progress = silent,
) -> AccuracyResult:
    """Score both subjects on the text's windows.

    Raises DataError for a text that is too short, UsageError for a pair or a window that cannot be compared, and
    EngineError for logits that are not finite.
    """
    _require_comparable(candidate, baseline, text, options)
    windows = split_windows(text, options)
    stage = Stage("accuracy", len(windows), progress)
    items, kl = [], []
    for window in windows:
        scores = score_window(candidate, baseline, window)
        _require_finite(window, scores)
        items.append(_item(window, scores))
        kl.append(scores.kl)
        stage.advance()
    return AccuracyResult(text.name, text.sha256, options, tuple(items), np.concatenate(kl))


def score_window(candidate: AccuracySubject, baseline: AccuracySubject, window: Window) -> TokenScores:
    """Scores of one window's targets, chunk by chunk."""
    parts, row = [], -window.skipped_rows
    for base, cand in zip(baseline.prompt_logits(window.inputs), candidate.prompt_logits(window.inputs), strict=True):
        skip = max(0, -row)
        targets = window.targets[row + skip : row + len(base)]
        if len(targets):
            parts.append(score(base[skip:], cand[skip:], targets))
        row += len(base)
    assert row == len(window.targets), (row, len(window.targets))
    return TokenScores.join(parts)


def _require_finite(window: Window, scores: TokenScores) -> None:
    for side, nll in (("baseline", scores.baseline_nll), ("candidate", scores.candidate_nll)):
        if not np.isfinite(nll).all():
            raise EngineError(
                f"the {side}'s logits are not finite in the window at token {window.start}: its weights or its "
                "quantization are broken; look for NaN or Inf in the checkpoint, or choose more bits"
            )


def _item(window: Window, scores: TokenScores) -> AccuracyItem:
    return AccuracyItem(
        start=window.start,
        tokens=len(window.targets),
        baseline_nll=float(scores.baseline_nll.sum()),
        candidate_nll=float(scores.candidate_nll.sum()),
        kl=float(scores.kl.sum()),
        kl_max=float(scores.kl.max()),
        agreements=int(scores.agrees.sum()),
    )


def _require_comparable(
    candidate: AccuracySubject, baseline: AccuracySubject, text: EvaluationText, options: AccuracyOptions
) -> None:
    if candidate.vocab_size != baseline.vocab_size:
        raise UsageError(
            f"candidate has {candidate.vocab_size} tokens in its vocabulary, baseline {baseline.vocab_size}; "
            "compare artifacts of the same checkpoint"
        )
    read = options.window_tokens + (text.bos_token_id is not None)
    context = min(candidate.context_tokens, baseline.context_tokens)
    if read > context:
        raise UsageError(
            f"a window reads {read} tokens, the model's context holds {context}; "
            f"set evaluation window_tokens to {context - read + options.window_tokens} or less"
        )
    _require_vocabulary(text.token_ids, baseline.vocab_size, text.name)


def _require_vocabulary(token_ids: Sequence[int], vocab_size: int, name: str) -> None:
    worst = max(token_ids, default=0)
    if worst >= vocab_size:
        raise UsageError(
            f"{name}: the tokenizer made token {worst}, the model knows {vocab_size}; "
            "tokenizer and weights are not of the same checkpoint"
        )
