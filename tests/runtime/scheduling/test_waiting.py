"""The waiting queue by itself: levels, aging, groups by virtual counters, resumed sequences, and random operations."""

import random

import pytest

from ingot.runtime.scheduling.sequence import Sequence
from ingot.runtime.scheduling.waiting import WaitingQueue
from tests.each_case import each_case


def sequence(number: int, *, priority: int = 0, group: str = "", num_tokens: int = 4) -> Sequence:
    return Sequence.of(number, [1] * num_tokens, 100, priority=priority, group=group)


def queue_of(*sequences: Sequence, aging_tokens: int = 10) -> WaitingQueue:
    queue = WaitingQueue(aging_tokens)
    for each in sequences:
        queue.add(each)
    return queue


def take(queue: WaitingQueue) -> Sequence:
    first = queue.first()
    assert first is not None
    queue.take(first)
    queue.check()
    return first


def order(queue: WaitingQueue, num_charged: int = 0) -> list[int]:
    """Ids in the order in which the queue gives them, when each is served `num_charged` tokens at once."""
    found = []
    while queue:
        found.append(take(queue))
        if num_charged:
            queue.serve(found[-1], 0, num_charged)
    return [each.id for each in found]


def test_the_lowest_priority_number_is_first_and_arrival_decides_among_equals() -> None:
    queue = queue_of(*(sequence(number, priority=priority) for number, priority in enumerate([1, 0, 2, 0, -1, 1])))
    assert order(queue) == [4, 1, 3, 0, 5, 2]
    assert queue.first() is None


def test_a_group_with_many_requests_delays_another_by_one_turn() -> None:
    queue = queue_of(*(sequence(number, group="many") for number in range(5)), sequence(9, group="one"))
    assert order(queue, num_charged=4) == [0, 9, 1, 2, 3, 4]


def test_groups_take_turns_by_the_tokens_that_they_were_served() -> None:
    long = [sequence(number, group="long", num_tokens=30) for number in range(3)]
    short = [sequence(number, group="short", num_tokens=10) for number in range(10, 16)]
    queue = queue_of(*long, *short)
    found = []
    while queue:
        found.append(take(queue))
        queue.serve(found[-1], 0, found[-1].num_prompt_tokens)
    assert [each.id for each in found] == [0, 10, 11, 12, 1, 13, 14, 15, 2]


def test_a_group_that_comes_back_has_no_credit_for_its_idle_time() -> None:
    queue = queue_of(*(sequence(number, group="busy") for number in range(6)))
    for _ in range(3):
        queue.serve(take(queue), 0, 4)
    for number in range(10, 14):
        queue.add(sequence(number, group="back"))
    assert queue.served("back") == queue.served("busy") == 12
    assert order(queue, num_charged=4) == [3, 10, 4, 11, 5, 12, 13]


def test_a_group_that_comes_back_keeps_its_debt() -> None:
    queue = queue_of(sequence(0, group="served"), sequence(1, group="other"))
    queue.serve(take(queue), 0, 400)
    queue.add(sequence(2, group="served"))
    queue.add(sequence(3, group="other"))
    assert order(queue, num_charged=4) == [1, 3, 2]


def test_a_generated_token_counts_twice_and_a_token_computed_again_or_cached_does_not_count() -> None:
    queue = queue_of(first := sequence(0, group="a", num_tokens=8))
    take(queue)
    queue.serve(first, 4, 4)  # the first 4 came from the prefix cache
    assert queue.served("a") == 4
    for position in range(8, 11):
        queue.serve(first, position, 1)
    assert queue.served("a") == 4 + 2 * 3
    queue.serve(first, 0, 11)
    assert queue.served("a") == 4 + 2 * 3


def test_a_preempted_sequence_is_first_in_its_level_in_the_order_of_first_admission() -> None:
    queue = queue_of(*(sequence(number) for number in range(5)), sequence(9, priority=-1))
    urgent, *running = [take(queue) for _ in range(4)]
    assert [each.rank for each in (urgent, *running)] == [(-1, 1), (0, 2), (0, 3), (0, 4)]
    for each in (running[2], running[0], running[1]):
        queue.put_back(each)
    queue.check()
    assert order(queue) == [0, 1, 2, 3, 4]


def test_a_level_ages_while_more_urgent_ones_are_served_and_starts_again_after_an_admission() -> None:
    queue = queue_of(*(sequence(number, priority=2) for number in range(2)))
    urgent = [sequence(number) for number in range(10, 16)]
    for each in urgent:
        queue.add(each)
    taken = []
    while queue:
        taken.append(take(queue))
        queue.serve(taken[-1], 0, 10)
    assert [each.id for each in taken] == [10, 11, 0, 12, 1, 13, 14, 15]
    assert [each.level for each in taken] == [0] * 8, "it keeps the level that it reached"


def test_a_level_alone_does_not_age() -> None:
    queue = queue_of(sequence(0, priority=3), sequence(1, priority=3))
    first = take(queue)
    queue.serve(first, 0, 1000)
    assert queue.first_level == 3


def test_a_level_does_not_age_beyond_those_that_overtake_it() -> None:
    queue = queue_of(sequence(0), sequence(1, priority=5))
    queue.serve(take(queue), 0, 1000)
    assert queue.first_level == 0


def test_removing_a_sequence_that_does_not_wait_is_an_error() -> None:
    queue = queue_of(first := sequence(0))
    take(queue)
    with pytest.raises(ValueError, match="sequence 0 does not wait"):
        queue.remove(first)


def test_counters_of_idle_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.runtime.scheduling.waiting._MAX_IDLE_GROUPS", 3)
    queue = queue_of()
    for number in range(20):
        queue.add(sequence(number, group=f"group {number}"))
        queue.serve(take(queue), 0, 4)
    assert sum(queue.served(f"group {number}") > 0 for number in range(20)) <= 4


@each_case("seed", range(40))
def test_random_operations_keep_counts_and_serve_everything(seed: int) -> None:
    rng = random.Random(seed)
    queue = queue_of(aging_tokens=rng.choice([1, 7, 100]))
    running: list[Sequence] = []
    num_left, number = 0, 0
    for _ in range(300):
        match rng.choice(["add", "add", "take", "put back", "remove", "end", "serve"]):
            case "add":
                priority, group = rng.choice([0, 0, 1, 5, -2]), rng.choice("aab")
                queue.add(sequence(number, priority=priority, group=group, num_tokens=rng.randrange(1, 9)))
                number += 1
            case "take" if queue:
                best = queue.first_level
                running.append(take(queue))
                assert running[-1].level == best <= running[-1].priority
            case "put back" if running:
                queue.put_back(running.pop(rng.randrange(len(running))))
            case "remove" if queue:
                queue.remove(rng.choice(list(queue)))
                num_left += 1
            case "end" if running:
                running.pop(rng.randrange(len(running)))
                num_left += 1
            case "serve" if running:
                queue.serve(rng.choice(running), 0, rng.randrange(1, 30))
        queue.check()
        assert len(queue) + len(running) + num_left == number
    ids = order(queue)
    assert len(ids) == len(set(ids)) == number - num_left - len(running)
