"""The figures: well-formed SVG inside its box, scales, ticks and escaping."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import numpy as np
import pytest

from ingot.artifact import GateOutcome
from ingot.validation.report import charts
from ingot.validation.report import charts as svg
from ingot.validation.report.charts import Scale, linear_ticks, padded, tick_label

RNG = np.random.default_rng(0)
LOSS = RNG.normal(3, 0.5, 30).tolist()
SIDES = {"baseline": [1.0, 2.0, 3.0], "candidate": [0.5, 1.5, 2.5]}
FIGURES: dict[str, Callable[[], str]] = {
    "nll_scatter": lambda: charts.nll_scatter(LOSS, LOSS),
    "difference_histogram": lambda: charts.difference_histogram([x - 3 for x in LOSS], 0.01),
    "kl_histogram": lambda: charts.kl_histogram(RNG.lognormal(-5, 2, 500).tolist(), {"mean 0.05": 0.05}),
    "text_profile": lambda: charts.text_profile([0, 512, 1024], [0.1, 0.2, 0.0], 0.1),
    "cdf": lambda: charts.cdf(SIDES, "time"),
    "round_dots": lambda: charts.round_dots({"TTFT": [0.9, 1.1]}, {"TTFT": (1.0, 0.8, 1.2)}),
    "stacked_bars": lambda: charts.stacked_bars({"baseline": {"weights": 4.0}, "candidate": {"weights": 1.0}}, "MB"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_well_formed_described_and_inside_its_box(name: str) -> None:
    svg_text = FIGURES[name]()
    root = ET.fromstring(svg_text)
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    assert root.attrib["aria-label"]
    for shape in root.iter():
        for attribute in ("x", "x1", "x2", "cx"):
            assert -1 <= float(shape.attrib.get(attribute, 0)) <= width + 1
        for attribute in ("y", "y1", "y2", "cy"):
            assert -1 <= float(shape.attrib.get(attribute, 0)) <= height + 1


@pytest.mark.parametrize("name", FIGURES)
def test_colors_come_only_from_the_style_sheet(name: str) -> None:
    assert not re.search(r"#[0-9a-f]{3}|rgb|style=|fill=|stroke=", FIGURES[name]())


def test_equal_models_have_figures_too() -> None:
    zeros = [0.0] * 20
    ET.fromstring(charts.kl_histogram(zeros, {"mean 0": 0.0}))
    ET.fromstring(charts.difference_histogram(zeros, 0.0))
    ET.fromstring(charts.text_profile([0], [0.0], 0.0))
    ET.fromstring(charts.cdf({"baseline": [1.0], "candidate": [1.0]}, "time"))


def test_every_window_has_its_dot() -> None:
    assert charts.nll_scatter(LOSS, LOSS).count("<circle") == len(LOSS)


def test_a_long_sample_is_thinned_in_its_curve() -> None:
    values = RNG.normal(10, 1, 5000).tolist()
    assert len(charts.cdf({"baseline": values, "candidate": values}, "time")) < 20_000


@pytest.mark.parametrize(("bound", "on_the_right"), [("max", True), ("min", False)])
def test_the_forbidden_side_of_a_gate_is_shaded(bound: str, on_the_right: bool) -> None:
    outcome = GateOutcome(name="kl_mean", verdict="UNDECIDED", measured=1.0, low=0.9, high=1.1, limit=1.05, bound=bound)  # type: ignore[arg-type]
    root = ET.fromstring(charts.gate_bar(outcome))
    [shade] = [shape for shape in root if shape.get("class") == "forbidden"]
    [limit] = [shape for shape in root if shape.get("class") == "limit"]
    assert (float(shade.attrib["x"]) == float(limit.attrib["x1"])) is on_the_right
    assert any(shape.get("class") == "undecided-soft" for shape in root)


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
    assert 'aria-label="a &quot;b&quot;"' in svg.figure([], 'a "b"')
