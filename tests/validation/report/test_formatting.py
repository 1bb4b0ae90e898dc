"""Formatting of numbers and titles."""

from typing import Literal

import pytest

from ingot.artifact import GateOutcome
from ingot.artifact.metrics import METRICS
from ingot.validation.report import formatting as fmt
from ingot.validation.statistics import Estimate, Measured, exact
from tests.each_case import each_case


def test_every_metric_has_a_title_for_readers() -> None:
    titles = [fmt.title(name) for name in METRICS]
    assert len(set(titles)) == len(METRICS)
    assert all("_" not in title for title in titles)
    assert fmt.key_title("tpot_ratio@4") == "Time per output token, 4 in flight"


@each_case(
    ("value", "expected"),
    [
        (2.5, "2.5 s"),
        (0.0123, "12.3 ms"),
        (0.000456, "456 µs"),
        (0.9996, "1,000 ms"),
        (1234.5, "1,230 s"),
        (0.0, "0 µs"),
    ],
)
def test_seconds_choose_their_unit(value: float, expected: str) -> None:
    assert fmt.seconds(value) == expected


def test_times_in_a_row_have_one_unit_and_equally_many_decimals() -> None:
    assert fmt.seconds_row([0.0252, 0.029, 0.0296]) == "25.2 / 29.0 / 29.6 ms"
    assert fmt.seconds_row([0.000391, 0.00106]) == "0.39 / 1.06 ms"
    assert fmt.seconds_row([0.0, 0.002]) == "0 / 2 ms"


@pytest.mark.parametrize(("count", "shown"), [(5_770_496, "5.77 M"), (6_738_415_616, "6.74 B"), (999_999, "1.00 M")])
def test_parameters_have_three_digits(count: int, shown: str) -> None:
    assert fmt.parameters(count) == shown


def _ratio(metric: str, value: float, low: float, high: float, detectable: float = 0.02) -> Measured:
    return Measured(metric, Estimate(value, low, high, 5, "t", detectable), level=1)


def test_a_quantity_of_one_side_has_its_unit() -> None:
    assert fmt.quantity(None, "seconds") == "-"
    assert fmt.quantity(1234.5, "tokens/s") == "1,230 tokens/s"
    assert fmt.quantity(18.9230, "") == "18.92"


@each_case(
    ("metric", "value", "low", "high", "shown", "interval"),
    [
        ("perplexity", 10.9247, 8.0003, 14.9179, "10.9", "8.0 to 14.9"),
        ("perplexity_ratio", 1.010804, 1.00736, 1.014259, "1.0108", "1.0074 to 1.0143"),
        ("top1_agreement", 0.931999, 0.924489, 0.938811, "93.20 %", "92.45 to 93.88 %"),
        ("kl_mean", 0.01716, 0.01617, 0.01836, "0.0172", "0.0162 to 0.0184"),
        ("kl_mean", 1.23e-7, 1.1e-7, 1.4e-7, "1.23e-7", "1.10e-7 to 1.40e-7"),
        ("kl_mean", 0.0, 0.0, 3e-9, "0", "0 to 3.0e-9"),
        ("perplexity", 123_456.7, 98_765.4, 154_321.0, "123,000", "99,000 to 154,000"),
        ("perplexity", 1.23e8, 9.1e7, 2.04e8, "1.23e8", "9.10e7 to 2.04e8"),
        ("ttft_ratio", 1.0, 0.01, 100.0, "1.00", "0.01 to 100.00"),
        ("peak_memory_ratio", 0.91428, 0.91390, 0.91467, "0.914", "0.914 to 0.915"),
        ("size_ratio", 1.0, 1 - 1e-12, 1 + 1e-12, "1.00000", "1.00000 to 1.00000"),
    ],
)
def test_a_measured_value_has_the_digits_of_its_interval(
    metric: str, value: float, low: float, high: float, shown: str, interval: str
) -> None:
    measured = _ratio(metric, value, low, high)
    assert (fmt.value(measured), fmt.interval(measured)) == (shown, interval)


@each_case(
    ("value", "low", "high", "shown"),
    [
        (0.383431, 0.308821, 0.476066, "-61.7 %"),
        (1.010804, 1.00736, 1.014259, "+1.08 %"),
        (1.0, 0.8, 1.25, "0 %"),
        (2.1122, 1.6544, 2.6965, "+111 %"),
        (1.284, 0.3, 5.5, "+30 %"),
        (1.05, 0.01, 90.0, "+5 %"),
        (1.00002, 1.00001, 1.00003, "+0.002 %"),
        (7e6, 6e6, 9e6, "> +999 %"),
    ],
)
def test_a_change_is_the_paired_ratio_in_percent(value: float, low: float, high: float, shown: str) -> None:
    assert fmt.change(_ratio("tpot_ratio", value, low, high)) == shown


def test_a_metric_of_the_pair_has_no_ratio_and_no_change() -> None:
    kl = _ratio("kl_mean", 0.0172, 0.0162, 0.0184)
    assert (fmt.ratio(kl), fmt.change(kl), fmt.sides(kl)) == ("-", "-", ("-", "0.0172"))


def test_both_sides_have_one_unit() -> None:
    times = Measured("tpot_ratio", exact(0.4), baseline=1.06e-3, candidate=391e-6, unit="seconds", level=1)
    sizes = Measured("size_ratio", exact(0.2), baseline=23.2e6, candidate=4.4e6, unit="bytes")
    assert fmt.sides(times) == ("1.06 ms", "0.39 ms")
    assert fmt.sides(sizes) == ("23.2 MB", "4.4 MB")


def test_an_exact_quantity_shows_no_interval() -> None:
    size = Measured("size_ratio", exact(0.3))
    assert (fmt.value(size), fmt.interval(size), fmt.detectable(size)) == ("0.3000", "exact", "-")
    assert fmt.change(size) == "-70.0 %"
    assert fmt.change(Measured("size_ratio", exact(1.0))) == "0 %"


@pytest.mark.parametrize(
    ("metric", "effect", "shown"),
    [
        ("e2e_ratio", 0.02, "±2.0 %"),
        ("e2e_ratio", 0.3361, "±34 %"),
        ("e2e_ratio", 1.6801, "factor 2.7"),
        ("top1_agreement", 0.0102, "±1.0 points"),
        ("kl_mean", 0.00155, "±0.0015"),
    ],
)
def test_the_detectable_effect_has_two_digits(metric: str, effect: float, shown: str) -> None:
    assert fmt.detectable(_ratio(metric, 1.0, 0.9, 1.1, effect)) == shown


def test_a_limit_reads_as_in_the_recipe() -> None:
    def gate(name: str, bound: Literal["max", "min"], limit: float) -> GateOutcome:
        return GateOutcome(name=name, verdict="PASS", measured=1, low=1, high=1, limit=limit, bound=bound)

    assert fmt.limit(gate("perplexity_ratio", "max", 1.03)) == "≤ 1.03"
    assert fmt.limit(gate("top1_agreement", "min", 0.9)) == "≥ 90 %"


def test_a_change_of_memory_has_the_digits_that_builds_agree_on() -> None:
    assert fmt.change(_ratio("peak_memory_ratio", 0.91428, 0.91390, 0.91467)) == "-8.6 %"
    assert fmt.change(_ratio("tpot_ratio", 0.91428, 0.91390, 0.91467)) == "-8.572 %"
