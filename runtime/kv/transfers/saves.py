"""Which places of a pool are saved to host memory, and when: while that has free slots, and before they are evicted.

    evicted next ◄───────── idle places ─────────► used last ◄─ in use ─►
    │◄─ kept in host memory ─►│◄─ there or on disk ─►│  spare in host memory, or not there
    │◄───────────────────── width ──────────────────►│

A place that the device keeps for long takes no room below it. As long as host memory has free slots, everything is
saved at once, which costs no room, and nothing has to be looked for: `has_all`. Later only the places that are evicted
next are saved, unless a tier has them: idle ones, and while these are few also some in use. Their number, the width,
must cover what is evicted at a time, as no step waits for a save, while a step begins only some: it is three times the
most that was evicted between two polls while the pool was filled twice, and at least an eighth of the pool. Until the
pool was filled once it is all of it.

A flush stores all that is cached in the lowest tier, for as long as that advances. Its length depends on the disk and
on the size of the tiers, so it is not bounded by a fixed time: it ends when nothing has reached its tier for
`STALL_SECONDS`, and earlier only where the caller sets a limit.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.events import HostEvicted
from ingot.runtime.kv.host_tier import HostBlock
from ingot.runtime.kv.keys import state_content
from ingot.runtime.kv.pool_tiers import PoolTiers, Saved
from ingot.runtime.kv.states import StateManager
from ingot.runtime.kv.transfers.background import GoesOn, always

STALL_SECONDS = 30.0  # without a block that reaches its tier
_LEAST_SHARE = 8  # the width is at least 1 / 8 of the pool
_SCAN_SHARE = 8  # the next places are looked at again after 1 / 8 of them have changed
_LOOKS = 16  # at places, between which a step may end
_LEAST_AT_ONCE = 16  # saves that a step begins if more are due, besides half of those evicted in one step lately


class Evictable(Protocol):
    """A pool and the order in which it evicts."""

    @property
    def num_places(self) -> int:
        """Places of the pool."""
        ...

    @property
    def num_free(self) -> int:
        """Places that are given away before any is evicted."""
        ...

    @property
    def num_evicted(self) -> int:
        """Places evicted since the pool was made."""
        ...

    def find(self, block: int) -> Saved | None:
        """What is cached of a KV block: itself, or its snapshot."""
        ...

    def by_age(self) -> Iterator[int]:
        """KV blocks of all that is cached and worth saving, what is evicted next first."""
        ...


class EvictableBlocks:
    """The blocks of a pool. Implements `Evictable`."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self.num_places = blocks.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return self._blocks.num_free

    @property
    def num_evicted(self) -> int:
        """Blocks evicted."""
        return self._blocks.num_evicted

    def find(self, block: int) -> Saved | None:
        """What a block holds, if it is cached."""
        cached = self._blocks.cached(block)
        return Saved(block, *cached) if cached else None

    def by_age(self) -> Iterator[int]:
        """Idle blocks as they are evicted, then those in use."""
        return self._blocks.by_age()


class EvictableStates:
    """The snapshots of side state. Implements `Evictable`."""

    def __init__(self, blocks: BlockManager, states: StateManager) -> None:
        self._blocks, self._states = blocks, states
        self.num_places = states.num_slots

    @property
    def num_free(self) -> int:
        """Slots without a state."""
        return self._states.num_free

    @property
    def num_evicted(self) -> int:
        """Snapshots that running sequences took the slots of."""
        return self._states.num_evicted

    def find(self, block: int) -> Saved | None:
        """The snapshot of a block."""
        cached = self._blocks.cached(block)
        slot = self._states.find(cached[0].hash) if cached else None
        if cached is None or slot is None:
            return None
        return Saved(slot, state_content(cached[0].hash), cached[1])

    def by_age(self) -> Iterator[int]:
        """Snapshots as they leave."""
        return map(self._blocks.block, self._states.by_age())


class _Held:
    """KV blocks of which a tier had what is to be saved when it was looked at: so that no look is repeated.

    Of these, host memory keeps some. A key leaves with its copy in host memory, a block when it is offered again: it
    may have another content by then, or be used since.
    """

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._kept: set[int] = set()

    def add(self, block: int, key: bytes, *, keeps: bool) -> None:
        """Record that a tier has the key of a block, and whether host memory keeps it."""
        self._keys[block] = key
        self._blocks[key] = block
        if keeps:
            self._kept.add(block)

    def others(self, blocks: list[int], *, keeps: bool) -> list[int]:
        """The blocks that are not held."""
        held = self._kept if keeps else self._keys
        return [block for block in blocks if block not in held]

    def drop(self, block: int) -> None:
        """Forget a block. Also while another thread drops a key."""
        key = self._keys.pop(block, None)
        if key is not None:
            self._blocks.pop(key, None)
            self._kept.discard(block)

    def drop_key(self, key: bytes) -> None:
        """Forget the block with this key."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._keys.pop(block, None)
            self._kept.discard(block)


class _Next(NamedTuple):
    """A place that is evicted soon: its key and KV block, and whether host memory is to keep it."""

    key: bytes
    block: int
    keeps: bool


class Saves:
    """Saves what one pool holds. Its owner guards it with a lock."""

    def __init__(self, pool: Evictable, tiers: PoolTiers) -> None:
        self._pool, self._tiers = pool, tiers
        self._offered: dict[int, None] = {}  # KV blocks, oldest first
        self._most_kept = max(1, tiers.host.num_slots // 2)
        self._width = pool.num_places
        self._polled = self._filled = pool.num_evicted  # at the last poll, and when the pool was filled last
        self._bursts = (0, 0)  # most evicted between two polls: since the pool was filled last, and before that
        self._num_changes = 0  # places offered and evicted since the next ones were saved
        self._waits = False  # the last step left what is due to the next one
        self._flushed: set[bytes] = set()  # keys of all that the last flush was to store
        self._to_write: deque[HostBlock] = deque()  # of these
        self._to_save: deque[Saved] = deque()
        self._soon: deque[tuple[list[int], bool]] = (
            deque()
        )  # KV blocks evicted next; whether host memory is to keep them
        self._next: deque[_Next] = deque()  # of these, what no tier had when they were looked at
        self._held = _Held()
        self._had_all = True  # see `has_all`
        self._host_events = tiers.host.events.reader()

    def offer(self, block: int) -> None:
        """Take note of a KV block that is cached now, has a snapshot now, or is used no more."""
        self._offered[block] = None
        self._held.drop(block)
        self._num_changes += 1

    @property
    def has_all(self) -> bool:
        """Return whether all that is cached is in host memory or offered: until slots run out or one is lost."""
        return self._had_all and not self._host_events

    def _read_host_events(self) -> None:
        """Forget the keys that left host memory."""
        while self._host_events:
            event = self._host_events.popleft()
            assert isinstance(event, HostEvicted)
            self._had_all = False
            self._held.drop_key(event.key)

    @property
    def has_due(self) -> bool:
        """Whether there may be something to begin."""
        return bool(self._offered or self._soon or self._next or self._pool.num_evicted != self._polled)

    def start(self, goes_on: GoesOn = always) -> None:
        """Begin to save what fits into free slots, and what is evicted next.

        A step that evicts many has more to do than others: it begins a load, or a long prompt. So it leaves this to the
        next one.
        """
        self._read_host_events()
        self._waits = self._measure() > _LEAST_AT_ONCE and not self._waits
        if self._waits:
            return
        most = _LEAST_AT_ONCE + max(self._bursts) // 2  # after a burst, as many as two more evict are saved already
        for block in list(islice(self._offered, most)):
            if not (self._tiers.host.num_free and self._tiers.has_room_to_save and goes_on()):
                break
            del self._offered[block]
            found = self._pool.find(block)
            if found and self._tiers.host.find(found.content) is None:
                most -= self._tiers.save(found, keeps=False)
        if not self._tiers.host.num_free:
            self._offered.clear()
            self._had_all = False
        if not self.has_all and self._num_changes >= max(1, self._width // _SCAN_SHARE) and goes_on():
            self._scan()
        self._read_host_events()
        while self._soon and goes_on():
            blocks, keeps = self._soon.popleft()
            for block in self._held.others(blocks, keeps=keeps):
                self._look(block, keeps)
        for _ in range(most):
            if not (self._next and goes_on() and self._save_next(self._next[0])):
                return
            self._next.popleft()

    def begin_flush(self) -> None:
        """Note all that is to be stored, the least valuable first: so the disk's newest blocks are the best."""
        disk = self._tiers.disk

        def is_stored(key: bytes) -> bool:
            return disk is not None and disk.contains(key)

        held = [block for block in self._tiers.host if disk and not block.tree.private]
        self._to_write = deque(block for block in held if not is_stored(block.content.hash))
        found = map(self._pool.find, self._pool.by_age())
        self._to_save = deque(saved for saved in found if saved and not is_stored(saved.content.hash))
        self._flushed = self.unflushed

    def flush(self) -> None:
        """Begin to store what was noted, as far as there is room.

        With a disk all goes there, what is on the device through spare slots. Without one, host memory keeps it.
        """
        self._read_host_events()
        while self._to_write and self._tiers.write(self._to_write[0]):
            self._to_write.popleft()
        while self._to_save and not self._to_write and self._store(self._to_save[0]):
            self._to_save.popleft()

    @property
    def has_unflushed(self) -> bool:
        """Whether anything has not reached its tier; see `unflushed`."""
        return bool(self._to_write or self._to_save or self._tiers.is_moving_down)

    @property
    def unflushed(self) -> set[bytes]:
        """Keys of what `begin_flush` noted, and of what moves down besides, that are still on their way."""
        noted = {*(block.content.hash for block in self._to_write), *(saved.content.hash for saved in self._to_save)}
        return noted | self._tiers.moving_down

    def unstored(self) -> set[bytes]:
        """Keys of what the last flush was to write to disk that is not there."""
        disk = self._tiers.disk
        return {key for key in self._flushed if disk and not disk.contains(key)}

    def _store(self, saved: Saved) -> bool:
        if self._tiers.disk is None or saved.tree.private:
            return self._save(saved, keeps=True)
        held = self._tiers.host.find(saved.content)
        return self._tiers.write(held) if held else self._save(saved, keeps=False)

    def _measure(self) -> int:
        """Take note of how many places are evicted at a time; returns how many were since the last step."""
        evicted = self._pool.num_evicted
        burst = evicted - self._polled
        now, before = self._bursts
        self._bursts = max(now, burst), before
        self._num_changes += burst
        self._polled = evicted
        most = self._pool.num_places
        if evicted - self._filled >= most:
            self._filled, self._width = evicted, 0
            self._bursts = 0, self._bursts[0]
        self._width = min(most, max(self._width, most // _LEAST_SHARE, 3 * max(self._bursts)))
        return burst

    def _scan(self) -> None:
        """Note the places that are evicted next, to be looked at some at a time."""
        width = max(0, self._width - self._pool.num_free)
        if not self._tiers.writes_to_disk:
            width = min(width, self._most_kept)
        self._num_changes = 0
        self._next.clear()
        soon = list(islice(self._pool.by_age(), width))
        self._soon = deque(
            (soon[start : min(start + _LOOKS, end)], keeps)
            for first, end, keeps in ((0, self._most_kept, True), (self._most_kept, len(soon), False))
            for start in range(first, min(end, len(soon)), _LOOKS)
        )

    def _look(self, block: int, keeps: bool) -> None:
        saved = self._pool.find(block)
        if saved is None:
            return
        if self._tiers.has(saved.content.hash, keeps=keeps):
            self._held.add(block, saved.content.hash, keeps=keeps)
        else:
            self._next.append(_Next(saved.content.hash, block, keeps))

    def _save_next(self, following: "_Next") -> bool:
        """Save what a scan noted, if it is there still; False while there is no room."""
        saved = self._pool.find(following.block)
        if saved is None or saved.content.hash != following.key:
            return True
        if not self._save(saved, keeps=following.keeps):
            return False
        self._read_host_events()
        self._held.add(following.block, following.key, keeps=following.keeps)
        return True

    def _save(self, saved: Saved, *, keeps: bool) -> bool:
        """Save a place unless a tier has it, for host memory to keep or to the disk; False while there is no room."""
        if self._tiers.has(saved.content.hash, keeps=keeps):
            return True
        return self._tiers.save(saved, keeps=keeps, through=not keeps)


class Flush:
    """One flush of several pools, each with what saves it. Its owner guards it with a lock, and advances it.

    seconds   most that it takes; None: as long as it advances
    """

    def __init__(
        self,
        pools: Sequence[tuple[Saves, PoolTiers]],
        seconds: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._pools, self._seconds, self._clock = pools, seconds, clock
        self._failed_before = [tiers.num_failed for _, tiers in pools]
        for saves, _ in pools:
            saves.begin_flush()
        self._num_ended = -1
        self._started = self._advanced = clock()
        self.is_done = False  # nothing is left: it was stored, or failed

    def advance(self) -> bool:
        """Begin to store what there is room for; returns whether to go on."""
        for saves, _ in self._pools:
            saves.flush()
        self.is_done = not any(saves.has_unflushed for saves, _ in self._pools)
        num_ended = sum(tiers.num_ended for _, tiers in self._pools)
        if num_ended != self._num_ended:
            self._num_ended, self._advanced = num_ended, self._clock()
        return not (self.is_done or self.reason)

    @property
    def reason(self) -> str:
        """Why it has to be given up; empty while it advances."""
        now = self._clock()
        if self._seconds is not None and now - self._started >= self._seconds:
            return f"the limit of {self._seconds:g} seconds was reached"
        refusal = next((tiers.disk_refusal for _, tiers in self._pools if tiers.disk_refusal), None)
        if refusal:
            return refusal
        if now - self._advanced >= STALL_SECONDS:
            return f"none was written for {STALL_SECONDS:g} seconds"
        return ""

    def lost(self) -> list[set[bytes]]:
        """For each pool, keys of what it holds that is not stored, because time was up or transfers failed.

        A write that has begun may still end, so what is stored by then is not lost.
        """
        pairs = zip(self._pools, self._failed_before, strict=True)
        return [
            saves.unflushed | (saves.unstored() if tiers.num_failed > before else set())
            for (saves, tiers), before in pairs
        ]
