"""Statistics of quantized weights: ranking, totals, advice, and a round trip through JSON."""

from dataclasses import replace

import pytest

from ingot.validation.evidence_json import quantization_text
from ingot.validation.quantization import Quantization, WeightFigures, summarize
from ingot.validation.report.quantization_text import COLUMNS, shown_columns, summary_sentences, weight_cells
from ingot.validation.result import Evidence
from tests.validation.sample_evidence import sample_evidence


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return sample_evidence()


def weight(name: str, **figures: float) -> WeightFigures:
    """A weight of 1,000 numbers in 4 bits."""
    return replace(WeightFigures(name, f"{name}.q", 4, 32, False, 1000, stored_bytes=625), **figures)  # type: ignore[arg-type]


def test_weights_are_ranked_by_kl_or_else_by_their_errors() -> None:
    measured = Quantization((weight("a", kl=0.1), weight("b", kl=0.4), weight("c", kl=0.2)))
    assert [each.name for each in measured.worst_first] == ["b", "c", "a"]
    estimated = Quantization((weight("a", relative_error=0.1), weight("b", output_error=0.05)))
    assert [each.name for each in estimated.worst_first] == ["b", "a"]


def test_the_summary_counts_bytes_and_the_share_of_the_worst() -> None:
    kls = (0.5, 0.2, 0.1, 0.1, 0.05, 0.05)
    found = summarize(Quantization(tuple(weight(f"w{at}", kl=kl) for at, kl in enumerate(kls))))
    assert (found.elements, found.stored_bytes, found.effective_bits) == (6000, 3750, 5.0)
    assert found.kl_sum == pytest.approx(1.0)
    assert found.worst_share == pytest.approx(0.95)
    assert found.advice[0] == "Give w0 8 bits: alone it causes 50 % of the summed KL; cost: 0 kB more (+13.3 %)"
    assert len(found.advice) == 3


def test_weights_of_8_bits_or_without_kl_get_no_advice() -> None:
    assert summarize(Quantization((replace(weight("a", kl=1.0), bits=8),))).advice == ()
    unknown = summarize(Quantization((weight("a"),)))
    assert (unknown.kl_sum, unknown.worst_share, unknown.advice) == (None, None, ())


def test_an_unknown_size_makes_the_total_unknown() -> None:
    found = summarize(Quantization((weight("a"), replace(weight("b"), stored_bytes=None))))
    assert (found.stored_bytes, found.effective_bits) == (None, None)


def test_statistics_survive_a_round_trip_through_json(evidence: Evidence) -> None:
    found = evidence.notes.quantization
    assert Quantization.from_json(quantization_text(found)) == found


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
