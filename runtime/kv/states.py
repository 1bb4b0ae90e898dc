"""Bookkeeping of side state: what recurrent layers keep for a sequence next to its KV blocks. Ints only.

State has a fixed size and no positions: unlike keys and values, it cannot be cut to a shorter prefix. So the executor
has a pool of state slots, and a slot is one of:

    live        the state of a running sequence after its newest computed token
    pending     a copy of a live one, made when a step ended at a block's end; its block is not in the prefix index yet
    snapshot    a pending one whose block is indexed: a prefix that ends there may be reused
    checkpoint  a live state before a step that verifies drafts, to return to when one is rejected
    arriving    the target of a state that is restored from a tier for a running sequence; then pending
    free

A prefix hit needs the snapshot of its last block, and is shortened to the longest prefix that has one. Snapshots are
made where a prompt has its last full block and after every `snapshot_blocks` blocks; the scheduler ends chunks there.
A snapshot leaves with its block, or earlier: running sequences take slots from the least recently used snapshot, and
then from pending ones, so only live slots, and for a moment those of transfers, keep a sequence waiting. A slot that a
transfer reads or writes is pinned: it is not given to another use, and if its own has ended, it is free once unpinned.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ingot.runtime.kv.events import EventLog, StateCached, StateEvicted

SNAPSHOT_BLOCKS = 16  # 256 tokens in blocks of 16


class StateCopy(NamedTuple):
    """Copy the state in slot `source` onto slot `target` before the step computes. Copies are made in order."""

    source: int
    target: int


class StateManager:
    """Allocates state slots to sequences and snapshots. Blocks are named by their keys in the prefix index."""

    def __init__(self, num_slots: int, block_tokens: int, *, snapshot_blocks: int = SNAPSHOT_BLOCKS) -> None:
        assert num_slots > 0
        assert snapshot_blocks > 0
        self.num_slots = num_slots
        self.num_evicted = 0  # snapshots, pending ones included, that running sequences took the slots of
        self._block_tokens = block_tokens
        self._interval = snapshot_blocks * block_tokens  # tokens
        self._free = list(range(num_slots - 1, -1, -1))
        self._live: dict[int, int] = {}
        self._checkpoints: dict[int, int] = {}
        self._pending: OrderedDict[tuple[int, int], int] = OrderedDict()  # by sequence and its number of tokens
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # by the key of the last block
        self._arriving: dict[int, tuple[int, int]] = {}  # number of tokens and slot, by sequence
        self._pins: Counter[int] = Counter()
        self._ended: set[int] = set()  # pinned, and of no more use
        self.events = EventLog()

    @property
    def num_available(self) -> int:
        """Slots that running sequences can get."""
        arriving = [slot for _, slot in self._arriving.values()]
        return self.num_slots - len({*self._live.values(), *self._checkpoints.values(), *arriving, *self._pins})

    @property
    def num_pinned(self) -> int:
        """Slots with a transfer."""
        return len(self._pins)

    @property
    def num_snapshots(self) -> int:
        """States that a prefix hit can start from."""
        return len(self._snapshots)

    @property
    def num_free(self) -> int:
        """Slots without a state."""
        return len(self._free)

    def by_age(self) -> Iterator[bytes]:
        """Blocks that have a snapshot, by their keys, as running sequences take the slots."""
        return iter(self._snapshots)

    def slot(self, sequence_id: int) -> int:
        """The live slot of a running sequence."""
        return self._live[sequence_id]

    def holds(self, sequence_id: int, slot: int) -> bool:
        """Whether a slot is the live one or the checkpoint of a sequence."""
        return slot in (self._live[sequence_id], self._checkpoints.get(sequence_id))

    def find(self, block: bytes) -> int | None:
        """The slot with the snapshot of a block."""
        return self._snapshots.get(block)

    def longest(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Number of leading blocks after which a sequence of `num_tokens` can start, given their keys; 0 for none.

        At least one token is left to compute, because its logits are needed.
        """
        most = min(len(hashes), (num_tokens - 1) // self._block_tokens)
        return next((count for count in range(most, 0, -1) if hashes[count - 1] in self._snapshots), 0)

    def admit(self, sequence_id: int, last_block: bytes | None) -> tuple[StateCopy, ...]:
        """Give a sequence its live slot, with the snapshot of the block `last_block`, or an unset one without it.

        The caller has seen `num_available`.
        """
        assert sequence_id not in self._live
        if last_block is None or last_block not in self._snapshots:
            self._live[sequence_id] = self._allocate()
            return ()
        self._snapshots.move_to_end(last_block)
        source = self._snapshots[last_block]
        target = self._live[sequence_id] = self._allocate()
        return (StateCopy(source, target),) if source != target else ()  # equal if it was the only slot left

    def fork(self, parent_id: int, child_id: int) -> StateCopy:
        """Give a sequence a live slot with the state of another. The caller has seen `num_available`."""
        assert child_id not in self._live
        self._live[child_id] = self._allocate()
        return StateCopy(self._live[parent_id], self._live[child_id])

    def arrive(self, sequence_id: int, num_tokens: int) -> int:
        """The slot to restore the state of a sequence after `num_tokens` to: a free one, to keep it, or the live one.

        The slot is the sequence's until `arrived`.
        """
        assert sequence_id not in self._arriving
        if not self._free:
            return self._live[sequence_id]
        self._arriving[sequence_id] = num_tokens, self._free[-1]
        return self._free.pop()

    def arrived(self, sequence_id: int, *, is_sound: bool) -> tuple[StateCopy, ...]:
        """Record that a state was restored or not; returns the copy that makes it the live one, if it is not."""
        if sequence_id not in self._arriving:
            return ()
        num_tokens, slot = self._arriving.pop(sequence_id)
        if not is_sound:
            self._release(slot)
            return ()
        self._pending[sequence_id, num_tokens] = slot
        return (StateCopy(slot, self._live[sequence_id]),)

    def release(self, sequence_id: int) -> None:
        """Free all slots of a sequence but its snapshots."""
        self._release(self._live.pop(sequence_id))
        self.arrived(sequence_id, is_sound=False)
        self.drop_checkpoint(sequence_id)
        self.rollback(sequence_id, 0)

    def checkpoint(self, sequence_id: int) -> StateCopy | None:
        """Keep the live state of a sequence before a step that verifies drafts; None when no slot is left."""
        if not self.num_available:
            return None
        assert sequence_id not in self._checkpoints
        self._checkpoints[sequence_id] = self._allocate()
        return StateCopy(self._live[sequence_id], self._checkpoints[sequence_id])

    def restore(self, sequence_id: int) -> StateCopy:
        """Return to the checkpoint of a sequence, which frees its slot: make the copy before any other."""
        slot = self._checkpoints[sequence_id]
        self.drop_checkpoint(sequence_id)
        return StateCopy(slot, self._live[sequence_id])

    def drop_checkpoint(self, sequence_id: int) -> None:
        """Free the checkpoint of a sequence, if it has one."""
        slot = self._checkpoints.pop(sequence_id, None)
        if slot is not None:
            self._release(slot)

    def num_drafts(self, start: int, most: int) -> int:
        """Drafts that a step from `start` may verify, so that a later step ends at the next place for a snapshot."""
        place = (start // self._interval + 1) * self._interval
        return max(0, min(most, place - start - 2))

    def chunk_end(self, start: int, end: int, num_prompt_tokens: int) -> int:
        """Where a step that would compute start .. end - 1 ends, so that no place for a snapshot is inside of it."""
        size = self._block_tokens
        places = (
            (start // self._interval + 1) * self._interval,
            (num_prompt_tokens - 1) // size * size,
            num_prompt_tokens // size * size,
        )
        return min((place for place in places if start < place < end), default=end)

    def snapshot(self, sequence_id: int, num_tokens: int, num_prompt_tokens: int) -> StateCopy | None:
        """Keep the live state of a sequence after `num_tokens`, if that is a place for it and a slot is left."""
        at_end = num_prompt_tokens - self._block_tokens <= num_tokens <= num_prompt_tokens
        if num_tokens % self._interval and (num_tokens % self._block_tokens or not at_end):
            return None
        if not self.num_available or (sequence_id, num_tokens) in self._pending:
            return None
        target = self._pending[sequence_id, num_tokens] = self._allocate()
        return StateCopy(self._live[sequence_id], target)

    def commit(self, sequence_id: int, hashes: Sequence[bytes]) -> list[bytes]:
        """Make snapshots of pending states at the ends of a sequence's indexed blocks, given their keys in order.

        Returns the keys of the blocks that have one now and had none.
        """
        new = []
        ready = [key for key in self._pending if key[0] == sequence_id and key[1] <= len(hashes) * self._block_tokens]
        for key in ready:
            block, slot = hashes[key[1] // self._block_tokens - 1], self._pending.pop(key)
            if block in self._snapshots:
                self._release(slot)
                self._snapshots.move_to_end(block)
            else:
                self._snapshots[block] = slot
                self.events.record(StateCached(block))
                new.append(block)
        return new

    def rollback(self, sequence_id: int, num_tokens: int) -> None:
        """Drop pending states of a sequence after more than `num_tokens`: they do not count, or were never copied."""
        for key in [key for key in self._pending if key[0] == sequence_id and key[1] > num_tokens]:
            self._release(self._pending.pop(key))

    def forget(self, block: bytes) -> None:
        """Drop the snapshot of a block that leaves the prefix index, if it has one."""
        slot = self._snapshots.pop(block, None)
        if slot is not None:
            self._release(slot)
            self.events.record(StateEvicted(block))

    def pin(self, slot: int) -> None:
        """Keep a slot's state and place while a transfer reads or writes it."""
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Undo one `pin`."""
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._ended:
                self._ended.remove(slot)
                self._free.append(slot)

    def check(self, sequences: Collection[int], indexed: Collection[bytes]) -> None:
        """Assert that no slot leaks or is used twice, that the sequences are live, and that snapshots have blocks."""
        kept = [*self._checkpoints.values(), *self._pending.values(), *self._snapshots.values()]
        arriving = [slot for _, slot in self._arriving.values()]
        used = [*self._free, *self._live.values(), *kept, *arriving, *self._ended]
        assert sorted(used) == list(range(self.num_slots)), "a state slot leaked or is used twice"
        assert self._live.keys() == set(sequences)
        assert self._ended <= self._pins.keys()
        assert not self._pins.keys() & {*self._free}, "a slot with a transfer is free"
        assert {
            *self._arriving,
            *self._checkpoints,
            *(sequence_id for sequence_id, _ in self._pending),
        } <= self._live.keys()
        assert self._snapshots.keys() <= set(indexed), "a snapshot outlived its block"

    def _allocate(self) -> int:
        if self._free:
            return self._free.pop()
        self.num_evicted += 1
        oldest = next((block for block, slot in self._snapshots.items() if slot not in self._pins), None)
        if oldest is not None:
            self.events.record(StateEvicted(oldest))
            return self._snapshots.pop(oldest)
        return self._pending.popitem(last=False)[1]  # a pending state has no transfer

    def _release(self, slot: int) -> None:
        """Free a slot, or have it freed when it is unpinned."""
        if slot in self._pins:
            self._ended.add(slot)
        else:
            self._free.append(slot)
