"""Hits of several tiers on a trace: inclusive as in the engine, and exclusive for comparison.

Inclusive: a block on the device is also in host memory and on disk, and takes room in each. Exclusive: a block is in
one tier; what the device evicts moves to host memory, and what that evicts to disk. The engine is inclusive,
because a block that is saved ahead costs nothing when it is evicted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from ingot.runtime.kv.policies import EvictionPolicy, make_policy

Chain = Sequence[bytes]


class Store:
    """A tier of the simulation: keys, and a policy that evicts when it is full."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.keys: set[bytes] = set()
        self._policy = policy

    def touch(self, keys: Chain) -> None:
        """Record that the leading blocks of a chain were used."""
        for key in reversed(keys):
            if key in self.keys:
                self._policy.touch(key)

    def insert(self, chain: Chain) -> list[bytes]:
        """Store the missing blocks, as far as there is room next to the chain itself; returns what was evicted."""
        pinned, evicted = set(chain), []
        for index, key in enumerate(chain):
            if key not in self.keys:
                if len(self.keys) >= self.capacity:
                    victim = self._policy.evict(lambda each: each not in pinned)
                    if victim is None:
                        break
                    self.keys.remove(victim)
                    evicted.append(victim)
                self._policy.insert(key, chain[index - 1] if index else b"")
                self.keys.add(key)
        return evicted

    def take(self, key: bytes, parent: bytes) -> bytes | None:
        """Store one block; returns the block that was evicted for it."""
        victim = self._policy.evict(lambda each: True) if len(self.keys) >= self.capacity else None
        self.keys.discard(victim or b"")
        self._policy.insert(key, parent)
        self.keys.add(key)
        return victim

    def give(self, keys: Chain) -> None:
        """Remove those of these blocks that are stored."""
        for key in keys:
            if key in self.keys:
                self.keys.remove(key)
                self._policy.remove(key)


def make_stores(sizes: Mapping[str, int], policy: str) -> dict[str, Store]:
    """The tiers that have a size: pool and disk evict by LRU, host memory by `policy`."""
    policies = {"device": "lru", "host": policy, "disk": "lru"}
    return {name: Store(size, make_policy(policies[name], size)) for name, size in sizes.items() if size}


def tier_hits(chains: Sequence[Chain], sizes: Mapping[str, int], policy: str) -> Counter[str]:
    """Hits by the tier that has the block; `sizes` in blocks, fastest tier first."""
    stores = make_stores(sizes, policy)
    hits: Counter[str] = Counter()
    for chain in chains:
        places = _places(chain, stores)
        hits.update(places)
        for name, store in stores.items():
            if name != "disk":
                store.touch(chain[: len(places)])
            elif "disk" in places:
                last = max(index for index, place in enumerate(places) if place == "disk")
                store.touch(chain[: last + 1])
            store.insert(chain)
    return hits


def exclusive_hits(chains: Sequence[Chain], sizes: Mapping[str, int], policy: str) -> Counter[str]:
    """Hits by the tier that has the block, where each block is in one tier only."""
    stores = make_stores(sizes, policy)
    device, *lower = stores.values()
    parents: dict[bytes, bytes] = {}
    hits: Counter[str] = Counter()
    for chain in chains:
        parents.update(zip(chain, [b"", *chain], strict=False))
        places = _places(chain, stores)
        hits.update(places)
        device.touch(chain[: len(places)])
        for store in lower:
            store.give(chain)
        for evicted in device.insert(chain):
            moved: bytes | None = evicted
            for store in lower:
                moved = store.take(moved, parents[moved]) if moved is not None else None
    return hits


def prefix_in(chain: Chain, keys: set[bytes] | dict[bytes, tuple[int, int]]) -> int:
    """Leading blocks of the chain that are stored."""
    return next((index for index, key in enumerate(chain) if key not in keys), len(chain))


def _places(chain: Chain, stores: Mapping[str, Store]) -> list[str]:
    """The first tier that has each leading block."""
    places = []
    for key in chain:
        place = next((name for name, store in stores.items() if key in store.keys), None)
        if place is None:
            break
        places.append(place)
    return places
