"""Lists of cores: numbers or ranges in text, in the order given."""

import pytest

from ingot.cores import cores_in_words, parse_cores
from tests.each_case import each_case


@each_case(
    ("value", "cores", "words"),
    [
        ("0-3,8", (0, 1, 2, 3, 8), "0-3,8"),
        ("5", (5,), "5"),
        (7, (7,), "7"),
        ([2, 0], (2, 0), "2,0"),
        ((0, 1, 8191), (0, 1, 8191), "0-1,8191"),
        (" 4,2-3 ", (4, 2, 3), "4,2-3"),
    ],
)
def test_cores_are_numbers_or_ranges_and_keep_their_order(value: object, cores: tuple[int, ...], words: str) -> None:
    assert parse_cores(value) == cores
    assert cores_in_words(cores) == words
    assert parse_cores(words) == cores


@each_case(
    ("value", "message"),
    [
        *((value, "names no cores; write numbers from 0 to 8191") for value in ("", "a", "0-", "1,,2", "3-2", "0x1")),
        *((value, "names no cores; write numbers from 0 to 8191") for value in ([], [8192], -1, True, [1.0], "99999")),
        ([0, 1, 0], r"\[0, 1, 0\] names core 0 twice; each thread has a core of its own"),
        ("0-256", "'0-256' names 257 cores; there are up to 256 threads"),
    ],
)
def test_anything_else_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_cores(value)
