"""The disk store's index: the limit, the order of eviction, and when the folder is listed again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.kv.disk.folder import StoredFile
from ingot.runtime.kv.disk.index import StoreIndex


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def files(*numbers: int, num_bytes: int = 10) -> list[StoredFile]:
    """Files whose number is their time of last use."""
    return [StoredFile(key(number), num_bytes, number) for number in numbers]


def test_room_is_reserved_up_to_the_limit() -> None:
    index = StoreIndex(100)
    index.replace(files(1, 2, 3))
    assert index.used_bytes == 30
    assert index.reserve(70)
    assert not index.reserve(1)
    index.release(70, written=False)
    assert index.reserve(1)


def test_a_block_counts_once() -> None:
    index = StoreIndex(100)
    for _ in range(2):
        index.add(files(1)[0])
    assert (len(index), index.used_bytes) == (1, 10)
    for _ in range(2):
        index.drop(key(1))
    assert (len(index), index.used_bytes) == (0, 0)


def test_the_oldest_are_evicted_first() -> None:
    index = StoreIndex(10_000)
    index.replace(files(*range(64, 0, -1)))
    assert [index.pop_oldest() for _ in range(5)] == [*files(1, 2, 3, 4), None]


def test_a_folder_over_the_limit_lists_enough_to_get_below_it() -> None:
    index = StoreIndex(100)
    index.replace(files(*range(1, 41)))
    popped = 0
    while index.used_bytes > 100:
        oldest = index.pop_oldest()
        assert oldest
        index.drop(oldest.key)
        popped += 1
    assert popped == 30


def test_a_used_block_is_older_than_those_before_it() -> None:
    index = StoreIndex(1000)
    index.replace(files(1, 2, 3))
    stamps = dict(index.touch(key(1), b""))
    stamps |= index.touch(key(2), key(1))
    stamps |= index.touch(key(3), key(2))
    assert stamps[key(3)] < stamps[key(2)] < stamps[key(1)]
    assert stamps[key(3)] > 3
    again = dict(index.touch(key(2), key(1)))
    assert stamps[key(3)] < again[key(2)] < stamps[key(1)]


def test_a_chain_used_block_by_block_takes_two_new_times_for_each() -> None:
    index = StoreIndex(10_000)
    index.replace(files(*range(1, 101)))
    touched = [index.touch(key(number), key(number - 1)) for number in range(1, 101)]
    assert [len(stamps) for stamps in touched] == [1] + [2] * 99
    stamps = {each: stamp for stamps in touched for each, stamp in stamps}
    assert all(stamps[key(number)] > stamps[key(number + 1)] for number in range(1, 100))


def test_blocks_before_a_used_one_follow_it_once_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    index = StoreIndex(1000)
    index.replace(files(1, 2, 3))
    monkeypatch.setattr("ingot.runtime.kv.disk.index._LEAD_NS", 0)
    for number in (1, 2, 3):
        index.touch(key(number), key(number - 1))
    stamps = dict(index.touch(key(3), key(2)))
    assert stamps[key(3)] < stamps[key(2)] < stamps[key(1)]


def test_a_listing_keeps_the_chains_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.runtime.kv.disk.index._LEAD_NS", 0)
    index = StoreIndex(1000)
    index.replace(files(1, 2))
    index.touch(key(2), key(1))
    index.replace(files(1, 2))
    assert [touched for touched, _ in index.touch(key(2), key(1))] == [key(2), key(1)]


def test_a_touch_of_an_unknown_block_changes_nothing() -> None:
    assert StoreIndex(100).touch(key(1), key(2)) == []


def test_the_fuller_the_folder_the_sooner_it_is_listed() -> None:
    def written_until_due(used: int) -> int:
        index = StoreIndex(3200)
        index.replace(files(1, num_bytes=used) if used else [])
        written = 0
        while not index.is_listing_due():
            index.reserve(1)
            index.release(1, written=True)
            written += 1
        return written - 1

    assert [written_until_due(used) for used in (0, 1600, 3200)] == [800, 400, 100]


@given(st.lists(st.tuples(st.sampled_from(["add", "drop", "touch", "reserve", "replace"]), st.integers(0, 9))))
def test_counts_hold_for_any_sequence_of_calls(calls: list[tuple[str, int]]) -> None:
    index, held, reserved = StoreIndex(55), dict[bytes, int](), 0
    for call, number in calls:
        if call == "add":
            index.add(files(number)[0])
            held[key(number)] = 10
        elif call == "drop":
            index.drop(key(number))
            held.pop(key(number), None)
        elif call == "touch":
            touched = index.touch(key(number), key(number - 1) if number else b"")
            stamps = [stamp for _, stamp in touched]
            assert stamps == sorted(set(stamps))
            assert bool(touched) == (key(number) in held)
        elif call == "reserve":
            fits = sum(held.values()) + reserved + number <= 55
            assert index.reserve(number) == fits
            reserved += number * fits
        else:
            index.replace(files(*range(number)))
            held = {key(other): 10 for other in range(number)}
        assert index.used_bytes == sum(held.values())
        assert all((key(other) in index) == (key(other) in held) for other in range(10))
