"""The figures: well-formed SVG inside its box, with a description, without colors of their own."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import numpy as np
import pytest

from ingot.artifact import GateOutcome
from ingot.sizes import format_bytes
from ingot.validation.report import charts
from ingot.validation.report.charts import LayerBar, RatioRow
from ingot.validation.report.svg import BOTTOM, HEIGHT
from tests.each_case import each_case

RNG = np.random.default_rng(0)
LOSS = RNG.normal(3, 0.5, 30).tolist()
CHANGE = RNG.normal(0.01, 0.02, 30).tolist()
SIDES = {"baseline": [1.0, 2.0, 3.0], "candidate": [0.5, 1.5, 2.5]}
LAYERS = [LayerBar("embed", 9.25, {"embed_tokens": 9.25}), LayerBar("0", 5.1, {"q_proj": 4.5, "o_proj": 5.7})]
FIGURES: dict[str, Callable[[], str]] = {
    "loss_difference": lambda: charts.loss_difference(LOSS, CHANGE, 0.01),
    "difference_histogram": lambda: charts.difference_histogram(CHANGE, 0.01, (0.002, 0.018)),
    "kl_histogram": lambda: charts.kl_histogram(RNG.lognormal(-5, 2, 500).tolist(), {"mean 0.05": 0.05}),
    "text_profile": lambda: charts.text_profile([0, 512, 1024], [0.1, 0.2, 0.0], 0.1),
    "cdf": lambda: charts.cdf(SIDES, "time"),
    "round_dots": lambda: charts.round_dots([RatioRow("TTFT", [0.9, 1.1], 1.0, 0.8, 1.2, "")]),
    "paired_bars": lambda: charts.paired_bars({"weights": (4e6, 1e6), "other": (0, 516)}, format_bytes),
    "layer_bars": lambda: charts.layer_bars(LAYERS, "bits per element", "bits"),
}


@each_case("name", FIGURES)
def test_every_figure_is_well_formed_described_and_inside_its_box(name: str) -> None:
    root = ET.fromstring(FIGURES[name]())
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    assert root.attrib["role"] == "img"
    assert root[0].tag == "title"
    assert len(root[0].text or "") > 20
    for shape in root.iter():
        for attribute in ("x", "x1", "x2", "cx"):
            assert -1 <= float(shape.attrib.get(attribute, 0)) <= width + 1
        for attribute in ("y", "y1", "y2", "cy"):
            assert -1 <= float(shape.attrib.get(attribute, 0)) <= height + 1


@each_case("name", FIGURES)
def test_colors_come_only_from_the_style_sheet(name: str) -> None:
    assert not re.search(r"#[0-9a-f]{3}|rgb|style=|fill=|stroke=", FIGURES[name]())


def test_equal_models_have_figures_too() -> None:
    zeros = [0.0] * 20
    ET.fromstring(charts.kl_histogram(zeros, {"mean 0": 0.0}))
    ET.fromstring(charts.loss_difference([2.0] * 20, zeros, 0.0))
    ET.fromstring(charts.difference_histogram(zeros, 0.0, (0.0, 0.0)))
    ET.fromstring(charts.text_profile([0], [0.0], 0.0))
    ET.fromstring(charts.cdf({"baseline": [1.0], "candidate": [1.0]}, "time"))
    ET.fromstring(charts.paired_bars({"weights": (0, 0)}, format_bytes))
    ET.fromstring(charts.layer_bars([LayerBar("0", 0.0, {"q": 0.0})], "KL", "nats"))


def test_every_window_has_its_dot_above_zero_if_it_is_worse() -> None:
    root = ET.fromstring(charts.loss_difference([1.0, 2.0, 3.0], [0.02, -0.01, 0.03], 0.0133))
    [zero] = [shape for shape in root if shape.get("class") == "equal"]
    above = [float(shape.attrib["cy"]) < float(zero.attrib["y1"]) for shape in root if shape.tag == "circle"]
    assert above == [True, False, True]
    assert "2 of 3 windows are worse" in (root[0].text or "")


def test_a_very_long_text_gives_a_figure_of_limited_size() -> None:
    many = RNG.normal(0.01, 0.02, 40_000).tolist()
    assert charts.loss_difference(many, many, 0.01).count("<circle") <= 1501
    assert charts.text_profile(range(40_000), np.abs(many).tolist(), 0.01).count("<circle") <= 1501


def test_a_long_sample_is_thinned_in_its_curve() -> None:
    values = RNG.normal(10, 1, 5000).tolist()
    assert len(charts.cdf({"baseline": values, "candidate": values}, "time")) < 20_000


@pytest.mark.parametrize("mark", ["better", "worse"])
def test_a_ratio_that_changed_is_marked_in_words(mark: str) -> None:
    root = ET.fromstring(charts.round_dots([RatioRow("TTFT", [1.2], 1.2, 1.1, 1.3, mark)]))
    [band] = [shape for shape in root if shape.get("class") == f"interval {mark}"]
    assert band.tag == "rect"
    assert mark in [shape.text for shape in root.iter("text")]


def test_every_layer_has_a_bar_and_every_weight_of_several_a_dot() -> None:
    root = ET.fromstring(charts.layer_bars(LAYERS, "bits per element", "bits"))
    assert [shape[0].text for shape in root.iter("rect")] == ["embed: 9.25 bits", "0: 5.1 bits"]
    assert [shape[0].text for shape in root.iter("circle")] == ["q_proj: 4.5 bits", "o_proj: 5.7 bits"]


def test_many_layers_have_round_labels_and_ranges_instead_of_dots() -> None:
    layers = [LayerBar("embed", 9.25, {"embed_tokens": 9.25})]
    layers += [LayerBar(str(index), 5.0, {"q_proj": 4.5, "o_proj": 5.5}) for index in range(96)]
    root = ET.fromstring(charts.layer_bars(layers, "bits per element", "bits"))
    labels = [shape.text for shape in root.iter("text") if shape.get("y") == str(HEIGHT - BOTTOM + 17)]
    assert labels == ["embed", *(str(number) for number in range(10, 96, 10))]
    assert len(list(root.iter("rect"))) == 97
    assert not list(root.iter("circle"))
    assert [shape.get("class") for shape in root.iter("line")].count("range") == 96


def test_the_baseline_is_hatched_and_dashed_so_that_color_is_not_needed() -> None:
    bars = ET.fromstring(charts.paired_bars({"weights": (4e6, 1e6)}, format_bytes))
    assert [shape.get("class") for shape in bars].count("hatch") == 2  # the bar and its key
    curves = [shape.get("class") for shape in ET.fromstring(FIGURES["cdf"]()).iter("path")]
    assert curves == ["curve baseline-stroke", "curve candidate-stroke"]


@pytest.mark.parametrize(("bound", "on_the_right"), [("max", True), ("min", False)])
def test_the_forbidden_side_of_a_gate_is_shaded(bound: str, on_the_right: bool) -> None:
    outcome = GateOutcome(name="kl_mean", verdict="UNDECIDED", measured=1.0, low=0.9, high=1.1, limit=1.05, bound=bound)  # type: ignore[arg-type]
    root = ET.fromstring(charts.gate_bar(outcome))
    [shade] = [shape for shape in root if shape.get("class") == "forbidden"]
    [limit] = [shape for shape in root if shape.get("class") == "limit"]
    assert (float(shade.attrib["x"]) == float(limit.attrib["x1"])) is on_the_right
    assert any(shape.get("class") == "undecided-soft" for shape in root)
    assert any(shape.get("class") == "hatch" for shape in root)
