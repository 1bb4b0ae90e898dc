"""Acceptance counts the drafts that the model would have chosen, as long as those before them were right."""

# mypy: disable-error-code="no-untyped-call"
# torch leaves some of its methods without annotations.

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="examples train with torch: pip install --group oracle")
pytest.importorskip("transformers")

from examples import mtp_acceptance  # noqa: E402
from examples.mtp_acceptance import Acceptance, continue_greedily, measure  # noqa: E402
from examples.mtp_layer import BaseStates  # noqa: E402

from tests.examples.tiny_llama import tiny_llama  # noqa: E402

BEGIN = 6


def foretell(wrong: dict[int, list[int]]) -> Any:
    """An unrolled layer whose results are the model's own states, but wrong in these slots of a depth."""

    def unroll(_: Any, states: BaseStates, depths: int) -> list[Any]:
        found = [states.normed[:, 1:].clone() for _ in range(depths)]
        for depth, slots in wrong.items():
            found[depth - 1][:, slots] *= -1
        return found

    return unroll


def accepted(monkeypatch: pytest.MonkeyPatch, rows: Any, wrong: dict[int, list[int]]) -> Acceptance:
    monkeypatch.setattr(mtp_acceptance, "unroll", foretell(wrong))
    layer: Any = None
    return measure(tiny_llama(), layer, rows, BEGIN)


def test_a_draft_counts_only_after_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = continue_greedily(tiny_llama(), torch.randint(0, 320, (3, BEGIN)), 14)
    assert accepted(monkeypatch, rows, {}) == Acceptance((36, 36, 36), (36, 36, 36))
    # The drafts that begin in slot 5 and in slot 6 fail at depth 1 and at depth 2.
    assert accepted(monkeypatch, rows, {1: [5], 2: [7]}) == Acceptance((36, 33, 30), (33, 30, 30))


def test_in_a_text_drafts_count_up_to_its_first_difference_from_the_models_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = tiny_llama()
    rows = continue_greedily(base, torch.randint(0, 320, (1, BEGIN)), 14)
    rows[0, 10] = (rows[0, 10] + 1) % 320
    rest = continue_greedily(base, rows[:, :11], 9)
    found = accepted(monkeypatch, rest, {})
    # Token 10 is drafted in slot 8: at depth 1 by the draft of slot 8, at depth 2 by that of slot 7.
    assert found == Acceptance((12, 11, 10), (12, 11, 10))


def test_tokens_of_a_step_are_its_own_and_those_of_right_drafts() -> None:
    found = Acceptance((100, 50, 20), (50, 20, 5))
    assert found.tokens_per_step == pytest.approx(1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.25)
    assert str(found) == "50.0%, 40.0%, 25.0%; 1.75 tokens a step with 3 drafts"
