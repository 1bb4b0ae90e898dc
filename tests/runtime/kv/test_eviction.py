"""Eviction policies: each keeps what it says, and none lets a chain lose its middle before its end."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import UsageError
from ingot.runtime.kv.eviction import (
    DEFAULT_POLICY,
    POLICIES,
    AdaptiveReplacement,
    EvictionPolicy,
    LeastRecentlyUsed,
    RecencyAndUses,
    make_policy,
    require_policy,
)

MakePolicy = Callable[[int], EvictionPolicy]


def key(name: str) -> bytes:
    return name.encode()


def insert(policy: EvictionPolicy, *names: str) -> None:
    """Insert keys that are first in their chains."""
    for name in names:
        policy.insert(key(name))


def insert_chain(policy: EvictionPolicy, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        policy.insert(key(name), key(names[index - 1]) if index else b"")


def touch(policy: EvictionPolicy, names: str) -> None:
    for name in names:
        policy.touch(key(name))


def evicted(policy: EvictionPolicy, count: int) -> str:
    found = [policy.evict(lambda key: True) or b"." for _ in range(count)]
    return b"".join(found).decode()


def test_lru_evicts_what_was_used_the_longest_ago() -> None:
    policy = LeastRecentlyUsed(4)
    insert(policy, *"abcd")
    touch(policy, "ac")
    assert evicted(policy, 5) == "bdac."


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_chain_is_evicted_from_its_end(make: MakePolicy) -> None:
    policy = make(4)
    insert_chain(policy, "abcd")
    assert evicted(policy, 5) == "dcba."


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_block_goes_after_all_that_follow_it(make: MakePolicy) -> None:
    policy = make(8)
    insert_chain(policy, "ab")
    policy.insert(key("c"), key("b"))
    policy.insert(key("d"), key("b"))
    touch(policy, "cd")
    assert sorted(evicted(policy, 2)) == ["c", "d"]
    assert evicted(policy, 2) == "ba"


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_what_may_not_leave_stays_and_so_does_what_it_needs(make: MakePolicy) -> None:
    policy = make(4)
    insert_chain(policy, "ab")
    insert(policy, "c")
    assert policy.evict(lambda found: found != key("b")) == key("c")
    assert policy.evict(lambda found: found != key("b")) is None
    assert evicted(policy, 2) == "ba"


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_removed_key_is_not_evicted(make: MakePolicy) -> None:
    policy = make(4)
    insert_chain(policy, "abc")
    policy.remove(key("b"))
    assert sorted(evicted(policy, 3)) == [".", "a", "c"]


def test_a_key_that_was_used_again_outlives_newer_ones() -> None:
    policy = RecencyAndUses(4)
    insert(policy, "a")
    touch(policy, "a")
    insert(policy, "b")
    assert evicted(policy, 1) == "b"


def test_it_does_not_outlive_them_for_good() -> None:
    policy = RecencyAndUses(4)
    insert(policy, "a")
    touch(policy, "a" * 100)
    insert(policy, *"bcdefghijk")
    assert "a" in evicted(policy, 11)
    insert(policy, "a")
    for number in range(40):
        insert(policy, f"<{number}>")
    assert evicted(policy, 1) != "a"


def test_a_use_counts_as_much_as_the_mean_time_between_uses() -> None:
    policy = RecencyAndUses(4)
    insert(policy, *"abcdefghijklmnop")
    touch(policy, "a")  # after 15 other keys: it looks 15 keys newer, where a share of the capacity would be 1.6
    insert(policy, *"qrstuvwxyzABCD")
    assert evicted(policy, 29) == "bcdefghijklmnopqrstuvwxyzABCD"


def test_a_mean_time_between_uses_does_not_protect_for_good() -> None:
    policy = RecencyAndUses(4)
    insert(policy, *"abcdefghijklmnop")
    touch(policy, "a")
    insert(policy, *"qrstuvwxyzABCDEFGH")
    assert evicted(policy, 31).endswith("Ea")


def test_uses_are_remembered_after_an_eviction() -> None:
    policy = RecencyAndUses(4)
    insert(policy, "a")
    touch(policy, "a")
    assert evicted(policy, 1) == "a"
    insert(policy, "a", "b")
    assert evicted(policy, 1) == "b"


def test_arc_keeps_what_was_used_twice_from_a_scan() -> None:
    policy = AdaptiveReplacement(4)
    insert(policy, *"ab")
    touch(policy, "ab")
    insert(policy, *"cdef")
    assert evicted(policy, 4) == "cdef"


def test_arc_gives_more_room_to_recency_when_new_keys_are_evicted_too_soon() -> None:
    policy = AdaptiveReplacement(4)
    insert(policy, *"ab")
    touch(policy, "ab")
    insert(policy, *"cd")
    assert evicted(policy, 2) == "cd"
    insert(policy, *"dc")  # each shifts the share by at least one key
    insert(policy, *"e")
    assert evicted(policy, 1) == "a"


def test_unknown_policies_are_refused_with_the_known_ones() -> None:
    assert isinstance(make_policy(DEFAULT_POLICY, 3), RecencyAndUses)
    with pytest.raises(UsageError, match=r"unknown kv_policy 'lfu'"):
        require_policy("lfu")


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.tuples(st.sampled_from("iiitter"), st.integers(0, 30), st.integers(0, 3)), max_size=150),
)
def test_any_sequence_of_calls_keeps_every_key_once_and_evicts_leaves(
    name: str, calls: list[tuple[str, int, int]]
) -> None:
    policy = make_policy(name, 8)
    parents: dict[bytes, bytes] = {}
    for call, number, pinned in calls:
        chosen, parent = bytes([number]), bytes([number // 2]) if number > 1 else b""
        if call == "i" and chosen not in parents:
            policy.insert(chosen, parent)
            parents[chosen] = parent
        elif call == "t" and chosen in parents:
            policy.touch(chosen)
        elif call == "r" and chosen in parents:
            policy.remove(chosen)
            del parents[chosen]
        elif call == "e":
            leaves = {each for each in parents if each not in parents.values() and each[0] % 4 != pinned}
            found = policy.evict(lambda each: each[0] % 4 != pinned)  # noqa: B023
            assert found in leaves if leaves else found is None
            parents.pop(found or b"", None)
    remaining = {policy.evict(lambda key: True) for _ in range(len(parents))}
    assert remaining == set(parents)
    assert policy.evict(lambda key: True) is None


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_memory_does_not_grow_with_time(make: MakePolicy) -> None:
    policy = make(8)
    for number in range(5000):
        if number >= 8:
            policy.evict(lambda key: True)
        policy.insert(number.to_bytes(4, "big"))
        policy.touch(number.to_bytes(4, "big"))
    sizes = [
        len(held)
        for owner in (policy, *(part for part in vars(policy).values() if hasattr(part, "__dict__")))
        for held in vars(owner).values()
        if isinstance(held, dict | list)
    ]
    assert sizes
    assert max(sizes) < 200


def test_a_name_that_is_not_text_is_refused_as_an_unknown_one() -> None:
    with pytest.raises(UsageError, match=r"unknown kv_policy \[1\]; known: arc, lru"):
        require_policy([1])
