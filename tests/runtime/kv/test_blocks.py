"""Block tables, copy on write, the prefix cache, eviction: examples, then random operations against the invariants."""

from array import array
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ingot.runtime.kv.blocks import SHARED, BlockCopy, BlockManager, BlockMove, Copy, TokenArray
from ingot.runtime.kv.events import Cached, Evicted, Forgotten, Moved, Unused
from ingot.runtime.kv.keys import BlockContent, prefix_scope

BLOCK_TOKENS = 4


def tokens_of(values: Iterable[int]) -> TokenArray:
    return array("q", values)


def filled(manager: BlockManager, sequence_id: int, tokens: TokenArray) -> int:
    """Admit and compute a sequence; return its cached tokens."""
    admission = manager.admit(sequence_id, tokens)
    assert admission is not None
    manager.commit(sequence_id, tokens, len(tokens))
    manager.check()
    return admission.cached_tokens


def test_a_second_sequence_shares_the_full_blocks_of_a_common_prefix() -> None:
    manager = BlockManager(8, BLOCK_TOKENS)
    assert filled(manager, 1, tokens_of([*range(8), 50])) == 0
    assert filled(manager, 2, tokens_of([*range(8), 60, 61])) == 8
    assert manager.table(1)[:2] == manager.table(2)[:2]
    assert manager.num_in_use == 4


def test_the_blocks_of_a_sequence_share_one_tree_which_the_collector_visits_once() -> None:
    manager = BlockManager(8, BLOCK_TOKENS)
    filled(manager, 1, tokens_of(range(13)))
    cached = [manager.cached(block) for block in manager.table(1)[:3]]
    assert len({id(each[1]) for each in cached if each}) == 1
    assert cached[0] is not None
    assert cached[0][1].first == cached[0][0].hash


def test_the_last_token_of_a_wholly_cached_prompt_is_computed_again_in_a_copied_block() -> None:
    manager = BlockManager(8, BLOCK_TOKENS)
    filled(manager, 1, tokens_of(range(8)))
    admission = manager.admit(2, tokens_of(range(8)))
    assert admission is not None
    assert admission.cached_tokens == 7
    assert admission.copies == (BlockCopy(manager.table(1)[1], manager.table(2)[1]),)
    manager.check()


def test_an_unshared_idle_block_is_rewritten_without_a_copy() -> None:
    manager = BlockManager(2, BLOCK_TOKENS)
    filled(manager, 1, tokens_of(range(8)))
    manager.release(1)
    admission = manager.admit(2, tokens_of(range(8)))
    assert admission is not None
    assert (admission.cached_tokens, admission.copies) == (7, ())
    assert manager.num_cached == 1, "a block that is being written can still be hit"
    manager.commit(2, tokens_of(range(8)), 8)
    assert manager.num_cached == 2
    manager.check()


def test_only_full_computed_blocks_are_found() -> None:
    manager = BlockManager(8, BLOCK_TOKENS)
    prompt = tokens_of(range(12))
    manager.admit(1, prompt)
    manager.commit(1, prompt, 7)
    assert filled(manager, 2, prompt) == 4


def test_forgotten_blocks_and_all_that_continue_them_are_not_found_any_more() -> None:
    manager = BlockManager(16, BLOCK_TOKENS)
    chains = [tokens_of(range(12)), tokens_of([*range(4), *range(20, 28)]), tokens_of(range(50, 62))]
    for number, chain in enumerate(chains):
        filled(manager, number, chain)
    manager.release(1)
    manager.forget(tokens_of([*range(4), 99]))
    manager.check()
    assert manager.num_cached == 3, "the third chain has another first block"
    assert [filled(manager, 10 + number, chain) for number, chain in enumerate(chains[::-1])] == [11, 0, 4]
    manager.release(0)
    manager.check()


def test_forgetting_removes_blocks_whose_chain_is_incomplete() -> None:
    manager = BlockManager(16, BLOCK_TOKENS)
    chain = tokens_of(range(12))
    filled(manager, 1, chain)
    manager.release(1)
    manager.admit(2, chain[:8])  # rewrites its second block; the third is still in the index
    assert manager.num_cached == 2
    manager.forget(chain[:4])
    assert manager.num_cached == 0, "the third block continues the forgotten one"
    manager.check()


def test_sequences_of_another_scope_share_no_block() -> None:
    manager = BlockManager(16, BLOCK_TOKENS)
    scopes = [prefix_scope(b"root"), prefix_scope(b"root", cache_salt="tenant"), prefix_scope(b"root", shared=False)]
    tokens = tokens_of(range(9))
    for number, scope in enumerate(scopes):
        admission = manager.admit(number, tokens, scope=scope)
        assert admission is not None
        assert admission.cached_tokens == 0
        manager.commit(number, tokens, 9)
        manager.release(number)
    assert manager.num_cached == 6
    again = manager.admit(9, tokens, scope=scopes[2])
    assert again is not None
    assert again.cached_tokens == 8, "a preempted sequence finds its own blocks"
    manager.release(9)
    manager.forget(tokens, scopes[2])
    assert manager.num_cached == 4
    manager.check()


def test_admission_allocates_all_blocks_or_none() -> None:
    manager = BlockManager(3, BLOCK_TOKENS)
    filled(manager, 1, tokens_of(range(8)))
    assert manager.admit(2, tokens_of(range(100, 108))) is None
    assert manager.admit(2, tokens_of([7]), spare_blocks=1) is None
    assert manager.num_available == 1
    manager.check()


def test_the_end_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    manager = BlockManager(4, BLOCK_TOKENS)
    filled(manager, 1, tokens_of(range(8)))
    manager.release(1)
    filled(manager, 2, tokens_of(range(100, 109)))
    manager.release(2)
    assert filled(manager, 3, tokens_of(range(8))) == 4


def test_blocks_are_offered_to_tiers_when_they_are_cached_and_when_they_become_idle() -> None:
    manager = BlockManager(8, BLOCK_TOKENS)
    events = manager.events.reader()
    for number, scope in enumerate([prefix_scope(b"root"), prefix_scope(b"root", shared=False)]):
        manager.admit(number, tokens_of(range(9)), scope=scope)
        table = list(manager.table(number))
        manager.commit(number, tokens_of(range(9)), 9)
        keys = [scope.root, *manager.hashes(number)]
        assert list(events) == [
            Cached(key, parent, BLOCK_TOKENS, block, scope.private)
            for key, parent, block in zip(keys[1:], keys[:2], table[:2], strict=True)
        ]
        events.clear()
        manager.release(number)
        assert list(events) == [Unused(keys[2], table[1]), Unused(keys[1], table[0])]
        events.clear()


def test_events_say_what_is_evicted_and_forgotten_and_nothing_is_recorded_without_a_reader() -> None:
    manager, tokens = BlockManager(2, BLOCK_TOKENS), tokens_of(range(8))
    filled(manager, 1, tokens)
    first, second = manager.hashes(1)
    manager.release(1)
    assert manager.events.readers == []
    events = manager.events.reader()
    manager.admit(2, tokens_of([50]))
    assert list(events) == [Evicted(second)]
    events.clear()
    manager.forget(tokens)
    assert list(events) == [Forgotten(first, (first, second))]


def test_a_pinned_block_is_neither_evicted_nor_freed_nor_written() -> None:
    manager = BlockManager(3, BLOCK_TOKENS)
    filled(manager, 1, tokens_of(range(8)))
    first, second = manager.table(1)
    manager.pin(second)
    assert manager.reserve(1, 7, 8) == (BlockCopy(second, manager.table(1)[1]),), "written in place while it is read"
    manager.release(1)
    manager.pin(first)
    manager.check()
    assert manager.num_available == 1
    assert manager.admit(2, tokens_of(range(50, 56))) is None
    manager.unpin(first)
    manager.check()
    assert manager.admit(2, tokens_of(range(50, 56))) is not None
    assert second not in manager.table(2)
    manager.forget(tokens_of(range(8)))
    manager.check()
    assert manager.num_available == 0, "it is not cached any more, and a transfer still reads it"
    manager.unpin(second)
    manager.check()
    assert manager.num_available == 1


def test_a_shortage_is_reported_before_a_request_is_refused() -> None:
    manager = BlockManager(2, BLOCK_TOKENS)
    filled(manager, 1, tokens_of(range(8)))
    table = list(manager.table(1))
    manager.release(1)
    for block in table:
        manager.pin(block)

    assert manager.admit(2, tokens_of(range(100, 105))) is None

    class Saves:
        """Tiers that save all blocks."""

        def relieve(self) -> None:
            for block in table:
                manager.unpin(block)

        def find_arriving(self, content: BlockContent) -> int | None:
            return None

        def find_state(self, hashes: list[bytes], count: int) -> int:
            return count

    assert manager.admit(2, tokens_of(range(100, 105)), tiers=Saves()) is not None
    manager.check()


def test_restored_blocks_are_cached_like_computed_ones() -> None:
    manager, tokens = BlockManager(8, BLOCK_TOKENS), tokens_of(range(13))
    manager.admit(1, tokens)
    following = list(manager.following(1, tokens))
    assert [content.tokens for content in following] == [tokens[i : i + 4].tobytes() for i in (0, 4, 8)]
    assert manager.tree(1, following) == (following[0].hash, False)
    manager.adopt(1, following[:2])
    manager.check()
    assert manager.hashes(1) == [content.hash for content in following[:2]]
    assert manager.tree(1, following[2:]) == (following[0].hash, False)
    assert [manager.has(content) for content in manager.contents(tokens, SHARED)] == [True, True, False]
    assert filled(manager, 2, tokens) == 8


def test_a_fork_shares_everything_until_one_side_writes() -> None:
    manager = BlockManager(8, BLOCK_TOKENS)
    filled(manager, 1, tokens_of(range(6)))
    manager.fork(1, 2)
    assert manager.num_in_use == 2
    copies = manager.reserve(2, 6, 7)
    assert copies == (BlockCopy(manager.table(1)[1], manager.table(2)[1]),)
    assert manager.reserve(1, 6, 7) == ()
    manager.check()


def test_blocks_of_the_fast_part_are_taken_first() -> None:
    manager = BlockManager(6, BLOCK_TOKENS, num_fast=3)
    assert manager.admit(1, tokens_of(range(20))) is not None
    assert sorted(manager.table(1)[:3]) == [0, 1, 2]
    assert sorted(manager.table(1)[3:]) == [3, 4]
    assert (manager.num_slow, manager.num_slow_in_use, manager.has_fast_room) == (3, 2, False)
    manager.release(1)
    manager.check()


def test_usage_is_a_share_of_the_fast_part_and_at_most_whole() -> None:
    manager = BlockManager(8, BLOCK_TOKENS, num_fast=4)
    filled(manager, 1, tokens_of(range(2 * BLOCK_TOKENS)))
    assert manager.usage == manager.num_in_use / 4
    filled(manager, 2, tokens_of(range(100, 100 + 5 * BLOCK_TOKENS)))
    assert manager.num_in_use > 4
    assert manager.usage == 1.0


def test_cached_blocks_make_room_in_the_fast_part_by_moving_down_and_are_found_there() -> None:
    manager = BlockManager(6, BLOCK_TOKENS, num_fast=3, most_moves=2)
    old = tokens_of(range(12))
    filled(manager, 1, old)
    manager.release(1)
    events = manager.events.reader()
    manager.begin_step()
    admission = manager.admit(2, tokens_of(range(50, 61)))
    assert admission is not None
    assert admission.copies == (BlockMove(2, 3), BlockMove(1, 4)), "the last block of the sequence is the oldest"
    assert sorted(manager.table(2)) == [0, 1, 2]
    assert [type(event) for event in events] == [Moved, Moved, Evicted], "the third exceeds what may move in a step"
    assert (manager.num_moved_down, manager.num_evicted) == (2, 1)
    manager.check()
    manager.release(2)
    assert [manager.has(content) for content in manager.contents(old, SHARED)] == [False, True, True]


def test_a_block_in_use_moves_up_once_the_fast_part_has_room_and_takes_its_content_along() -> None:
    manager = BlockManager(7, BLOCK_TOKENS, num_fast=2, most_moves=4)
    shared = tokens_of(range(8))
    filled(manager, 1, tokens_of(range(50, 58)))
    filled(manager, 2, tokens_of([*shared, 1]))
    filled(manager, 3, tokens_of([*shared, 2]))
    tables = [manager.tables[2], manager.tables[3]]
    assert manager.move_up(tables, 0) == (), "no room"
    manager.release(1)
    assert manager.move_up(tables[:1], 0) == (), "a sequence that is not given has the block, too"
    manager.begin_step()
    source = tables[0].blocks[0]
    idle_to, up = manager.move_up(tables, 0)
    assert idle_to.source == up.target
    assert up.source == source
    assert tables[0].blocks[0] == tables[1].blocks[0] == up.target < manager.num_fast
    assert manager.has(next(manager.contents(shared, SHARED)))
    assert (manager.num_moved_down, manager.num_moved_up) == (1, 1)
    manager.check()


def test_content_that_was_lost_on_its_way_is_not_found() -> None:
    manager = BlockManager(4, BLOCK_TOKENS, num_fast=1)
    tokens = tokens_of(range(8))
    filled(manager, 1, tokens)
    manager.discard_content(manager.table(1)[1])
    assert [manager.has(content) for content in manager.contents(tokens, SHARED)] == [True, False]
    manager.release(1)
    manager.check()
    assert manager.num_free == 3


class BlockOperations(RuleBasedStateMachine):
    """Random use by many sequences, with a model of the memory: each slot records the history written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.make_manager()
        self.sequences: dict[int, TokenArray] = {}
        self.memory: dict[tuple[int, int], bytes] = {}
        self.next_id = 0
        self.pinned: list[int] = []
        self.contents: dict[int, list[bytes | None]] = {}

    def make_manager(self) -> BlockManager:
        return BlockManager(7, BLOCK_TOKENS)

    def copy(self, copies: Iterable[Copy]) -> None:
        for source, target in copies:
            for offset in range(BLOCK_TOKENS):
                self.memory[target, offset] = self.memory.get((source, offset), b"")

    def write(self, sequence_id: int, start: int, copies: Iterable[Copy]) -> None:
        tokens = self.sequences[sequence_id]
        self.copy(copies)
        for position in range(start, len(tokens)):
            block = self.manager.table(sequence_id)[position // BLOCK_TOKENS]
            self.memory[block, position % BLOCK_TOKENS] = tokens[: position + 1].tobytes()
        self.manager.commit(sequence_id, tokens, len(tokens))

    def pick(self, number: int) -> int | None:
        return sorted(self.sequences)[number % len(self.sequences)] if self.sequences else None

    @rule(values=st.lists(st.integers(0, 1), min_size=1, max_size=14), spare=st.integers(0, 2))
    def admit(self, values: list[int], spare: int) -> None:
        self.next_id += 1
        available = self.manager.num_available
        admission = self.manager.admit(self.next_id, tokens_of(values), spare_blocks=spare)
        if admission is None:
            assert self.manager.num_available == available
            return
        assert admission.cached_tokens < len(values)
        assert self.manager.num_available >= spare
        self.sequences[self.next_id] = tokens_of(values)
        self.write(self.next_id, admission.cached_tokens, admission.copies)

    @rule(number=st.integers(0, 100), values=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, number: int, values: list[int]) -> None:
        sequence_id = self.pick(number)
        if sequence_id is None:
            return
        start = len(self.sequences[sequence_id])
        available, table = self.manager.num_available, self.manager.table(sequence_id)[:]
        copies = self.manager.reserve(sequence_id, start, start + len(values))
        if copies is None:
            assert (self.manager.num_available, self.manager.table(sequence_id)) == (available, table)
            return
        self.sequences[sequence_id].extend(values)
        self.write(sequence_id, start, copies)

    @rule(number=st.integers(0, 100))
    def fork(self, number: int) -> None:
        sequence_id = self.pick(number)
        if sequence_id is not None:
            self.next_id += 1
            self.manager.fork(sequence_id, self.next_id)
            self.sequences[self.next_id] = self.sequences[sequence_id][:]

    @rule(number=st.integers(0, 100))
    def release(self, number: int) -> None:
        sequence_id = self.pick(number)
        if sequence_id is not None:
            self.manager.release(sequence_id)
            del self.sequences[sequence_id]

    @rule(number=st.integers(0, 6))
    def pin(self, number: int) -> None:
        """A transfer reads a cached block until it ends."""
        if self.manager.cached(number) and len(self.pinned) < 3:
            self.manager.pin(number)
            self.pinned.append(number)

    @rule(number=st.integers(0, 100))
    def unpin(self, number: int) -> None:
        if self.pinned:
            self.manager.unpin(self.pinned.pop(number % len(self.pinned)))

    @rule(values=st.lists(st.integers(0, 1), min_size=4, max_size=14))
    def forget(self, values: list[int]) -> None:
        self.manager.forget(tokens_of(values))

    @invariant()
    def a_pinned_block_keeps_its_content(self) -> None:
        for block in self.pinned:
            content = [self.memory.get((block, offset)) for offset in range(BLOCK_TOKENS)]
            assert self.contents.setdefault(block, content) == content
        self.contents = {block: self.contents[block] for block in self.pinned}

    @invariant()
    def bookkeeping_is_consistent(self) -> None:
        self.manager.check()

    @invariant()
    def every_sequence_finds_its_own_history(self) -> None:
        for sequence_id, tokens in self.sequences.items():
            table = self.manager.table(sequence_id)
            for position in range(len(tokens)):
                slot = table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                assert self.memory[slot] == tokens[: position + 1].tobytes()


TestBlockOperations = BlockOperations.TestCase
TestBlockOperations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class SlowBlockOperations(BlockOperations):
    """The same with a slow part: blocks move between the parts, too."""

    def make_manager(self) -> BlockManager:
        return BlockManager(7, BLOCK_TOKENS, num_fast=3, most_moves=3)

    @rule()
    def begin_step(self) -> None:
        self.manager.begin_step()

    @rule(number=st.integers(0, 100), index=st.integers(0, 4), without=st.integers(0, 9))
    def move(self, number: int, index: int, without: int) -> None:
        """Move a block of a sequence to the other part; a block that one more sequence has stays."""
        sequence_id = self.pick(number)
        if sequence_id is None or index >= len(self.manager.table(sequence_id)):
            return
        manager, own = self.manager, self.manager.tables[sequence_id]
        tables = [own, *(table for other, table in manager.tables.items() if other != sequence_id and other != without)]
        before, available = own.blocks[index], manager.num_available
        is_fast = before < manager.num_fast
        moves = (manager.move_down if is_fast else manager.move_up)(tables, index)
        self.copy(moves)
        if moves:
            assert (own.blocks[index] < manager.num_fast) != is_fast
            assert before not in self.pinned
        else:
            assert (own.blocks[index], manager.num_available) == (before, available)


TestSlowBlockOperations = SlowBlockOperations.TestCase
TestSlowBlockOperations.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
