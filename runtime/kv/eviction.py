"""Which block a tier evicts. To add a policy, write its class and add its row to `POLICIES`.

A block is of use only with all blocks before it, so every policy evicts leaves: blocks that no block of the tier
follows. Among these it takes the one with the lowest priority. A chain thus loses its end before its middle.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import Protocol

from ingot.artifact.serving import ArtifactOptions
from ingot.errors import UsageError, unknown

MayLeave = Callable[[bytes], bool]


class EvictionPolicy(Protocol):
    """Order of the keys in one tier. Every key that enters, is used or leaves is reported to it."""

    def insert(self, key: bytes, parent: bytes = b"") -> None:
        """Record a key that has entered the tier, and the key of the block before it."""
        ...

    def touch(self, key: bytes) -> None:
        """Record that a key of the tier was used."""
        ...

    def evict(self, may_leave: MayLeave) -> bytes | None:
        """Remove and return the key to give up among the leaves that may leave; None if none may."""
        ...

    def remove(self, key: bytes) -> None:
        """Record that a key has left the tier without being evicted."""
        ...


class Chains:
    """Which keys of a tier follow which."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes] = {}
        self._children: Counter[bytes] = Counter()

    def add(self, key: bytes, parent: bytes) -> None:
        """Add a key after its parent, which may be in the tier or not."""
        self._parents[key] = parent
        self._children[parent] += 1

    def remove(self, key: bytes) -> bytes | None:
        """Remove a key; returns its parent if no other key follows that."""
        parent = self._parents.pop(key)
        self._children[parent] -= 1
        if self._children[parent]:
            return None
        del self._children[parent]
        return parent

    def is_leaf(self, key: bytes) -> bool:
        """Whether no key of the tier follows this one."""
        return key not in self._children


class LeafQueue:
    """Keys with priorities; finds the leaf with the lowest in logarithmic time.

    The heap may hold outdated entries, which are dropped when they come up. Keys that are not leaves need no entry.
    """

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._priorities: dict[bytes, float] = {}
        self._heap: list[tuple[float, bytes]] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._priorities

    def __len__(self) -> int:
        return len(self._priorities)

    def put(self, key: bytes, priority: float) -> None:
        """Add a key, or change its priority."""
        self._priorities[key] = priority
        self._expose(key)

    def discard(self, key: bytes) -> None:
        """Remove a key, if it is here."""
        self._priorities.pop(key, None)

    def expose_after(self, parent: bytes | None) -> None:
        """Take note of a key that has become a leaf, if it is here."""
        if parent is not None:
            self._expose(parent)

    def lowest(self, may_leave: MayLeave) -> tuple[float, bytes] | None:
        """Priority and key of the lowest leaf that may leave; it stays in the queue."""
        kept, found = [], None
        while self._heap and found is None:
            entry = heappop(self._heap)
            if self._is_current(entry):
                kept.append(entry)
                found = entry if may_leave(entry[1]) else None
        for entry in kept:
            heappush(self._heap, entry)
        return found

    def _expose(self, key: bytes) -> None:
        if key in self._priorities and self._chains.is_leaf(key):
            heappush(self._heap, (self._priorities[key], key))
        if len(self._heap) > 64 + 4 * len(self._priorities):
            self._heap = [entry for entry in set(self._heap) if self._is_current(entry)]
            heapify(self._heap)

    def _is_current(self, entry: tuple[float, bytes]) -> bool:
        priority, key = entry
        return self._priorities.get(key) == priority and self._chains.is_leaf(key)


class LeastRecentlyUsed:
    """Evicts the leaf that was inserted or touched the longest ago."""

    def __init__(self, capacity: int) -> None:
        self._clock = 0
        self._chains = Chains()
        self._queue = LeafQueue(self._chains)

    def insert(self, key: bytes, parent: bytes = b"") -> None:
        """Make the key the newest."""
        self._chains.add(key, parent)
        self.touch(key)

    def touch(self, key: bytes) -> None:
        """Make the key the newest."""
        self._clock += 1
        self._queue.put(key, self._clock)

    def evict(self, may_leave: MayLeave) -> bytes | None:
        """Remove the oldest leaf."""
        found = self._queue.lowest(may_leave)
        if found is None:
            return None
        self.remove(found[1])
        return found[1]

    def remove(self, key: bytes) -> None:
        """Remove a key."""
        self._queue.discard(key)
        self._queue.expose_after(self._chains.remove(key))


class RecencyAndUses:
    """Evicts the leaf that was used the longest ago, where every use after the first makes a key look newer.

    Time is counted in keys that enter. A use counts as much as the mean time between two uses of a key, which is
    measured, but at least `use_share` of the time in which as many keys enter as the tier holds; at most `most_uses`
    count. So a conversation that went on outlives the pause before its next turn, also in a tier that new keys fill
    sooner. The last `memory` * capacity keys that were evicted are remembered: a conversation that went on once is
    likelier to go on again. docs/log.md has the measurements that chose the constants.
    """

    use_share = 0.4
    most_uses = 6
    memory = 4

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entered = 0
        self._chains = Chains()
        self._queue = LeafQueue(self._chains)
        self._last_use: dict[bytes, int] = {}  # of the tier's keys: how many had entered
        self._remembered: OrderedDict[bytes, int] = OrderedDict()  # the same of keys that were evicted
        self._uses: dict[bytes, int] = {}  # after the first, of both, if any
        self._mean_gap = 0.0  # over the last `capacity` uses, roughly
        self._num_gaps = 0

    def insert(self, key: bytes, parent: bytes = b"") -> None:
        """Count a use, after those that are remembered."""
        self._chains.add(key, parent)
        self._entered += 1
        remembered = self._remembered.pop(key, None)
        if remembered is not None:
            self._last_use[key] = remembered
            self.touch(key)
        else:
            self._last_use[key] = self._entered
            self._queue.put(key, self._entered)

    def touch(self, key: bytes) -> None:
        """Count a use."""
        self._observe_gap(self._entered - self._last_use[key])
        uses = self._uses[key] = min(self.most_uses, self._uses.get(key, 0) + 1)
        self._last_use[key] = self._entered
        self._queue.put(key, self._entered + uses * max(self._mean_gap, self.use_share * self._capacity))

    def evict(self, may_leave: MayLeave) -> bytes | None:
        """Remove the leaf that looks the oldest, and remember its uses."""
        found = self._queue.lowest(may_leave)
        if found is None:
            return None
        self._remembered[found[1]] = self._last_use[found[1]]
        self._take_out(found[1])
        while len(self._remembered) > self.memory * self._capacity:
            key, _ = self._remembered.popitem(last=False)
            self._uses.pop(key, None)
        return found[1]

    def remove(self, key: bytes) -> None:
        """Remove a key."""
        self._uses.pop(key, None)
        self._take_out(key)

    def _take_out(self, key: bytes) -> None:
        del self._last_use[key]
        self._queue.discard(key)
        self._queue.expose_after(self._chains.remove(key))

    def _observe_gap(self, gap: int) -> None:
        self._num_gaps = min(self._num_gaps + 1, self._capacity)
        self._mean_gap += (gap - self._mean_gap) / self._num_gaps


class AdaptiveReplacement:
    """ARC: keys used once and keys used again, whose shares adapt to which of those evicted are needed again.

    (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", 2003)
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._clock = 0
        self._once_target = 0.0
        self._chains = Chains()
        self._once, self._again = LeafQueue(self._chains), LeafQueue(self._chains)
        self._lost_once: OrderedDict[bytes, None] = OrderedDict()  # evicted from each
        self._lost_again: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, key: bytes, parent: bytes = b"") -> None:
        """Make the key the newest; one that was evicted not long ago counts as used again, and shifts the shares."""
        self._chains.add(key, parent)
        once, again = len(self._lost_once), len(self._lost_again)
        if key in self._lost_once:
            self._once_target = min(self._capacity, self._once_target + max(1.0, again / once))
            del self._lost_once[key]
        elif key in self._lost_again:
            self._once_target = max(0.0, self._once_target - max(1.0, once / again))
            del self._lost_again[key]
        else:
            self._put(self._once, key)
            return
        self._put(self._again, key)

    def touch(self, key: bytes) -> None:
        """Count the key as used again, and make it the newest."""
        self._once.discard(key)
        self._put(self._again, key)

    def evict(self, may_leave: MayLeave) -> bytes | None:
        """Remove the oldest leaf of the queue that has more than its share, or else of the other."""
        queues = [(self._once, self._lost_once), (self._again, self._lost_again)]
        if len(self._once) <= self._once_target:
            queues.reverse()
        for queue, lost in queues:
            found = queue.lowest(may_leave)
            if found is not None:
                self.remove(found[1])
                lost[found[1]] = None
                self._trim()
                return found[1]
        return None

    def remove(self, key: bytes) -> None:
        """Remove a key."""
        self._once.discard(key)
        self._again.discard(key)
        parent = self._chains.remove(key)
        self._once.expose_after(parent)
        self._again.expose_after(parent)

    def _put(self, queue: LeafQueue, key: bytes) -> None:
        self._clock += 1
        queue.put(key, self._clock)

    def _trim(self) -> None:
        while self._lost_once and len(self._once) + len(self._lost_once) > self._capacity:
            self._lost_once.popitem(last=False)
        while len(self._lost_once) + len(self._lost_again) > self._capacity:
            (self._lost_again or self._lost_once).popitem(last=False)


POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {
    "lru-uses": RecencyAndUses,
    "lru": LeastRecentlyUsed,
    "arc": AdaptiveReplacement,
}
"""Policies by their name in options; each is made with the capacity of its tier, in blocks."""

DEFAULT_POLICY = ArtifactOptions.kv_policy


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Make the policy of a tier of `capacity` blocks; UsageError for an unknown name."""
    require_policy(name)
    return POLICIES[name](capacity)


def require_policy(name: object) -> None:
    """Raise UsageError unless there is a policy of this name."""
    if not isinstance(name, str) or name not in POLICIES:
        raise UsageError(unknown("kv_policy", name, POLICIES))
