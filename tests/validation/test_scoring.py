import numpy as np
import pytest

from ingot.validation import scoring
from ingot.validation.scoring import score


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


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
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
