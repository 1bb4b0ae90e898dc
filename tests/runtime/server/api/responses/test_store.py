"""Kept responses: within bounds, and no holder of a key takes the share of another."""

import random

import pytest

from ingot.runtime.server.api.responses.store import ResponseStore
from ingot.runtime.server.http.api_error import ApiError


def put(store: ResponseStore, group: str, name: str, size: int = 0) -> None:
    store.put(group, {"id": name, "status": "completed", "text": "x" * size}, [])


def test_a_holder_alone_uses_all_of_the_store() -> None:
    store = ResponseStore(8, 1 << 20)
    for number in range(20):
        put(store, "a", str(number))
    assert [store.has("a", str(number)) for number in range(20)] == [False] * 12 + [True] * 8


def test_the_holder_with_most_responses_gives_up_its_oldest_first() -> None:
    store = ResponseStore(8, 1 << 20)
    for number in range(3):
        put(store, "quiet", str(number))
    for number in range(1000):
        put(store, "busy", str(number))
    assert all(store.has("quiet", str(number)) for number in range(3))
    assert [number for number in range(1000) if store.has("busy", str(number))] == [*range(995, 1000)]


def test_a_holder_that_comes_later_gets_its_share() -> None:
    store = ResponseStore(8, 1 << 20)
    for number in range(100):
        put(store, "first", str(number))
    for number in range(100):
        put(store, "second", str(number))
    for group in ("first", "second"):
        assert [number for number in range(100) if store.has(group, str(number))] == [96, 97, 98, 99]


def test_bytes_are_shared_as_numbers_are() -> None:
    store = ResponseStore(1000, 10_000)
    put(store, "quiet", "small", 1000)
    for number in range(20):
        put(store, "busy", str(number), 3000)
    assert store.has("quiet", "small")
    assert store.num_bytes <= 10_000
    put(store, "third", "large", 9000)
    assert not store.has("third", "large"), "it would use more than any other holder does"
    assert store.has("busy", "19"), "and nothing was given up for it"


def test_the_store_keeps_its_bounds_and_shares_whatever_comes() -> None:
    rng = random.Random(0)
    for _ in range(20):
        most, most_bytes = rng.randrange(1, 12), rng.randrange(500, 5000)
        store = ResponseStore(most, most_bytes)
        for _put in range(200):
            group, name = rng.choice("aaaaaaabc"), str(rng.randrange(40))
            before = {each: _names(store, each) for each in "abc"}
            put(store, group, name, rng.randrange(400))
            after = {each: _names(store, each) for each in "abc"}
            assert sum(map(len, after.values())) == store.num_responses <= most
            assert store.num_bytes <= most_bytes
            for each in "abc":
                if each != group and after[each] < before[each]:
                    fair = most / sum(bool(names) or of == group for of, names in before.items())
                    assert len(before[each]) >= fair or store.num_bytes > most_bytes / 4, "it had more than its share"
            if rng.random() < 0.1 and store.has(group, name):
                store.delete(group, name)
                with pytest.raises(ApiError):
                    store.get(group, name)
        for each in "abc":
            for name in _names(store, each):
                store.delete(each, name)
        assert (store.num_responses, store.num_bytes) == (0, 0)


def _names(store: ResponseStore, group: str) -> set[str]:
    return {str(name) for name in range(40) if store.has(group, str(name))}
