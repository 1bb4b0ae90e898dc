"""Renders the report: one self-contained HTML file, and a Markdown summary for a CI page.

This file gives the templates what they show: numbers as text from tables.py, figures from figures.py. Text and layout
are in report.*.jinja.
"""

import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from ingot.artifact.metrics import METRICS
from ingot.validation.quantization import Quantization
from ingot.validation.report import formatting as fmt
from ingot.validation.report import tables
from ingot.validation.report.figures import accuracy_figures, latency_figures, quantization_figures, resource_figures
from ingot.validation.report.quantization_text import shown_columns, summary_sentences, weight_cells
from ingot.validation.result import Evidence
from ingot.validation.verify.result import VerifyResult, cell_text, matrix_rows, verify_sentences

PAIRED_NOTE = (
    "The ratio is paired: the geometric mean of the ratios of single rounds, probes or windows. Baseline and candidate "
    "of a latency are medians over all requests. So the ratio can differ from candidate / baseline: a round that was "
    "slow for both moves the medians, but not the ratio. The interval is the ratio's or, without a ratio, the "
    "candidate's."
)
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|&~])")


def render_html(evidence: Evidence) -> str:
    """The report as one HTML page. The same evidence gives the same bytes."""
    shown = {
        "accuracy_figures": accuracy_figures(evidence),
        "latency_figures": latency_figures(evidence),
        "resource_figures": resource_figures(evidence),
        "quantization_figures": quantization_figures(evidence.notes.quantization),
        "contents": contents(evidence),
        "levels": tables.level_groups(evidence),
        "definitions": [METRICS[name] for name in dict.fromkeys(m.metric for m in evidence.measured.values())],
    }
    return page_template("report.html.jinja").render(_context(evidence), **shown)


def render_markdown(evidence: Evidence) -> str:
    """The verdict, the gates and the significant changes; metrics, weights and samples folded."""
    return page_template("report.md.jinja").render(_context(evidence))


def contents(evidence: Evidence) -> dict[str, str]:
    """The sections of the page: anchor -> heading."""
    notes = evidence.notes
    sections = {
        "gates": ("Gates", True),
        "changes": ("Significant changes", True),
        "metrics": ("Baseline and candidate", True),
        "samples": ("Generated text", notes.samples),
        "accuracy": ("Accuracy", True),
        "latency": ("Latency", True),
        "resources": ("Size and memory", True),
        "prediction": ("Predicted and measured", notes.prediction),
        "verification": ("Verification of the runtime", evidence.verification),
        "quantization": ("Quantized weights", notes.quantization.weights),
        "passes": ("Passes", notes.passes),
        "method": ("Definitions and method", True),
        "environment": ("Origin and environment", True),
    }
    return {anchor: heading for anchor, (heading, is_shown) in sections.items() if is_shown}


def _context(evidence: Evidence) -> dict[str, Any]:
    return {
        "evidence": evidence,
        "verdict": tables.verdict_words(evidence),
        "verdict_sentences": tables.verdict_sentences(evidence),
        "gates": tables.gate_rows(evidence),
        "metrics": tables.metric_groups(evidence),
        "worse": tables.changes(evidence, "worse"),
        "better": tables.changes(evidence, "better"),
        "samples": tables.sample_rows(evidence.notes.samples),
        "predictions": tables.prediction_rows(evidence.notes.prediction),
        **_quantization(evidence.notes.quantization),
        **_verification(evidence.verification),
        "paired_note": PAIRED_NOTE,
        "fmt": fmt,
    }


def _quantization(found: Quantization) -> dict[str, Any]:
    columns = shown_columns(found)
    return {
        "columns": columns,
        "quantized": [weight_cells(weight, columns) for weight in found.worst_first],
        "quantization_summary": summary_sentences(found),
    }


def _verification(found: VerifyResult | None) -> dict[str, Any]:
    return {
        "verify_rows": matrix_rows(found) if found else [],
        "verify_sentences": verify_sentences(found) if found else [],
        "verify_failures": [(cell.name, cell.verdict, cell_text(cell)) for cell in found.failures] if found else [],
    }


def escape_markdown(words: str) -> str:
    """Escape what Markdown and a table's cell would read as markup; lines become spaces."""
    return _MARKDOWN.sub(r"\\\1", " ".join(words.split()))


def fenced(words: str) -> str:
    """A code block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", words)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{words}\n{fence}"


def breakable(name: str) -> Markup:
    """A dotted name that a browser may break after dots and underscores."""
    return Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(name))))


def _source(name: str) -> str:
    return (files("ingot.validation.report") / name).read_text("utf-8")


@cache
def page_template(name: str) -> Template:
    """A template of this folder; values in those for HTML are escaped."""
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": escape_markdown, "fenced": fenced, "breakable": breakable}
    return environment.get_template(name)
