"""The report: valid self-contained HTML, and Markdown tables."""

import re
from html.parser import HTMLParser

import pytest

from ingot.validation.gates import GateSpec
from ingot.validation.report.quantization_text import COLUMNS
from ingot.validation.report.report import render_html, render_markdown
from ingot.validation.result import Evidence
from tests.validation.sample_evidence import sample_evidence

_VOID = {"meta", "br", "hr", "img", "link", "input"}


class _Balance(HTMLParser):
    """Fails on a tag that closes what is not open; collects ids, tags and headings."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def _parsed(page: str) -> _Balance:
    parser = _Balance()
    parser.feed(page)
    parser.close()
    return parser


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return sample_evidence()


@pytest.fixture(scope="module")
def page(evidence: Evidence) -> str:
    return render_html(evidence)


def test_the_page_is_valid_html_with_every_section(page: str) -> None:
    parsed = _parsed(page)
    assert parsed.open == []
    assert parsed.ids == [
        *("gates", "metrics", "accuracy", "latency", "resources"),
        *("quantization", "passes", "method", "environment"),
    ]


def test_the_page_has_every_figure(page: str) -> None:
    parsed = _parsed(page)
    accuracy, latency_levels, resources, gates = 4, 2, 2, 7
    assert parsed.seen.count("figure") == accuracy + 4 * latency_levels + resources
    assert parsed.seen.count("svg") == parsed.seen.count("figure") + gates


def test_the_page_loads_no_external_resource(page: str) -> None:
    assert not re.search(r"(?:https?:)?//[a-z]|url\(|@import|<script|<link|<img|src=|href=", page)


def test_the_page_contains_no_object_address(page: str) -> None:
    assert " at 0x" not in page
    assert "object at" not in page


def test_the_same_evidence_gives_the_same_bytes(page: str) -> None:
    assert render_html(sample_evidence()) == page


def test_names_are_escaped(page: str) -> None:
    assert "stdlib-llama-6m &lt;int4&gt;" in page
    assert "<int4>" not in page


def test_the_page_shows_gates_with_values_intervals_limits_and_verdicts(evidence: Evidence, page: str) -> None:
    assert evidence.verdict == "FAIL"
    for gate in evidence.gates:
        assert f'<span class="badge small {gate.verdict}">{gate.verdict}</span>' in page
    assert "≤ 0.4000" in page
    assert "of 7 gates failed" in page


def test_evidence_of_sizes_only_has_a_page_without_the_other_sections() -> None:
    small = sample_evidence((GateSpec("size_ratio", "max", 0.4),), with_runs=False)
    parsed = _parsed(render_html(small))
    assert parsed.ids == ["gates", "metrics", "resources", "method", "environment"]
    assert small.verdict == "PASS"


def test_evidence_without_gates_has_no_verdict() -> None:
    page = render_html(sample_evidence((), with_runs=False))
    assert "Measured without gates" in page
    assert 'class="badge' not in page


def test_the_summary_is_three_tables_of_markdown(evidence: Evidence) -> None:
    text = render_markdown(evidence)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    tables = [len(evidence.gates), len(evidence.measured), len(evidence.notes.quantization.weights)]
    assert len(rows) == sum(2 + table for table in tables)
    widths = [row.count("|") for row in rows]
    assert widths == [6] * (4 + tables[0] + tables[1]) + [1 + len(COLUMNS)] * (2 + tables[2])
    assert "**FAIL**" in text
    assert "exact" in text
