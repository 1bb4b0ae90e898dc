"""What a verification proves: the verdict, the metric and its gate, and the lines that explain it."""

import pytest

from ingot.errors import GateFailed, GateUndecided
from ingot.validation.gates import GateSpec, decide, raise_for
from ingot.validation.verify import CellResult, VerifyResult
from ingot.validation.verify.result import cell_text, matrix_rows, raise_for_cells, verify_metrics, verify_sentences
from tests.validation.verify.results import differing, not_exercised, sample_result

GATE = GateSpec("verify", "max", 0)
PAIR = ("prefix-hit", "preemption")


def verdict_of(result: VerifyResult) -> str:
    measured = {one.key: one for one in verify_metrics(result)}
    [outcome] = decide([GATE], measured)
    return outcome.verdict


def test_all_equal_passes() -> None:
    assert sample_result().verdict == verdict_of(sample_result()) == "PASS"


@pytest.mark.parametrize(
    ("wrong", "verdict", "error", "line"),
    [
        (
            differing(*PAIR),
            "FAIL",
            GateFailed,
            "prefix-hit+preemption DIFFERS: request one-less: tokens differ at output token 3: 5 on the plain path, "
            "here 7; repeat it with `ingot verify demo --quick --only prefix-hit+preemption --seed 0`",
        ),
        (
            not_exercised(*PAIR),
            "UNDECIDED",
            GateUndecided,
            "prefix-hit+preemption NOT EXERCISED: the run did not exercise preemption; repeat it with",
        ),
    ],
)
def test_the_gate_names_the_pair(wrong: CellResult, verdict: str, error: type[Exception], line: str) -> None:
    result = sample_result(wrong)
    assert result.verdict == verdict_of(result) == verdict
    measured = {one.key: one for one in verify_metrics(result)}
    with pytest.raises(error) as caught:
        raise_for(decide([GATE], measured), measured)
    assert line in str(caught.value)
    assert "build again with --set gates={}" in str(caught.value), (
        "a rejected build keeps no artifact to repeat it with"
    )
    assert "more bits" not in str(caught.value)
    assert "sample" not in str(caught.value)


def test_nothing_that_ran_proves_nothing() -> None:
    cells = [CellResult(features=cell.features, verdict="N/A", reason="no blocks") for cell in sample_result().cells]
    result = sample_result(*cells)
    assert result.num_checked == 0
    assert result.verdict == verdict_of(result) == "UNDECIDED"
    with pytest.raises(GateUndecided, match=r"no cell was run, so nothing is proved: no blocks$"):
        raise_for_cells(result)
    assert "equal" not in " ".join(verify_sentences(result))


def test_the_matrix_has_each_pair_once() -> None:
    result = sample_result(differing(*PAIR))
    (first, alone), (second, pair) = matrix_rows(result)
    assert (first, second) == ("1 prefix-hit", "2 preemption")
    assert [cell for cell in (*alone, *pair) if cell] == [result.cells[0], result.cells[1], result.cells[2]]


def test_the_words_count_what_was_checked_and_why_not() -> None:
    skipped = CellResult(features=("preemption",), verdict="N/A", reason="preemption: too few blocks")
    words = " ".join(verify_sentences(sample_result(skipped, not_exercised(*PAIR))))
    assert (
        "UNDECIDED: 1 features alone, 1 pairs checked against the plain path; 0 differ, 1 were not exercised." in words
    )
    assert "2 requests with prompts of 1 to 64 tokens (windows of the given text)" in words
    assert "Not available, 1 cells: preemption: too few blocks." in words
    assert cell_text(skipped) == ["preemption: too few blocks"]
    assert cell_text(not_exercised(*PAIR))[:2] == ["prefix-hit: 1", "preemption: not exercised"]
