"""Bookkeeping of the paged KV cache: block tables, reference counts, copy on write, prefix cache, LRU eviction.

Ints only; the executor owns the memory. A block is in one of three states:

    free        has no useful content
    in use      in at least one sequence's table; shared blocks are in several
    idle        in no table, but indexed: a prefix that may be hit again; evicted oldest first when blocks run out

The pool may have a fast and a slow part: blocks 0 .. num_fast - 1, and the rest. Blocks are allocated in the fast part
as long as it has a free or an idle one. The content of an idle one then moves to the slow part, up to `most_moves`
blocks a step; beyond that it is evicted. `move_up` brings blocks in use back when the fast part has room.

A shared block is never written: `admit` and `reserve` copy it first. An indexed one leaves the index before it is
written (after Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023).
A block that a transfer reads or writes is pinned: it is not evicted, not freed, and copied like a shared one.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias

from ingot.runtime.kv.events import Cached, EventLog, Evicted, Forgotten, Moved, StateShared, Unused
from ingot.runtime.kv.keys import BlockContent, PrefixScope, Tree, block_hash
from ingot.runtime.kv.prefix_index import PrefixIndex
from ingot.runtime.kv.states import StateCopy, StateManager

# int64 tokens that numpy reads in place. Quoted: the class cannot be subscripted at run time before Python 3.12.
TokenArray: TypeAlias = "array[int]"


SHARED = PrefixScope(b"")  # of sequences that say nothing else
_MOVES_UP = 2  # to bring a block up: an idle one may have to make room for it


class BlockCopy(NamedTuple):
    """Copy `source` onto `target` before the step writes. Copies of one step are made in order."""

    source: int
    target: int


class BlockMove(NamedTuple):
    """Copy `source` onto `target`, which has its content from now on. In order with the copies of the step."""

    source: int
    target: int


Copy: TypeAlias = BlockCopy | BlockMove | StateCopy


class Admission(NamedTuple):
    """Result of allocating a sequence's blocks; its first `cached_tokens` need not be computed.

    num_arriving   blocks after those that are being restored for another sequence, and are shared with it
    needs_state    whether the side state after all of these is in a tier alone, and must be restored
    """

    cached_tokens: int
    copies: tuple[Copy, ...]
    num_arriving: int = 0
    needs_state: bool = False


class LowerTiers(Protocol):
    """The tiers below the pool, as far as an allocation needs them at once. `TierManager` implements this."""

    def relieve(self) -> None:
        """Unpin what is queued to be saved."""
        ...

    def find_arriving(self, content: BlockContent) -> int | None:
        """Return the block that this content is being restored to."""
        ...

    def find_state(self, hashes: list[bytes], count: int) -> int:
        """Return how many of the blocks with these keys to share, if a tier has the side state after more than `count`.

        `count` of them have a state on the device after them.
        """
        ...


class _Start(NamedTuple):
    """Where a sequence starts: cached blocks with their keys, and blocks that arrive; see `Admission`."""

    hits: list[int]
    arriving: list[int]
    hashes: list[bytes]
    needs_state: bool


class BlockTable:
    """Blocks of one sequence (int32, readable in place by numpy) and the keys of its leading computed full ones."""

    __slots__ = ("_tree", "blocks", "hashes", "scope")

    def __init__(self, scope: PrefixScope, blocks: TokenArray, hashes: list[bytes]) -> None:
        self.scope = scope
        self.blocks = blocks
        self.hashes = hashes
        self._tree: Tree | None = None

    def tree(self, following: Sequence[BlockContent] = ()) -> Tree:
        """The tree of its blocks, one object for all; `following` are those after the ones that have a key."""
        first = self.hashes[0] if self.hashes else following[0].hash
        if self._tree is None or self._tree.first != first:
            self._tree = Tree(first, self.scope.private)
        return self._tree


def _moves(copies: Iterable[BlockCopy | BlockMove]) -> tuple[BlockMove, ...]:
    return tuple(copy for copy in copies if isinstance(copy, BlockMove))


def _sharing(tables: Iterable[BlockTable], index: int, block: int) -> list[BlockTable]:
    """The tables that have a block: sequences share it at the same index, since its key chains over all before it."""
    return [table for table in tables if index < len(table.blocks) and table.blocks[index] == block]


class BlockManager:
    """Allocates blocks to sequences. A call that needs blocks gets all of them or changes nothing."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        states: StateManager | None = None,
        num_fast: int | None = None,
        most_moves: int = 1,
    ) -> None:
        num_fast = num_blocks if num_fast is None else num_fast
        assert 0 < num_fast <= num_blocks
        assert block_tokens > 0
        assert most_moves > 0
        self.num_blocks = num_blocks
        self.num_fast = num_fast  # blocks with smaller numbers are in the fast part
        self.block_tokens = block_tokens
        self.num_moved_down = self.num_moved_up = 0  # blocks, since this was made
        self.states = states  # None for models without side state
        self.num_evicted = 0  # blocks, since this was made
        self.events = EventLog()
        self._most_moves = self._moves_left = most_moves
        self._free = list(range(num_fast - 1, -1, -1))
        self._free_slow = list(range(num_blocks - 1, num_fast - 1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_slow: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._pins: Counter[int] = Counter()
        self.tables: dict[int, BlockTable] = {}  # by sequence
        self._index = PrefixIndex()

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones, and idle ones without a transfer."""
        unpinned = self.num_free + len(self._idle) + len(self._idle_slow)
        return unpinned - sum(map(self._is_idle, self._pins)) if self._pins else unpinned

    @property
    def num_free(self) -> int:
        """Blocks without useful content."""
        return len(self._free) + len(self._free_slow)

    @property
    def num_slow(self) -> int:
        """Blocks of the slow part."""
        return self.num_blocks - self.num_fast

    @property
    def num_slow_in_use(self) -> int:
        """Blocks of the slow part in some sequence's table."""
        return self.num_slow - len(self._free_slow) - len(self._idle_slow) - self._num_limbo(self.num_fast)

    @property
    def num_in_use(self) -> int:
        """Blocks in some sequence's table."""
        return self.num_blocks - self.num_free - len(self._idle) - len(self._idle_slow) - self._num_limbo()

    @property
    def usage(self) -> float:
        """Blocks in use as a share of the fast part, at most 1."""
        return min(1.0, self.num_in_use / self.num_fast)

    @property
    def num_pinned(self) -> int:
        """Blocks with a transfer."""
        return len(self._pins)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix index, in use or idle."""
        return len(self._index)

    @property
    def has_fast_room(self) -> bool:
        """Return whether the fast part has a block that no sequence uses, and that may be given to one."""
        return bool(self._free) or self._oldest(self._idle) is not None

    def begin_step(self) -> None:
        """Allow the moves of one more step."""
        self._moves_left = self._most_moves

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def holds(self, sequence_id: int, copy: Copy) -> bool:
        """Whether a sequence reads the target of a copy."""
        if isinstance(copy, StateCopy):
            return self.states is not None and self.states.holds(sequence_id, copy.target)
        return copy.target in self.tables[sequence_id].blocks

    def table(self, sequence_id: int) -> TokenArray:
        """Blocks of a sequence: entry i holds positions i * block_tokens and following."""
        return self.tables[sequence_id].blocks

    def admit(
        self,
        sequence_id: int,
        tokens: TokenArray,
        *,
        scope: PrefixScope = SHARED,
        spare_blocks: int = 0,
        reuse_prefix: bool = True,
        tiers: LowerTiers | None = None,
        may_restore: bool = True,
    ) -> Admission | None:
        """Allocate blocks for all tokens of a new sequence; with `reuse_prefix`, use as many cached blocks as possible.

        With `may_restore`, also blocks and side state that only come from one of the `tiers`: the caller must restore
        them before the sequence runs. The last token is always computed, because its logits are needed. Returns None,
        and changes nothing, when fewer than `spare_blocks` would be left for other sequences.
        """
        assert sequence_id not in self.tables
        start = _Start([], [], [], needs_state=False)
        if reuse_prefix:
            start = self._start(scope.root, tokens, tiers if may_restore else None)
        hits, arriving, hashes = start.hits, start.arriving, start.hashes
        cached_tokens = min(len(hits) * self.block_tokens, len(tokens) - 1)
        rewrites = cached_tokens < len(hits) * self.block_tokens
        needed = self.blocks_for(len(tokens)) - len(hits) - len(arriving)
        needed += rewrites and not self._is_writable(hits[-1], 0)
        if self.states and not self.states.num_available:
            return None
        if not self._have(needed + spare_blocks, tiers, hits):
            return None
        for block in (*hits, *arriving):
            self._idle_of(block).pop(block, None)
            self._references[block] += 1
        table = self.tables[sequence_id] = BlockTable(scope, array("i", [*hits, *arriving]), hashes)
        copies: tuple[Copy, ...] = self._make_writable(table, [len(hits) - 1] if rewrites else [])
        copies += self._extend(table, self.blocks_for(len(tokens)))
        if self.states:
            copies += self.states.admit(sequence_id, hashes[-1] if hashes and not start.needs_state else None)
        return Admission(cached_tokens, copies, len(arriving), start.needs_state)

    def reserve(
        self, sequence_id: int, start: int, end: int, *, spare_blocks: int = 0, tiers: LowerTiers | None = None
    ) -> tuple[BlockCopy | BlockMove, ...] | None:
        """Make positions start..end-1 of a sequence writable; None, and nothing changed, when blocks run out.

        With `spare_blocks`, also when it takes a block and would leave fewer than these for other sequences.
        """
        table = self.tables[sequence_id]
        first, num_wanted = start // self.block_tokens, -(-end // self.block_tokens)
        if first + 1 == num_wanted <= len(table.blocks) and len(table.hashes) <= first:
            # Most steps write to one block, which the sequence has for itself.
            block = table.blocks[first]
            if self._references[block] == 1 and block not in self._pins and block not in self._index.contents:
                return ()
        indices = range(first, min(num_wanted, len(table.blocks)))
        shared = [i for i in indices if not self._is_writable(table.blocks[i], 1)]
        needed = max(0, num_wanted - len(table.blocks)) + len(shared)
        if needed and not self._have(needed + spare_blocks, tiers):
            return None
        return self._make_writable(table, indices) + self._extend(table, num_wanted)

    def commit(self, sequence_id: int, tokens: TokenArray, num_computed: int) -> None:
        """Add to the prefix index every block that is full now that `num_computed` tokens are in the pool."""
        table = self.tables[sequence_id]
        num_full = num_computed // self.block_tokens
        if len(table.hashes) < num_full:
            self._index_blocks(table, self._contents(table.scope.root, table.hashes, tokens, num_full))
        if self.states:
            self._commit_states(sequence_id, self.states)

    def contents(self, tokens: TokenArray, scope: PrefixScope) -> Iterator[BlockContent]:
        """Contents of the full blocks of a sequence's tokens."""
        return self._contents(scope.root, [], tokens, len(tokens) // self.block_tokens)

    def following(self, sequence_id: int, tokens: TokenArray) -> Iterator[BlockContent]:
        """Contents of the full blocks after those of a sequence that are cached; the last token is in none of them."""
        table = self.tables[sequence_id]
        return self._contents(table.scope.root, table.hashes, tokens, (len(tokens) - 1) // self.block_tokens)

    def tree(self, sequence_id: int, following: Sequence[BlockContent]) -> Tree:
        """The tree of the blocks of a sequence, of which these contents follow those that are cached."""
        return self.tables[sequence_id].tree(following)

    def has(self, content: BlockContent) -> bool:
        """Whether the prefix index has a block with exactly this content."""
        return self._index.find(content) is not None

    def adopt(self, sequence_id: int, contents: Iterable[BlockContent]) -> None:
        """Add blocks of a sequence to the prefix index, after those that are cached: they were restored."""
        self._index_blocks(self.tables[sequence_id], contents)
        if self.states:
            self._commit_states(sequence_id, self.states)

    def is_shared(self, sequence_id: int, index: int) -> bool:
        """Whether another sequence's table has block `index` of a sequence too."""
        return self._references[self.tables[sequence_id].blocks[index]] > 1

    def cached(self, block: int) -> tuple[BlockContent, Tree] | None:
        """Content of a block and the tree that it belongs to; None if it is not in the prefix index."""
        return (self._index.content(block), self._index.tree(block)) if block in self._index else None

    def by_age(self) -> Iterator[int]:
        """Cached blocks: idle ones as they are evicted, then those in use, but for those of a private scope."""
        tree = self._index.tree
        in_use = (block for block in self._index if not self._is_idle(block) and not tree(block).private)
        return chain(self._idle_slow, self._idle, in_use)

    def block(self, key: bytes) -> int:
        """The cached block with this key."""
        return self._index.block(key)

    def hashes(self, sequence_id: int) -> list[bytes]:
        """Keys of a sequence's leading blocks that are cached."""
        return self.tables[sequence_id].hashes

    def pin(self, block: int) -> None:
        """Keep a block's content and place while a transfer reads or writes it."""
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        """Undo one `pin`."""
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
            if not self._references[block] and not self._is_idle(block):
                self._settle(block)

    def forget(self, tokens: TokenArray, scope: PrefixScope = SHARED) -> None:
        """Remove from the prefix index the blocks of these tokens, and all that share the first of them."""
        contents = list(self.contents(tokens, scope))
        if not contents:
            return
        forgotten = self._index.remove_tree(contents[0].hash)
        for block in filter(self._is_idle, forgotten):
            del self._idle_of(block)[block]
            self._settle(block)
        if self.states:
            for content in forgotten.values():
                self.states.forget(content.hash)
        keys = () if scope.private else tuple(content.hash for content in contents)
        self.events.record(Forgotten(contents[0].hash, keys))

    def fork(self, parent_id: int, child_id: int) -> tuple[StateCopy, ...]:
        """Start a sequence that shares all blocks of another; the first to write to a block copies it.

        Returns the copy of the side state that the child needs before a step, for which a slot must be available.
        """
        assert child_id not in self.tables
        parent = self.tables[parent_id]
        for block in parent.blocks:
            self._references[block] += 1
        self.tables[child_id] = BlockTable(parent.scope, parent.blocks[:], parent.hashes[:])
        return (self.states.fork(parent_id, child_id),) if self.states else ()

    def shrink(self, sequence_id: int, num_tokens: int) -> None:
        """Free the blocks after those of a sequence's first `num_tokens` tokens; they must not be committed."""
        table = self.tables[sequence_id]
        keep = self.blocks_for(num_tokens)
        assert len(table.hashes) <= keep
        while len(table.blocks) > keep:
            self._drop(table.blocks.pop())

    def move_up(self, tables: Sequence[BlockTable], index: int) -> tuple[BlockMove, ...]:
        """Move block `index` of sequences, which is in the slow part, to the fast one, if that has room.

        tables   those of sequences that nothing is restored for; if one more has the block too, it stays
        """
        block = tables[0].blocks[index]
        assert not self._is_fast(block)
        if self._moves_left < _MOVES_UP or not self._is_movable(tables, index):
            return ()
        copies: list[BlockCopy | BlockMove] = []
        target = self._vacate_fast(copies)
        if target is None:
            return ()
        return (*_moves(copies), self._move_in_use(tables, index, target))

    def move_down(self, tables: Sequence[BlockTable], index: int) -> tuple[BlockMove, ...]:
        """Move block `index` of sequences from the fast part to the slow one, if that has room; see `move_up`."""
        assert self._is_fast(tables[0].blocks[index])
        if not self._moves_left or not self._is_movable(tables, index):
            return ()
        target = self._vacate_slow()
        return () if target is None else (self._move_in_use(tables, index, target),)

    def _is_movable(self, tables: Sequence[BlockTable], index: int) -> bool:
        block = tables[0].blocks[index]
        return block not in self._pins and self._references[block] == len(_sharing(tables, index, block))

    def _move_in_use(self, tables: Sequence[BlockTable], index: int, target: int) -> BlockMove:
        block = tables[0].blocks[index]
        move = self._move(block, target)
        for table in _sharing(tables, index, block):
            table.blocks[index] = target
        self._references[target], self._references[block] = self._references[block], 0
        self._settle(block)
        return move

    def discard_content(self, block: int) -> None:
        """Remove a block from the prefix index: its content was lost when it moved."""
        if block in self._index:
            self._unindex(block)
        if self._is_idle(block):
            del self._idle_of(block)[block]
            self._settle(block)

    def checkpoint(self, sequence_id: int) -> tuple[StateCopy, ...]:
        """The copy that keeps a sequence's side state while drafts are verified; none for models without."""
        copy = self.states.checkpoint(sequence_id) if self.states else None
        return (copy,) if copy else ()

    def release(self, sequence_id: int) -> None:
        """Free a sequence's blocks. Cached ones become idle; the last of them is evicted first."""
        for block in reversed(self.tables.pop(sequence_id).blocks):
            self._drop(block)
        if self.states:
            self.states.release(sequence_id)

    def check(self) -> None:
        """Assert that no block is leaked or allocated twice and that counts equal the tables' references."""
        counts = Counter(block for table in self.tables.values() for block in table.blocks)
        assert all(self._references[block] == counts[block] for block in range(self.num_blocks))
        assert all(pins > 0 for pins in self._pins.values())
        in_use, idle, free = set(counts), {*self._idle, *self._idle_slow}, {*self._free, *self._free_slow}
        held = {*self._pins} - in_use - idle  # a transfer of a sequence that has ended
        assert len(free) == self.num_free, "a block was freed twice"
        fast, slow = [*self._free, *self._idle], [*self._free_slow, *self._idle_slow]
        assert all(map(self._is_fast, fast)), "a slow block counts as fast"
        assert not any(map(self._is_fast, slow)), "a fast block counts as slow"
        assert self.num_slow_in_use == sum(not self._is_fast(block) for block in in_use)
        assert in_use | idle | free | held == set(range(self.num_blocks)), "a block leaked"
        assert len(in_use) + len(idle) + len(free) + len(held) == self.num_blocks, "a block is in two states"
        assert self.num_in_use == len(in_use)
        assert self.num_available == len(free) + len(idle - {*self._pins})
        assert all(block in self._index for block in idle)
        assert not any(block in self._index for block in free)
        self._index.check()
        if self.states:
            self.states.check(self.tables, self._index.hashes)

    def _start(self, root: bytes, tokens: TokenArray, tiers: LowerTiers | None) -> _Start:
        """Return the longest prefix that a sequence can start after; with side state it ends where there is a state."""
        hits, hashes = self._match(root, tokens)
        arriving, keys = self._match_arriving(root, tokens, hashes, tiers) if tiers else ([], hashes)
        if self.states is None:
            return _Start(hits, arriving, hashes, needs_state=False)
        most = min(len(keys), (len(tokens) - 1) // self.block_tokens)
        on_device = self.states.longest(hashes, len(tokens))
        count = tiers.find_state(keys[:most], on_device) if tiers else on_device
        arriving = arriving[: max(0, count - len(hits))]
        return _Start(hits[:count], arriving, hashes[:count], needs_state=count > on_device)

    def _match_arriving(
        self, root: bytes, tokens: TokenArray, hashes: list[bytes], tiers: LowerTiers
    ) -> tuple[list[int], list[bytes]]:
        """Blocks after the cached ones that are being restored, and the keys of all of both."""
        arriving: list[int] = []
        keys = hashes[:]
        for content in self._contents(root, hashes, tokens, (len(tokens) - 1) // self.block_tokens):
            block = tiers.find_arriving(content)
            if block is None:
                break
            arriving.append(block)
            keys.append(content.hash)
        return arriving, keys

    def _commit_states(self, sequence_id: int, states: StateManager) -> None:
        """Make snapshots of states after blocks that are cached now; report those that others may use."""
        table = self.tables[sequence_id]
        for key in states.commit(sequence_id, table.hashes):
            if key not in self._index.hashes:
                states.forget(key)  # its block was forgotten meanwhile
            elif not table.scope.private:
                self.events.record(StateShared(key, self._index.block(key)))

    def _match(self, root: bytes, tokens: TokenArray) -> tuple[list[int], list[bytes]]:
        """Cached blocks of the longest prefix in the index, and their hashes."""
        hits: list[int] = []
        hashes: list[bytes] = []
        if not self._index:
            return hits, hashes
        for content in self._contents(root, [], tokens, len(tokens) // self.block_tokens):
            block = self._index.find(content)
            if block is None:
                break
            hits.append(block)
            hashes.append(content.hash)
        return hits, hashes

    def _contents(self, root: bytes, hashes: list[bytes], tokens: TokenArray, end: int) -> Iterator[BlockContent]:
        """Contents of a sequence's blocks up to `end`, after those whose keys are given."""
        size, parent = self.block_tokens, hashes[-1] if hashes else root
        for first in range(len(hashes) * size, end * size, size):
            data = tokens[first : first + size].tobytes()
            content = BlockContent(block_hash(parent, data), parent, data)
            yield content
            parent = content.hash

    def _make_writable(self, table: BlockTable, indices: range | list[int]) -> tuple[BlockCopy | BlockMove, ...]:
        copies: list[BlockCopy | BlockMove] = []
        for index in indices:
            block = table.blocks[index]
            if not self._is_writable(block, 1):
                table.blocks[index] = self._allocate(copies)
                copies.append(BlockCopy(block, table.blocks[index]))
                self._drop(block)
            elif block in self._index:
                self._unindex(block)
            del table.hashes[index:]
        return tuple(copies)

    def _extend(self, table: BlockTable, num_blocks: int) -> tuple[BlockMove, ...]:
        moves: list[BlockCopy | BlockMove] = []
        for _ in range(num_blocks - len(table.blocks)):
            table.blocks.append(self._allocate(moves))
        return _moves(moves)

    def _allocate(self, copies: list[BlockCopy | BlockMove]) -> int:
        """A block for one sequence, in the fast part if that has a free or an idle one; `copies` gets what must move.

        Without a slow part: a free one, else the one that was idle the longest.
        """
        block = self._vacate_fast(copies)
        if block is None:
            block = self._vacate_slow()
        assert block is not None
        self._references[block] = 1
        return block

    def _vacate_fast(self, copies: list[BlockCopy | BlockMove]) -> int | None:
        """Take a block of the fast part: a free one, else the oldest idle one, whose content moves down if possible."""
        if self._free:
            return self._free.pop()
        block = self._oldest(self._idle)
        if block is None:
            return None
        target = self._vacate_slow() if self.num_slow and self._moves_left else None
        if target is None:
            self._evict(block)
        else:
            del self._idle[block]
            self._idle_slow[target] = None
            copies.append(self._move(block, target))
        return block

    def _vacate_slow(self) -> int | None:
        """Take a block of the slow part: a free one, else the one that was idle the longest."""
        if self._free_slow:
            return self._free_slow.pop()
        block = self._oldest(self._idle_slow)
        if block is not None:
            self._evict(block)
        return block

    def _oldest(self, idle: Iterable[int]) -> int | None:
        return next((block for block in idle if block not in self._pins), None)

    def _evict(self, block: int) -> None:
        self.num_evicted += 1
        del self._idle_of(block)[block]
        self._unindex(block)

    def _move(self, source: int, target: int) -> BlockMove:
        """Give the content of a block another place: its entry of the index, if it has one."""
        if source in self._index:
            content = self._index.move(source, target)
            if self.events.readers:
                self.events.record(Moved(content.hash, target))
        self._moves_left -= 1
        if self._is_fast(target):
            self.num_moved_up += 1
        else:
            self.num_moved_down += 1
        return BlockMove(source, target)

    def _is_fast(self, block: int) -> bool:
        return block < self.num_fast

    def _idle_of(self, block: int) -> OrderedDict[int, None]:
        """The idle blocks of the part that a block is in."""
        return self._idle if block < self.num_fast else self._idle_slow

    def _is_idle(self, block: int) -> bool:
        return block in self._idle or block in self._idle_slow

    def _num_limbo(self, first: int = 0) -> int:
        """Blocks from `first` on that only a transfer keeps."""
        return sum(block >= first and not self._references[block] and not self._is_idle(block) for block in self._pins)

    def _unindex(self, block: int) -> None:
        content = self._index.remove(block)
        if self.states:
            self.states.forget(content.hash)
        if self.events.readers:
            self.events.record(Evicted(content.hash))

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if not self._references[block]:
            self._settle(block)

    def _settle(self, block: int) -> None:
        """Put a block that no table has where it belongs. One that is pinned and not cached stays until `unpin`."""
        if block in self._index:
            self._idle_of(block)[block] = None
            if self.events.readers:
                self.events.record(Unused(self._index.contents[block].hash, block))
        elif block not in self._pins:
            (self._free if self._is_fast(block) else self._free_slow).append(block)

    def _index_blocks(self, table: BlockTable, contents: Iterable[BlockContent]) -> None:
        """Index the next blocks of a table."""
        for content in contents:
            block = table.blocks[len(table.hashes)]
            table.hashes.append(content.hash)
            if self._index.insert(block, content, table.tree()) and self.events.readers:
                private = table.scope.private
                self.events.record(Cached(content.hash, content.parent, self.block_tokens, block, private))

    def _is_writable(self, block: int, own_references: int) -> bool:
        """Whether a block that is in `own_references` tables of its writer may be written in place."""
        return self._references[block] <= own_references and block not in self._pins

    def _have(self, num_blocks: int, tiers: LowerTiers | None, hits: Collection[int] = ()) -> bool:
        """Whether so many blocks can be allocated while the hits stay, after unpinning what can be if need be."""
        for last in (False, True):
            idle_hits = sum(self._is_idle(block) and block not in self._pins for block in hits) if hits else 0
            if num_blocks <= self.num_available - idle_hits:
                return True
            if not last and self._pins and tiers:
                tiers.relieve()
        return False
