"""SVG elements: scales, ticks and escaping."""

import xml.etree.ElementTree as ET

import pytest

from ingot.validation.report import svg
from ingot.validation.report.svg import Scale, linear_ticks, padded, tick_label


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (0.9, 1.12, [0.9, 0.95, 1.0, 1.05, 1.1]),
        (-0.012, 0.031, [-0.01, 0.0, 0.01, 0.02, 0.03]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(expected)


def test_a_scale_maps_its_ends_to_its_pixels() -> None:
    linear, log = Scale(2, 4, 10, 110), Scale(0.001, 10, 0, 400, log=True)
    assert [linear(value) for value in (2, 3, 4)] == [10, 60, 110]
    assert [log(value) for value in (0.001, 0.1, 10)] == pytest.approx([0, 200, 400])
    assert log.ticks == pytest.approx([0.001, 0.01, 0.1, 1, 10])


def test_a_range_of_one_value_is_widened() -> None:
    low, high = padded([3.0, 3.0])
    assert low < 3 < high
    assert padded([0.0]) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0"), (0.25, "0.25"), (1e-5, "1e-5"), (12_000, "12k"), (0.30000000000000004, "0.3")]
)
def test_tick_labels_are_short(value: float, expected: str) -> None:
    assert tick_label(value) == expected


def test_words_are_escaped() -> None:
    assert "&lt;b&gt;" in svg.text(0, 0, "<b>")
    [title] = ET.fromstring(svg.figure([], "a < b"))
    assert (title.tag, title.text) == ("title", "a < b")


def test_a_wide_logarithmic_scale_omits_powers() -> None:
    assert len(Scale(1e-12, 1e6, 0, 400, log=True).ticks) <= 10
