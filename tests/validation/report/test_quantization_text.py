"""The table of quantized weights as text: cells, columns and summary."""

import pytest

from ingot.validation.quantization import Quantization
from ingot.validation.report.quantization_text import COLUMNS, shown_columns, summary_sentences, weight_cells
from ingot.validation.result import Evidence
from tests.validation.sample_evidence import sample_evidence, weight


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return sample_evidence()


def test_a_dash_marks_what_was_not_measured() -> None:
    cells = weight_cells(weight("a"))
    assert list(cells) == list(COLUMNS)
    assert cells["KL alone"] == cells["Output error"] == "-"
    assert cells["Scales"] == "- / - / -"


def test_columns_without_values_are_omitted(evidence: Evidence) -> None:
    assert list(shown_columns(Quantization((weight("a"), weight("b", kl=0.1))))) == [
        "Weight",
        "Format",
        "Bytes",
        "Bits",
        "KL alone",
    ]
    assert shown_columns(evidence.notes.quantization) == COLUMNS


def test_the_summary_says_why_kl_is_missing(evidence: Evidence) -> None:
    sentences = summary_sentences(Quantization((weight("a"),), kl_absent="the recipe has no evaluation text"))
    assert sentences[-1] == "KL of single weights was not measured: the recipe has no evaluation text"
    assert "Measured on 2,048 tokens of heldout.txt in float32, in 3.2 s" in summary_sentences(
        evidence.notes.quantization
    )
