"""Which blocks of a trace each eviction policy keeps: hit rates next to an unlimited cache and to Belady's optimum.

    python -m benchmarks.kv.policies --trace ../shared/data/traces/conversation_trace.jsonl

A request is a chain of blocks (512 tokens in the trace); a hit is a block of the longest prefix that is stored when it
arrives. Afterwards all its blocks are stored, and the policy evicts until the capacity holds. Requests come one after
another in the trace's order. The working set is the number of different blocks.

"Belady": a block that is not needed again is not kept; else the one that is needed last is evicted, and of those that
are needed by the same request the last in its chain. Every request that needs a block needs all blocks before it, so
the rule never evicts a block before those that follow it: it meets the prefix constraint, and being optimal without the
constraint it is optimal with it. It may drop blocks as soon as a request has ended, so no policy can be better.

"Tiers": the pool evicts idle blocks by LRU; each block is saved to host memory, by `kv_policy`, and to disk, whose
store evicts by LRU and sees only its own reads. A block is counted where it is found first.
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.device import device_facts
from benchmarks.kv.other_policies import GreedyDualFrequency, SmallMainFifo
from ingot.runtime.kv.policies import DEFAULT_POLICY, POLICIES, EvictionPolicy, make_policy

Chain = Sequence[bytes]
SHARES = (1, 5, 10, 20, 50)  # percent of the working set
ALL_POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {
    **POLICIES,
    "s3-fifo": SmallMainFifo,
    "gdsf": GreedyDualFrequency,
}


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

    def insert(self, chain: Chain) -> None:
        """Store the blocks that are missing, as far as there is room next to the chain itself."""
        pinned = set(chain)
        for index, key in enumerate(chain):
            if key not in self.keys:
                if len(self.keys) >= self.capacity and not self._evict(pinned):
                    return
                self._policy.insert(key, chain[index - 1] if index else b"")
                self.keys.add(key)

    def _evict(self, pinned: set[bytes]) -> bool:
        key = self._policy.evict(lambda key: key not in pinned)
        self.keys.discard(key or b"")
        return key is not None


@dataclass(frozen=True)
class Tiers:
    """Sizes of the tiers in percent of the working set; 0 for none."""

    device: int
    host: int
    disk: int


TIERS = (Tiers(10, 0, 0), Tiers(10, 20, 0), Tiers(10, 20, 50), Tiers(10, 20, 100), Tiers(2, 3, 5))


def read_trace(path: Path, limit: int | None = None) -> list[list[bytes]]:
    """The chains of a trace's requests."""
    lines = path.read_text("utf-8").splitlines()[:limit]
    return [[key.to_bytes(8, "big") for key in json.loads(line)["hash_ids"]] for line in lines]


def unlimited_hits(chains: Sequence[Chain]) -> int:
    """Hits of a cache that keeps everything."""
    seen: set[bytes] = set()
    hits = 0
    for chain in chains:
        hits += prefix_in(chain, seen)
        seen.update(chain)
    return hits


def belady_hits(chains: Sequence[Chain], capacity: int) -> int:
    """Hits of the best cache of this capacity, which has seen the future."""
    needed = _next_needs(chains)
    kept: dict[bytes, tuple[int, int]] = {}
    heap: list[tuple[int, int, bytes]] = []
    hits = 0
    for chain, following in zip(chains, needed, strict=True):
        hits += prefix_in(chain, kept)
        for depth, (key, need) in enumerate(zip(chain, following, strict=True)):
            kept.pop(key, None)
            if need is not None:
                kept[key] = (need, depth)
                heapq.heappush(heap, (-need, -depth, key))
        while len(kept) > capacity:
            need, depth, key = heapq.heappop(heap)
            if kept.get(key) == (-need, -depth):
                del kept[key]
    return hits


def policy_hits(chains: Sequence[Chain], capacity: int, make: Callable[[int], EvictionPolicy]) -> int:
    """Hits of one tier with a policy."""
    store = Store(capacity, make(capacity))
    hits = 0
    for chain in chains:
        found = prefix_in(chain, store.keys)
        hits += found
        store.touch(chain[:found])
        store.insert(chain)
    return hits


def tier_hits(chains: Sequence[Chain], sizes: Mapping[str, int], policy: str) -> Counter[str]:
    """Hits by the tier that has the block; `sizes` in blocks, fastest tier first."""
    policies = {"device": "lru", "host": policy, "disk": "lru"}
    stores = {name: Store(size, make_policy(policies[name], size)) for name, size in sizes.items() if size}
    hits: Counter[str] = Counter()
    for chain in chains:
        places = [_place(key, stores) for key in chain]
        found = places.index(None) if None in places else len(places)
        hits.update(place for place in places[:found] if place)
        for name, store in stores.items():
            if name != "disk":
                store.touch(chain[:found])
            elif "disk" in places[:found]:
                last = max(index for index in range(found) if places[index] == "disk")
                store.touch(chain[: last + 1])
            store.insert(chain)
    return hits


def prefix_in(chain: Chain, keys: set[bytes] | dict[bytes, tuple[int, int]]) -> int:
    """Leading blocks of the chain that are stored."""
    return next((index for index, key in enumerate(chain) if key not in keys), len(chain))


def _place(key: bytes, stores: Mapping[str, Store]) -> str | None:
    return next((name for name, store in stores.items() if key in store.keys), None)


def _next_needs(chains: Sequence[Chain]) -> list[list[int | None]]:
    """For each block of each request, the next request that needs it."""
    later: dict[bytes, int] = {}
    needs: list[list[int | None]] = []
    for index in range(len(chains) - 1, -1, -1):
        needs.append([later.get(key) for key in chains[index]])
        later.update(dict.fromkeys(chains[index], index))
    return needs[::-1]


def compare(chains: Sequence[Chain]) -> dict[str, object]:
    """All policies at all sizes, and the tiers."""
    total, working_set = sum(map(len, chains)), len({key for chain in chains for key in chain})
    unlimited = unlimited_hits(chains)
    rows = []
    for share in SHARES:
        capacity = working_set * share // 100
        best = belady_hits(chains, capacity)
        hits = {name: policy_hits(chains, capacity, make) for name, make in ALL_POLICIES.items()}
        of_best = {name: round(count / best, 3) for name, count in hits.items()}
        rates = {name: round(count / total, 4) for name, count in hits.items()}
        row = {
            "share": share,
            "blocks": capacity,
            "belady": round(best / total, 4),
            "hits": rates,
            "of_belady": of_best,
        }
        rows.append(row)
        click.echo(json.dumps(row))
    tiers = []
    for sizes in TIERS:
        blocks = {name: working_set * share // 100 for name, share in vars(sizes).items()}
        found = tier_hits(chains, blocks, DEFAULT_POLICY)
        everything = sum(found.values())
        tier_row = {
            "percent": vars(sizes),
            "hits": {name: round(found[name] / total, 4) for name in blocks},
            "all": round(everything / total, 4),
            "of_unlimited": round(everything / unlimited, 3),
            "of_belady_at_largest": round(everything / belady_hits(chains, max(blocks.values())), 3),
            "of_belady_at_pool": round(everything / belady_hits(chains, blocks["device"]), 3),
        }
        tiers.append(tier_row)
        click.echo(json.dumps(tier_row))
    facts = {"requests": len(chains), "blocks": total, "working_set": working_set}
    return {**facts, "unlimited": round(unlimited / total, 4), "one_tier": rows, "tiers": tiers}


@click.command()
@click.option("--trace", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--requests", multiple=True, type=int, help="Only so many requests; several times for several runs.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(trace: Path, requests: tuple[int, ...], output: Path | None) -> None:
    """Simulate all policies on a trace."""
    runs = [compare(read_trace(trace, limit)) for limit in requests or (None,)]
    result = {"device": device_facts(), "trace": trace.name, "default_policy": DEFAULT_POLICY, "runs": runs}
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
