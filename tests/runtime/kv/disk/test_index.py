"""The disk store's index: which slot has which block, free slots, and the order of eviction."""

import gc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.kv.disk.folder import StoreFolder
from ingot.runtime.kv.disk.index import DiskPlace, ReplaceableSlot, StoreIndex
from ingot.runtime.kv.disk.segment import FREE, DiskSegment, Geometry, SegmentEntry


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> list[DiskSegment]:
    """Two segments of 40 slots, and one of other slots."""
    folder = StoreFolder(tmp_path_factory.mktemp("index"))
    added = [folder.add_segment(Geometry(size, 40)) for size in (4096, 4096, 8192)]
    folder.close()
    return added


def filled(segment: DiskSegment, *numbers: int) -> StoreIndex:
    """An index with blocks whose number is their time of last use, in slots 0, 1, ..."""
    index = StoreIndex()
    index.refresh(segment, table_of(*numbers))
    return index


def table_of(*numbers: int, num_slots: int = 40) -> list[SegmentEntry]:
    return [*(SegmentEntry(key(number), number) for number in numbers), *[FREE] * (num_slots - len(numbers))]


def test_a_table_says_where_blocks_are(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], 5, 6)
    assert (len(index), index.place(key(6)), index.place(key(7))) == (2, DiskPlace(segments[0], 1), None)
    assert index.in_slots_of(4096, 1) == [DiskPlace(segments[0], 0)]
    assert index.in_slots_of(8192, 1) == []
    index.refresh(segments[0], table_of(7, 6))
    assert [key(number) in index for number in (5, 6, 7)] == [False, True, True]
    assert index.segments == [segments[0]]


def test_blocks_and_free_slots_add_no_objects_that_the_collector_visits(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path)
    segment, index = folder.add_segment(Geometry(4096, 1000)), StoreIndex()
    table = table_of(*range(1, 501), num_slots=1000)
    gc.collect()
    before = len(gc.get_objects())
    index.refresh(segment, table)
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    assert index.place(key(500)) == DiskPlace(segment, 499)
    assert index.take_free(4096) == DiskPlace(segment, 500)
    folder.close()


def test_a_dropped_segment_gives_no_free_slot(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], *range(1, 39))
    index.drop(segments[0])
    assert (index.take_free(4096), index.place(key(1)), index.segments) == (None, None, [])
    index.refresh(segments[0], table_of(*range(1, 40)))
    assert [index.take_free(4096) for _ in range(2)] == [DiskPlace(segments[0], 39), None]


def test_free_slots_are_given_once(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], *range(1, 39))
    taken = [index.take_free(4096) for _ in range(3)]
    assert taken == [DiskPlace(segments[0], 38), DiskPlace(segments[0], 39), None]
    assert index.take_free(8192) is None
    index.release(DiskPlace(segments[0], 39))
    assert index.take_free(4096) == DiskPlace(segments[0], 39)


def test_a_slot_that_another_process_freed_is_free(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], *range(1, 41))
    assert index.take_free(4096) is None
    index.put(DiskPlace(segments[0], 3), FREE)
    assert key(4) not in index
    assert index.take_free(4096) == DiskPlace(segments[0], 3)


def test_a_free_slot_that_another_process_filled_is_not_given(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], *range(1, 40))
    index.put(DiskPlace(segments[0], 39), SegmentEntry(key(99), 1))
    assert index.take_free(4096) is None


def test_a_forgotten_slot_is_neither_found_nor_free(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], *range(1, 41))
    index.forget(DiskPlace(segments[0], 0))
    assert key(1) not in index
    assert index.take_free(4096) is None
    index.refresh(segments[0], table_of(*range(1, 41)))
    assert key(1) in index, "the next reading of the table finds it again"


def test_a_block_in_two_slots_is_found_until_both_are_gone(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], 1, 2)
    index.refresh(segments[1], table_of(2, 1))
    assert len(index) == 2
    assert set(index.places(key(1))) == {DiskPlace(segments[0], 0), DiskPlace(segments[1], 1)}
    index.forget(DiskPlace(segments[0], 0))
    assert index.places(key(1)) == [DiskPlace(segments[1], 1)]
    index.drop(segments[1])
    assert index.places(key(1)) == []
    assert index.place(key(2)) == DiskPlace(segments[0], 1)


def test_a_dropped_segment_takes_its_blocks_and_free_slots_along(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], 1, 2)
    index.drop(segments[0])
    assert (len(index), index.segments, index.take_free(4096)) == (0, [], None)
    index.put(DiskPlace(segments[0], 3), SegmentEntry(key(3), 3))
    assert len(index) == 0


def test_the_oldest_are_evicted_first(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], *range(80, 40, -1))
    index.refresh(segments[1], table_of(*range(40, 0, -1)))
    assert index.pop_oldest(4096) is None
    index.sort(4096)
    expected = [
        ReplaceableSlot(DiskPlace(segments[1], 40 - number), SegmentEntry(key(number), number))
        for number in range(1, 6)
    ]
    assert [index.pop_oldest(4096) for _ in range(6)] == [*expected, None], "a sixteenth of 80"
    assert index.oldest_use(4096) == 1
    assert index.oldest_use(8192) is None


def test_what_was_used_since_it_was_sorted_is_not_evicted(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], *range(1, 33))
    index.sort(4096)
    index.touch(key(1), b"")
    oldest = index.pop_oldest(4096)
    assert oldest
    assert oldest.entry == SegmentEntry(key(2), 2)


def test_the_segment_of_other_slots_that_was_used_least_recently(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], *range(11, 51))
    index.refresh(segments[1], table_of(*range(61, 101)))
    assert index.stalest(except_for=4096) is None
    index.refresh(segments[2], table_of(*range(101, 111)))
    assert index.stalest(except_for=8192) == (segments[0], 30)
    assert index.stalest(except_for=4096) == (segments[2], 0), "most of its slots are free"


def stamps_of(touched: list[ReplaceableSlot]) -> dict[bytes | None, int]:
    return {candidate.entry.key: candidate.entry.used_ns for candidate in touched}


def test_a_used_block_is_older_than_those_before_it(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], 1, 2, 3)
    stamps = stamps_of(index.touch(key(1), b""))
    stamps |= stamps_of(index.touch(key(2), key(1)))
    stamps |= stamps_of(index.touch(key(3), key(2)))
    assert 3 < stamps[key(3)] < stamps[key(2)] < stamps[key(1)]
    again = stamps_of(index.touch(key(2), key(1)))
    assert stamps[key(3)] < again[key(2)] < stamps[key(1)]


def test_a_chain_used_block_by_block_takes_two_new_times_for_each(segments: list[DiskSegment]) -> None:
    index = filled(segments[0], *range(1, 41))
    touched = [index.touch(key(number), key(number - 1)) for number in range(1, 41)]
    assert [len(each) for each in touched] == [1] + [2] * 39
    stamps: dict[bytes | None, int] = {}
    for each in touched:
        stamps |= stamps_of(each)
    assert all(stamps[key(number)] > stamps[key(number + 1)] for number in range(1, 40))


def test_blocks_before_a_used_one_follow_it_once_they_are_old(
    segments: list[DiskSegment], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(segments[0], 1, 2, 3)
    monkeypatch.setattr("ingot.runtime.kv.disk.index._LEAD_NS", 0)
    for number in (1, 2, 3):
        index.touch(key(number), key(number - 1))
    index.refresh(segments[0], table_of(1, 2, 3))
    stamps = stamps_of(index.touch(key(3), key(2)))
    assert stamps[key(3)] < stamps[key(2)] < stamps[key(1)]


def test_a_touch_of_an_unknown_block_changes_nothing() -> None:
    assert StoreIndex().touch(key(1), key(2)) == []


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "free", "forget", "touch", "take", "evict", "drop"]), st.integers(0, 7)))
)
def test_blocks_and_slots_agree_after_any_sequence_of_calls(
    segments: list[DiskSegment], calls: list[tuple[str, int]]
) -> None:
    index, held, taken = StoreIndex(), dict[DiskPlace, bytes](), set[DiskPlace]()
    for segment in segments[:2]:
        index.refresh(segment, table_of())
    for call, number in calls:
        place = DiskPlace(segments[number % 2], number // 2)
        if call == "put" and place.segment in index.segments:
            held[place] = key(number // 3)
            taken.discard(place)
            index.put(place, SegmentEntry(key(number // 3), number))
        elif call == "free":
            index.put(place, FREE)
            held.pop(place, None)
        elif call == "forget":
            index.forget(place)
            if held.pop(place, None):
                taken.add(place)
        elif call == "touch":
            stamps = [
                candidate.entry.used_ns for candidate in index.touch(key(number), key(number - 1) if number else b"")
            ]
            assert stamps == sorted(set(stamps))
            assert bool(stamps) == (key(number) in held.values())
        elif call == "take":
            free = index.take_free(4096)
            assert free not in held
            assert free is None or free not in taken
            if free:
                taken.add(free)
        elif call == "evict":
            index.sort(4096)
            oldest = index.pop_oldest(4096)
            assert (oldest is None) == (not held)
            assert oldest is None or held[oldest.place] == oldest.entry.key
        elif number == 0:
            index.drop(segments[0])
            held = {place: each for place, each in held.items() if place.segment is not segments[0]}
            taken = {place for place in taken if place.segment is not segments[0]}
        assert len(index) == len(set(held.values()))
        for each in range(3):
            assert set(index.places(key(each))) == {place for place, found in held.items() if found == key(each)}
