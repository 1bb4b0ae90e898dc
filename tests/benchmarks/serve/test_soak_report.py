"""The growth of memory that a soak reports, and when it is a fault."""

import pytest
from benchmarks.serve.soak_report import Outcome, facts_of, growth

MIB = 1 << 20
SECONDS = [10.0 * number for number in range(360)]


def samples(server: list[float]) -> list[tuple[float, dict[str, float]]]:
    names = ("process_resident_memory_bytes", "ingot_engine_resident_bytes")
    pairs = zip(SECONDS, server, strict=True)
    return [(seconds, dict(zip(names, (value, 300 * MIB), strict=True))) for seconds, value in pairs]


def test_the_slope_of_a_line_with_outliers_is_found() -> None:
    values = [5 * MIB + 2 * MIB * seconds / 3600 for seconds in SECONDS]
    values[100:110] = [500 * MIB] * 10
    found = growth(SECONDS, values)
    assert found.per_hour == pytest.approx(2 * MIB, rel=0.01)
    assert found.lower <= found.per_hour <= found.upper


@pytest.mark.parametrize(("mib_per_hour", "num_faults"), [(0, 0), (1, 0), (10, 1)])
def test_memory_that_surely_grows_is_a_fault(mib_per_hour: float, num_faults: int) -> None:
    outcome = Outcome(samples=samples([100 * MIB + mib_per_hour * MIB * seconds / 3600 for seconds in SECONDS]))
    facts = facts_of(outcome, {})
    assert facts["num_faults"] == num_faults
    assert facts["memory"]["server"]["growth_mib_per_hour"] == pytest.approx(mib_per_hour, abs=1e-3)  # type: ignore[index]


def test_growth_before_the_part_that_counts_is_no_fault() -> None:
    filling = [min(100 + seconds / 20, 140) * MIB for seconds in SECONDS]  # full after 800 of 3,600 seconds
    assert facts_of(Outcome(samples=samples(filling)), {})["num_faults"] == 0
