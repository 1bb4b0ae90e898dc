import pytest

from ingot.validation.student_t import quantile, two_sided_probability


@pytest.mark.parametrize(
    ("probability", "df", "expected"),
    [
        (0.975, 1, 12.7062047),
        (0.975, 2, 4.30265273),
        (0.975, 3, 3.18244631),
        (0.975, 4, 2.77644511),
        (0.975, 9, 2.26215716),
        (0.975, 119, 1.98009988),
        (0.8, 8, 0.88888952),
        (0.5, 7, 0.0),
    ],
)
def test_quantiles_equal_the_published_tables(probability: float, df: int, expected: float) -> None:
    assert quantile(probability, df) == pytest.approx(expected, abs=1e-7)


def test_quantile_is_the_inverse_of_the_probability() -> None:
    for df in (1, 2, 5, 30, 999):
        assert two_sided_probability(quantile(0.9, df), df) == pytest.approx(0.8, abs=1e-12)


def test_many_degrees_of_freedom_never_make_the_interval_too_narrow() -> None:
    assert quantile(0.975, 10**9) == quantile(0.975, 1000)
    assert 1.95996 < quantile(0.975, 10**9) < 1.9625
