"""Tolerances are in tolerances.yaml, each with its reason; `within` prints the measured value next to its limit."""

from functools import cache
from pathlib import Path

import yaml


@cache
def _table() -> dict[str, dict[str, float | str]]:
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    assert isinstance(table, dict)
    return table


def tolerance(name: str) -> float:
    """The limit of that name."""
    return float(_table()[name]["limit"])


def within(name: str, measured: float, about: str = "", scale: float = 1.0) -> bool:
    """Whether a measured difference is within the limit of that name times `scale`; prints both."""
    limit = tolerance(name) * scale
    print(f"{about or name}: {measured:.2e}, limit {limit:.1e} ({name})")
    return measured <= limit
