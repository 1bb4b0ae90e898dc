"""Blocks in host memory: which slot has which block, and which of them to give up. Ints only; moves nothing.

    filling    a copy into the slot is queued; the block is found, but must not be read yet
    ready      the slot has the block
    lost       the copy failed or the block was forgotten; it is not found any more

A slot with a transfer is pinned. It is given up or reused when the last pin is gone.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ingot.runtime.kv.keys import BlockContent, Tree
from ingot.runtime.kv.policies import EvictionPolicy

Origin = Literal["host", "disk"]


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
    origin: Origin
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
        self._trees: defaultdict[bytes, set[HostBlock]] = defaultdict(set)  # by the key of a tree's first block
        self._lost: set[HostBlock] = set()  # still pinned

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, content: BlockContent) -> HostBlock | None:
        """The block with exactly this content, filling or ready."""
        found = self._blocks.get(content.hash)
        return found if found is not None and found.content == content else None

    def reserve(self, content: BlockContent, tree: Tree, origin: Origin) -> HostBlock | None:
        """Give a block that is not in the tier a slot, filling and pinned once; None while every slot is pinned."""
        if content.hash in self._blocks or not (self._free or self._evict()):
            return None
        block = self._blocks[content.hash] = HostBlock(content, tree, self._free.pop(), origin)
        self._trees[tree.first].add(block)
        self._policy.insert(content.hash, content.parent)
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
        self._policy.remove(block.content.hash)
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
        if key in self._blocks:
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
        assert {block for tree in self._trees.values() for block in tree} == {*self._blocks.values()}
        assert all(block.pins > 0 for block in self._lost)
        assert all(block.pins > 0 for block in self._blocks.values() if block.state is SlotState.FILLING)

    def _evict(self) -> bool:
        key = self._policy.evict(lambda key: not self._blocks[key].pins)
        if key is None:
            return False
        block = self._blocks[key]
        self._remove(block)
        self._free.append(block.slot)
        return True

    def _remove(self, block: HostBlock) -> None:
        del self._blocks[block.content.hash]
        block.state = SlotState.LOST
        tree = self._trees[block.tree.first]
        tree.remove(block)
        if not tree:
            del self._trees[block.tree.first]

    def _free_if_unused(self, block: HostBlock) -> None:
        if block in self._lost and not block.pins:
            self._lost.remove(block)
            self._free.append(block.slot)
