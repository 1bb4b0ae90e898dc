"""Bookkeeping of the paged KV cache: block tables, reference counts, copy on write, prefix cache, LRU eviction.

Ints only; the executor owns the memory. A block is in one of three states:

    free        has no useful content
    in use      in at least one sequence's table; shared blocks are in several
    idle        in no table, but indexed: a prefix that may be hit again; evicted oldest first when blocks run out

A shared block is never written: `admit` and `reserve` copy it first. An indexed one leaves the index before it is
written (after Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023).
A block that a transfer reads or writes is pinned: it is not evicted, not freed, and copied like a shared one.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol, TypeAlias

from ingot.runtime.kv.events import Cached, EventLog, Evicted, Forgotten, StateShared, Unused
from ingot.runtime.kv.keys import BlockContent, PrefixScope, Tree, block_hash
from ingot.runtime.kv.prefix_index import PrefixIndex
from ingot.runtime.kv.states import StateCopy, StateManager

# int64 tokens that numpy reads in place. Quoted: the class cannot be subscripted at run time before Python 3.12.
TokenArray: TypeAlias = "array[int]"


SHARED = PrefixScope(b"")  # of sequences that say nothing else


class BlockCopy(NamedTuple):
    """Copy `source` onto `target` before the step writes. Copies of one step are made in order."""

    source: int
    target: int


Copy: TypeAlias = BlockCopy | StateCopy


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


class BlockManager:
    """Allocates blocks to sequences. A call that needs blocks gets all of them or changes nothing."""

    def __init__(self, num_blocks: int, block_tokens: int, *, states: StateManager | None = None) -> None:
        assert num_blocks > 0
        assert block_tokens > 0
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.states = states  # None for models without side state
        self.num_evicted = 0  # blocks, since this was made
        self.events = EventLog()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._pins: Counter[int] = Counter()
        self.tables: dict[int, BlockTable] = {}  # by sequence
        self._index = PrefixIndex()

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones, and idle ones without a transfer."""
        return len(self._free) + len(self._idle) - sum(block in self._idle for block in self._pins)

    @property
    def num_free(self) -> int:
        """Blocks without useful content."""
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        """Blocks in some sequence's table."""
        limbo = sum(not self._references[block] and block not in self._idle for block in self._pins)
        return self.num_blocks - len(self._free) - len(self._idle) - limbo

    @property
    def num_pinned(self) -> int:
        """Blocks with a transfer."""
        return len(self._pins)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix index, in use or idle."""
        return len(self._index)

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
            self._idle.pop(block, None)
            self._references[block] += 1
        table = self.tables[sequence_id] = BlockTable(scope, array("i", [*hits, *arriving]), hashes)
        copies: tuple[Copy, ...] = self._make_writable(table, [len(hits) - 1] if rewrites else [])
        self._extend(table, self.blocks_for(len(tokens)))
        if self.states:
            copies += self.states.admit(sequence_id, hashes[-1] if hashes and not start.needs_state else None)
        return Admission(cached_tokens, copies, len(arriving), start.needs_state)

    def reserve(
        self, sequence_id: int, start: int, end: int, *, spare_blocks: int = 0, tiers: LowerTiers | None = None
    ) -> tuple[BlockCopy, ...] | None:
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
        copies = self._make_writable(table, indices)
        self._extend(table, num_wanted)
        return copies

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
        in_use = (block for block in self._index if block not in self._idle and not tree(block).private)
        return chain(self._idle, in_use)

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
            if not self._references[block] and block not in self._idle:
                self._settle(block)

    def forget(self, tokens: TokenArray, scope: PrefixScope = SHARED) -> None:
        """Remove from the prefix index the blocks of these tokens, and all that share the first of them."""
        contents = list(self.contents(tokens, scope))
        if not contents:
            return
        forgotten = self._index.remove_tree(contents[0].hash)
        for block in forgotten.keys() & self._idle.keys():
            del self._idle[block]
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
        in_use, idle, free = set(counts), set(self._idle), set(self._free)
        held = {*self._pins} - in_use - idle  # a transfer of a sequence that has ended
        assert len(free) == len(self._free), "a block was freed twice"
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

    def _make_writable(self, table: BlockTable, indices: range | list[int]) -> tuple[BlockCopy, ...]:
        copies = []
        for index in indices:
            block = table.blocks[index]
            if not self._is_writable(block, 1):
                table.blocks[index] = self._allocate(1)[0]
                copies.append(BlockCopy(block, table.blocks[index]))
                self._drop(block)
            elif block in self._index:
                self._unindex(block)
            del table.hashes[index:]
        return tuple(copies)

    def _extend(self, table: BlockTable, num_blocks: int) -> None:
        missing = num_blocks - len(table.blocks)
        if missing > 0:
            table.blocks.extend(self._allocate(missing))

    def _allocate(self, count: int) -> list[int]:
        """Free blocks, or if there are too few, those that were idle the longest."""
        num_free = min(count, len(self._free))
        blocks = [self._free.pop() for _ in range(num_free)]
        if num_free < count:
            blocks += self._evict(count - num_free)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self, count: int) -> list[int]:
        blocks = list(islice((block for block in self._idle if block not in self._pins), count))
        assert len(blocks) == count
        self.num_evicted += count
        for block in blocks:
            del self._idle[block]
            self._unindex(block)
        return blocks

    def _unindex(self, block: int) -> None:
        content = self._index.remove(block)
        if self.states:
            self.states.forget(content.hash)
        self.events.record(Evicted(content.hash))

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if not self._references[block]:
            self._settle(block)

    def _settle(self, block: int) -> None:
        """Put a block that no table has where it belongs. One that is pinned and not cached stays until `unpin`."""
        if block in self._index:
            self._idle[block] = None
            self.events.record(Unused(self._index.contents[block].hash, block))
        elif block not in self._pins:
            self._free.append(block)

    def _index_blocks(self, table: BlockTable, contents: Iterable[BlockContent]) -> None:
        """Index the next blocks of a table."""
        for content in contents:
            block = table.blocks[len(table.hashes)]
            table.hashes.append(content.hash)
            if self._index.insert(block, content, table.tree()):
                private = table.scope.private
                self.events.record(Cached(content.hash, content.parent, self.block_tokens, block, private))

    def _is_writable(self, block: int, own_references: int) -> bool:
        """Whether a block that is in `own_references` tables of its writer may be written in place."""
        return self._references[block] <= own_references and block not in self._pins

    def _have(self, num_blocks: int, tiers: LowerTiers | None, hits: Iterable[int] = ()) -> bool:
        """Whether so many blocks can be allocated while the hits stay, after unpinning what can be if need be."""
        for last in (False, True):
            idle_hits = sum(block in self._idle and block not in self._pins for block in hits)
            if num_blocks <= self.num_available - idle_hits:
                return True
            if not last and self._pins and tiers:
                tiers.relieve()
        return False
