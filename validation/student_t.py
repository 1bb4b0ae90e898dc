"""Student's t distribution, enough of it for confidence intervals: no scipy in an install."""

import math
from functools import cache

_MAX_EXACT_DF = 1000
_BISECTIONS = 200


def two_sided_probability(t: float, df: int) -> float:
    """P(|T| <= t) for `df` degrees of freedom, by the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    assert df >= 1, df
    theta = math.atan2(t, math.sqrt(df))
    cos_squared = math.cos(theta) ** 2
    if df == 1:
        return 2 * theta / math.pi
    if df % 2:
        series = _series(math.cos(theta), cos_squared, range(3, df - 1, 2))
        return 2 / math.pi * (theta + math.sin(theta) * series)
    return math.sin(theta) * _series(1.0, cos_squared, range(2, df - 1, 2))


def _series(first: float, cos_squared: float, divisors: range) -> float:
    """first * (1 + (d1-1)/d1 cos² + (d1-1)/d1 (d2-1)/d2 cos⁴ + ...) over the divisors."""
    total = term = first
    for divisor in divisors:
        term *= cos_squared * (divisor - 1) / divisor
        total += term
    return total


@cache
def quantile(probability: float, df: int) -> float:
    """The t with P(T <= t) = probability, for probability in [0.5, 1), to 12 digits.

    Above 1000 degrees of freedom the value for 1000 is returned: it is larger by less than 0.1 %, so an interval
    made from it is never too narrow.
    """
    assert 0.5 <= probability < 1, probability
    df = min(df, _MAX_EXACT_DF)
    wanted = 2 * probability - 1
    low, high = 0.0, 1.0
    while two_sided_probability(high, df) < wanted:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if two_sided_probability(middle, df) < wanted else (low, middle)
    return high
