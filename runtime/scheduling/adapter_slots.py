"""Which adapter is in which slot of the executor: a slot for each that running sequences use, the rest as a cache.

A sequence has its slot from its admission until it ends or is preempted. Where every slot is in use, or the memory that
an executor sets apart for adapters, the next sequence with another adapter waits. An adapter stays in its slot after
its last sequence, and leaves it for another when it was used least recently. Equal digests are one adapter, whatever
their names.
"""

from collections import Counter

from ingot.errors import EngineError
from ingot.runtime.adapters import Adapter
from ingot.runtime.executors import AdaptingExecutor


class AdapterSlots:
    """The slots of one executor. An adapter is loaded when the first step that uses it is built."""

    def __init__(self, executor: AdaptingExecutor) -> None:
        self._executor = executor
        self._slots: dict[str, int] = {}  # by digest, the least recently used first
        self.num_slots = executor.max_adapters
        self._free = list(range(self.num_slots))
        self._users: Counter[str] = Counter()  # running sequences by digest
        self._shares: dict[str, float] = {}  # share of the adapters' memory of each in use, by digest
        self._loaded: dict[int, str] = {}  # what the executor has in a slot
        self._dropped: set[str] = set()  # to leave with their last users
        self.num_loads = 0

    def has_room(self, adapter: Adapter) -> bool:
        """Whether a sequence with this adapter can be admitted."""
        if adapter.digest in self._users:
            return True
        has_slot = adapter.digest in self._slots or bool(self._free) or len(self._users) < len(self._slots)
        return has_slot and sum(self._shares.values()) + self._executor.adapter_share(adapter) <= 1

    def take(self, adapter: Adapter) -> None:
        """Give a running sequence its adapter's slot; there must be room."""
        digest = adapter.digest
        slot = self._slots.pop(digest, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
        self._slots[digest] = slot
        self._users[digest] += 1
        self._shares.setdefault(digest, self._executor.adapter_share(adapter))

    def release(self, adapter: Adapter) -> None:
        """Record that a running sequence has left."""
        self._users[adapter.digest] -= 1
        if not self._users[adapter.digest]:
            del self._users[adapter.digest], self._shares[adapter.digest]
            if adapter.digest in self._dropped:
                self.drop(adapter.digest)

    def slot(self, adapter: Adapter) -> int:
        """Slot of a running sequence's adapter, which is loaded if it is not. Raises the errors of the executor."""
        slot = self._slots[adapter.digest]
        if self._loaded.get(slot) != adapter.digest:
            self._unload(slot)
            self._load(slot, adapter)
            self._loaded[slot] = adapter.digest
            self.num_loads += 1
        return slot

    def drop(self, digest: str) -> None:
        """Free the slot of an adapter that no new request can name, once no running sequence uses it."""
        if digest in self._users:
            self._dropped.add(digest)
            return
        self._dropped.discard(digest)
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._free.append(slot)
            self._unload(slot)

    def check(self, running: Counter[str]) -> None:
        """Assert that users are the running sequences, each with a slot of its own adapter."""
        assert self._users == running, (self._users, running)
        assert self._users.keys() <= self._slots.keys()
        places = [*self._slots.values(), *self._free]
        assert sorted(places) == list(range(self.num_slots))

    def _evict(self) -> int:
        unused = next(digest for digest in self._slots if digest not in self._users)
        return self._slots.pop(unused)

    def _load(self, slot: int, adapter: Adapter) -> None:
        """Load it; with too little memory in place of adapters that no running sequence uses, the oldest first."""
        while True:
            try:
                self._executor.load_adapter(slot, adapter)
            except EngineError:
                unused = next((slot for slot in self._loaded if not self._is_used(slot)), None)
                if unused is None:
                    raise
                self._unload(unused)
            else:
                return

    def _is_used(self, slot: int) -> bool:
        """Whether running sequences use what the executor has in a slot."""
        digest = self._loaded[slot]
        return digest in self._users and self._slots[digest] == slot

    def _unload(self, slot: int) -> None:
        if self._loaded.pop(slot, None) is not None:
            self._executor.unload_adapter(slot)
