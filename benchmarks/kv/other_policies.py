"""The eviction policy that was better than the kept ones at the smallest capacities only: see docs/log.md."""

from collections import OrderedDict

from ingot.runtime.kv.eviction import Chains, LeafQueue, MayLeave


class SmallMainFifo:
    """S3-FIFO: new keys pass a small queue first; used again there or soon after it, they enter the main one.

    (Yang et al., "FIFO Queues are All You Need for Cache Eviction", 2023)
    """

    small_share = 0.1
    _most_uses = 3

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_target = max(1, int(capacity * self.small_share))
        self._clock = 0
        self._chains = Chains()
        self._small, self._main = LeafQueue(self._chains), LeafQueue(self._chains)
        self._lost: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[bytes, int] = {}

    def insert(self, key: bytes, parent: bytes = b"") -> None:
        """Put the key at the end of the small queue, or of the main one if it was evicted not long ago."""
        self._chains.add(key, parent)
        self._uses[key] = 0
        was_lost = key in self._lost
        self._lost.pop(key, None)
        self._put(self._main if was_lost else self._small, key)

    def touch(self, key: bytes) -> None:
        """Count a use; its place does not change."""
        self._uses[key] = min(self._most_uses, self._uses[key] + 1)

    def evict(self, may_leave: MayLeave) -> bytes | None:
        """Remove the first key that was not used: from the small queue if it has more than its share."""
        if len(self._small) > self._small_target or not len(self._main):
            return self._evict_small(may_leave) or self._evict_main(may_leave)
        return self._evict_main(may_leave) or self._evict_small(may_leave)

    def remove(self, key: bytes) -> None:
        """Remove a key."""
        del self._uses[key]
        self._small.discard(key)
        self._main.discard(key)
        parent = self._chains.remove(key)
        self._small.expose_after(parent)
        self._main.expose_after(parent)

    def _evict_small(self, may_leave: MayLeave) -> bytes | None:
        while (found := self._small.lowest(may_leave)) is not None:
            key = found[1]
            if not self._uses[key]:
                self.remove(key)
                self._lost[key] = None
                while len(self._lost) > self._capacity:
                    self._lost.popitem(last=False)
                return key
            self._small.discard(key)
            self._uses[key] = 0
            self._put(self._main, key)
        return None

    def _evict_main(self, may_leave: MayLeave) -> bytes | None:
        while (found := self._main.lowest(may_leave)) is not None:
            key = found[1]
            if not self._uses[key]:
                self.remove(key)
                return key
            self._uses[key] -= 1
            self._put(self._main, key)
        return None

    def _put(self, queue: LeafQueue, key: bytes) -> None:
        self._clock += 1
        queue.put(key, self._clock)
