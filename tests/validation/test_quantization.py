"""Statistics of quantized weights: ranking, totals, advice, and a round trip through JSON."""

from dataclasses import replace

import pytest

from ingot.validation.evidence_json import quantization_text
from ingot.validation.quantization import Quantization, summarize
from ingot.validation.result import Evidence
from tests.validation.sample_evidence import sample_evidence, weight


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return sample_evidence()


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
