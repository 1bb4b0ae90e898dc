"""The scheduler without an executor: budgets, order, preemption, and random loads that must all finish."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import RequestError
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.keys import prefix_scope
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch, Sequence, SequenceState

BLOCK_TOKENS = 4


def scheduler(num_blocks: int = 16, budget: int = 8, max_sequences: int = 8) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, BLOCK_TOKENS), max_batch_tokens=budget, max_sequences=max_sequences)


def sequence(number: int, prompt: Tokens[int], max_tokens: int = 4, *, shared: bool = True) -> Sequence:
    return Sequence.of(number, prompt, max_tokens, scope=prefix_scope(b"root", shared=shared))


def step(under_test: Scheduler) -> ScheduledBatch:
    """Schedule, pretend to compute, append a token that depends on the history, finish what is full."""
    batch = under_test.schedule()
    under_test.blocks.check()
    under_test.complete(batch)
    for entry in batch.entries:
        if entry.samples:
            under_test.share(entry)
            entry.sequence.tokens.append(sum(entry.sequence.tokens) % 3)
            if entry.sequence.is_full:
                under_test.remove(entry.sequence)
    under_test.blocks.check()
    return batch


def shape(batch: ScheduledBatch) -> list[tuple[int, int]]:
    return [(entry.sequence.id, entry.num_tokens) for entry in batch.entries]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_samples_at_its_end() -> None:
    under_test = scheduler()
    under_test.add(sequence(1, range(20), max_tokens=2))
    batches = [step(under_test) for _ in range(4)]
    assert [shape(batch) for batch in batches] == [[(1, 8)], [(1, 8)], [(1, 4)], [(1, 1)]]
    assert [batch.entries[0].samples for batch in batches] == [False, False, True, True]
    assert not under_test.has_sequences


def test_decoding_sequences_come_before_prompts() -> None:
    under_test = scheduler()
    under_test.add(sequence(1, range(4)))
    step(under_test)
    under_test.add(sequence(2, range(100, 120)))
    assert shape(step(under_test)) == [(1, 1), (2, 7)]


def test_an_empty_scheduler_makes_an_empty_step() -> None:
    assert scheduler().schedule().entries == []


def test_no_more_than_max_sequences_run_at_once() -> None:
    under_test = scheduler(max_sequences=2)
    for number in range(4):
        under_test.add(sequence(number, [number]))
    assert shape(step(under_test)) == [(0, 1), (1, 1)]


def test_the_newest_sequence_is_preempted_and_resumes_first() -> None:
    under_test = scheduler(num_blocks=3)
    under_test.add(sequence(1, range(4), max_tokens=8))
    under_test.add(sequence(2, range(10, 13), max_tokens=6))
    under_test.add(sequence(3, range(20, 23), max_tokens=2))
    batches = []
    while under_test.has_sequences:
        batches.append(step(under_test))
        if batches[-1].preempted:
            assert [each.id for each in under_test.waiting] == [2, 3]
    preempted = [sequence.id for batch in batches for sequence in batch.preempted]
    assert preempted == [2]
    assert under_test.num_preemptions == 1


def test_a_request_that_could_never_fit_is_refused_with_numbers() -> None:
    with pytest.raises(RequestError, match=r"40 tokens, which takes 10 KV blocks .*; the pool has 3.*kv_blocks"):
        scheduler(num_blocks=3).add(sequence(1, range(20), max_tokens=20))


def test_a_request_that_just_fits_the_pool_is_served_alone() -> None:
    under_test = scheduler(num_blocks=3)
    under_test.add(sequence(1, range(8), max_tokens=5))
    while under_test.has_sequences:
        step(under_test)
    assert under_test.num_preemptions == 0


def test_removing_a_sequence_in_any_state_frees_its_blocks() -> None:
    under_test = scheduler(max_sequences=1)
    sequences = [sequence(number, range(6)) for number in range(2)]
    for each in sequences:
        under_test.add(each)
    step(under_test)
    for each in sequences:
        under_test.remove(each)
        under_test.remove(each)
    assert under_test.blocks.num_in_use == 0
    assert not under_test.has_sequences


def test_a_common_prefix_is_computed_once() -> None:
    under_test = scheduler()
    under_test.add(sequence(1, [*range(8), 50]))
    step(under_test)
    assert under_test.blocks.num_cached == 0, "no logits yet that show whether its keys and values are finite"
    step(under_test)
    second = sequence(2, [*range(8), 60, 61])
    under_test.add(second)
    step(under_test)
    assert second.cached_tokens == (8, 0, 0)
    assert under_test.prefix_hit_tokens.total() == 8


def test_a_queued_step_is_followed_by_the_next_and_its_blocks_are_found_once_they_are_shared() -> None:
    under_test = scheduler()
    first = sequence(1, range(8), max_tokens=2)
    under_test.add(first)
    queued = under_test.schedule()
    under_test.queue(queued)
    assert (first.num_pending, first.num_in_flight, first.is_full) == (1, 1, False)
    second = under_test.schedule()
    assert shape(second) == [(1, 1)]
    assert second.entries[0].start == 8
    under_test.queue(second)
    assert first.is_full
    assert under_test.schedule().entries == [], "its length is known ahead"
    assert under_test.blocks.num_cached == 0
    under_test.retire(queued)
    under_test.share(queued.entries[0])
    assert (under_test.blocks.num_cached, first.num_in_flight) == (2, 1)


def test_retiring_a_step_skips_sequences_that_have_ended_or_been_preempted() -> None:
    under_test = scheduler(num_blocks=3)
    old, young = sequence(1, range(4), max_tokens=8), sequence(2, range(10, 14), max_tokens=4)
    under_test.add(old)
    under_test.add(young)
    queued = under_test.schedule()
    under_test.queue(queued)
    second = under_test.schedule()
    assert second.preempted == [young]
    assert young.num_in_flight == 1
    under_test.remove(old)
    second.drop_ended()
    assert (second.entries, second.num_tokens) == ([], 0)
    under_test.retire(queued)
    for entry in queued.entries:
        under_test.share(entry)
    assert (young.num_in_flight, under_test.blocks.num_cached) == (0, 0)
    young.tokens.append(5)
    assert shape(under_test.schedule()) == [(2, 5)]
    under_test.blocks.check()


@dataclass
class Load:
    """A random load: requests as (prompt, max_tokens, step of arrival), and the scheduler's limits."""

    requests: list[tuple[list[int], int, int]]
    spare_blocks: int
    budget: int
    max_sequences: int
    prefix_cache: bool
    aborts: set[int]


LOADS = st.builds(
    Load,
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=16), st.integers(1, 24), st.integers(0, 10)),
        min_size=1,
        max_size=12,
    ),
    spare_blocks=st.integers(0, 6),
    budget=st.integers(1, 12),
    max_sequences=st.integers(1, 6),
    prefix_cache=st.booleans(),
    aborts=st.sets(st.integers(0, 11), max_size=3),
)


def blocks_needed(load: Load) -> int:
    return max(-(-(len(prompt) + most - 1) // BLOCK_TOKENS) for prompt, most, _ in load.requests)


def expected_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(sum(tokens) % 3)
    return tokens


@settings(max_examples=150, deadline=None)
@given(LOADS)
def test_every_request_of_a_random_load_finishes_in_order_with_its_own_tokens(load: Load) -> None:
    pool = blocks_needed(load) + load.spare_blocks
    under_test = scheduler(pool, load.budget, load.max_sequences)
    requests = [
        sequence(number, prompt, most, shared=load.prefix_cache)
        for number, (prompt, most, _) in enumerate(load.requests)
    ]
    first_step: dict[int, int] = {}
    arrivals: list[int] = []
    most_steps = 11 + sum(len(prompt) + most for prompt, most, _ in load.requests) * (len(requests) + 1)
    for now in range(most_steps):
        for number, (_, _, arrival) in enumerate(load.requests):
            if arrival == now:
                under_test.add(requests[number])
                arrivals.append(number)
            if number in load.aborts and arrival + 3 == now:
                under_test.remove(requests[number])
        oldest = next(iter([*under_test.running.values(), *under_test.waiting]), None)
        batch = step(under_test)
        assert batch.num_tokens == sum(entry.num_tokens for entry in batch.entries) <= load.budget
        assert len(under_test.running) <= load.max_sequences
        order = [arrivals.index(each.id) for each in [*under_test.running.values(), *under_test.waiting]]
        assert order == sorted(order), "running and waiting are not in order of arrival"
        assert (oldest is None) == (not batch.entries), "a step without work, or work that is not done"
        if oldest is not None and oldest.num_pending == 1 and not batch.preempted:
            assert any(entry.sequence is oldest for entry in batch.entries), "the oldest does not advance"
        for entry in batch.entries:
            first_step.setdefault(entry.sequence.id, now)
    assert not under_test.has_sequences
    assert under_test.blocks.num_in_use == 0
    assert all(request.state is SequenceState.FINISHED for request in requests)
    starts = [first_step[number] for number in arrivals if number in first_step]
    assert starts == sorted(starts), "a later request overtook an earlier one"
    for number, (prompt, most, _) in enumerate(load.requests):
        if number not in load.aborts:
            assert list(requests[number].tokens) == expected_tokens(prompt, most)
