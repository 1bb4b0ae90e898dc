import pytest

from ingot.sizes import ceil_div, format_bytes, round_up
from tests.each_case import each_case


@pytest.mark.parametrize(("count", "groups"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_a_partial_group_counts(count: int, groups: int) -> None:
    assert ceil_div(count, 64) == groups
    assert round_up(count, 64) == groups * 64


@each_case(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (4_701_234, "4.7 MB"),
        (11_540_992, "11.5 MB"),
        (2_200_000_000, "2.2 GB"),
        (2.5e12, "2.5 TB"),
    ],
)
def test_bytes_are_shown_in_powers_of_a_thousand(count: float, text: str) -> None:
    assert format_bytes(count) == text
