"""A segment's name, table and lock; the layout is the documented one."""

import os
import struct
import time
from pathlib import Path

import pytest

from ingot.runtime.kv.disk.segment import FREE, DiskSegment, Geometry, SegmentEntry, geometry_for, new_name, parse_name
from tests.each_case import each_case

GEOMETRY = Geometry(8192, 70)
KEYS = [bytes([number]) * 32 for number in range(1, 6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / new_name(GEOMETRY)
    path.touch()
    os.truncate(path, GEOMETRY.file_bytes)
    return path


def opened(path: Path) -> DiskSegment:
    return DiskSegment(path.name, os.open(path, os.O_RDWR))


def test_the_name_has_the_geometry() -> None:
    name = new_name(GEOMETRY)
    assert name.endswith("-8192-70.kvs")
    parsed = parse_name(name)
    assert parsed
    assert (parsed[0].hex(), parsed[1]) == (name[:16], GEOMETRY)


@each_case(
    "name",
    [
        "",
        "0123456789abcdef-8192-70",
        "0123456789ABCDEF-8192-70.kvs",
        "0123456789abcdef-8192-0.kvs",
        "0123456789abcdef-08192-7.kvs",
        "0123456789abcdef-8191-70.kvs",
        "0123456789abcdef-8192-9999999999.kvs",
        "../0123456789abcdef-8192-70.kvs",
        "0123456789abcdef-8192-70.kvs\n",
    ],
)
def test_other_names_are_not_segments(name: str) -> None:
    assert parse_name(name) is None


def test_a_segment_is_as_large_as_it_may_be_and_has_a_slot_at_least() -> None:
    for most in (4096, 12_287, 12_288, 100_000, 1 << 20, 64 << 20):
        geometry = geometry_for(8192, most)
        assert geometry.num_slots >= 1
        assert geometry.num_slots == 1 or geometry.file_bytes <= most
        assert Geometry(8192, geometry.num_slots + 1).file_bytes > most
    assert [geometry_for(8192, most).num_slots for most in (0, 12_288, 20_479, 20_480)] == [1, 1, 1, 2]


def test_the_table_is_that_of_the_documentation(path: Path) -> None:
    segment = opened(path)
    now = time.time_ns()
    segment.publish(2, SegmentEntry(KEYS[0], now))
    data = path.read_bytes()
    assert len(data) == 8192 + 70 * 8192, "70 entries take two pages"
    assert data[128:192] == KEYS[0] + struct.pack("<q", now) + bytes(24)
    assert data[:128] == bytes(128)
    assert data[192:] == bytes(len(data) - 192)
    assert segment.offset(3) == 8192 + 3 * 8192


def test_entries_are_published_stamped_and_cleared(path: Path) -> None:
    segment, other = opened(path), opened(path)
    segment.publish(0, SegmentEntry(KEYS[0], 5))
    segment.publish(69, SegmentEntry(KEYS[1], 6))
    segment.stamp(69, 7)
    assert other.table() == [SegmentEntry(KEYS[0], 5), *[FREE] * 68, SegmentEntry(KEYS[1], 7)]
    assert [other.entry(slot) for slot in (0, 1, 69)] == [SegmentEntry(KEYS[0], 5), FREE, SegmentEntry(KEYS[1], 7)]
    segment.clear(0)
    assert other.entry(0) == FREE


def test_an_erased_slot_has_neither_entry_nor_header(path: Path) -> None:
    segment = opened(path)
    for slot in (1, 2):
        segment.publish(slot, SegmentEntry(KEYS[slot], 5))
        os.pwrite(segment.file, b"h" * 200, segment.offset(slot))
    segment.erase(1)
    assert segment.table()[:3] == [FREE, FREE, SegmentEntry(KEYS[2], 5)]
    data = path.read_bytes()
    assert data[segment.offset(1) :][:200] == bytes(136) + b"h" * 64
    assert data[segment.offset(2) :][:200] == b"h" * 200


@pytest.mark.parametrize(
    "stamp",
    [-5, time.time_ns() + 2 * 3600 * 10**9, 2**63 - 1],
    ids=["negative", "two hours from now", "largest"],  # the same in every process of the tests
)
def test_an_impossible_time_of_use_counts_as_never(path: Path, stamp: int) -> None:
    segment = opened(path)
    segment.publish(0, SegmentEntry(KEYS[0], stamp))
    assert segment.entry(0) == SegmentEntry(KEYS[0], 0)


@pytest.mark.parametrize(("size", "num_slots"), [(0, 0), (100, 0), (16_384, 1), (16_383, 0), (8192 + 10 * 8192, 10)])
def test_a_segment_that_was_cut_has_the_slots_that_are_left(path: Path, size: int, num_slots: int) -> None:
    os.truncate(path, size)
    segment = opened(path)
    assert segment.num_slots == num_slots
    assert segment.table() == [FREE] * num_slots
    assert segment.entry(69) == FREE


def test_one_writer_at_a_time_has_the_lock(path: Path) -> None:
    segment, other = opened(path), opened(path)
    assert segment.lock()
    assert not other.lock()
    segment.unlock()
    assert other.lock()
    del other
    assert segment.lock(), "the lock ends with its holder"


def test_the_descriptor_is_closed_with_the_last_reference(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    segment = opened(path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del segment
    assert len(os.listdir("/proc/self/fd")) == before
