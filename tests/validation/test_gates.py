"""Gates: verdicts by interval, and the messages of failed and undecided gates."""

import math
from dataclasses import replace
from typing import Literal

import pytest

from ingot.errors import GateFailed, GateUndecided, UsageError
from ingot.validation.gates import GateSpec, Rerun, advisory_lines, decide, raise_for
from ingot.validation.machine import MachineLoad
from ingot.validation.statistics import Estimate, Measured, exact
from tests.each_case import each_case


def _measured(metric: str, low: float, value: float, high: float, level: int | None = None) -> dict[str, Measured]:
    unit, size = ("latency rounds", 5) if level else ("evaluation tokens", 1000)
    estimate = Estimate(value, low, high, items=5, method="t over items")
    one = Measured(metric, estimate, level=level, sample_unit=unit, sample_size=size)
    return {one.key: one}


@each_case(
    ("bound", "limit", "verdict"),
    [
        ("max", 1.2, "PASS"),
        ("max", 1.1, "PASS"),  # the interval may touch the limit
        ("max", 1.05, "UNDECIDED"),
        ("max", 0.9, "UNDECIDED"),
        ("max", 0.89, "FAIL"),
        ("min", 0.8, "PASS"),
        ("min", 0.9, "PASS"),
        ("min", 0.95, "UNDECIDED"),
        ("min", 1.1, "UNDECIDED"),
        ("min", 1.11, "FAIL"),
    ],
)
def test_the_interval_decides_not_the_value(bound: Literal["max", "min"], limit: float, verdict: str) -> None:
    [outcome] = decide([GateSpec("kl_mean", bound, limit)], _measured("kl_mean", 0.9, 1.0, 1.1))
    assert outcome.verdict == verdict
    assert (outcome.measured, outcome.low, outcome.high, outcome.limit) == (1.0, 0.9, 1.1, limit)


def test_an_exact_quantity_is_always_decided() -> None:
    measured = {"size_ratio": Measured("size_ratio", exact(0.3))}
    verdicts = [decide([GateSpec("size_ratio", "max", limit)], measured)[0].verdict for limit in (0.3, 0.29)]
    assert verdicts == ["PASS", "FAIL"]


def test_a_latency_gate_must_hold_at_every_concurrency() -> None:
    measured = _measured("tpot_ratio", 0.5, 0.6, 0.7, 1) | _measured("tpot_ratio", 0.8, 0.9, 1.1, 4)
    outcomes = decide([GateSpec("tpot_ratio", "max", 1.0)], measured)
    assert [(o.name, o.verdict) for o in outcomes] == [("tpot_ratio@1", "PASS"), ("tpot_ratio@4", "UNDECIDED")]


def test_a_latency_gate_may_name_one_concurrency() -> None:
    measured = _measured("tpot_ratio", 0.5, 0.6, 0.7, 1) | _measured("tpot_ratio", 0.8, 0.9, 1.1, 4)
    outcomes = decide([GateSpec("tpot_ratio@1", "max", 1.0)], measured)
    assert [(o.name, o.verdict) for o in outcomes] == [("tpot_ratio@1", "PASS")]


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"unknown metric 'perplexity_ration'. Did you mean 'perplexity_ratio'\?"):
        GateSpec("perplexity_ration", "max", 1.0)


def test_a_limit_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(UsageError, match="limit is nan"):
        GateSpec("kl_mean", "max", math.nan)


def test_a_gate_on_a_metric_that_was_not_measured_is_refused() -> None:
    with pytest.raises(UsageError, match=r"gate kl_mean: this metric was not measured; measured: size_ratio"):
        decide([GateSpec("kl_mean", "max", 1.0)], {"size_ratio": Measured("size_ratio", exact(0.3))})


def test_passing_gates_raise_no_error() -> None:
    measured = _measured("kl_mean", 0.9, 1.0, 1.1)
    raise_for(decide([GateSpec("kl_mean", "max", 2.0)], measured), measured)
    raise_for([])


def test_a_failed_gate_is_reported_with_value_interval_and_limit() -> None:
    measured = _measured("perplexity_ratio", 1.04, 1.05, 1.06)
    with pytest.raises(GateFailed) as error:
        raise_for(decide([GateSpec("perplexity_ratio", "max", 1.01)], measured), measured)
    first, advice = str(error.value).splitlines()
    assert first == ("gate failed: perplexity_ratio is 1.05 (95 % interval 1.04 to 1.06), the gate requires <= 1.01.")
    assert advice.endswith("is acceptable (--set gates.perplexity_ratio.max=NUMBER).")
    assert error.value.exit_code == 3


def test_an_undecided_gate_says_how_many_tokens_might_decide_it() -> None:
    measured = _measured("kl_mean", 0.8, 1.0, 1.2)
    with pytest.raises(GateUndecided, match=r"requires <= 1\.1") as error:
        raise_for(decide([GateSpec("kl_mean", "max", 1.1)], measured), measured)
    assert "About 4400 evaluation tokens instead of 1000 might decide it." in str(error.value)
    assert error.value.exit_code == 4


def test_without_the_measurement_the_advice_is_a_factor() -> None:
    outcomes = decide([GateSpec("kl_mean", "max", 1.1)], _measured("kl_mean", 0.8, 1.0, 1.2))
    with pytest.raises(GateUndecided, match=r"A sample 4.4 times as large"):
        raise_for(outcomes)


def test_no_sample_is_advised_when_the_value_is_at_the_limit() -> None:
    measured = _measured("ttft_ratio", 0.8, 1.0, 1.2, 4)
    with pytest.raises(GateUndecided, match="move the limit"):
        raise_for(decide([GateSpec("ttft_ratio", "max", 1.0)], measured), measured)


def test_a_failed_gate_wins_over_an_undecided_one_and_both_are_reported() -> None:
    measured = _measured("kl_mean", 0.8, 1.0, 1.2) | _measured("kl_p99", 3, 4, 5)
    outcomes = decide([GateSpec("kl_mean", "max", 1.1), GateSpec("kl_p99", "max", 1.0)], measured)
    with pytest.raises(GateFailed, match=r"gate failed: kl_p99[^\n]*\ngate undecided: kl_mean"):
        raise_for(outcomes, measured)


def test_the_advice_uses_the_side_of_the_interval_next_to_the_limit() -> None:
    measured = _measured("kl_mean", 0.5, 1.0, 1.2)
    with pytest.raises(GateUndecided, match="About 4400 evaluation tokens"):
        raise_for(decide([GateSpec("kl_mean", "max", 1.1)], measured), measured)


def test_an_advisory_gate_is_reported_and_blocks_nothing() -> None:
    measured = _measured("kl_mean", 0.8, 1.0, 1.2) | _measured("kl_p99", 3, 4, 5)
    specs = [GateSpec("kl_mean", "max", 1.1, advisory=True), GateSpec("kl_p99", "max", 1.0, advisory=True)]
    outcomes = decide(specs, measured)
    assert [(o.verdict, o.advisory) for o in outcomes] == [("UNDECIDED", True), ("FAIL", True)]
    raise_for(outcomes, measured)


def test_an_advisory_gate_is_not_in_the_message_of_one_that_blocks() -> None:
    measured = _measured("kl_mean", 0.8, 1.0, 1.2) | _measured("kl_p99", 3, 4, 5)
    outcomes = decide([GateSpec("kl_mean", "max", 1.1, advisory=True), GateSpec("kl_p99", "max", 1.0)], measured)
    with pytest.raises(GateFailed) as error:
        raise_for(outcomes, measured)
    assert "kl_mean" not in str(error.value)


BUILD = ("ingot", "build", "my recipe.yaml", "--set", "latency.max_seconds=60", "--set", "seed=1", "-o", "out")
BUSY = MachineLoad(others=1.62, peak=1.94, cores=2, threads=2)


def message_of(specs: list[GateSpec], measured: dict[str, Measured], rerun: Rerun) -> list[str]:
    with pytest.raises(GateUndecided) as error:
        raise_for(decide(specs, measured), measured, rerun)
    return str(error.value).splitlines()


def test_an_undecided_latency_gate_names_the_busy_machine_and_a_command_to_paste() -> None:
    measured = _measured("tpot_ratio", 0.9, 1.0, 1.1, 4)
    lines = message_of([GateSpec("tpot_ratio", "max", 1.05)], measured, Rerun(BUILD, seconds=60, load=BUSY))
    assert lines[0].startswith("gate undecided: tpot_ratio@4 is 1 (95 % interval 0.9 to 1.1)")
    assert lines[1:] == [
        "The machine was busy: other processes kept 1.6 of 2 processors busy (at most 1.9); latency is decided sooner "
        "when it is idle.",
        "Measure more: ingot build 'my recipe.yaml' --set seed=1 -o out --set latency.max_seconds=270",
    ]


def test_one_command_decides_all_gates_and_an_idle_machine_is_not_named() -> None:
    measured = _measured("kl_mean", 0.8, 1.0, 1.2) | _measured("tpot_ratio", 0.8, 1.0, 1.1, 1)
    idle = MachineLoad(others=0.1, peak=0.2, cores=2, threads=2)
    gates = [GateSpec("kl_mean", "max", 1.1), GateSpec("tpot_ratio", "max", 1.09)]
    lines = message_of(gates, measured, Rerun(BUILD[:3], seconds=100, load=idle))
    assert len(lines) == 3
    settings = "--set evaluation.tokens=4400 --set latency.max_seconds=200"
    assert lines[-1] == f"Measure more: ingot build 'my recipe.yaml' {settings}"


def test_a_text_without_enough_tokens_gets_no_command_that_would_fail() -> None:
    [(key, one)] = _measured("kl_mean", 0.8, 1.0, 1.2).items()
    lines = message_of([GateSpec(key, "max", 1.1)], {key: replace(one, most_samples=2000)}, Rerun(BUILD))
    assert lines == [
        "gate undecided: kl_mean is 1 (95 % interval 0.8 to 1.2), the gate requires <= 1.1. About 4400 evaluation "
        "tokens instead of 1000 might decide it, but the text has 2000: use a longer one, or move the limit."
    ]


def test_advisory_gates_that_did_not_pass_are_described_the_same_way() -> None:
    measured = _measured("kl_mean", 0.8, 1.0, 1.2) | _measured("kl_p99", 3, 4, 5)
    specs = [GateSpec("kl_mean", "max", 1.1, advisory=True), GateSpec("kl_p99", "max", 1.0, advisory=True)]
    failed, undecided, command = advisory_lines(decide(specs, measured), measured, Rerun(BUILD[:3], load=BUSY))
    assert failed.startswith("advisory gate failed: kl_p99 is 4")
    assert undecided.startswith("advisory gate undecided: kl_mean is 1")
    assert command == "Measure more: ingot build 'my recipe.yaml' --set evaluation.tokens=4400"
