"""Expressions of numbers allow exactly the decimal spellings that exact arithmetic allows."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import pytest

from ingot.runtime.constraints.numbers import Number, NumberRange, exact, literal
from tests.each_case import each_case

_STEPS: tuple[Number, ...] = (1, 2, 3, 7, 20, 25, *map(Decimal, ("0.5", "0.01", "0.07", "0.25", "1.5", "0.2")))


def spells(numbers: NumberRange) -> Callable[[str], bool]:
    """The language of a range's terminals, read as llguidance reads them."""
    bodies = dict(line.split(": ", 1) for line in numbers.terminals("N"))

    def matches(name: str, text: str) -> bool:
        body = bodies[name]
        if body.startswith("/") or " & " in body:
            return all(term(each, text) for each in body.split(" & "))
        return any(term(each, text) for each in body.split(" | "))

    def term(each: str, text: str) -> bool:
        if each.startswith("/"):
            return re.fullmatch(each[1:-1], text) is not None
        if each.startswith('"-" '):
            return text.startswith("-") and matches(each[4:], text[1:])
        return matches(each, text)

    return lambda text: matches("N", text)


def number(rng: random.Random) -> Number:
    match rng.randrange(4):
        case 0:
            return rng.randrange(-3, 4)
        case 1:
            return rng.randrange(-2000, 2000)
        case 2:
            return Decimal(rng.randrange(-2000, 2000)).scaleb(-rng.randrange(1, 4))
        case _:
            large = (1 << rng.randrange(50, 66)) + rng.randrange(-3, 4)
            return rng.choice([-large, large])


def near(rng: random.Random, value: Number) -> Decimal:
    return Decimal(value) + Decimal(rng.randrange(-12, 13)).scaleb(-rng.randrange(4))


def spelling(rng: random.Random, value: Decimal) -> str:
    text = f"{abs(value):f}"
    text = text.rstrip("0").rstrip(".") if "." in text and rng.random() < 0.5 else text
    if rng.random() < 0.3:
        text += ("" if "." in text else ".") + "0" * rng.randrange(1, 3)
    return f"-{text}" if value < 0 or (value == 0 and rng.random() < 0.5) else text


def random_range(rng: random.Random) -> NumberRange:
    found = NumberRange(integer=rng.random() < 0.4)
    one = number(rng)
    other = near(rng, one) if rng.random() < 0.5 else number(rng)
    if rng.random() < 0.75:
        found = found.above(min(one, other), excludes=rng.random() < 0.5)
    if rng.random() < 0.75:
        found = found.below(max(one, other), excludes=rng.random() < 0.5)
    return replace(found, multiple_of=rng.choice(_STEPS)) if rng.random() < 0.35 else found


@each_case("seed", range(4))
def test_a_spelling_is_allowed_where_its_number_is(seed: int) -> None:
    rng = random.Random(seed)
    tried = {True: 0, False: 0}
    for _ in range(250):
        numbers = random_range(rng)
        try:
            is_spelled = spells(numbers)
        except ValueError:
            continue
        bounds = [bound for bound in (numbers.low, numbers.high) if bound is not None] or [0]
        for _ in range(25):
            text = spelling(rng, near(rng, rng.choice(bounds) if rng.random() < 0.8 else number(rng)))
            expected = Fraction(text) in numbers and not (numbers.integer and "." in text)
            assert is_spelled(text) == expected, (numbers, text)
            tried[expected] += 1
    assert min(tried.values()) > 500


@each_case(
    ("text", "value", "is_in"),
    [
        ("[-9223372036854775808, 9223372036854775807]", "-9223372036854775808", True),
        ("[-9223372036854775808, 9223372036854775807]", "-9223372036854775809", False),
        ("[-9223372036854775808, 9223372036854775807]", "9223372036854775807", True),
        ("[-9223372036854775808, 9223372036854775807]", "9223372036854775808", False),
        ("[-3.4028234663852886e38, 3.4028234663852886e38]", "340282346638528860000000000000000000000.0", True),
        ("[-3.4028234663852886e38, 3.4028234663852886e38]", "340282346638528860000000000000000000000.1", False),
        ("[0.12345678901234567890123456789012345678901, 1]", "0.12345678901234567890123456789012345678901", True),
        ("[0.12345678901234567890123456789012345678901, 1]", "0.12345678901234567890123456789012345678900", False),
    ],
)
def test_large_and_precise_bounds_are_exact(text: str, value: str, is_in: bool) -> None:
    low, high = map(exact, text.strip("[]").split(", "))
    assert spells(NumberRange(low, high))(value) == is_in


@each_case(
    ("numbers", "reason"),
    [
        (NumberRange(Decimal("1e101")), "at most 100 digits"),
        (NumberRange(Decimal("1e-101")), "at most 100 digits"),
        (NumberRange(Decimal("1e999999999")), "at most 100 digits"),
        (NumberRange(0, multiple_of=7), "cannot be combined with these bounds"),
        (NumberRange(0, 7001, multiple_of=7), "cannot be combined with these bounds"),
    ],
)
def test_a_number_that_no_expression_spells_is_refused(numbers: NumberRange, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        numbers.terminals("N")


def test_a_number_is_spelled_in_plain_digits() -> None:
    assert literal(exact("-1.50e2")) == "-150"
    assert literal(1234567890123456789) == "1234567890123456789"
    assert literal(exact("0.00000000000000000001230")) == "0.0000000000000000000123"
