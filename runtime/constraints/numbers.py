"""Numbers of JSON schemas as regular expressions over their decimal spellings, exact at every size.

llguidance reads bounds as floats, and its own expressions forbid or allow some numbers next to a bound wrongly. What
it does not express is spelled here, from integers and `Decimal`s. Spellings have no exponent; -0 is 0, and zeros at
the end of a fraction change nothing.
"""

from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor

from ingot.errors import shown

Number = int | Decimal
MAX_DIGITS = 100
"""The most digits that a bound may have before its point, and after it."""
MOST_MULTIPLES = 1000  # that are listed one by one
LARGEST_DOUBLE = Decimal("1.7976931348623157e308")
_LARGEST_EXACT = 1 << 53
_MOST_CHARS, _MOST_EXPONENT = 400, 400  # of a number that is read: a double has 308
_EXACT_DIGITS = 15  # decimals of so many survive as floats
_MOST_MULTIPLE_OF = (1 << 32) - 1


class NotExpressible(ValueError):
    """A number that no expression here spells, with the reason."""


@dataclass(frozen=True)
class NumberRange:
    """Numbers between two bounds, integers alone if `integer`, and multiples of a number.

    excludes_low, excludes_high   whether the bound itself is left out
    """

    low: Number | None = None
    high: Number | None = None
    excludes_low: bool = False
    excludes_high: bool = False
    integer: bool = False
    multiple_of: Number | None = None

    def above(self, low: Number, *, excludes: bool) -> "NumberRange":
        """The numbers of this range from another bound on."""
        if self.low is None or (low, excludes) > (self.low, self.excludes_low):
            return replace(self, low=low, excludes_low=excludes)
        return self

    def below(self, high: Number, *, excludes: bool) -> "NumberRange":
        """The numbers of this range up to another bound."""
        if self.high is None or (_negated(high), excludes) > (_negated(self.high), self.excludes_high):
            return replace(self, high=high, excludes_high=excludes)
        return self

    def __contains__(self, value: Number | Fraction) -> bool:
        exact = Fraction(value)
        is_above = self.low is None or (exact > self.low if self.excludes_low else exact >= self.low)
        is_below = self.high is None or (exact < self.high if self.excludes_high else exact <= self.high)
        is_multiple = self.multiple_of is None or exact % Fraction(self.multiple_of) == 0
        return is_above and is_below and is_multiple and (not self.integer or exact.denominator == 1)

    @property
    def is_empty(self) -> bool:
        """Whether its bounds leave no number."""
        own = self._whole() if self.integer else self
        if own.low is None or own.high is None:
            return False
        return own.low > own.high or (own.low == own.high and (own.excludes_low or own.excludes_high))

    @property
    def is_native(self) -> bool:
        """Whether llguidance expresses it exactly."""
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        if self.multiple_of is not None and not _survives_as_a_multiple(self.multiple_of):
            return False
        if self.integer:
            return all(_survives(bound) for bound in bounds)
        if not bounds:
            return True
        # It lacks zeros at the end of fractions next to an excluded bound, and next to 0, which parts the signs.
        is_plain = not (self.excludes_low or self.excludes_high) and self.low is not None and 0 <= self.low != self.high
        return is_plain and all(_is_whole(bound) and bound <= _LARGEST_EXACT for bound in bounds)

    def terminals(self, name: str) -> list[str]:
        """Lark's terminals of its spellings; the first has this name. Raises NotExpressible."""
        own = self._whole() if self.integer else self
        found = [*_signed(name, own, f"{name}_POSITIVE", f"{name}_NEGATIVE")]
        multiples = own.multiple_of if own.multiple_of != 1 or not own.integer else None
        if multiples is None:
            return found
        expression = _multiples(Fraction(multiples), own)
        return [f"{name}: {name}_BOUNDED & /{expression}/", found[0].replace(name, f"{name}_BOUNDED", 1), *found[1:]]

    def _whole(self) -> "NumberRange":
        """The same integers, with whole bounds that are not left out."""
        low = None if self.low is None else floor(self.low) + 1 if self.excludes_low else ceil(self.low)
        high = None if self.high is None else ceil(self.high) - 1 if self.excludes_high else floor(self.high)
        return replace(self, low=low, high=high, excludes_low=False, excludes_high=False)


def literal(value: Number) -> str:
    """The plain decimal spelling of a number. Raises NotExpressible for one with too many digits."""
    sign, digits, fraction = _digits(value)
    return f"{'-' if sign else ''}{digits}{'.' if fraction else ''}{fraction}"


def is_native_constant(value: Number) -> bool:
    """Whether llguidance spells a number of const or enum exactly."""
    return _survives(value)


def _negated(value: Number) -> Number:
    """The number with the other sign; minus would round a Decimal to the digits of its context."""
    return value.copy_negate() if isinstance(value, Decimal) else -value


def _is_whole(value: Number) -> bool:
    return isinstance(value, int) or value == value.to_integral_value()


def _survives(value: Number) -> bool:
    """Whether a number is the same after it was a float, which is printed in plain digits and fits 64 bits."""
    if _is_whole(value):
        return -_LARGEST_EXACT <= value <= _LARGEST_EXACT
    assert isinstance(value, Decimal)
    return len(value.as_tuple().digits) <= _EXACT_DIGITS and -_EXACT_DIGITS <= value.adjusted() <= _EXACT_DIGITS


def _survives_as_a_multiple(value: Number) -> bool:
    """Whether llguidance's reading of multipleOf, by floats times ten, gives the same number."""
    if not _survives(value):
        return False
    scaled, exponent = float(value), 0
    while scaled % 1 and exponent <= _EXACT_DIGITS:
        scaled, exponent = scaled * 10, exponent + 1
    return scaled <= _MOST_MULTIPLE_OF and Fraction(scaled) == Fraction(value) * 10**exponent


def _digits(value: Number) -> tuple[bool, str, str]:
    """Whether it is negative, its digits before the point, and those after, without zeros at the end."""
    if isinstance(value, Decimal) and not -MAX_DIGITS <= value.adjusted() <= MAX_DIGITS and value:
        raise NotExpressible(f"it is {_brief(value)}; numbers have at most {MAX_DIGITS} digits before the point")
    plain = f"{value:f}" if isinstance(value, Decimal) else str(value)
    whole, _, fraction = plain.lstrip("-").partition(".")
    fraction = fraction.rstrip("0")
    if len(whole) > MAX_DIGITS or len(fraction) > MAX_DIGITS:
        raise NotExpressible(
            f"it is {_brief(value)}; numbers have at most {MAX_DIGITS} digits before and after the point"
        )
    return value < 0, whole, fraction


def _brief(value: Number) -> str:
    text = str(value)
    return text if len(text) <= 40 else shown(text)


def _signed(name: str, own: NumberRange, positive: str, negative: str) -> list[str]:
    """Terminals of a range without its multiples."""
    kinds, rules = [], []
    if own.high is None or own.high > 0 or (own.high == 0 and not own.excludes_high):
        kinds.append(positive)
        rules.append(f"{positive}: {_magnitudes(own.low, own.high, own)}")
    if own.low is None or own.low < 0 or (own.low == 0 and not own.excludes_low):
        kinds.append(f'"-" {negative}')
        turned = replace(
            own,
            low=None if own.high is None else _negated(own.high),
            high=None if own.low is None else _negated(own.low),
            excludes_low=own.excludes_high,
            excludes_high=own.excludes_low,
        )
        rules.append(f"{negative}: {_magnitudes(turned.low, turned.high, turned)}")
    return [f"{name}: {' | '.join(kinds)}", *rules]


def _magnitudes(low: Number | None, high: Number | None, own: NumberRange) -> str:
    """Lark's terms of the spellings without a sign between two bounds."""
    fraction = "" if own.integer else r"(\.[0-9]+)?"
    found = []
    if low is not None and (low > 0 or (low == 0 and own.excludes_low)):
        found.append(_at_least(low, own.excludes_low, fraction))
    if high is not None:
        found.append(_at_most(high, own.excludes_high, fraction))
    return " & ".join(f"/{one}/" for one in found or [f"(0|[1-9][0-9]*){fraction}"])


def _at_least(low: Number, is_strict: bool, any_fraction: str) -> str:
    _, whole, fraction = _digits(low)
    greater = [_repeated("[1-9][0-9]", len(whole), None)]
    greater += [
        f"{whole[:place]}{_between(int(digit) + 1, 9)}{_repeated('[0-9]', len(whole) - place - 1)}"
        for place, digit in enumerate(whole)
        if digit != "9"
    ]
    found = [f"({'|'.join(greater)}){any_fraction}"]
    some = "[0-9]*[1-9][0-9]*" if is_strict else "[0-9]*"
    if fraction:
        found += [
            rf"{whole}\.{fraction[:place]}{_between(int(digit) + 1, 9)}[0-9]*"
            for place, digit in enumerate(fraction)
            if digit != "9"
        ]
        found.append(rf"{whole}\.{fraction}{some}")
    else:
        found.append(rf"{whole}\.{some}" if is_strict else f"{whole}{any_fraction}")
    return "|".join(found)


def _at_most(high: Number, is_strict: bool, any_fraction: str) -> str:
    _, whole, fraction = _digits(high)
    less = ["0|[1-9]" + _repeated("[0-9]", 0, len(whole) - 2)] if len(whole) > 1 else []
    for place, digit in enumerate(whole):
        lowest = 1 if place == 0 and len(whole) > 1 else 0
        if int(digit) > lowest:
            rest = _repeated("[0-9]", len(whole) - place - 1)
            less.append(f"{whole[:place]}{_between(lowest, int(digit) - 1)}{rest}")
    found = [f"({'|'.join(less)}){any_fraction}"] if less else []
    if fraction:
        found.append(whole)
        for place, digit in enumerate(fraction):
            found += [rf"{whole}\.{fraction[:place]}{_between(0, int(digit) - 1)}[0-9]*"] if digit != "0" else []
            found += [rf"{whole}\.{fraction[:place]}"] if place else []
    if not is_strict:
        zeros = rf"\.{fraction}0*" if fraction else r"(\.0+)?" if any_fraction else ""
        found.append(whole + zeros)
    return "|".join(found)


def _between(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _repeated(expression: str, least: int, most: int | None = -1) -> str:
    """The last class of an expression so many times; `most` is `least` unless given, and None without an end."""
    if most == least or most == -1:
        return f"{expression}{{{least}}}" if least else ""
    return f"{expression}{{{least},{'' if most is None else most}}}" if most is None or most > 0 else ""


def _multiples(step: Fraction, own: NumberRange) -> str:
    """An expression of the spellings of multiples; their sign and bounds are left to others."""
    places = 0
    while (step * 10**places).denominator != 1:
        places += 1
    unit, last = int(step * 10**places), 0
    while 10 ** (places + last) % unit and last <= 4:
        last += 1
    if 10 ** (places + last) % unit == 0 and 10 ** (places + last) // unit <= MOST_MULTIPLES:
        return "-?(" + "|".join(_endings(unit, places, last, own)) + ")"
    if own.low is None or own.high is None or (Fraction(own.high) - Fraction(own.low)) / step > MOST_MULTIPLES:
        raise NotExpressible(
            "its multipleOf cannot be combined with these bounds: use a divisor of a power of ten, or bounds with at"
            f" most {MOST_MULTIPLES:,} multiples between them"
        )
    counts = range(ceil(Fraction(own.low) / step), floor(Fraction(own.high) / step) + 1)
    return "|".join(_spelled(unit * count, places, own) for count in counts) or "-"


def _endings(unit: int, places: int, last: int, own: NumberRange) -> list[str]:
    """Expressions of all numbers that end, around the point, in the digits of a multiple."""
    found = []
    for number in range(0, 10 ** (places + last), unit):
        whole, fraction = divmod(number, 10**places)
        ending = _fraction(fraction, places, own)
        if ending is not None:
            before = f"({whole}|[1-9][0-9]*{whole:0{last}d})" if last else "(0|[1-9][0-9]*)"
            found.append(before + ending)
    return found


def _spelled(value: int, places: int, own: NumberRange) -> str:
    """The expression of a value in units of the last of so many places."""
    whole, fraction = divmod(abs(value), 10**places)
    ending = _fraction(fraction, places, own)
    sign = "-" if value < 0 else "-?" if value == 0 else ""
    return "-" if ending is None else f"{sign}{whole}{ending}"


def _fraction(fraction: int, places: int, own: NumberRange) -> str | None:
    """The expression of a fraction of so many places; None where an integer has it."""
    if fraction == 0:
        return "" if own.integer else r"(\.0+)?"
    return None if own.integer else rf"\.{f'{fraction:0{places}d}'.rstrip('0')}0*"


def exact(text: str) -> Decimal:
    """A number of JSON text with a point or an exponent. Raises NotExpressible for one that is slow to compute with."""
    value = Decimal(text)
    if not value:
        return Decimal(0)
    if len(text) > _MOST_CHARS or not -_MOST_EXPONENT <= value.adjusted() <= _MOST_EXPONENT:
        raise NotExpressible(
            f"it has the number {_brief(value)}; at most {_MOST_CHARS} characters and exponents up to {_MOST_EXPONENT}"
            " are allowed"
        )
    return value
