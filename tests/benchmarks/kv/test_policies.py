"""The simulation of eviction policies: its optimum is the optimum, and no policy beats it."""

import json
from itertools import combinations
from pathlib import Path

import pytest
from benchmarks.kv.policies import (
    ALL_POLICIES,
    belady_hits,
    known_dead_hits,
    main,
    policy_hits,
    read_trace,
    unlimited_hits,
)
from benchmarks.kv.tier_simulation import prefix_in
from click.testing import CliRunner
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


@given(st.lists(st.integers(1, 40).map(chain_to), max_size=40), st.integers(1, 12))
def test_to_know_what_is_dead_does_not_beat_belady(chains: Chains, capacity: int) -> None:
    assert known_dead_hits(chains, capacity) <= belady_hits(chains, capacity)


def test_what_is_never_needed_again_leaves_before_what_is() -> None:
    chains = [[b"a"], [b"b"], [b"c"], [b"a"]]
    assert policy_hits(chains, 2, ALL_POLICIES["lru"]) == 0
    assert known_dead_hits(chains, 2) == 1


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([0, 1], [0, 2])))
    first, second = read_trace(path)
    assert first[0] == second[0] != second[1]


def test_each_part_of_a_trace_is_a_run(tmp_path: Path) -> None:
    trace, output = tmp_path / "trace.jsonl", tmp_path / "result.json"
    trace.write_text(6 * (json.dumps({"hash_ids": [*range(100)]}) + "\n"))
    arguments = ["--trace", str(trace), "--requests", "0:2", "--requests", "2:6", "--output", str(output)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    first, second = json.loads(output.read_text())["runs"]
    assert (first["first"], first["requests"], first["unlimited"]) == (0, 2, 0.5)
    assert (second["first"], second["requests"], second["unlimited"]) == (2, 4, 0.75)


@pytest.mark.parametrize("part", ["2000", "5:5", "a:b", ":3"])
def test_a_part_that_is_not_a_range_is_refused(tmp_path: Path, part: str) -> None:
    (tmp_path / "trace").touch()
    result = CliRunner().invoke(main, ["--trace", str(tmp_path / "trace"), "--requests", part])
    assert result.exit_code == 2
    assert f"'{part}' must be START:END" in result.output
