"""Priorities and groups in the scheduler: who runs first, who yields, and that nothing starves or changes a token."""

import random

from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import Sequence, SequenceState
from ingot.runtime.scheduling_policy import SchedulingPolicy
from tests.each_case import each_case
from tests.runtime.scheduling.test_scheduler import BLOCK_TOKENS, expected_tokens, shape, step


def scheduler(
    num_blocks: int = 64, budget: int = 8, max_sequences: int = 8, aging_tokens: int | None = None
) -> Scheduler:
    blocks = BlockManager(num_blocks, BLOCK_TOKENS)
    policy = SchedulingPolicy(priority_aging_tokens=aging_tokens)
    return Scheduler(blocks, max_batch_tokens=budget, max_sequences=max_sequences, policy=policy)


def sequence(
    number: int, num_tokens: int = 4, max_tokens: int = 4, *, priority: int = 0, group: str = "", reuse: bool = True
) -> Sequence:
    prompt = [(number + position) % 7 for position in range(num_tokens)]
    return Sequence.of(number, prompt, max_tokens, priority=priority, group=group, reuse_prefix=reuse)


def run(under_test: Scheduler, *sequences: Sequence) -> list[int]:
    """Serve all; ids in the order in which they end."""
    for each in sequences:
        under_test.add(each)
    left, ended = list(sequences), list[int]()
    for _ in range(10_000):
        if not under_test.has_sequences:
            return ended
        step(under_test)
        under_test.waiting.check()
        ended += [each.id for each in left if each.state is SequenceState.FINISHED]
        left = [each for each in left if each.state is not SequenceState.FINISHED]
    raise AssertionError("it never ends")


def test_urgent_requests_are_served_first() -> None:
    requests = [sequence(number, priority=priority) for number, priority in enumerate([2, 0, 1, 0])]
    assert run(scheduler(max_sequences=1), *requests) == [1, 3, 2, 0]


def test_a_running_sequence_yields_its_place_to_an_urgent_one_and_resumes_first() -> None:
    under_test = scheduler(max_sequences=1)
    slow, next_slow = sequence(1, max_tokens=20, priority=1), sequence(2, priority=1)
    under_test.add(slow)
    under_test.add(next_slow)
    for _ in range(5):
        step(under_test)
    under_test.add(urgent := sequence(3, max_tokens=2))
    batch = step(under_test)
    assert (batch.preempted, shape(batch)) == ([slow], [(3, 4)])
    assert (slow.level, slow.resume_level, slow.num_yields, under_test.num_yields, under_test.num_preemptions) == (
        1,
        0,
        1,
        1,
        1,
    )
    assert run(under_test) == []
    assert [each.num_preemptions for each in (slow, next_slow, urgent)] == [1, 0, 0]
    assert list(slow.tokens) == expected_tokens(list(slow.tokens[:4]), 20)


def test_a_running_sequence_yields_its_blocks_to_an_urgent_one() -> None:
    under_test = scheduler(num_blocks=8, budget=32)
    slow = [sequence(number, num_tokens=12, max_tokens=4, priority=1, reuse=False) for number in range(2)]
    for each in slow:
        under_test.add(each)
    step(under_test)
    under_test.add(sequence(9, num_tokens=9, max_tokens=4, reuse=False))
    assert under_test.schedule().preempted == [], "it is refused first"
    batch = under_test.schedule()
    assert batch.preempted == [slow[1]], "the newest of the least urgent"
    assert 9 in under_test.running


def test_nothing_yields_when_the_urgent_request_would_not_fit_all_the_same() -> None:
    under_test = scheduler(num_blocks=8, budget=64)
    large = sequence(0, num_tokens=16, max_tokens=9, reuse=False)
    small = sequence(1, num_tokens=4, max_tokens=2, priority=1, reuse=False)
    for each in (large, small):
        under_test.add(each)
    step(under_test)
    under_test.add(sequence(2, num_tokens=20, max_tokens=2, reuse=False))
    for _ in range(2):
        assert under_test.schedule().preempted == []


def test_requests_of_one_priority_never_yield_to_each_other() -> None:
    under_test = scheduler(max_sequences=2, aging_tokens=1)
    run(under_test, *(sequence(number, max_tokens=9, group="ab"[number % 2]) for number in range(9)))
    assert under_test.num_yields == 0


def test_a_stream_of_urgent_requests_makes_a_slow_one_yield_a_few_times_only() -> None:
    under_test = scheduler(max_sequences=1, aging_tokens=10**9)
    slow = sequence(0, max_tokens=20, priority=100)
    under_test.add(slow)
    number = 1
    while slow.state is not SequenceState.FINISHED:
        if slow.state is SequenceState.RUNNING and not under_test.waiting:
            under_test.add(sequence(number, max_tokens=1))
            number += 1
        step(under_test)
        assert number < 200
    assert 1 < slow.num_yields <= 8, "levels 99, 97, 93, ..., 0"


def test_a_waiting_request_is_served_while_urgent_ones_arrive_without_end() -> None:
    under_test = scheduler(max_sequences=2, aging_tokens=20)
    patient = sequence(0, priority=3)
    under_test.add(patient)
    for number in range(1, 200):
        under_test.add(sequence(number))
        step(under_test)
        if patient.state is SequenceState.FINISHED:
            break
    assert patient.state is SequenceState.FINISHED
    assert number > 5, "it did not wait at all"
    assert len(under_test.waiting) > 5


def test_the_least_urgent_sequence_is_preempted_when_blocks_run_out() -> None:
    under_test = scheduler(num_blocks=4, budget=16)
    requests = [sequence(0, max_tokens=8, priority=1, reuse=False), sequence(1, max_tokens=8, reuse=False)]
    order = run(under_test, *requests)
    assert order == [1, 0]
    assert [each.num_preemptions for each in requests] == [1, 0]
    assert under_test.num_yields == 0


@each_case("seed", range(60))
def test_random_loads_end_with_their_own_tokens_and_within_bounds(seed: int) -> None:
    """Random priorities, groups, arrivals and aborts: all end, yields are bounded, the first in rank advances."""
    rng = random.Random(seed)
    levels = rng.choice([[0], [0, 1], [0, 3, 40], [-5, 0, 5]])
    requests = [
        sequence(
            number,
            rng.randrange(1, 14),
            rng.randrange(1, 20),
            priority=rng.choice(levels),
            group=rng.choice("aaab"),
            reuse=rng.random() < 0.8,
        )
        for number in range(rng.randrange(2, 14))
    ]
    prompts = [list(each.tokens) for each in requests]
    needed = max(-(-each.max_stored_tokens // BLOCK_TOKENS) for each in requests)
    under_test = scheduler(
        needed + rng.randrange(6), rng.randrange(1, 12), rng.randrange(1, 6), rng.choice([1, 30, None])
    )
    arrivals = sorted(rng.randrange(30) for _ in requests)
    aborts = {number: arrivals[number] + rng.randrange(1, 20) for number in range(len(requests)) if rng.random() < 0.1}
    for now in range(6000):
        for number, each in enumerate(requests):
            if arrivals[number] == now:
                under_test.add(each)
            if aborts.get(number) == now:
                under_test.remove(each)
        first = min(under_test.running.values(), key=lambda each: each.rank, default=None)
        batch = step(under_test)
        under_test.waiting.check()
        assert len(under_test.running) <= under_test.max_sequences
        assert bool(batch.entries) == bool(under_test.has_sequences or batch.entries), "a step without work"
        if first and first.num_pending == 1 and first not in batch.preempted:
            assert any(entry.sequence is first for entry in batch.entries), "the first in rank does not advance"
        if now > max(arrivals) and not under_test.has_sequences:
            break
    assert not under_test.has_sequences, "a request starved"
    assert under_test.blocks.num_in_use == 0
    for number, each in enumerate(requests):
        assert each.num_yields <= (max(levels) - min(levels)).bit_length() + 1
        assert each.level <= each.priority
        if number not in aborts:
            assert list(each.tokens) == expected_tokens(prompts[number], each.max_total_tokens - len(prompts[number]))
