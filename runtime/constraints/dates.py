"""Dates in JSON schemas as patterns with leap years: llguidance's own allow February 29 in every year, and year 0.

The grammar of RFC 3339 has both forms; which days a month has is in its section 5.7, and ISO 8601's year 0 is left out,
because readers of dates (Python's, Java's, SQL's) refuse it.
"""

from collections.abc import Mapping
from typing import Any

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"  # 04, 08 .. 96
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_LONG = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_SHORT = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(0[1-9]|1[0-9]|2[0-8])"
_DATE = f"({_YEAR}-({_LONG}|{_SHORT}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOUR_AND_MINUTE})"
PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}

_MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})  # name -> schema
_VALUES = frozenset({"const", "default", "enum", "examples"})  # no schemas, whatever they look like


def with_dates(schema: Any) -> Any:
    """The schema with a pattern for each format in PATTERNS, unless it has a pattern of its own next to it."""
    if isinstance(schema, list):
        return [with_dates(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    pattern = PATTERNS.get(name) if isinstance(name := schema.get("format"), str) else None
    if pattern and "pattern" not in schema:
        schema = {("pattern" if key == "format" else key): value for key, value in schema.items()}
        schema["pattern"] = pattern
    return {key: _within(key, value) for key, value in schema.items()}


def _within(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key in _MAPS and isinstance(value, Mapping):
        return {name: with_dates(each) for name, each in value.items()}
    return with_dates(value)
