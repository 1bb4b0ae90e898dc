"""The report: valid, accessible, self-contained HTML, and Markdown for a CI page."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from ingot.validation.gates import GateSpec
from ingot.validation.latency.sequential import Stop
from ingot.validation.machine import MachineLoad
from ingot.validation.prediction import PredictedFigure, Prediction
from ingot.validation.report.page import Page, PageSection, PageTable, render_page
from ingot.validation.report.quantization_text import COLUMNS
from ingot.validation.report.report import (
    contents,
    escape_markdown,
    fenced,
    render_html,
    render_markdown,
)
from ingot.validation.result import Evidence, Sample
from tests.validation.sample_evidence import sample_evidence
from tests.validation.verify.results import differing, sample_result

_VOID = {"meta", "br", "hr", "img", "link", "input", "wbr"}
_HEADINGS = ("h1", "h2", "h3", "h4")


@dataclass
class _Element:
    tag: str
    attributes: Mapping[str, str]
    parents: tuple["_Element", ...]
    words: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


class _Page(HTMLParser):
    """All elements in order, each with its parents and its text. Fails on a tag that closes what is not open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[_Element] = []
        self.elements: list[_Element] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = _Element(tag, {name: value or "" for name, value in attrs}, tuple(self.open))
        self.elements.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(_Element(tag, {name: value or "" for name, value in attrs}, tuple(self.open)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.words.append(data)

    def find(self, *tags: str, inside: _Element | None = None) -> list[_Element]:
        found = [element for element in self.elements if element.tag in tags]
        return [element for element in found if inside is None or any(parent is inside for parent in element.parents)]

    def section(self, anchor: str) -> str:
        """The text of the section with this heading."""
        [section] = [found for found in self.find("section") if found.attributes["aria-labelledby"] == anchor]
        return section.text


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return sample_evidence()


@pytest.fixture(scope="module")
def text(evidence: Evidence) -> str:
    return render_html(evidence)


@pytest.fixture(scope="module")
def page(text: str) -> _Page:
    return _Page(text)


def test_the_contents_link_to_every_section(evidence: Evidence, page: _Page) -> None:
    links = {link.attributes["href"]: link.text for link in page.find("a")}
    headings = {f"#{heading.attributes['id']}": heading.text for heading in page.find("h2")}
    assert links == headings == {f"#{anchor}": words for anchor, words in contents(evidence).items()}
    assert {"#samples", "#quantization", "#passes"} <= set(links)


def test_ids_are_unique_and_labels_exist(page: _Page) -> None:
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    labels = [
        element.attributes["aria-labelledby"] for element in page.elements if "aria-labelledby" in element.attributes
    ]
    assert len(ids) == len(set(ids))
    assert labels
    assert set(labels) <= set(ids)


def test_headings_are_in_order(page: _Page) -> None:
    levels = [_HEADINGS.index(heading.tag) for heading in page.find(*_HEADINGS)]
    assert levels[0] == 0
    assert levels.count(0) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_table_has_a_caption_and_its_headers_have_scopes(page: _Page) -> None:
    tables = page.find("table")
    assert len(tables) == 6
    for table in tables:
        [caption] = page.find("caption", inside=table)
        assert "Scroll sideways" in caption.text
        assert table.parents[-1].attributes["aria-labelledby"] == caption.attributes["id"]
        assert table.parents[-1].attributes["tabindex"] == "0"
        assert {header.attributes["scope"] for header in page.find("th", inside=table)} >= {"col", "row"}


def test_the_verdict_is_in_the_second_column(page: _Page) -> None:
    [gates, metrics, *_] = page.find("table")
    assert [header.text for header in page.find("th", inside=gates)][:2] == ["Gate", "Verdict"]
    assert [header.text for header in page.find("th", inside=metrics)][:2] == ["Metric", "Significantly"]


def test_narrow_screens_have_a_label_in_every_cell(page: _Page) -> None:
    [gates, metrics, *_] = page.find("table")
    labels = {cell.attributes.get("data-label") for table in (gates, metrics) for cell in page.find("td", inside=table)}
    assert labels >= {"Measured", "95 % interval", "Limit", "Baseline", "Candidate", "Ratio (paired)", "Change"}


def test_every_figure_has_a_title_for_readers_who_do_not_see_it(page: _Page) -> None:
    figures, drawings = page.find("figure"), page.find("svg")
    accuracy, latency_levels, resources, layers, gates = 4, 2, 2, 2, 7
    assert len(figures) == accuracy + 4 * latency_levels + resources + layers
    assert len(drawings) == len(figures) + gates
    for drawing in drawings:
        assert drawing.attributes["role"] == "img"
        assert page.find("title", inside=drawing)[0].text


def test_the_page_loads_nothing_and_runs_nothing(text: str) -> None:
    assert not re.search(r"""(?:https?:)?//[a-z]|url\(|@import|<script|<link|<img|src=|href="[^#]| on[a-z]+=""", text)


def test_the_page_contains_no_object_address(text: str) -> None:
    assert " at 0x" not in text
    assert "object at" not in text


def test_the_same_evidence_gives_the_same_bytes(text: str) -> None:
    assert render_html(sample_evidence()) == text
    assert render_markdown(sample_evidence()) == render_markdown(sample_evidence())


def test_names_and_samples_are_escaped(text: str) -> None:
    assert "stdlib-llama-6m &lt;int4&gt;" in text
    assert "<int4>" not in text
    assert "return &lt;x&gt;" in text


def test_gates_are_shown_with_value_interval_limit_and_verdict(evidence: Evidence, page: _Page) -> None:
    rows = [row.text for row in page.find("tr", inside=page.find("table")[0])][1:]
    assert len(rows) == len(evidence.gates) == 7
    assert rows[4].startswith("Time per output token, 1 in flight✓ PASS0.684")
    assert "≤ 0.4" in rows[3]
    assert "✗ FAIL advisory" in rows[6]
    assert "of 6 gates failed" in page.find("main")[0].text


def test_origin_date_load_and_samples_are_shown(page: _Page) -> None:
    [facts] = [found for found in page.find("dl") if found.attributes["class"] == "facts"]
    for shown in ("stdlib-llama-6m 0123456789abcdef", "int4-cpu", "2026-01-31 12:00:00 UTC", "1.6 of 4 processors"):
        assert shown in facts.text
    assert "0123456789abcdef" * 4 in page.section("environment")
    assert [found.text for found in page.find("pre")] == ["def f(", "self): pass", "x): return <x>"]
    assert "They differ from the first character on." in page.section("samples")


def test_a_busy_machine_is_flagged(evidence: Evidence) -> None:
    assert evidence.latency is not None
    idle = replace(evidence, latency=replace(evidence.latency, load=MachineLoad(0.1, 0.2, 4, 4)))
    assert "BUSY MACHINE" in _Page(render_html(evidence)).section("latency")
    assert "BUSY MACHINE" in render_markdown(evidence)
    assert "BUSY MACHINE" not in render_html(idle) + render_markdown(idle)


def test_looks_at_a_growing_sample_are_explained(evidence: Evidence) -> None:
    assert evidence.latency is not None
    looked = replace(evidence, latency=replace(evidence.latency, stop=Stop(samples=10, looks=2, error=0.0125)))
    assert "at look 2: these intervals have a confidence of 98.75 %" in _Page(render_html(looked)).section("latency")
    fixed = replace(evidence, latency=replace(evidence.latency, stop=Stop(samples=5)))
    assert "at look" not in render_html(fixed)


def test_evidence_of_sizes_only_says_what_was_not_measured() -> None:
    page = _Page(render_html(sample_evidence((), with_runs=False)))
    assert "! NOT MEASURED" in page.find("header")[0].text
    assert page.section("gates").startswith("Gates NO GATES.")
    assert page.section("accuracy").startswith("Accuracy NOT MEASURED.")
    assert page.section("latency").startswith("Latency NOT MEASURED.")
    assert [heading.text for heading in page.find("h3")] == ["▼ Worse", "▲ Better", "Size on disk"]


def test_measured_evidence_without_gates_says_so() -> None:
    shown = sample_evidence(())
    assert "! NO GATES" in _Page(render_html(shown)).find("header")[0].text
    assert render_markdown(shown).startswith("## stdlib-llama-6m \\<int4\\>: NO GATES\n\nNO GATES: nothing had to hold")


def test_evidence_without_origin_date_or_load_has_a_page(evidence: Evidence) -> None:
    assert evidence.latency is not None
    latency = replace(evidence.latency, load=None)
    bare = replace(evidence, notes=replace(evidence.notes, origin=None), measured_at="", latency=latency)
    [facts] = [found for found in _Page(render_html(bare)).find("dl") if found.attributes["class"] == "facts"]
    assert facts.text.startswith("Model")
    assert "measured 20" not in render_markdown(bare)


def _luminance(color: str) -> float:
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colors_have_the_contrast_of_wcag_aa(text: str, scheme: int) -> None:
    palette = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6});", text.split(":root {")[1 + scheme]))
    for words in ("ink", "soft", "pass", "fail", "undecided"):
        for ground in ("page", "panel", "faint"):
            assert _contrast(palette[words], palette[ground]) >= 4.5, (words, ground)
    for side in ("baseline", "candidate"):
        assert _contrast(palette[side], palette["panel"]) >= 3, side


def test_the_summary_begins_with_the_verdict_and_folds_long_tables(evidence: Evidence) -> None:
    text = render_markdown(evidence)
    assert text.startswith("## stdlib-llama-6m \\<int4\\>: FAIL\n")
    open_part, *folded = re.split(r"<details><summary>(.*?)</summary>", text)
    assert [folded[0], folded[2], folded[4]] == ["All metrics", "2 quantized weights", "Generated text"]
    tables = [open_part, folded[1], folded[3]]
    lengths = [len(evidence.gates), len(evidence.measured), len(evidence.notes.quantization.weights)]
    for table, length, columns in zip(tables, lengths, (5, 7, len(COLUMNS)), strict=True):
        rows = [line for line in table.splitlines() if line.startswith("|")]
        assert [row.count("|") for row in rows] == [columns + 1] * (length + 2)
    assert text.count("<details>") == text.count("</details>") == 3
    assert "**FAIL** (advisory)" in open_part
    assert "| ratio (paired) | change |" in folded[1]


def test_the_summary_names_what_got_worse_and_better() -> None:
    worse = sample_evidence((GateSpec("perplexity_ratio", "max", 1.05),))
    text = render_markdown(worse)
    assert "\n\nSignificantly **better**: " in text
    assert "Size on disk (-78.4 %)" in text.split("<details>")[0]


def test_markdown_in_names_and_samples_stays_text(evidence: Evidence) -> None:
    assert escape_markdown("a|b\n<c> `d` *e*") == r"a\|b \<c\> \`d\` \*e\*"
    assert fenced("a ``` b") == "````text\na ``` b\n````"
    hostile = replace(evidence, notes=replace(evidence.notes, samples=(Sample("```\n</details>", "<b>", "|"),)))
    assert "````text\n```\n</details>\n````" in render_markdown(hostile)


def test_the_page_says_what_the_passes_were_calibrated_on_and_its_share_of_the_evaluation(text: str) -> None:
    assert "16,384 of 90,000 tokens of train.txt" in text
    assert "it has 2.10% of the evaluated tokens" in text


def test_the_report_shows_the_matrix_and_what_differs(evidence: Evidence) -> None:
    result = sample_result(differing("prefix-hit", "preemption"))
    verified = replace(evidence, verification=result)
    section = _Page(render_html(verified)).section("verification")
    assert "2 preemption" in section
    assert "prefix-hit+preemption: DIFFERS" in section
    assert "repeat: ingot verify demo --quick --only prefix-hit+preemption --seed 0" in section
    markdown = render_markdown(verified)
    assert "Verification of the runtime: FAIL" in markdown
    assert "request one-less: tokens differ at output token 3" in markdown
    assert "Verification of the runtime" not in render_markdown(evidence)


def test_the_report_shows_what_was_predicted_and_how_it_fared(evidence: Evidence) -> None:
    figures = {
        "weight_bytes": PredictedFigure(value=4_812_304, low=4_812_304, high=4_812_304, source="the recipe"),
        "tpot_seconds@4": PredictedFigure(value=0.002, low=0.0018, high=0.0022, source="steps"),
        "ttft_seconds@4": PredictedFigure(value=0.1, low=0.09, high=0.11, source="steps"),
    }
    made = Prediction(made_at="2026-01-31T12:00:00Z", figures=figures, left_out=("peak_memory_bytes: not modelled",))
    prediction = made.scored({"weight_bytes": 4_812_304, "tpot_seconds@4": 0.004})
    predicted = replace(evidence, notes=replace(evidence.notes, prediction=prediction))
    section = _Page(render_html(predicted)).section("prediction")
    for words in ("Time per output token, 4 in flight", "exact", "-50.0%", "OUTSIDE", "inside", "not modelled"):
        assert words in section
    assert "Time per output token, 4 in flight" in render_markdown(predicted)
    assert 'id="prediction"' not in render_html(evidence)


def test_the_page_of_a_comparison_has_every_table_and_escapes_names() -> None:
    rows, links = [["int4 <x>", "0.01"], ["int8", "-"]], ["a/report.html", ""]
    table = PageTable("figures", ["candidate", "KL"], rows, links=links)
    section = PageSection("checkpoint-0", "my <model>", sentences=["Winner: int8."], tables=[table])
    text = render_page(Page("Ingot comparison", "2 candidates", [section]))
    page = _Page(text)
    words = page.section("checkpoint-0")
    for part in ("my <model>", "Winner: int8.", "int4 <x>", "0.01", "int8"):
        assert part in words
    assert 'href="a/report.html"' in text
    assert 'href=""' not in text
    assert "<script" not in text
    assert "://" not in text.replace("http://www.w3.org", "")
