"""Tiers of the simulation: what each holds, and where a hit is counted."""

from benchmarks.kv.policies import belady_hits
from benchmarks.kv.tier_simulation import exclusive_hits, inclusive_hits
from hypothesis import given
from hypothesis import strategies as st


def chain_to(node: int) -> list[bytes]:
    """The path to a node of a binary tree."""
    return [*(chain_to(node // 2) if node > 1 else []), bytes([node])]


def test_hits_are_counted_where_they_are_found_first() -> None:
    chains = [chain_to(8), chain_to(9), chain_to(8)]
    hits = inclusive_hits(chains, {"device": 4, "host": 5, "disk": 6}, "lru")
    assert hits == {"device": 6, "host": 1}
    assert inclusive_hits(chains, {"device": 4, "host": 0, "disk": 6}, "lru") == {"device": 6, "disk": 1}


def test_exclusive_tiers_hold_as_much_as_all_together() -> None:
    chains = [[b"a"], [b"b"], [b"a"], [b"b"]]
    assert inclusive_hits(chains, {"device": 1, "host": 1, "disk": 0}, "lru") == {}
    assert exclusive_hits(chains, {"device": 1, "host": 1, "disk": 0}, "lru") == {"host": 2}
    assert exclusive_hits([*chains, [b"c"], [b"a"]], {"device": 1, "host": 1, "disk": 1}, "lru") == {
        "host": 2,
        "disk": 1,
    }


@given(
    st.lists(st.integers(1, 40).map(chain_to), max_size=40),
    st.fixed_dictionaries({"device": st.integers(1, 6), "host": st.integers(0, 6), "disk": st.integers(0, 6)}),
)
def test_no_tiers_beat_one_of_their_size_that_knows_the_future(
    chains: list[list[bytes]], sizes: dict[str, int]
) -> None:
    best = belady_hits(chains, sum(sizes.values()))
    assert exclusive_hits(chains, sizes, "lru-uses").total() <= best
    assert inclusive_hits(chains, sizes, "lru-uses").total() <= best
