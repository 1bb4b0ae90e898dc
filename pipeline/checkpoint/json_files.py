"""JSON files of checkpoints: reading, writing, and typed values whose errors name key, value and what is allowed."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ingot.errors import ConfigError, did_you_mean, one_of, shown

MAX_INTEGER = 2**31 - 1  # the largest size and token id


def write_json(file: Path, content: object) -> None:
    """Write it indented, keys in order: the same content gives the same bytes."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class ConfigReader:
    """One JSON object of a file; an absent key takes its value from `defaults`.

    Methods take Ingot's name of a key; `names` gives the object's own where that differs. Every method raises
    ConfigError. A method named optional_... gives None for null; the others refuse null.
    """

    def __init__(
        self,
        place: str,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`place` begins each message: the file, and the object in it where it is not the whole file."""
        self.place = place
        self.names = names
        self.values = values
        self.defaults = defaults

    def reads(self, key: str) -> bool:
        """Whether this object may hold the key: it has a default."""
        return self.names.get(key, key) in self.defaults

    def raw(self, key: str) -> Any:
        """Return the value without checks, or its default; null without either."""
        key = self.names.get(key, key)
        return self.values.get(key, self.defaults.get(key))

    def fail(self, key: str, wanted: str) -> ConfigError:
        """The error for a value that is not `wanted`; says so when it is missing or a default."""
        value, key = self.raw(key), self.names.get(key, key)
        if key in self.values:
            says = f"is {shown(value)}"
        else:
            says = "is missing" if value is None else f"is {shown(value)} (the default of this model_type)"
        return ConfigError(f"{self.place}: {key} {says}; it must be {wanted}")

    def integer(self, key: str, minimum: int = 1) -> int:
        """A whole number from `minimum` to MAX_INTEGER."""
        value = self.raw(key)
        if type(value) is not int or value < minimum:
            raise self.fail(key, f"a whole number from {minimum} up")
        if value > MAX_INTEGER:
            raise self.fail(key, f"at most {MAX_INTEGER}")
        return value

    def optional_integer(self, key: str, minimum: int = 1) -> int | None:
        """A whole number from `minimum` up, or None."""
        return None if self.raw(key) is None else self.integer(key, minimum)

    def number(self, key: str, positive: bool = True) -> float:
        """A finite number, above 0 when `positive`."""
        value = self.raw(key)
        if type(value) not in (int, float) or not math.isfinite(value) or (positive and value <= 0):
            raise self.fail(key, "a finite number" + (" above 0" if positive else ""))
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0, or None."""
        return None if self.raw(key) is None else self.number(key)

    def boolean(self, key: str) -> bool:
        """True or false; null counts as false."""
        value = self.raw(key)
        if value is not None and type(value) is not bool:
            raise self.fail(key, "true or false")
        return bool(value)

    def choice(self, key: str, allowed: Iterable[str]) -> str:
        """One of the allowed names; the error gives the nearest."""
        names = list(allowed)
        value = self.raw(key)
        if value not in names:
            raise ConfigError(
                f"{self.fail(key, f'one of {one_of(names)}')}."
                + (did_you_mean(value, names) if isinstance(value, str) else "")
            )
        return str(value)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Whole numbers from 0 up, given as one number or a list; None for null."""
        value = self.raw(key)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item <= MAX_INTEGER for item in items):
            raise self.fail(key, f"a whole number from 0 to {MAX_INTEGER}, or a list of them")
        return tuple(items)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` finite numbers above 0."""
        value = self.raw(key)
        numeric = isinstance(value, list) and all(type(item) in (int, float) and 0 < item < math.inf for item in value)
        if not numeric or len(value) != length:
            raise self.fail(key, f"a list of {length} numbers above 0")
        return tuple(float(item) for item in value)

    def optional_object(self, key: str) -> dict[str, Any] | None:
        """A JSON object, or None."""
        value = self.raw(key)
        if value is not None and not isinstance(value, dict):
            raise self.fail(key, "an object or null")
        return value
