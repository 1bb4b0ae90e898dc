"""The measuring loop that every adapter runs in."""

import numpy as np
from benchmarks.adapters.base import anonymous_regions, random_prompts, timed


def test_actions_are_repeated_and_counted() -> None:
    calls: list[int] = []
    assert timed(lambda: calls.append(1), most=3).steps == 3
    assert len(calls) == 3


def test_no_repetition_begins_after_the_time_but_one_is_always_made() -> None:
    assert timed(lambda: None, most=5, max_seconds=0.0).steps == 1


def test_processor_time_is_that_of_the_action() -> None:
    timing = timed(lambda: sum(range(300_000)))
    assert timing.cpu_seconds is not None
    assert timing.cpu_seconds > 0
    assert timing.seconds > 0


def test_memory_without_a_file_is_found_and_neither_stacks_nor_files_are() -> None:
    maps = """\
00400000-00500000 r-xp 00000000 08:01 10    /usr/bin/python
00500000-00600000 rw-p 00100000 08:01 10    /usr/bin/python
01000000-01800000 rw-p 00000000 00:00 0     [heap]
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
7f0040000000-7f0050000000 ---p 00000000 00:00 0
7f0050000000-7f0060000000 rw-s 00000000 00:01 11    /dev/shm/a name (deleted)
7ffc00000000-7ffc00200000 rw-p 00000000 00:00 0     [stack]
"""
    assert anonymous_regions(maps) == [(0x1000000, 0x1800000), (0x7F0000000000, 0x7F0040000000)]


def test_prompts_depend_on_the_seed_alone_and_hold_no_end_of_text() -> None:
    one, two, other = (random_prompts(4, 64, vocab_size=100, seed=seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)
    assert one.min() >= 1
    assert one.max() < 100
