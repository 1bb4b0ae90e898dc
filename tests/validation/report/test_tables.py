"""The report's tables as text: verdicts, groups, significant changes, samples."""

from dataclasses import replace

import pytest

from ingot.validation.gates import GateSpec
from ingot.validation.report import tables
from ingot.validation.result import Evidence, Sample
from ingot.validation.statistics import Estimate, Measured
from tests.validation.sample_evidence import sample_evidence

PASSES, FAILS = GateSpec("size_ratio", "max", 0.4), GateSpec("size_ratio", "max", 0.1)


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return sample_evidence()


def _with_slower_start(evidence: Evidence) -> Evidence:
    estimate = Estimate(1.14, 1.08, 1.2, 5, "t over items, log scale")
    slower = Measured("ttft_ratio", estimate, 0.02, 0.0228, "seconds", level=4)
    return replace(evidence, measured={**evidence.measured, "ttft_ratio@4": slower})


def test_a_regression_without_a_gate_is_named_next_to_the_verdict(evidence: Evidence) -> None:
    slower = _with_slower_start(sample_evidence((PASSES,)))
    assert tables.verdict_words(slower) == "PASS"
    [sentence] = [words for words in tables.verdict_sentences(slower) if "worse" in words]
    assert "Time to first token, 4 in flight (+14.0 %)" in sentence
    assert "without a gate" in sentence
    worse = {row.title: row for row in tables.changes(slower, "worse")}
    assert worse["Time to first token, 4 in flight"].gate == "no gate"


def test_a_change_names_the_gates_on_it(evidence: Evidence) -> None:
    better = {row.title: row.gate for row in tables.changes(evidence, "better")}
    assert better["Size on disk"] == "gate PASS"
    assert better["Time to first token, 1 in flight"] == "advisory gate FAIL"
    assert better["End-to-end time, 1 in flight"] == "no gate"


def test_metrics_are_grouped_with_a_mark(evidence: Evidence) -> None:
    groups = tables.metric_groups(evidence)
    assert list(groups) == ["Accuracy", "Latency, 1 in flight", "Latency, 4 in flight", "Size and memory"]
    assert {row.title: row.mark for row in groups["Size and memory"]} == {
        "Size on disk": "better",
        "Peak memory": "better",
    }
    assert all(row.mark == "" for row in groups["Accuracy"] if row.title != "Perplexity ratio")


def test_required_gates_come_first(evidence: Evidence) -> None:
    assert [row.advisory for row in tables.gate_rows(evidence)] == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("gates", "with_runs", "words", "sentence"),
    [
        ((PASSES,), True, "PASS", "1 gate passed: every 95 % interval is on the right side of its limit."),
        ((PASSES, FAILS), True, "FAIL", "1 of 2 gates failed: this artifact is rejected."),
        ((), True, "NO GATES", "NO GATES: nothing had to hold for this artifact to be sealed."),
        ((), False, "NOT MEASURED", "NOT MEASURED: accuracy and latency."),
        ((PASSES,), False, "PASS", "NOT MEASURED: accuracy and latency."),
    ],
)
def test_the_verdict_says_what_was_not_decided(
    gates: tuple[GateSpec, ...], with_runs: bool, words: str, sentence: str
) -> None:
    shown = sample_evidence(gates, with_runs=with_runs)
    assert tables.verdict_words(shown) == words
    assert sentence in tables.verdict_sentences(shown)


def test_a_calibration_text_that_has_evaluated_tokens_is_named(evidence: Evidence) -> None:
    sentence = "OVERLAP: the calibration text train.txt has 2.10% of the evaluated tokens."
    assert sentence in tables.verdict_sentences(evidence)
    alone = replace(evidence, candidate=replace(evidence.candidate, calibration=None))
    assert tables.overlap_sentence(alone) == ""


def test_only_advisory_gates_are_no_gates() -> None:
    shown = sample_evidence((replace(FAILS, advisory=True),))
    assert tables.verdict_words(shown) == "NO GATES"
    assert "Advisory gates that do not pass, which does not prevent a seal: Size on disk FAIL." in (
        tables.verdict_sentences(shown)
    )


@pytest.mark.parametrize(
    ("candidate", "baseline", "shared"),
    [("abcx", "abcyz", "abc"), ("same", "same", "same"), ("ab", "abc", "ab"), ("", "a", ""), ("alone", None, "")],
)
def test_a_sample_is_split_after_the_shared_beginning(candidate: str, baseline: str | None, shared: str) -> None:
    [row] = tables.sample_rows([Sample("prompt", candidate, baseline)])
    assert row.shared == shared
    assert row.shared + row.candidate == candidate
    assert baseline is None or row.shared + (row.baseline or "") == baseline
