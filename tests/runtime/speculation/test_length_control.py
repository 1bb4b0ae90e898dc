"""The number of drafts that a step verifies: what pays, off where nothing does, tries that cost little."""

import random
from collections.abc import Callable

import pytest

from ingot.runtime.speculation.length_control import DraftCandidates, LengthControl
from tests.each_case import each_case

KIND, GRADES = "lookup", (3,) * 8
PLAIN_SECONDS = 0.01


def simulate(
    control: LengthControl,
    accepts: Callable[[int], float],
    *,
    cost_per_draft: float = 0.1,
    look_cost: float = 0.02,
    num_steps: int = 2000,
    num_sequences: int = 1,
    seed: int = 0,
) -> tuple[float, list[int]]:
    """Speed relative to plain decoding, where a draft of step t is accepted with `accepts(t)`; drafts of each step.

    Costs are in plain steps. A model that replays computes accepted tokens again after one that was rejected.
    """
    rng = random.Random(seed)
    seconds, tokens, resting, measures, lengths = 0.0, 0, 0, True, []
    for now in range(num_steps):
        gained = 0
        took, counts, again = PLAIN_SECONDS * rng.uniform(0.9, 1.1), [0], 0
        if resting:
            resting -= 1
        elif measures:
            measures = not control.rested(num_sequences, took)
        else:
            counts = control.choose(
                [DraftCandidates(number, KIND, GRADES) for number in range(num_sequences)], num_sequences, 512
            )
            for number, count in enumerate(counts):
                if not count:
                    continue
                accepted = next((n for n in range(count) if rng.random() >= accepts(now)), count)
                control.verified(number, KIND, GRADES[: min(accepted + 1, count)], accepted)
                gained += accepted
                again += accepted + 1 if control.replays and accepted < count else 0
            took *= 1 + look_cost + cost_per_draft * sum(counts) / num_sequences
            due = control.looked(num_sequences, sum(counts), num_sequences + gained, took)
            if due:
                resting, measures = due - 1, True
        seconds += took + PLAIN_SECONDS * cost_per_draft * again / num_sequences
        tokens += num_sequences + gained
        lengths.append(sum(counts))
    return tokens / num_sequences * PLAIN_SECONDS / seconds, lengths


def test_drafts_that_are_accepted_are_verified_at_full_length() -> None:
    speed, lengths = simulate(LengthControl(), lambda _: 0.98)
    assert speed > 4
    assert sum(lengths[-200:]) > 200 * 7


@each_case("cost", [0.02, 0.1, 0.5, 1.0])
@each_case("look_cost", [0.0, 0.1, 1.0])
@each_case("num_sequences", [1, 16])
@each_case("rate", [0.0, 0.1])
def test_where_little_is_accepted_it_is_never_slower_than_0_97_of_plain(
    cost: float, look_cost: float, num_sequences: int, rate: float
) -> None:
    speed, _ = simulate(
        LengthControl(), lambda _: rate, cost_per_draft=cost, look_cost=look_cost, num_sequences=num_sequences
    )
    assert speed > 0.97


@each_case("rate", [0.0, 0.3, 0.6, 0.9])
@each_case("cost", [0.1, 0.3, 0.8])
def test_what_models_with_side_state_compute_again_is_part_of_the_cost(rate: float, cost: float) -> None:
    speed, _ = simulate(LengthControl(replays=True), lambda _: rate, cost_per_draft=cost)
    assert speed > 0.97


def test_models_with_side_state_verify_fewer_drafts_at_the_same_acceptance() -> None:
    _, lengths = simulate(LengthControl(), lambda _: 0.7, cost_per_draft=0.2)
    _, fewer = simulate(LengthControl(replays=True), lambda _: 0.7, cost_per_draft=0.2)
    assert 0 < sum(fewer) < 0.9 * sum(lengths)


def test_tries_become_rare_where_they_fail_and_frequent_again_where_they_do_not() -> None:
    _, lengths = simulate(LengthControl(), lambda now: 0.95 if now > 4000 else 0.0, look_cost=0.0, num_steps=6000)
    assert 0 < sum(lengths[2000:4000]) < 90, "a try after each rest would be 180"
    assert sum(lengths[5000:]) > 1000 * 4


@each_case("rate", [0.2, 0.4, 0.6, 0.8])
@each_case("cost", [0.05, 0.2, 0.4, 0.8])
def test_it_is_as_fast_as_the_best_constant_length_or_nearly(rate: float, cost: float) -> None:
    speed, _ = simulate(LengthControl(), lambda _: rate, cost_per_draft=cost)
    best = max(sum(rate**n for n in range(g + 1)) / (1 + cost * g) for g in range(9))
    assert speed > 0.88 * best


def test_text_that_begins_to_repeat_itself_is_found_and_text_that_stops_is_left() -> None:
    _, lengths = simulate(LengthControl(), lambda now: 0.95 if 1000 <= now < 2000 else 0.0, num_steps=3000)
    assert sum(lengths[1400:2000]) > 600 * 4
    assert sum(lengths[2100:3000]) < 900 * 0.3


def test_a_request_whose_drafts_are_rejected_does_not_take_them_from_another() -> None:
    control = LengthControl()
    for _ in range(3):
        control.rested(2, PLAIN_SECONDS)
    for count in (1, 1, 2, 2, 4, 4):
        control.looked(2, count, 2 + count, PLAIN_SECONDS)
    for _ in range(50):
        control.verified(1, KIND, (3,), 0)
        control.verified(2, KIND, (3,) * 4, 4)
    counts = control.choose([DraftCandidates(1, KIND, GRADES), DraftCandidates(2, KIND, GRADES)], 2, 6)
    assert counts == [0, 6]


def test_drafts_get_no_more_room_than_there_is() -> None:
    candidates = [DraftCandidates(number, KIND, GRADES) for number in range(3)]
    for room in range(30):
        for adapts in (False, True):
            counts = LengthControl(adapts=adapts).choose(candidates, 3, room)
            assert sum(counts) <= min(room, 24)
    assert LengthControl(adapts=False).choose(candidates, 3, 30) == [8, 8, 8]
    assert LengthControl(adapts=False).choose(candidates, 3, 7) == [3, 2, 2]


def test_estimates_of_a_request_go_with_it() -> None:
    control = LengthControl()
    control.verified(1, KIND, GRADES, 8)
    control.forget(1)
    control.forget(1)
    assert not control.acceptance._own
    assert control.acceptance.survivals(1, KIND, GRADES[:2])[1] == pytest.approx(
        control.acceptance.rate(5, KIND, 3) ** 2
    )
