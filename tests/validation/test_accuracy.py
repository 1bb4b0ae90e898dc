"""Accuracy: scores, sums per window, metrics and refusals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ingot.errors import DataError, EngineError, UsageError
from ingot.progress import progress_to
from ingot.validation import accuracy as scoring
from ingot.validation.accuracy import AccuracyResult, accuracy_metrics, measure_accuracy, score
from ingot.validation.options import AccuracyOptions
from ingot.validation.windows import EvaluationText
from tests.validation.fake_subject import TableSubject

BASELINE = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]], np.float32))
CANDIDATE = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]], np.float32))
TEXT = EvaluationText("text.txt", "0" * 64, (0, 0, 0, 2, 2, 1, 1, 1, 1))
OPTIONS = AccuracyOptions(tokens=8, window_tokens=4)


def _measure(text: EvaluationText = TEXT, options: AccuracyOptions = OPTIONS) -> AccuracyResult:
    return measure_accuracy(TableSubject(CANDIDATE), TableSubject(BASELINE), text, options)


def test_items_equal_hand_computed_sums() -> None:
    # window 1 reads 0 0 0 2 and predicts 0 0 2 2: p = 1/2 1/2 1/4, then 1/2 (baseline) or 1/4 (candidate)
    # window 2 reads 2 1 1 1 and predicts 1 1 1 1: p = 1/4 of both, then 1/2 each
    first, second = _measure().items
    assert first.baseline_nll == pytest.approx(5 * math.log(2), abs=1e-6)
    assert first.candidate_nll == pytest.approx(6 * math.log(2), abs=1e-6)
    assert second.baseline_nll == second.candidate_nll == pytest.approx(5 * math.log(2), abs=1e-6)
    assert first.kl == second.kl == pytest.approx(0.25 * math.log(2), abs=1e-6)
    assert (first.agreements, second.agreements) == (3, 3)
    assert (first.start, second.start) == (0, 4)


def test_perplexity_kl_and_agreement_follow_from_the_items() -> None:
    result = _measure()
    measured = {one.metric: one for one in accuracy_metrics(result)}
    assert result.baseline_perplexity == pytest.approx(2 ** (10 / 8), abs=1e-6)
    assert measured["perplexity"].estimate.value == pytest.approx(2 ** (11 / 8), abs=1e-6)
    assert measured["perplexity_ratio"].estimate.value == pytest.approx(2 ** (1 / 8), abs=1e-6)
    assert measured["perplexity_ratio"].candidate == result.candidate_perplexity
    assert measured["kl_mean"].estimate.value == pytest.approx(math.log(2) / 16, abs=1e-6)
    assert measured["kl_p99"].estimate.value == pytest.approx(math.log(2) / 4, abs=1e-6)
    assert measured["top1_agreement"].estimate.value == 0.75
    assert measured["top1_agreement"].sample_size == 8


def test_every_window_starts_from_an_empty_context() -> None:
    subject = TableSubject(BASELINE)
    measure_accuracy(TableSubject(CANDIDATE), subject, TEXT, OPTIONS)
    assert subject.prompts == [(0, 0, 0, 2), (2, 1, 1, 1)]


def test_a_bos_token_changes_the_context_and_not_the_targets() -> None:
    plain, opened = _measure(), _measure(replace(TEXT, bos_token_id=1))
    assert opened.items == plain.items  # the table looks one token back only


def test_a_bos_token_alone_in_its_chunk_predicts_no_target() -> None:
    subjects = TableSubject(CANDIDATE, chunk_tokens=1), TableSubject(BASELINE, chunk_tokens=1)
    assert measure_accuracy(*subjects, replace(TEXT, bos_token_id=1), OPTIONS).items == _measure().items


def test_the_baseline_equals_itself() -> None:
    result = measure_accuracy(TableSubject(BASELINE), TableSubject(BASELINE), TEXT, OPTIONS)
    measured = {one.metric: one.estimate for one in accuracy_metrics(result)}
    for metric, value in {"perplexity_ratio": 1.0, "kl_mean": 0.0, "kl_p99": 0.0}.items():
        assert (measured[metric].low, measured[metric].value, measured[metric].high) == (value, value, value)
    assert measured["top1_agreement"].value == 1.0


def test_progress_counts_the_windows() -> None:
    seen: list[tuple[str, int, int]] = []
    with progress_to(lambda name, done, total: seen.append((name, done, total))):
        measure_accuracy(TableSubject(CANDIDATE), TableSubject(BASELINE), TEXT, OPTIONS)
    assert seen == [("accuracy", 0, 2), ("accuracy", 1, 2), ("accuracy", 2, 2)]


def test_subjects_of_different_vocabularies_are_refused() -> None:
    small = TableSubject(np.zeros((2, 2), np.float32))
    with pytest.raises(UsageError, match="the candidate's vocabulary has 2 tokens, the baseline's 3"):
        measure_accuracy(small, TableSubject(BASELINE), TEXT, OPTIONS)


def test_a_window_longer_than_the_context_is_refused() -> None:
    subject = TableSubject(BASELINE, context_tokens=3)
    with pytest.raises(UsageError, match=r"a window has 4 tokens.*context is limited to 3.*window_tokens to 3 or less"):
        measure_accuracy(subject, subject, TEXT, OPTIONS)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="makes token 9 of it, but the model's vocabulary has 3 tokens"):
        _measure(replace(TEXT, token_ids=(9,) * 9))


def test_logits_that_are_not_finite_are_refused_with_side_and_window() -> None:
    broken = CANDIDATE.copy()
    broken[1, 2] = np.nan
    with pytest.raises(EngineError, match="candidate's logits are not finite in the window at token 4"):
        measure_accuracy(TableSubject(broken), TableSubject(BASELINE), TEXT, OPTIONS)


def _log(*rows: tuple[float, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.log(np.array(rows, np.float32))


def test_scores_equal_hand_computed_values() -> None:
    baseline, candidate = _log((0.5, 0.25, 0.25)), _log((0.25, 0.5, 0.25))
    scores = score(baseline, candidate, np.array([0]))
    assert scores.baseline_nll[0] == pytest.approx(np.log(2), abs=1e-7)
    assert scores.candidate_nll[0] == pytest.approx(np.log(4), abs=1e-7)
    assert scores.kl[0] == pytest.approx(0.25 * np.log(2), abs=1e-7)  # .5 ln 2 - .25 ln 2 + 0
    assert scores.agrees.tolist() == [False]


def test_equal_logits_have_no_divergence_and_agree() -> None:
    logits = np.random.default_rng(0).normal(0, 5, (7, 50)).astype(np.float32)
    scores = score(logits, logits.copy(), np.arange(7))
    assert scores.kl.tolist() == [0.0] * 7
    assert scores.agrees.all()


def test_a_constant_added_to_all_logits_changes_no_score() -> None:
    logits = np.array([[1.0, 2.0, 4.0]], np.float32)
    scores = score(logits, logits + np.float32(64), np.array([1]))
    assert scores.kl[0] < 1e-15
    assert scores.baseline_nll[0] == pytest.approx(scores.candidate_nll[0], abs=1e-12)


def test_logits_far_apart_do_not_overflow() -> None:
    logits = np.array([[3e4, -3e4]], np.float32)
    scores = score(logits, logits[:, ::-1], np.array([1]))
    assert scores.baseline_nll[0] == 6e4
    assert scores.kl[0] == 6e4


def test_slices_do_not_change_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    baseline, candidate = (rng.normal(size=(11, 9)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 9, 11)
    whole = score(baseline, candidate, targets)
    monkeypatch.setattr(scoring, "_SLICE_CELLS", 20)
    sliced = score(baseline, candidate, targets)
    assert np.array_equal(whole.kl, sliced.kl)
    assert np.array_equal(whole.candidate_nll, sliced.candidate_nll)
