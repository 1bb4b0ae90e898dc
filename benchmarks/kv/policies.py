"""Which blocks of a trace each eviction policy keeps: hit rates next to an unlimited cache and to Belady's optimum.

    python -m benchmarks.kv.policies --trace ../shared/data/traces/conversation_trace.jsonl

A request is a chain of blocks (512 tokens in the trace); a hit is a block of the longest prefix that is stored when it
arrives. Afterwards all its blocks are stored, and the policy evicts until the capacity holds. Requests come one after
another in the trace's order. The working set is the number of different blocks.

"Belady": a block that is not needed again is not kept; else the one that is needed last is evicted, and of those that
are needed by the same request the last in its chain. Every request that needs a block needs all blocks before it, so
the rule never evicts a block before those that follow it: it meets the prefix constraint, and being optimal without the
constraint it is optimal with it. It may drop blocks as soon as a request has ended, so no policy can be better.

"Known dead": LRU that evicts first the blocks that are never needed again, which only the future shows.

"Tiers": the pool evicts idle blocks by LRU, host memory by `kv_policy`, and the disk by LRU of its own reads, each to
the tier below. A block is counted where it is found first. Hits are compared with Belady's at the pool's size and at
the sizes of all tiers together; "exclusive" is of tiers that share no block, "inclusive" of ones that share all.
"""

import heapq
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.device import device_facts
from benchmarks.kv.other_policies import SmallMainFifo
from benchmarks.kv.tier_simulation import Chain, Store, engine_hits, exclusive_hits, inclusive_hits, prefix_in
from ingot.runtime.kv.eviction import DEFAULT_POLICY, POLICIES, EvictionPolicy, LeastRecentlyUsed

SHARES = (1, 5, 10, 20, 50)  # percent of the working set
ALL_POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {
    **POLICIES,
    "s3-fifo": SmallMainFifo,
}


@dataclass(frozen=True)
class Tiers:
    """Sizes of the tiers in percent of the working set; 0 for none."""

    device: int
    host: int
    disk: int


TIERS = tuple(
    Tiers(*sizes)
    for sizes in ((10, 0, 0), (10, 10, 0), (10, 20, 0), (10, 10, 20), (10, 20, 50), (10, 20, 100), (2, 3, 5))
)


def read_trace(path: Path) -> list[list[bytes]]:
    """The chains of a trace's requests."""
    lines = path.read_text("utf-8").splitlines()
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


def known_dead_hits(chains: Sequence[Chain], capacity: int) -> int:
    """Hits of LRU that evicts first the blocks that are never needed again."""
    policy = _KnownDead(capacity)
    store = Store(capacity, policy)
    hits = 0
    for chain, following in zip(chains, _next_needs(chains), strict=True):
        found = prefix_in(chain, store.keys)
        hits += found
        policy.dead.difference_update(chain)
        policy.dead.update(key for key, need in zip(chain, following, strict=True) if need is None)
        store.touch(chain[:found])
        store.insert(chain)
    return hits


class _KnownDead(LeastRecentlyUsed):
    """LRU that evicts the blocks named in `dead` first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.dead: set[bytes] = set()

    def touch(self, key: bytes) -> None:
        """Make the key the newest, or the first to go."""
        self._clock += 1
        self._queue.put(key, -1 if key in self.dead else self._clock)


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
            "known_dead_of_belady": round(known_dead_hits(chains, capacity) / best, 3),
            "hits": rates,
            "of_belady": of_best,
        }
        rows.append(row)
        click.echo(json.dumps(row))
    tiers = [_compare_tiers(chains, working_set, sizes) for sizes in TIERS]
    facts = {"requests": len(chains), "blocks": total, "working_set": working_set}
    return {**facts, "unlimited": round(unlimited_hits(chains) / total, 4), "one_tier": rows, "tiers": tiers}


def _compare_tiers(chains: Sequence[Chain], working_set: int, sizes: Tiers) -> dict[str, object]:
    blocks = {name: working_set * share // 100 for name, share in vars(sizes).items()}
    found = engine_hits(chains, blocks, DEFAULT_POLICY)
    everything, total = sum(found.values()), sum(map(len, chains))
    at_pool, at_total = belady_hits(chains, blocks["device"]), belady_hits(chains, sum(blocks.values()))
    exclusive = sum(exclusive_hits(chains, blocks, DEFAULT_POLICY).values())
    inclusive = sum(inclusive_hits(chains, blocks, DEFAULT_POLICY).values())
    row = {
        "percent": vars(sizes),
        "hits": {name: round(found[name] / total, 4) for name in blocks},
        "all": round(everything / total, 4),
        "of_unlimited": round(everything / unlimited_hits(chains), 3),
        "of_belady_at_pool": round(everything / at_pool, 3),
        "of_belady_at_total": round(everything / at_total, 3),
        "inclusive_of_belady_at_pool": round(inclusive / at_pool, 3),
        "exclusive_of_belady_at_pool": round(exclusive / at_pool, 3),
        "exclusive_of_belady_at_total": round(exclusive / at_total, 3),
    }
    click.echo(json.dumps(row))
    return row


def _part(text: str) -> slice:
    """Read START:END; BadParameter unless both are numbers and END is the larger."""
    start, _, end = text.partition(":")
    if not (start.isdecimal() and end.isdecimal() and int(start) < int(end)):
        raise click.BadParameter(f"{text!r} must be START:END, two numbers with START < END, such as 0:2000")
    return slice(int(start), int(end))


@click.command()
@click.option("--trace", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--requests", multiple=True, type=_part, help="START:END, only these; several times for several runs.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(trace: Path, requests: tuple[slice, ...], output: Path | None) -> None:
    """Simulate all policies on a trace."""
    chains = read_trace(trace)
    runs = [{"first": part.start or 0, **compare(chains[part])} for part in requests or (slice(None),)]
    result = {"device": device_facts(), "trace": trace.name, "default_policy": DEFAULT_POLICY, "runs": runs}
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
