"""State slots: snapshots at block ends, hits that need one, and slots that running sequences take back."""

import random

from ingot.runtime.kv.states import StateCopy, StateManager
from tests.each_case import each_case

SIZE = 4


def keys(count: int, name: str = "a") -> list[bytes]:
    """Keys of a chain of blocks."""
    return [f"{name}{number}".encode() for number in range(count)]


def manager(num_slots: int = 4, snapshot_blocks: int = 4) -> StateManager:
    return StateManager(num_slots, SIZE, snapshot_blocks=snapshot_blocks)


def with_snapshot(states: StateManager, sequence_id: int, blocks: list[bytes]) -> int:
    """Compute a prompt of these blocks, keep its state, end it; the slot of the snapshot."""
    states.admit(sequence_id, None)
    num_tokens = len(blocks) * SIZE
    copy = states.snapshot(sequence_id, num_tokens, num_tokens)
    assert copy is not None
    assert copy.source == states.slot(sequence_id)
    states.commit(sequence_id, blocks)
    states.release(sequence_id)
    return copy.target


def test_a_sequence_starts_from_the_longest_prefix_with_a_state_and_leaves_a_token_to_compute() -> None:
    states, blocks = manager(), keys(5)
    with_snapshot(states, 1, blocks[:2])
    with_snapshot(states, 2, blocks[:4])
    for num_tokens, expected in ((40, 4), (17, 4), (16, 2), (9, 2), (8, 0), (1, 0)):
        assert states.longest(blocks, num_tokens) == expected
    assert states.longest(blocks[:3], 40) == 2
    assert states.longest(keys(5, "b"), 40) == 0


def test_a_hit_copies_the_snapshot_which_stays() -> None:
    states, blocks = manager(), keys(2)
    kept = with_snapshot(states, 1, blocks)
    (copy,) = states.admit(2, blocks[1])
    assert copy == StateCopy(kept, states.slot(2))
    assert states.num_snapshots == 1
    states.check([2], blocks)


def test_a_hit_takes_the_snapshot_itself_when_no_other_slot_is_left() -> None:
    states, blocks = manager(num_slots=2), keys(2)
    kept = with_snapshot(states, 1, blocks)
    states.admit(2, None)
    assert states.admit(3, blocks[1]) == ()
    assert states.slot(3) == kept
    assert states.num_snapshots == states.num_available == 0
    states.check([2, 3], blocks)


def test_nothing_is_kept_when_running_sequences_have_all_slots() -> None:
    states = manager(num_slots=1)
    states.admit(1, None)
    assert states.snapshot(1, 8, 8) is None
    states.check([1], [])


def test_steps_end_where_a_state_is_kept() -> None:
    states = manager()
    ends = [0]
    while ends[-1] < 39:
        ends.append(states.chunk_end(ends[-1], 39, num_prompt_tokens=39))
    assert ends == [0, 16, 32, 36, 39]
    assert states.chunk_end(0, 10, num_prompt_tokens=39) == 10
    assert states.chunk_end(33, 39, num_prompt_tokens=36) == 36
    assert states.chunk_end(0, 8, num_prompt_tokens=8) == 4, "a repeated prompt starts one block before its end"
    assert states.chunk_end(0, 3, num_prompt_tokens=3) == 3


def test_a_state_is_kept_at_places_only_and_found_once_its_block_is_indexed() -> None:
    states, blocks = manager(num_slots=8), keys(9)
    states.admit(1, None)
    kept = [end for end in range(1, 40) if states.snapshot(1, end, num_prompt_tokens=38)]
    assert kept == [16, 32, 36]
    assert states.longest(blocks, 100) == 0
    states.commit(1, blocks[:8])
    assert states.longest(blocks, 100) == 8
    states.commit(1, blocks)
    assert states.longest(blocks, 100) == 9
    states.check([1], blocks)


def test_states_after_a_failed_step_are_dropped() -> None:
    states, blocks = manager(), keys(8)
    states.admit(1, None)
    assert states.snapshot(1, 16, 60)
    assert states.snapshot(1, 32, 60)
    states.rollback(1, 16)
    states.commit(1, blocks)
    assert states.longest(blocks, 100) == 4
    states.check([1], blocks)


def test_a_snapshot_leaves_with_its_block() -> None:
    states, blocks = manager(), keys(2)
    with_snapshot(states, 1, blocks)
    states.forget(blocks[0])
    assert states.longest(blocks, 9) == 2
    states.forget(blocks[1])
    assert states.longest(blocks, 9) == 0
    states.check([], blocks)


def test_running_sequences_take_the_oldest_snapshot_first_then_pending_ones() -> None:
    states = manager(num_slots=3)
    oldest, newest = (with_snapshot(states, number, keys(2, name)) for number, name in enumerate("ab"))
    states.admit(7, None)
    states.admit(8, None)
    assert states.slot(8) == oldest
    assert states.snapshot(7, 8, 8) == StateCopy(states.slot(7), newest)
    assert states.num_snapshots == 0
    states.admit(9, None)
    assert states.slot(9) == newest
    assert (states.num_available, states.num_evicted) == (0, 3)
    states.commit(7, keys(2, "c"))
    assert states.num_snapshots == 0
    states.check([7, 8, 9], keys(2, "c"))


def test_a_fork_copies_the_state() -> None:
    states = manager()
    states.admit(1, None)
    assert states.fork(1, 2) == StateCopy(states.slot(1), states.slot(2))
    states.check([1, 2], [])


def test_a_rejected_draft_returns_to_the_state_before_the_step() -> None:
    states = manager(num_slots=3)
    states.admit(1, None)
    copy = states.checkpoint(1)
    assert copy is not None
    assert (copy.source, states.num_available) == (states.slot(1), 1)
    assert states.holds(1, copy.target)
    assert states.restore(1) == StateCopy(copy.target, states.slot(1))
    assert states.num_available == 2
    states.check([1], [])


def test_drafts_are_verified_only_while_a_slot_is_left_and_stop_before_a_place_for_a_snapshot() -> None:
    states = manager(num_slots=2)
    states.admit(1, None)
    states.admit(2, None)
    assert states.checkpoint(1) is None
    states.release(2)
    assert states.checkpoint(1) is not None
    states.release(1)
    assert states.num_available == 2
    states.check([], [])
    assert [states.num_drafts(start, 8) for start in (0, 6, 12, 13, 14, 15, 16)] == [8, 8, 2, 1, 0, 0, 8]


@each_case("seed", range(6))
def test_random_operations_leak_no_slot_and_never_lose_or_mix_up_a_state(seed: int) -> None:
    """A model of the pool's content: every slot holds the chain and length whose state it has."""
    rng = random.Random(seed)
    states = manager(num_slots=rng.choice([1, 2, 5, 12]), snapshot_blocks=rng.choice([1, 2, 5]))
    chains = {name: keys(12, name) for name in "abc"}
    content: dict[int, tuple[str, int]] = {}
    running: dict[int, tuple[str, int, int]] = {}  # chain, tokens computed, tokens of the prompt
    indexed: dict[str, int] = dict.fromkeys("abc", 0)  # leading blocks in the prefix index

    def made(copies: tuple[StateCopy, ...]) -> None:
        for source, target in copies:
            content[target] = content[source]

    for number in range(3000):
        action = rng.random()
        if action < 0.3 and states.num_available:
            name, prompt = rng.choice("abc"), rng.randrange(1, 12 * SIZE)
            hits = states.longest(chains[name][: min(indexed[name], prompt // SIZE)], prompt)
            made(states.admit(number, chains[name][hits - 1] if hits else None))
            if hits:
                assert content[states.slot(number)] == (name, hits * SIZE), "the state is not that of the prefix"
            running[number] = (name, hits * SIZE, prompt)
        elif action < 0.75 and running:
            chosen = rng.choice(list(running))
            name, start, prompt = running[chosen]
            end = states.chunk_end(start, min(start + rng.randrange(1, 9), 12 * SIZE), prompt)
            content[states.slot(chosen)] = (name, end)
            running[chosen] = (name, end, prompt)
            copy = states.snapshot(chosen, end, prompt)
            made((copy,) if copy else ())
            if rng.random() < 0.7:
                indexed[name] = max(indexed[name], end // SIZE)
                states.commit(chosen, chains[name][: end // SIZE])
        elif action < 0.9 and running:
            chosen = rng.choice(list(running))
            del running[chosen]
            states.release(chosen)
        elif indexed[name := rng.choice("abc")]:
            indexed[name] -= 1
            states.forget(chains[name][indexed[name]])
        states.check(running, {key for name, count in indexed.items() for key in chains[name][:count]})
    assert states.num_evicted or states.num_slots == 1
