"""Blocks in host memory: which slot has which block, and which of them to give up. Ints only; moves nothing.

    filling    a copy into the slot is queued; the block is found, but must not be read yet
    ready      the slot has the block
    lost       the copy failed or the block was forgotten; it is not found any more

A slot with a transfer is pinned. It is given up or reused when the last pin is gone.

Slots are given up in this order:

    spare      another tier has the block: the device, where it was used not long ago, or the disk
    kept       the policy's choice: no other tier has the block, or the device is about to evict it

So what the device has takes no room that anything else needs. `keep`, `spare` and `demote` say which is which.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ingot.runtime.kv.events import EventLog, HostEvicted
from ingot.runtime.kv.eviction import EvictionPolicy
from ingot.runtime.kv.keys import BlockContent, Tree

BlockOrigin = Literal["host", "disk"]


class SlotState(Enum):
    """State of a host block."""

    FILLING = "filling"
    READY = "ready"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class HostBlock:
    """A block in a slot. `origin` is "disk" from when it was read ahead from there until it is used."""

    content: BlockContent
    tree: Tree
    slot: int
    origin: BlockOrigin
    state: SlotState = SlotState.FILLING
    pins: int = 1


class HostTier:
    """Blocks by key, in `num_slots` slots."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self._policy = policy
        self._free = list(range(num_slots - 1, -1, -1))
        self._blocks: dict[bytes, HostBlock] = {}
        self._spare: OrderedDict[bytes, HostBlock] = OrderedDict()  # first to go first; the policy has the others
        self._trees: defaultdict[bytes, set[HostBlock]] = defaultdict(set)  # by the key of a tree's first block
        self._lost: set[HostBlock] = set()  # still pinned
        self.events = EventLog()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[HostBlock]:
        return iter(self._blocks.values())

    @property
    def num_free(self) -> int:
        """Slots without a block."""
        return len(self._free)

    @property
    def num_spare(self) -> int:
        """Slots that cost nothing to give up: free ones, and those whose block another tier has."""
        return len(self._free) + len(self._spare)

    def find(self, content: BlockContent) -> HostBlock | None:
        """The block with exactly this content, filling or ready."""
        found = self._blocks.get(content.hash)
        return found if found is not None and found.content == content else None

    def reserve(
        self, content: BlockContent, tree: Tree, origin: BlockOrigin, *, keeps: bool = True, takes_kept: bool = True
    ) -> HostBlock | None:
        """Give a block that is not in the tier a slot, filling and pinned once.

        keeps       whether the block is kept, or spare
        takes_kept  whether another block that is kept may lose its slot

        None while every slot that may be taken is pinned.
        """
        if content.hash in self._blocks or not (self._free or self._evict(takes_kept)):
            return None
        block = self._blocks[content.hash] = HostBlock(content, tree, self._free.pop(), origin)
        self._trees[tree.first].add(block)
        if keeps:
            self._policy.insert(content.hash, content.parent)
        else:
            self._add_spare(block)
        return block

    def keep(self, key: bytes) -> bool:
        """Give up a block as the policy chooses, if it is here: soon no other tier has it. Returns whether it is."""
        block = self._blocks.get(key)
        if block is None:
            return False
        if self._spare.pop(key, None):
            self._policy.insert(key, block.content.parent)
        return True

    def spare(self, key: bytes) -> None:
        """Give up a block before all others, if it is here: the device has it, and uses it."""
        block = self._blocks.get(key)
        if block is not None:
            self._take_out(key)
            self._add_spare(block)

    def demote(self) -> HostBlock | None:
        """Make the next block that the policy gives up the last spare one, and return it: the disk is to have it.

        None while all that are kept are pinned.
        """
        key = self._policy.evict(lambda key: not self._blocks[key].pins)
        if key is None:
            return None
        block = self._spare[key] = self._blocks[key]
        return block

    def fill(self, block: HostBlock) -> None:
        """Record that the copy into the slot is complete."""
        if block.state is SlotState.FILLING:
            block.state = SlotState.READY
        self.unpin(block)

    def lose(self, block: HostBlock) -> None:
        """Take a block out of the tier; its slot is free when the last pin is gone."""
        if block.state is SlotState.LOST:
            return
        self._take_out(block.content.hash)
        self._remove(block)
        self._lost.add(block)
        self._free_if_unused(block)

    def pin(self, block: HostBlock) -> None:
        """Keep the block in its slot."""
        block.pins += 1

    def unpin(self, block: HostBlock) -> None:
        """Undo one `pin`, or that of `reserve`."""
        block.pins -= 1
        assert block.pins >= 0
        self._free_if_unused(block)

    def touch(self, key: bytes) -> None:
        """Record that a block was used, if it is here."""
        if key in self._blocks and key not in self._spare:
            self._policy.touch(key)

    def lose_tree(self, first: bytes) -> list[BlockContent]:
        """Take all blocks of a tree out of the tier, and return their contents."""
        blocks = [*self._trees.get(first, ())]
        for block in blocks:
            self.lose(block)
        return [block.content for block in blocks]

    def check(self) -> None:
        """Assert that no slot leaked or is used twice."""
        used = [block.slot for block in (*self._blocks.values(), *self._lost)]
        assert len(used) == len(set(used)), "a slot has two blocks"
        assert sorted([*used, *self._free]) == list(range(self.num_slots)), "a slot leaked"
        assert all(block.content.hash == key for key, block in self._blocks.items())
        assert all(self._blocks.get(key) is block for key, block in self._spare.items())
        assert {block for tree in self._trees.values() for block in tree} == {*self._blocks.values()}
        assert all(block.pins > 0 for block in self._lost)
        assert all(block.pins > 0 for block in self._blocks.values() if block.state is SlotState.FILLING)

    def _evict(self, takes_kept: bool) -> bool:
        block = next((block for block in self._spare.values() if not block.pins), None)
        if block is not None:
            del self._spare[block.content.hash]
        elif takes_kept:
            key = self._policy.evict(lambda key: not self._blocks[key].pins)
            block = self._blocks[key] if key is not None else None
        if block is None:
            return False
        self._remove(block)
        self._free.append(block.slot)
        return True

    def _add_spare(self, block: HostBlock) -> None:
        """Make it the first to go: of the blocks on the device, the one used last is evicted there last."""
        self._spare[block.content.hash] = block
        self._spare.move_to_end(block.content.hash, last=False)

    def _take_out(self, key: bytes) -> None:
        """Take a block out of the order in which blocks are given up."""
        if not self._spare.pop(key, None):
            self._policy.remove(key)

    def _remove(self, block: HostBlock) -> None:
        del self._blocks[block.content.hash]
        self.events.record(HostEvicted(block.content.hash))
        block.state = SlotState.LOST
        tree = self._trees[block.tree.first]
        tree.remove(block)
        if not tree:
            del self._trees[block.tree.first]

    def _free_if_unused(self, block: HostBlock) -> None:
        if block in self._lost and not block.pins:
            self._lost.remove(block)
            self._free.append(block.slot)
