"""Drafts that a model makes: where they beat the copied ones, as many as pay, none that risk too much."""

import pytest

from ingot.runtime.speculation.draft_plan import CopiedDrafts, Draftable, DraftPlan, best_plan

GOOD, BAD = (0.9, 0.8, 0.7), (0.1,)


def draftable(number: int, copied: tuple[float, ...] = (), most: int = 4) -> Draftable:
    return Draftable(number, most, 0, 10, 10, copied)


def costs(row: float, num_sequences: int) -> list[float]:
    return [1 + row * drafts / num_sequences for drafts in range(65)]


def planned(
    requests: list[Draftable], rate: float, *, row: float = 0.1, step: float = 0.1, stake: float = 9.0
) -> DraftPlan | None:
    lines = costs(row, len(requests))
    copied = CopiedDrafts.best(requests, lines, len(requests))
    return best_plan(
        "mtp", requests, [rate] * len(requests), copied, lines, num_sequences=len(requests), step=step, stake=stake
    )


def test_copied_drafts_are_counted_up_to_those_that_pay() -> None:
    found = CopiedDrafts.best([draftable(1, GOOD), draftable(2, BAD)], costs(0.5, 2), 2)
    assert found.counts == [3, 0]
    assert found.expected == pytest.approx([2.4, 0.0])
    assert found.gain == pytest.approx((2 + 2.4) / (2 * 1.75))
    nothing = CopiedDrafts.best([draftable(1, BAD), draftable(2)], costs(0.5, 2), 2)
    assert (nothing.counts, nothing.gain) == ([0, 0], 1.0)


def test_the_model_drafts_only_where_it_beats_the_copies() -> None:
    found = planned([draftable(1, GOOD), draftable(2, BAD)], 0.8)
    assert found is not None
    assert found.kind == "mtp"
    assert found.lengths[0] == 0
    assert found.lengths[1] > 1
    assert planned([draftable(1, GOOD)], 0.8) is None
    assert planned([draftable(1, BAD)], 0.1) is None


def test_a_slower_model_makes_fewer_drafts_and_one_that_is_not_measured_one() -> None:
    lengths = [
        found.lengths[0] if (found := planned([draftable(1)], 0.8, step=step)) else 0 for step in (0.01, 0.3, 2.0)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (4, 0)
    unknown = planned([draftable(1)], 0.8, step=0.0)
    assert unknown is not None
    assert unknown.lengths == [1]


def test_no_step_takes_longer_than_the_stake() -> None:
    for stake in (1.0, 1.3, 1.5, 9.0):
        found = planned([draftable(1)], 0.99, stake=stake)
        assert found is None or 1 + 0.2 * found.lengths[0] <= stake
    assert planned([draftable(1)], 0.99, stake=1.1) is None
