"""Figures of a comparison: equal to those of a build alone, paired with the best, with a front and a winner."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.builder.compare.results import ComparedRow, Comparison, compare, is_ahead
from ingot.builder.compare.run import Outcome
from ingot.errors import UsageError
from ingot.pipeline.recipe.sections import GateLimit
from ingot.validation.evidence_json import read_recorded
from tests.builder.compare.conftest import Compared


def rows_of(comparison: Comparison) -> dict[str, ComparedRow]:
    return {row.name: row for row in comparison.rows}


def with_gates(compared: Compared, **limits: float) -> Comparison:
    """The comparison with the gates kl_mean and the like in place of the recipes'."""
    outcomes = []
    for outcome in compared.outcomes:
        gates = {name: GateLimit(max=limit) for name, limit in limits.items()}
        changed = outcome.candidate.recipe.model_copy(update={"gates": gates})
        outcomes.append(replace(outcome, candidate=replace(outcome.candidate, recipe=changed)))
    return compare(compared.group, outcomes, price=0.4)


def test_accuracy_and_size_equal_those_of_a_build_alone(compared: Compared, measured_alone: Artifact) -> None:
    row, alone = (
        rows_of(compare(compared.group, compared.outcomes))["int8-cpu"],
        read_recorded(measured_alone.path / "evidence"),
    )
    for name in ("kl_mean", "perplexity_ratio", "top1_agreement"):
        assert row.figures[name] == alone.measured[name].estimate
    assert row.figures["bytes"].value == measured_alone.manifest.program_bytes


def test_accuracy_is_paired_window_by_window_with_the_best(compared: Compared) -> None:
    comparison = compare(compared.group, compared.outcomes, prefer="kl_mean")
    rows = rows_of(comparison)
    assert comparison.best is comparison.winner is rows["fp32-cpu"]
    sides = [rows[name].outcome.recorded for name in ("int4-cpu", "fp32-cpu")]
    assert all(side and side.accuracy for side in sides)
    items = [side.accuracy.items for side in sides if side and side.accuracy]
    logs = [(a.candidate_nll - b.candidate_nll) / a.tokens for a, b in zip(*items, strict=True)]
    paired = rows["int4-cpu"].against_best
    assert paired["perplexity_ratio"].value == pytest.approx(float(np.exp(np.mean(logs))))
    assert paired["perplexity_ratio"].low < paired["perplexity_ratio"].value < paired["perplexity_ratio"].high
    assert paired["kl_mean"].value == pytest.approx(rows["int4-cpu"].figures["kl_mean"].value)
    assert is_ahead(rows["int4-cpu"], "kl_mean")
    assert not rows["fp32-cpu"].against_best


def test_latency_has_ratios_of_rounds_and_costs_follow_from_the_price(compared: Compared) -> None:
    row = rows_of(compare(compared.group, compared.outcomes, price=0.4))["int8-cpu"]
    recorded = row.outcome.recorded
    assert recorded
    assert row.against_baseline["tpot"] == recorded.measured["tpot_ratio@1"].estimate
    assert row.figures["tpot"].value == pytest.approx(float(np.exp(np.mean(np.log(recorded.rounds("tpot", 1))))))
    rate, cost = row.figures["tokens_per_second"], row.figures["cost"]
    assert cost.value == pytest.approx(0.4 / 3600 * 1e6 / rate.value)
    assert (cost.low, cost.high) == pytest.approx(
        (cost.value * rate.value / rate.high, cost.value * rate.value / rate.low)
    )
    with pytest.raises(UsageError, match="the axis cost needs a price"):
        compare(compared.group, compared.outcomes, axes=("cost",))
    with pytest.raises(UsageError, match=r"kl_meen.*kl_mean"):
        compare(compared.group, compared.outcomes, axes=("kl_meen",))


def test_the_front_has_all_that_nothing_dominates(compared: Compared) -> None:
    rows = rows_of(compare(compared.group, compared.outcomes, axes=("kl_mean", "bytes")))
    assert [name for name, row in rows.items() if row.on_front] == ["fp32-cpu", "int8-cpu", "int4-cpu"]
    rows = rows_of(compare(compared.group, compared.outcomes, axes=("bits", "bytes")))
    assert [name for name, row in rows.items() if row.on_front] == ["int4-cpu"]
    rows = rows_of(compare(compared.group, compared.outcomes, axes=("top1_agreement",)))
    assert [name for name, row in rows.items() if row.on_front] == ["fp32-cpu"]  # higher is better


def test_gates_decide_who_may_win(compared: Compared) -> None:
    kl = {row.name: row.figures["kl_mean"] for row in compare(compared.group, compared.outcomes).rows}
    between = (kl["int8-cpu"].high + kl["int4-cpu"].low) / 2
    comparison = with_gates(compared, kl_mean=between)
    assert [row.verdict for row in comparison.rows] == ["PASS", "PASS", "FAIL"]
    assert comparison.winner
    assert comparison.winner.name != "int4-cpu"
    none = with_gates(compared, size_ratio=0.01)
    assert none.winner is None
    assert none.best is rows_of(none)["fp32-cpu"]
    unmeasured = with_gates(compared, peak_memory_ratio=2.0)
    assert {row.unmeasured_gates for row in unmeasured.rows} <= {("peak_memory_ratio",)}


def test_a_candidate_that_was_not_measured_wins_nothing(compared: Compared) -> None:
    outcomes: Sequence[Outcome] = [replace(compared.outcomes[0], recorded=None), *compared.outcomes[1:]]
    comparison = compare(compared.group, outcomes, prefer="kl_mean")
    assert not comparison.rows[0].on_front
    assert comparison.winner is comparison.rows[1]
    facts = comparison.as_json()["candidates"]
    assert [bool(one["figures"]) for one in facts] == [False, True, True]
