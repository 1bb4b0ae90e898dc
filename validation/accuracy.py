"""Measures the candidate's accuracy relative to the baseline: perplexity, KL divergence, top-1 agreement.

Both read the same windows of the same text, chunk by chunk, so that memory holds one chunk of logits of each and one
float per token, for any length of text. Intervals are over windows. docs/evidence.md defines the metrics.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ingot.errors import EngineError, UsageError
from ingot.progress import Stage
from ingot.validation.options import AccuracyOptions
from ingot.validation.statistics import (
    Estimate,
    Measured,
    positive_interval,
    proportion_interval,
    quantile_interval,
    ratio_interval,
)
from ingot.validation.subject import AccuracySubject, LogitsArray
from ingot.validation.windows import EvaluationText, Window, split_windows

FloatArray = NDArray[np.float64]

_SLICE_CELLS = 1 << 20  # float64 values processed at once: three arrays of 8 MiB, for any vocabulary


@dataclass(frozen=True)
class TokenScores:
    """One value per predicted token, all [n].

    baseline_nll, candidate_nll  -log p(target), nats
    kl                           KL(baseline || candidate) of the next-token distributions, nats
    agrees                       both have the same most likely token (the lowest id in a tie)
    """

    baseline_nll: FloatArray
    candidate_nll: FloatArray
    kl: FloatArray
    agrees: NDArray[np.bool_]

    @staticmethod
    def join(chunks: list["TokenScores"]) -> "TokenScores":
        """Concatenate the scores of consecutive tokens."""
        names = ("baseline_nll", "candidate_nll", "kl", "agrees")
        return TokenScores(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names))


def score(baseline: LogitsArray, candidate: LogitsArray, targets: NDArray[np.int64]) -> TokenScores:
    """Score float32 logits [n, vocab] of both against the tokens [n] that follow, in float64."""
    assert baseline.shape == candidate.shape, (baseline.shape, candidate.shape)
    size = max(1, _SLICE_CELLS // baseline.shape[1])
    slices = [slice(start, start + size) for start in range(0, len(targets), size)]
    return TokenScores.join([_score(baseline[rows], candidate[rows], targets[rows]) for rows in slices])


def _score(baseline: LogitsArray, candidate: LogitsArray, targets: NDArray[np.int64]) -> TokenScores:
    rows = np.arange(len(targets))
    base, cand = _log_softmax(baseline), _log_softmax(candidate)  # [n, vocab]
    kl = np.einsum("nv,nv->n", np.exp(base), base - cand)
    return TokenScores(
        baseline_nll=-base[rows, targets],
        candidate_nll=-cand[rows, targets],
        kl=np.maximum(kl, 0.0),  # rounding can produce -1e-17
        agrees=baseline.argmax(axis=1) == candidate.argmax(axis=1),
    )


def _log_softmax(logits: LogitsArray) -> FloatArray:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


@dataclass(frozen=True)
class AccuracyItem:
    """One window: its first token in the text, and sums over its predicted tokens, in nats."""

    start: int
    tokens: int
    baseline_nll: float
    candidate_nll: float
    kl: float
    kl_max: float
    agreements: int


@dataclass(frozen=True)
class AccuracyResult:
    """All windows in text order, and the KL of every token [windows * window_tokens].

    text_tokens  number of tokens that could be predicted, in the whole text
    """

    text_name: str
    text_sha256: str
    options: AccuracyOptions
    items: tuple[AccuracyItem, ...]
    token_kl: FloatArray
    text_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of predicted tokens."""
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
        """Index of each token's window [windows * window_tokens]."""
        return np.repeat(np.arange(len(self.items)), [item.tokens for item in self.items])


def measure_accuracy(
    candidate: AccuracySubject,
    baseline: AccuracySubject,
    text: EvaluationText,
    options: AccuracyOptions,
) -> AccuracyResult:
    """Score both subjects on the text's windows.

    Raises DataError for a text that is too short or has tokens outside of the vocabulary, UsageError for different
    vocabularies or a window longer than the context, and EngineError for logits that are not finite.
    """
    _require_comparable(candidate, baseline, text, options)
    windows = split_windows(text, options)
    stage = Stage("accuracy", len(windows))
    items, kl = [], []
    for window in windows:
        scores = score_window(candidate, baseline, window)
        _require_finite(window, scores)
        items.append(_item(window, scores))
        kl.append(scores.kl)
        stage.advance()
    return AccuracyResult(text.name, text.sha256, options, tuple(items), np.concatenate(kl), len(text.token_ids) - 1)


def score_window(candidate: AccuracySubject, baseline: AccuracySubject, window: Window) -> TokenScores:
    """Score one window's targets, chunk by chunk."""
    scores, row = [], -window.skipped_rows
    for base, cand in zip(baseline.prompt_logits(window.inputs), candidate.prompt_logits(window.inputs), strict=True):
        skip = max(0, -row)
        targets = window.targets[row + skip : row + len(base)]
        if len(targets):
            scores.append(score(base[skip:], cand[skip:], targets))
        row += len(base)
    assert row == len(window.targets), (row, len(window.targets))
    return TokenScores.join(scores)


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
            f"the candidate's vocabulary has {candidate.vocab_size} tokens, the baseline's {baseline.vocab_size}; "
            "compare artifacts of the same checkpoint"
        )
    read = options.window_tokens + (text.bos_token_id is not None)
    context = min(candidate.context_tokens, baseline.context_tokens)
    if read > context:
        raise UsageError(
            f"a window has {read} tokens, but the model's context is limited to {context}; "
            f"set evaluation window_tokens to {context - read + options.window_tokens} or less"
        )
    text.require_vocabulary(baseline.vocab_size)


def accuracy_metrics(result: AccuracyResult) -> list[Measured]:
    """The metrics perplexity, perplexity_ratio, kl_mean, kl_p99 and top1_agreement, with intervals over windows."""
    tokens, seed = _column(result, "tokens"), result.options.seed
    candidate = _column(result, "candidate_nll") / tokens  # [windows] nats per token
    difference = candidate - _column(result, "baseline_nll") / tokens
    sides = (result.baseline_perplexity, result.candidate_perplexity)
    estimates = {
        "perplexity": _perplexity(candidate),
        "perplexity_ratio": ratio_interval(difference),
        "kl_mean": positive_interval(_column(result, "kl") / tokens, seed),
        "kl_p99": quantile_interval(result.token_kl, result.window_of_token, 0.99, seed),
        "top1_agreement": proportion_interval(_column(result, "agreements"), tokens),
    }
    return [
        _measured(result, name, estimate, sides if name.startswith("perplexity") else (None, None))
        for name, estimate in estimates.items()
    ]


def _perplexity(nll: FloatArray) -> Estimate:
    """exp of the mean, with `detectable` as an absolute change of the perplexity."""
    estimate = ratio_interval(nll)
    return replace(estimate, detectable=estimate.value * estimate.detectable)


def _measured(
    result: AccuracyResult, metric: str, estimate: Estimate, sides: tuple[float | None, float | None]
) -> Measured:
    baseline, candidate = sides
    return Measured(
        metric=metric,
        estimate=estimate,
        baseline=baseline,
        candidate=candidate,
        sample_unit="evaluation tokens",
        sample_size=result.num_tokens,
        most_samples=result.text_tokens,
    )


def _column(result: AccuracyResult, name: str) -> FloatArray:
    return np.array([getattr(item, name) for item in result.items], dtype=np.float64)
