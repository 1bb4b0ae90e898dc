"""Hits of several tiers on a trace: as in the engine, and inclusive and perfectly exclusive for comparison.

Inclusive: a block on the device is also in host memory and on disk, and takes room in each. Exclusive: a block is in
one tier; what the device evicts moves to host memory, and what that evicts to disk. The engine: as exclusive, but what
is evicted next has a copy in the tier below, and blocks that come back from disk stay there.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from ingot.runtime.kv.eviction import EvictionPolicy, make_policy

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


def inclusive_hits(chains: Sequence[Chain], sizes: Mapping[str, int], policy: str) -> Counter[str]:
    """Hits by the tier that has the block, where it takes room in all; `sizes` in blocks, fastest tier first."""
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


class EngineTiers:
    """The tiers as the engine uses them (`ingot.runtime.kv.transfers.saves`, `host_tier`); keys only.

    ahead   1 / this of the pool, and of host memory, has a copy in the tier below
    """

    ahead = 8

    def __init__(self, sizes: Mapping[str, int], policy: str) -> None:
        self._sizes = sizes
        self._device: OrderedDict[bytes, None] = OrderedDict()  # what is evicted next first, as in the others
        self._kept: set[bytes] = set()
        self._spare: OrderedDict[bytes, None] = OrderedDict()
        self._disk: OrderedDict[bytes, None] = OrderedDict()
        self._policy = make_policy(policy, max(1, sizes["host"]))
        self._parents: dict[bytes, bytes] = {}
        self.num_saved = self.num_written = 0

    def serve(self, chain: Chain) -> list[str]:
        """The first tier that has each leading block of a request, all of whose blocks are on the device afterwards."""
        self._parents.update(zip(chain, [b"", *chain], strict=False))
        places = list(map(self._place, chain))
        places = places[: places.index("")] if "" in places else places
        for key in reversed(chain[: len(places) - places[::-1].index("disk")] if "disk" in places else ()):
            if key in self._disk:
                self._disk.move_to_end(key)
        for key in chain:
            self._make_spare(key)
        self._load(chain)
        for key in list(self._device)[: max(1, self._sizes["device"] // self.ahead)]:
            self._save(key)
        return places

    def _place(self, key: bytes) -> str:
        if key in self._device:
            return "device"
        if key in self._kept or key in self._spare:
            return "host"
        return "disk" if key in self._disk else ""

    def _load(self, chain: Chain) -> None:
        pinned = set(chain)
        for key in chain:
            if key not in self._device and len(self._device) >= self._sizes["device"]:
                victim = next((each for each in self._device if each not in pinned), None)
                if victim is None:
                    break
                del self._device[victim]
                self._save(victim)
            self._device[key] = None
        for key in reversed(chain):
            if key in self._device:
                self._device.move_to_end(key)

    def _make_spare(self, key: bytes) -> None:
        if key in self._kept:
            self._kept.remove(key)
            self._policy.remove(key)
        elif key not in self._spare:
            return
        self._spare[key] = None
        self._spare.move_to_end(key, last=False)

    def _save(self, key: bytes) -> None:
        """Have host memory keep a block, unless only the disk has it."""
        if not self._sizes["host"] or key in self._kept or self._place_below(key) == "disk":
            return
        if key in self._spare:
            del self._spare[key]
        else:
            self._make_room()
            self.num_saved += 1
        self._policy.insert(key, self._parents[key])
        self._kept.add(key)
        self._write_ahead()

    def _place_below(self, key: bytes) -> str:
        return "disk" if key in self._disk and key not in self._spare else ""

    def _make_room(self) -> None:
        if len(self._kept) + len(self._spare) < self._sizes["host"]:
            return
        if self._spare:
            self._spare.popitem(last=False)
            return
        victim = self._policy.evict(lambda each: True)
        self._kept.discard(victim or b"")

    def _write_ahead(self) -> None:
        size = self._sizes["host"]
        while self._sizes["disk"] and self._kept and size - len(self._kept) < max(1, size // self.ahead):
            key = self._policy.evict(lambda each: True)
            assert key is not None
            self._kept.remove(key)
            self._spare[key] = None
            if key not in self._disk:
                if len(self._disk) >= self._sizes["disk"]:
                    self._disk.popitem(last=False)
                self._disk[key] = None
                self.num_written += 1


def engine_hits(chains: Sequence[Chain], sizes: Mapping[str, int], policy: str) -> Counter[str]:
    """Hits by the tier that has the block, in tiers as the engine uses them."""
    tiers = EngineTiers(sizes, policy)
    return Counter(place for chain in chains for place in tiers.serve(chain))


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
