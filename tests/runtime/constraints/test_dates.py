"""Dates of JSON schemas are those of the calendar, in every year."""

import datetime
import re
from collections.abc import Mapping

import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.dates import PATTERNS
from tests.runtime.constraints.grammars import matcher
from tests.runtime.engines import demo_tokenizer

_YEARS = (0, 1, 4, 100, 400, 1900, 1904, 1999, 2000, 2024, 2026, 2100, 9045, 9996, 9999)
_DAYS = ("00", "01", "28", "29", "30", "31", "32")


def allowed(text: str, schema: Mapping[str, object]) -> bool:
    """Whether the whole of a JSON text is allowed, and may end there."""
    ids = demo_tokenizer().encode(text, add_special_tokens=False)
    found = matcher(Constraint.json_schema(schema))
    return found.num_allowed(ids) == len(ids)


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_a_date_is_one_of_the_calendar() -> None:

    texts = [f"{year:04}-{month:02}-{day}" for year in _YEARS for month in range(14) for day in _DAYS]
    found = [text for text in texts if re.search(PATTERNS["date"], text)]
    assert found == [text for text in texts if is_date(text)]
    assert len(found) > 500


def test_the_29th_of_february_is_allowed_in_leap_years_alone() -> None:
    date, time = {"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}
    nested = {"type": "array", "items": {"anyOf": [date, {"type": "null"}]}}
    assert allowed('"2024-02-29"', date)
    assert allowed('["2000-02-29",null]', nested)
    assert allowed('"2024-02-29T23:59:59.5+01:00"', time)
    assert allowed('"2026-11-23T00:00:00Z"', time)
    for wrong in ("9045-02-29", "0000-09-07", "1900-02-29", "2026-04-31"):
        assert not allowed(f'"{wrong}"', date)
        assert not allowed(f'["{wrong}"]', nested)
        assert not allowed(f'"{wrong}T00:00:00Z"', time)
