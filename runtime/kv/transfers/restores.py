"""Which stored blocks are restored, and the loads in flight, each block once however many sequences need it.

`PrefixChoice` takes those that tiers have of a prompt's prefix, as far as the cost model says.

A block passes through host memory: read from disk to a slot there if need be, copied to its place in the pool as soon
as a step's own copies are made, and pinned in both until the copy has ended.

To begin a read takes some 10 us, and a copy half of that. So those of a long prefix begin a few at a time: its sequence
does not run before the last has arrived, and the steps of all others would be longer.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ingot.runtime.kv.cost_model import BlockPlace, CostModel, TierName
from ingot.runtime.kv.host_tier import SlotState
from ingot.runtime.kv.keys import BlockContent, Tree, state_content
from ingot.runtime.kv.pool_tiers import PoolTiers
from ingot.runtime.kv.transfers.background import GoesOn, always
from ingot.runtime.kv.transfers.restored_prefix import LoadingBlock, RestoredPrefix
from ingot.runtime.kv.transfers.transfer import Transfer

_log = logging.getLogger("ingot.runtime.kv.tiers")  # the name that the documentation gives
_LEAST_READS = 16  # that a step begins, if as many are due
_BEGUN_AT_ONCE = 8  # blocks of a load, between which a step may end
_SECONDS_PER_READ = 2e-4  # of the step before: a longer one may begin more, which takes a twentieth of its time


class PrefixChoice:
    """Chooses how much of a prefix to restore, and counts the choices. Its owner guards it with a lock."""

    def __init__(self, blocks: PoolTiers, states: PoolTiers | None, costs: CostModel) -> None:
        self._blocks, self._states, self._costs = blocks, states, costs
        self.num_restored = self.num_recomputed = 0  # prefixes

    def to_restore(self, following: Iterable[BlockContent], num_cached_tokens: int) -> list[BlockContent]:
        """The blocks to restore of those that follow a computed prefix."""
        found, tiers = self._find(following)
        if not found:
            return []
        states = self._states_after(content.hash for content in found)
        return found[: self._decide(tiers, num_cached_tokens, states)]

    def to_share(self, hashes: Sequence[bytes], count: int, num_cached_tokens: int) -> int:
        """How many blocks that are computed to share, where `count` of them have their state on the device."""
        states = self._states_after(hashes[count:])
        if not states:
            return count
        return count + self._decide(["device"] * (len(hashes) - count), num_cached_tokens, states)

    def _find(self, following: Iterable[BlockContent]) -> tuple[list[BlockContent], list[BlockPlace]]:
        """The leading blocks that are in a tier, and the tier of each."""
        found: list[BlockContent] = []
        tiers: list[BlockPlace] = []
        find = self._blocks.find
        for content in following:
            tier = find(content)
            if tier is None:
                break
            found.append(content)
            tiers.append(tier)
        return found, tiers

    def _states_after(self, keys: Iterable[bytes]) -> dict[int, TierName] | None:
        """After how many of these blocks a tier has the side state, and which; None for a model without."""
        if self._states is None:
            return None
        tiers = ((count, self._states.find(state_content(key))) for count, key in enumerate(keys, 1))
        return {count: tier for count, tier in tiers if tier}

    def _decide(
        self, tiers: Sequence[BlockPlace], num_cached_tokens: int, states: Mapping[int, TierName] | None
    ) -> int:
        decision = self._costs.decide(tiers, num_cached_tokens, states)
        if decision.num_blocks:
            self.num_restored += 1
        else:
            self.num_recomputed += 1
        _log.debug(
            "%d of %d stored blocks are restored after %d tokens on the device: %s",
            decision.num_blocks,
            len(tiers),
            num_cached_tokens,
            decision.reason,
        )
        return decision.num_blocks


class StateTarget(NamedTuple):
    """Side state to restore: its content, and the slot on the device that it is restored to."""

    content: BlockContent
    slot: int


class _Queued(NamedTuple):
    """A load that has not begun, or not wholly: the blocks that are left, each with its place in the pool."""

    load: RestoredPrefix
    blocks: deque[tuple[BlockContent, int]]
    tree: Tree
    state: StateTarget | None


class Restores:
    """Restores blocks and side states. Its owner guards it with a lock."""

    def __init__(self, blocks: PoolTiers, states: PoolTiers | None, clock: Callable[[], float]) -> None:
        self._blocks, self._states, self._clock = blocks, states, clock
        self._queued: dict[int, _Queued] = {}  # loads that have not begun, by identity
        self._loads: list[RestoredPrefix] = []
        self._arriving: dict[bytes, LoadingBlock] = {}  # blocks of loads in flight, by key
        self._reads_left = self._copies_left = 0  # that this step may begin
        self._last_start = clock()

    def __len__(self) -> int:
        return len(self._loads) + len(self._queued)

    @property
    def has_queued(self) -> bool:
        """Whether a load has not begun."""
        return bool(self._queued)

    @property
    def targets(self) -> tuple[set[int], set[int]]:
        """Blocks, and state slots, that are pinned because something is restored to them."""
        begun = [*self._loads, *(queued.load for queued in self._queued.values())]
        blocks = {block.target for load in begun for block in load.blocks if block.arrived is None}
        states = [load.state for load in self._loads if load.state]
        return blocks, {state.target for state in states if state.arrived is None}

    def find(self, content: BlockContent) -> int | None:
        """The block of the pool that this content is being restored to, for a sequence that has not given it up."""
        found = self._arriving.get(content.hash)
        if found is None or found.content != content or not found.num_loads or found.arrived is False:
            return None
        return found.target

    def queue(
        self, contents: Sequence[BlockContent], targets: Sequence[int], tree: Tree, state: StateTarget | None
    ) -> tuple[RestoredPrefix, int]:
        """Restore contents to blocks of the pool. Returns how often to call `begin`, before anything takes a slot."""
        assert len(contents) == len(targets)
        load = RestoredPrefix([], has_begun=False)
        self._queued[id(load)] = _Queued(load, deque(zip(contents, targets, strict=True)), tree, state)
        return load, max(1, -(-len(contents) // _BEGUN_AT_ONCE))

    def begin(self, load: RestoredPrefix) -> None:
        """Begin a load, or some blocks of it, unless it was cancelled.

        A block that is on its way to the same place already is shared.
        """
        queued = self._queued.get(id(load))
        if queued is None:
            return
        for _ in range(min(_BEGUN_AT_ONCE, len(queued.blocks))):
            content, target = queued.blocks.popleft()
            load.blocks.append(self._block(content, queued.tree, target))
        if not queued.blocks:
            self._have_begun(queued)

    def _have_begun(self, queued: _Queued) -> None:
        load, _, tree, state = queued
        del self._queued[id(load)]
        if state:
            assert self._states is not None
            load.state = LoadingBlock(state.content, tree, state.slot)
            self._states.pin(state.slot)
            self._take_source(self._states, load.state)
        load.has_begun = True
        self._loads.append(load)

    def cancel(self, load: RestoredPrefix) -> None:
        """Restore no more of what this load alone needs; what is being copied stays pinned until it has arrived."""
        queued = self._queued.get(id(load))
        if queued:
            self._have_begun(queued._replace(state=None))
        self._give_up(load, 0)

    def cancel_all(self) -> None:
        """Cancel all loads."""
        for load in [*(queued.load for queued in self._queued.values()), *self._loads]:
            self.cancel(load)

    def advance(self, *, may_start: bool, goes_on: GoesOn = always) -> None:
        """Bring all loads a move nearer. Reads and copies begin only if they `may_start`: a step calls it so once."""
        self._reads_left = self._next_reads() if may_start else 0
        self._copies_left = 2 * self._reads_left
        loads, self._loads = self._loads, []
        for load in loads:
            for number, part in enumerate(load.parts):
                if not goes_on():
                    break
                pool = self._states if part is load.state else self._blocks
                assert pool is not None
                self._advance_part(pool, part)
                if part.arrived is False:
                    self._give_up(load, number + 1)
            if load.done:
                self._forget(load)
            else:
                self._loads.append(load)

    def _next_reads(self) -> int:
        """How many reads a step may begin."""
        now = self._clock()
        seconds, self._last_start = now - self._last_start, now
        return max(_LEAST_READS, int(seconds / _SECONDS_PER_READ))

    def _block(self, content: BlockContent, tree: Tree, target: int) -> LoadingBlock:
        on_its_way = self.find(content)
        if on_its_way == target:
            shared = self._arriving[content.hash]
            shared.num_loads += 1
            return shared
        block = LoadingBlock(content, tree, target)
        if on_its_way is None:
            self._arriving[content.hash] = block
        self._blocks.pin(target)
        self._take_source(self._blocks, block, may_read=False)  # `advance` reads in order of position
        return block

    def _give_up(self, load: RestoredPrefix, first: int) -> None:
        """Record that a load does not need its parts from `first` on."""
        parts = load.parts
        for part in parts[first : len(parts) - load.num_given_up]:
            part.num_loads -= 1
            if part.transfer and not part.num_loads:
                part.transfer.cancel()
        load.num_given_up = max(load.num_given_up, len(parts) - first)

    def _forget(self, load: RestoredPrefix) -> None:
        """Drop a load that is done: its sequence adds its blocks to the prefix index."""
        for block in load.blocks:
            if self._arriving.get(block.content.hash) is block:
                del self._arriving[block.content.hash]

    def _advance_part(self, pool: PoolTiers, part: LoadingBlock) -> None:
        if part.arrived is None:
            part.arrived = self._advance(pool, part)
            if part.arrived is not None:
                pool.unpin_later(part.target)

    def _advance(self, pool: PoolTiers, part: LoadingBlock) -> bool | None:
        """Bring a block or state one move nearer; returns whether it arrived, None while it is on its way."""
        if part.transfer:
            return self._end_restore(pool, part, part.transfer) if part.transfer.done else None
        is_needed = part.num_loads > 0
        if is_needed and part.source is None:
            if not self._reads_left:
                return None
            self._take_source(pool, part)
            self._reads_left -= part.source is not None
        source = part.source
        if source is None:
            is_coming = is_needed and pool.find(part.content) is not None
            return None if is_coming else False  # no slot is free yet
        if not is_needed or source.state is SlotState.LOST:
            pool.host.unpin(source)
            return False
        if self._copies_left and source.state is SlotState.READY:
            part.transfer = pool.restore(source, part.target)
            self._copies_left -= 1
        return None

    def _take_source(self, pool: PoolTiers, part: LoadingBlock, *, may_read: bool = True) -> None:
        found = pool.take(part.content, part.tree, may_read=may_read)
        if found:
            part.source, part.tier = found

    def _end_restore(self, pool: PoolTiers, part: LoadingBlock, transfer: Transfer) -> bool:
        assert part.source is not None
        return pool.end_restore(part.source, transfer)
