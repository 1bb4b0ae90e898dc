"""The number of drafts that a step verifies: what pays, off where nothing does, tries that cost little."""

import random
from collections.abc import Callable

import pytest

from ingot.runtime.speculation.length_control import TRY_SHARE, Candidates, LengthControl

GRADES = (3,) * 8
PLAIN_SECONDS = 0.01


def simulate(
    control: LengthControl,
    accepts: Callable[[int], float],
    *,
    cost_per_draft: float = 0.1,
    num_steps: int = 2000,
    num_sequences: int = 1,
    seed: int = 0,
) -> tuple[float, list[int]]:
    """Speed relative to plain decoding, where a draft of step t is accepted with `accepts(t)`; drafts of each step."""
    rng = random.Random(seed)
    seconds, tokens, lengths = 0.0, 0, []
    for now in range(num_steps):
        candidates = [Candidates(number, GRADES) for number in range(num_sequences)]
        counts = control.choose(candidates, num_sequences, 512)
        gained = 0
        for number, count in enumerate(counts):
            if not count:
                continue
            accepted = next((n for n in range(count) if rng.random() >= accepts(now)), count)
            control.verified(number, GRADES[: min(accepted + 1, count)], accepted)
            gained += accepted
        took = PLAIN_SECONDS * (1 + cost_per_draft * sum(counts) / num_sequences) * rng.uniform(0.9, 1.1)
        control.stepped(num_sequences, sum(counts), num_sequences + gained, took)
        seconds += took
        tokens += num_sequences + gained
        lengths.append(sum(counts))
    return tokens / num_sequences * PLAIN_SECONDS / seconds, lengths


def test_drafts_that_are_accepted_are_verified_at_full_length() -> None:
    speed, lengths = simulate(LengthControl(), lambda _: 0.98)
    assert speed > 4
    assert sum(lengths[-200:]) > 200 * 7


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("num_sequences", [1, 16])
def test_where_nothing_is_accepted_it_is_never_slower_than_0_97_of_plain(cost: float, num_sequences: int) -> None:
    speed, lengths = simulate(LengthControl(), lambda _: 0.0, cost_per_draft=cost, num_sequences=num_sequences)
    assert speed > 0.97
    assert sum(lengths) * cost / num_sequences < 2.5 * TRY_SHARE * len(lengths)


@pytest.mark.parametrize("rate", [0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("cost", [0.05, 0.2, 0.4, 0.8])
def test_it_is_as_fast_as_the_best_constant_length_or_nearly(rate: float, cost: float) -> None:
    speed, _ = simulate(LengthControl(), lambda _: rate, cost_per_draft=cost)
    best = max(sum(rate**n for n in range(g + 1)) / (1 + cost * g) for g in range(9))
    assert speed > 0.94 * best


def test_text_that_begins_to_repeat_itself_is_found_and_text_that_stops_is_left() -> None:
    _, lengths = simulate(LengthControl(), lambda now: 0.95 if 1000 <= now < 2000 else 0.0, num_steps=3000)
    assert sum(lengths[1400:2000]) > 600 * 4
    assert sum(lengths[2100:3000]) < 900 * 0.3


def test_a_request_whose_drafts_are_rejected_does_not_take_them_from_another() -> None:
    control = LengthControl()
    for _ in range(3):
        control.stepped(2, 0, 2, PLAIN_SECONDS)
    for _ in range(50):
        control.verified(1, (3,), 0)
        control.verified(2, (3,) * 4, 4)
    counts = control.choose([Candidates(1, GRADES), Candidates(2, GRADES)], 2, 6)
    assert counts == [0, 6]


def test_drafts_get_no_more_room_than_there_is() -> None:
    candidates = [Candidates(number, GRADES) for number in range(3)]
    for room in range(30):
        for adapts in (False, True):
            counts = LengthControl(adapts=adapts).choose(candidates, 3, room)
            assert sum(counts) <= min(room, 24)
    assert LengthControl(adapts=False).choose(candidates, 3, 30) == [8, 8, 8]
    assert LengthControl(adapts=False).choose(candidates, 3, 7) == [3, 2, 2]


def test_estimates_of_a_request_go_with_it() -> None:
    control = LengthControl()
    control.verified(1, GRADES, 8)
    control.forget(1)
    control.forget(1)
    assert not control._own
    assert control.survival(1, GRADES[:2]) == pytest.approx(control.rate(5, 3) ** 2)
