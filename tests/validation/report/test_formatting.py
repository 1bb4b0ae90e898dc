"""Formatting of numbers and titles."""

import pytest

from ingot.artifact.metrics import METRICS
from ingot.validation.report import formatting as fmt
from ingot.validation.statistics import Estimate, Measured, exact


def test_every_metric_has_a_title_for_readers() -> None:
    titles = [fmt.title(name) for name in METRICS]
    assert len(set(titles)) == len(METRICS)
    assert all("_" not in title for title in titles)
    assert fmt.key_title("tpot_ratio@4") == "Time per output token, 4 in flight"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (0.000456, "456 µs"), (0.9996, "1,000 ms"), (0.0, "0 µs")],
)
def test_seconds_choose_their_unit(value: float, expected: str) -> None:
    assert fmt.seconds(value) == expected


def test_values_read_in_the_metric_s_own_way() -> None:
    assert fmt.metric_value("top1_agreement", 0.98765) == "98.77 %"
    assert fmt.metric_value("tpot_ratio@4", 0.5) == "0.5000"
    assert fmt.metric_value("kl_mean", 0.012345) == "0.01235"
    assert fmt.quantity(None, "seconds") == "-"
    assert fmt.quantity(1234.5, "tokens/s") == "1,234 tokens/s"


def test_an_exact_quantity_shows_no_interval() -> None:
    assert fmt.interval(Measured("size_ratio", exact(0.3))) == "exact"
    assert fmt.detectable(Measured("size_ratio", exact(0.3))) == "-"
    estimate = Estimate(1.0, 0.9, 1.1, 5, "t", detectable=0.02)
    assert fmt.interval(Measured("e2e_ratio", estimate)) == "0.9000 to 1.1000"
    assert fmt.detectable(Measured("e2e_ratio", estimate)) == "±2.00 %"
