"""The simulation of eviction policies: its optimum is the optimum, and no policy beats it."""

import json
from itertools import combinations
from pathlib import Path

import pytest
from benchmarks.kv.policies import (
    ALL_POLICIES,
    belady_hits,
    policy_hits,
    prefix_in,
    read_trace,
    tier_hits,
    unlimited_hits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

Chains = list[list[bytes]]


def chain_to(node: int) -> list[bytes]:
    """The path to a node of a binary tree: requests whose prefixes are shared."""
    return [*(chain_to(node // 2) if node > 1 else []), bytes([node])]


traces = st.lists(st.integers(1, 11).map(chain_to), max_size=6)


def best_by_trying_all(chains: Chains, capacity: int, kept: frozenset[bytes] = frozenset()) -> int:
    """Most hits of any cache that keeps at most `capacity` blocks of those that it has."""
    if not chains:
        return 0
    first, rest = chains[0], chains[1:]
    candidates = sorted(kept | set(first))
    choices = combinations(candidates, min(capacity, len(candidates)))
    return prefix_in(first, set(kept)) + max(
        best_by_trying_all(rest, capacity, frozenset(choice)) for choice in choices
    )


@settings(max_examples=60)
@given(traces.map(lambda chains: chains[:5]), st.integers(1, 4))
def test_belady_is_the_best_of_all_ways_to_evict(chains: Chains, capacity: int) -> None:
    assert belady_hits(chains, capacity) == best_by_trying_all(chains, capacity)


@given(
    st.lists(st.integers(1, 40).map(chain_to), max_size=40), st.integers(1, 12), st.sampled_from(sorted(ALL_POLICIES))
)
def test_no_policy_beats_it_and_it_does_not_beat_an_unlimited_cache(chains: Chains, capacity: int, name: str) -> None:
    hits = policy_hits(chains, capacity, ALL_POLICIES[name])
    assert hits <= belady_hits(chains, capacity) <= unlimited_hits(chains)


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
def test_a_cache_as_large_as_the_working_set_misses_nothing(name: str) -> None:
    chains = [chain_to(node % 23 + 1) for node in range(0, 700, 7)]
    assert policy_hits(chains, 23, ALL_POLICIES[name]) == unlimited_hits(chains)


def test_hits_are_counted_where_they_are_found_first() -> None:
    chains = [chain_to(8), chain_to(9), chain_to(8)]
    hits = tier_hits(chains, {"device": 4, "host": 5, "disk": 6}, "lru")
    assert hits == {"device": 6, "host": 1}
    assert tier_hits(chains, {"device": 4, "host": 0, "disk": 6}, "lru") == {"device": 6, "disk": 1}


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([0, 1], [0, 2])))
    first, second = read_trace(path)
    assert first[0] == second[0] != second[1]
    assert len(read_trace(path, 1)) == 1
